"""What a router says to the server that goes on with a stream, and what of it clients see: nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers.process import until
from helpers.raw_server import RawServer, answer, stream
from helpers.routed import Routed, routed
from quire.routing.continued import is_resume_code, is_stream_proof, unpacked

KEY = b"a key that all of them have"
MARK = "x-quire-stream: 0123456789abcdef\r\n"
REFUSAL = answer(409, b'{"error": {"code": "other_engine"}}')


def event(text: str, name: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    body = {"id": name, "created": 1, "system_fingerprint": "fp", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


BEGUN = (event("one ", "a"), b": ids 5\n\n", event("two ", "a") + b": ids 6 7\n\n", b": ids 8\n\n: ids 9\n\n")
LOST = stream(*BEGUN, headers=MARK, ends=False)
WHOLE = (event("one two ", "b") + b": ids 5 6 7 8\n\n" + event("three", "b"), b": ids 9 10\n\n")
END = event("", "b", "stop") + b"data: [DONE]\n\n"


@contextlib.contextmanager
def two(folder: Path, first: RawServer, second: RawServer, **routing: Any) -> Iterator[Routed]:
    (folder / "key").write_bytes(KEY)
    routing = {"kv_key_file": str(folder / "key"), "policy": "round-robin"} | routing
    try:
        with routed(urls=[first.url, second.url], **routing) as router:
            until(lambda: all(each.healthy for each in router.backends.all))
            yield router
    finally:
        first.close()
        second.close()


def text_of(body: bytes) -> str:
    lines = [line[6:] for line in body.decode().split("\n\n") if line and line != "data: [DONE]"]
    found = [json.loads(line) for line in lines]
    assert {each["id"] for each in found} == {"a"}, "one answer"
    return "".join(each["choices"][0]["delta"]["content"] for each in found)


def test_a_lost_stream_is_given_to_another_server(tmp_path: Path) -> None:
    first, second = RawServer(LOST), RawServer(stream(*WHOLE, END, headers=MARK))
    with two(tmp_path, first, second) as router:
        reply = router.chat("hello", stream=True)
        assert text_of(reply.body) == "one two three"
        assert b": ids" not in reply.body
        assert b"DONE" in reply.body
        assert "x-quire-stream" not in reply.headers
        (_, asked), (headers, again) = first.asked[0], second.asked[0]
        name, given = headers["x-request-id"], again.pop("resumed_output")
        assert again == asked, "the same request, with the seed that the router drew"
        assert is_stream_proof(KEY, name, headers["x-quire-stream"])
        assert unpacked(given["ids"]) == [[5, 6, 7, 8]], "the last one is drawn again"
        assert given["mark"] == "0123456789abcdef"
        assert is_resume_code(KEY, name, given["mark"], given["ids"], given["code"])
        until(lambda: router.service.context.metrics.resumed_by_ids == 1)
        until(lambda: router.service.context.kept == 0)


def test_each_sample_of_a_lost_stream_goes_on(tmp_path: Path) -> None:
    """Behind its own ids: one had no token, and one had ended."""

    def said(index: int, text: str, name: str, reason: str | None = None) -> bytes:
        return event(text, name, reason).replace(b'"index": 0', b'"index": %d' % index)

    lost = stream(
        said(0, "one ", "a"), b": ids 5\n\n", said(2, "zwei", "a", "stop"), b": ids@2 6 7\n\n",
        said(0, "two", "a"), b": ids 8\n\n", headers=MARK, ends=False,
    )  # fmt: skip
    rest = stream(
        said(2, "zwei", "b", "stop"), said(1, "ichi", "b", "stop"), said(0, "one two three", "b", "stop"),
        b"data: [DONE]\n\n", headers=MARK,
    )  # fmt: skip
    first, second = RawServer(lost), RawServer(rest)
    with two(tmp_path, first, second) as router:
        body = router.chat("hello", stream=True, n=3).body
        assert unpacked(second.asked[0][1]["resumed_output"]["ids"]) == [[5], [], [6]]
        texts = dict.fromkeys(range(3), "")
        for line in body.decode().split("\n\n"):
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                texts[choice["index"]] += choice["delta"]["content"]
        assert texts == {0: "one two three", 1: "ichi", 2: "zwei"}
        assert body.count(b'"stop"') == 3
        assert b": ids" not in body


def test_one_that_refuses_computes_all_of_it(tmp_path: Path) -> None:
    first, second = RawServer(LOST), RawServer(REFUSAL, stream(*WHOLE, END))
    with two(tmp_path, first, second) as router:
        assert text_of(router.chat("hello", stream=True).body) == "one two three"
        assert ["resumed_output" in body for _, body in second.asked] == [True, False]
        until(lambda: router.service.context.metrics.resumed == 1)
        assert router.service.context.metrics.resumed_by_ids == 0


def test_a_stream_goes_on_twice(tmp_path: Path) -> None:
    """The second server is lost, too: a third one gets the ids of both."""
    first, second = RawServer(LOST), RawServer(stream(*WHOLE, headers=MARK, ends=False))
    third = RawServer(stream(event("one two three", "c") + event(" four", "c"), END, headers=MARK))
    (tmp_path / "key").write_bytes(KEY)
    urls = [first.url, second.url, third.url]
    with routed(urls=urls, kv_key_file=str(tmp_path / "key"), policy="round-robin") as router:
        until(lambda: all(each.healthy for each in router.backends.all))
        assert text_of(router.chat("hello", stream=True).body) == "one two three four"
        assert unpacked(third.asked[0][1]["resumed_output"]["ids"]) == [[5, 6, 7, 8, 9]]
    for server in (first, second, third):
        server.close()


def test_what_clients_say_of_it_is_dropped(tmp_path: Path) -> None:
    made = answer(200, b'{"choices": []}')
    first, second = RawServer(made), RawServer(made)
    with two(tmp_path, first, second, resume=False) as router:
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "resumed_output": {"ids": "AAAA"},
            "stream": True,
        }
        router.request("POST", "/v1/chat/completions", body, {"x-quire-stream": "forged"})
        ((headers, asked),) = first.asked
        assert "resumed_output" not in asked
        assert asked["messages"] == body["messages"]
        assert "x-quire-stream" not in headers


def test_without_a_key_nobody_is_asked_for_ids(tmp_path: Path) -> None:
    first, second = RawServer(stream(event("one", "a"), END)), RawServer(REFUSAL)
    with two(tmp_path, first, second, kv_key_file=None) as router:
        router.chat("hello", stream=True)
        assert "x-quire-stream" not in first.asked[0][0]
