"""Streams behind a router that is behind a router: who goes on with one that is lost, and what of it clients see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.process import until
from helpers.raw_server import RawServer, stream
from helpers.routed import Routed, routed
from quire.routing.continued import unpacked

MARK = "x-quire-stream: 0123456789abcdef\r\n"


def event(text: str, name: str, reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    body = {"id": name, "created": 1, "system_fingerprint": "fp", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


LOST = stream(
    event("one ", "a") + b": ids 5\n\n", event("two ", "a") + b": ids 6 7\n\n", headers=MARK, ends=False
)
MORE = event("one two three ", "b") + b": ids 5 6 7 8\n\n", b": ids 9\n\n"
LOST_AGAIN = stream(*MORE, headers=MARK, ends=False)
WHOLE = stream(
    event("one two ", "c"), event("three four", "c", "stop"), b"data: [DONE]\n\n", headers=MARK,
)  # fmt: skip
TEXT = "one two three four"


@contextmanager
def places(folder: Path, *servers: list[RawServer]) -> Iterator[tuple[Routed, list[Routed]]]:
    """A router in front of one for each list of servers; all of them have a key."""
    (folder / "key").write_bytes(b"a key that all of them have")
    options: dict[str, Any] = {
        "kv_key_file": str(folder / "key"),
        "policy": "round-robin",
        "health_interval": 0.5,
    }
    with ExitStack() as stack:
        for each in servers:
            for server in each:
                stack.callback(server.close)
        inner = [stack.enter_context(routed(urls=[one.url for one in each], **options)) for each in servers]
        urls = [f"http://127.0.0.1:{each.port}" for each in inner]
        top = stack.enter_context(routed(urls=urls, **options))
        for router in (*inner, top):
            until(lambda router=router: all(each.healthy for each in router.backends.all))  # type: ignore[misc]
        yield top, inner


def text_of(body: bytes) -> str:
    """The text of a stream that is complete, told once, under one id, without what routers say to each other."""
    assert b": ids" not in body
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"error" not in body
    events = [json.loads(line[6:]) for line in body.split(b"\n\n")[:-2]]
    assert len({each["id"] for each in events}) == 1
    choices = [choice for each in events for choice in each["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    return "".join(choice["delta"]["content"] for choice in choices)


def test_ids_stay_within_a_place(tmp_path: Path) -> None:
    """Its router goes on behind them with another server of its own; the one in front sees an undisturbed stream."""
    one, two = RawServer(LOST), RawServer(WHOLE)
    with places(tmp_path, [one, two]) as (top, (inner,)):
        reply = top.chat("hello", stream=True)
        assert text_of(reply.body) == TEXT
        assert "x-quire-stream" not in reply.headers
        assert unpacked(two.asked[0][1]["resumed_output"]["ids"]) == [[5, 6]]
        until(lambda: inner.service.context.metrics.resumed_by_ids == 1)
        assert top.service.context.metrics.resumed == 0
        for router in (top, inner):
            until(lambda router=router: router.service.context.kept == 0)  # type: ignore[misc]


def test_another_place_begins_with_the_first_token(tmp_path: Path) -> None:
    """Nobody outside a place knows ids: all is computed again there, with the seed that the first router drew."""
    one, two = RawServer(LOST), RawServer(WHOLE)
    with places(tmp_path, [one], [two]) as (top, inner):
        assert text_of(top.chat("hello", stream=True).body) == TEXT
        (_, asked), (_, again) = one.asked[0], two.asked[0]
        assert "resumed_output" not in again
        assert again == asked
        until(lambda: top.service.context.metrics.resumed == 1)
        assert top.service.context.metrics.resumed_by_ids == 0
        assert [each.service.context.metrics.resumed for each in inner] == [0, 0]


def test_a_place_that_loses_all_its_servers_one_after_the_other(tmp_path: Path) -> None:
    """Its second server, which has gone on behind ids, is lost, too."""
    one, two, three = RawServer(LOST), RawServer(LOST_AGAIN), RawServer(WHOLE)
    with places(tmp_path, [one, two], [three]) as (top, (first, _)):
        assert text_of(top.chat("hello", stream=True).body) == TEXT
        assert "resumed_output" in two.asked[0][1]
        assert "resumed_output" not in three.asked[0][1]
        until(lambda: top.service.context.metrics.resumed == 1)
        until(lambda: first.service.context.kept == 0)


@pytest.mark.parametrize("field", ["return_token_ids", "best_of"])
def test_what_cannot_go_on_ends_with_one_error(tmp_path: Path, field: str) -> None:
    """Such as a stream that tells the ids of tokens: no second place is asked, and the client knows."""
    one, two = RawServer(LOST), RawServer(WHOLE)
    with places(tmp_path, [one], [two]) as (top, _):
        fields: dict[str, Any] = {"return_token_ids": True} if field == "return_token_ids" else {"best_of": 3}
        body = {"prompt": "hello", "max_tokens": 4, "stream": True} | fields
        reply = top.request("POST", "/v1/completions", body)
        assert reply.text.count("backend_lost") == 1
        assert "[DONE]" not in reply.text
        assert (len(one.asked), len(two.asked)) == (1, 0)


def test_samples_of_a_place_go_on_at_another(tmp_path: Path) -> None:
    """Three samples, of which one has ended and one has not begun."""
    lost = stream(
        event("one ", "a"), event("zwei", "a", "stop", 2), event("two", "a"), headers=MARK, ends=False
    )
    rest = stream(
        event("zwei", "b", "stop", 2), event("ichi", "b", "stop", 1), event("one two three", "b", "stop"),
        b"data: [DONE]\n\n", headers=MARK,
    )  # fmt: skip
    one, two = RawServer(lost), RawServer(rest)
    with places(tmp_path, [one], [two]) as (top, _):
        body = top.chat("hello", stream=True, n=3).body
        texts, reasons = dict.fromkeys(range(3), ""), []
        for line in body.split(b"\n\n"):
            for choice in json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
                texts[choice["index"]] += choice["delta"]["content"]
                reasons += [choice["finish_reason"]] * bool(choice["finish_reason"])
        assert texts == {0: "one two three", 1: "ichi", 2: "zwei"}
        assert reasons == ["stop"] * 3
        assert two.asked[0][1]["n"] == 3
