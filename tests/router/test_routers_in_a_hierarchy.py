"""A router as the server of a router: one address in front of several places that have routers of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from helpers.fake_llm import Behaviour, FakeLLM
from helpers.process import until
from helpers.routed import Routed, routed
from helpers.server import GUARD
from quire.config.routing import BackendEntry
from quire.router.backend_server import BackendServer

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
FAST = {"ttft": 0.0, "itl": 0.0}


@contextmanager
def places(*behaviours: Behaviour | FakeLLM, **outer: Any) -> Iterator[tuple[Routed, list[Routed]]]:
    """A router in front of routers, of which each has one server."""
    with ExitStack() as stack:
        inner = [stack.enter_context(routed(each)) for each in behaviours]
        urls = [f"http://127.0.0.1:{each.port}" for each in inner]
        top = stack.enter_context(routed(urls=urls, **outer))
        until(lambda: all(each.healthy for each in top.backends.all))
        yield top, inner


def test_answers_come_through_two_routers() -> None:
    """With the name of the place, and without that of a server in it."""
    with places(Behaviour(**FAST), Behaviour(**FAST), policy="round-robin") as (top, inner):
        replies = [top.chat("hello", stream=stream) for stream in (False, True) for _ in range(4)]
        assert {each.status for each in replies} == {200}
        assert all(each.text.endswith("data: [DONE]\n\n") for each in replies[4:])
        assert {each.headers["x-quire-backend"] for each in replies} == {"backend-1", "backend-2"}
        assert [len(each.fakes[0].seen) for each in inner] == [4, 4]
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", top.port, timeout=GUARD)
        ) as connection:
            body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            assert len(connection.getresponse().headers.get_all("x-quire-backend") or ()) == 1
        assert [each["id"] for each in top.request("GET", "/v1/models").json["data"]] == ["fake-model"]


def test_a_place_without_servers_gets_no_requests_until_it_has_one() -> None:
    """Its router says that it is not well, though it answers."""
    with places(Behaviour(**FAST), Behaviour(**FAST)) as (top, inner):
        inner[0].lose(0)
        until(lambda: not top.backends.all[0].healthy)
        assert {top.chat("hello").headers["x-quire-backend"] for _ in range(4)} == {"backend-2"}


def test_a_refusal_of_a_place_is_taken_elsewhere() -> None:
    busy = Behaviour(**FAST, refuse=set(range(100)))
    with places(busy, Behaviour(**FAST), policy="round-robin") as (top, _):
        assert {top.chat("hello").headers["x-quire-backend"] for _ in range(4)} == {"backend-2"}


def test_a_stream_that_a_place_loses_is_not_complete() -> None:
    """With no other place the client gets an error, and one alone."""
    with places(Behaviour(**FAST, cut={0})) as (top, _):
        reply = top.chat("hello", stream=True)
        assert reply.text.count("backend_lost") == 1
        assert "[DONE]" not in reply.text


def test_a_stream_that_a_place_loses_goes_on_at_another() -> None:
    """The place says nothing to the client, and the router in front sends the request to the other one."""
    cut = Behaviour(**FAST, cut=set(range(100)))
    with places(cut, Behaviour(**FAST), policy="round-robin") as (top, inner):
        replies = [top.chat("hello", stream=True, tokens=8) for _ in range(4)]
        assert all(each.text.endswith("data: [DONE]\n\n") for each in replies)
        assert {each.text.count(" word") for each in replies} == {8}
        assert not any("backend_lost" in each.text for each in replies)
        assert [len(each.fakes[0].seen) for each in inner] == [2, 4]
        seeds = [ask["seed"] for each in inner for _, ask in each.fakes[0].seen]
        assert len(set(seeds)) == 4, "the same one for both parts of a stream"


def test_peers_do_not_send_back_what_they_get() -> None:
    """Two places that help each other: neither is well by the other alone, and a request crosses once."""
    with places(Behaviour(**FAST), Behaviour(**FAST)) as (_, inner):
        for one, other in (inner, inner[::-1]):
            peer = BackendServer(
                BackendEntry(f"http://127.0.0.1:{other.port}", "peer", peer=True), one.backends.config
            )
            one.do(lambda one=one, peer=peer: one.backends.all.append(peer))  # type: ignore[misc]
        until(lambda: all(each.backends.all[-1].healthy for each in inner))
        assert [each.request("GET", "/health").json["capacity"] for each in inner] == [1.0, 1.0]
        first = inner[0]
        first.lose(0)
        until(lambda: not first.backends.all[0].healthy)
        assert first.chat("hello").headers["x-quire-backend"] == "peer"
        assert first.request("GET", "/health").status == 200
        assert first.request("GET", "/health", headers={"x-quire-spilled": "1"}).status == 503
        until(lambda: not inner[1].backends.all[-1].healthy)
        assert inner[1].chat("hello").headers["x-quire-backend"] == "backend-1"
        spilled = first.request("POST", "/v1/chat/completions", CHAT, {"x-quire-spilled": "1"})
        assert (spilled.status, spilled.json["error"]["code"]) == (503, "no_backend")


def test_the_share_of_a_place_is_that_of_its_servers() -> None:
    """Three servers of weight 1 behind one address count as three, as long as they are there."""
    with routed(*(Behaviour(**FAST) for _ in range(3))) as large, routed(Behaviour(**FAST)) as small:
        urls = [f"http://127.0.0.1:{each.port}" for each in (large, small)]
        with routed(urls=urls, policy="round-robin") as top:
            until(lambda: [each.weight for each in top.backends.all] == [3.0, 1.0])
            names = Counter(top.chat("hello").headers["x-quire-backend"] for _ in range(40))
            assert names == {"backend-1": 30, "backend-2": 10}
            large.lose(0)
            large.lose(1)
            until(lambda: [each.weight for each in top.backends.all] == [1.0, 1.0])
