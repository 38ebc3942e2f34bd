"""Requests through a router over sockets: streams, failures, limits, and what is not passed."""

from __future__ import annotations

import concurrent.futures
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fake_llm import Behaviour, FakeLLM
from helpers.process import until
from helpers.raw_server import RawServer, stream
from helpers.routed import routed
from helpers.server import GUARD
from quire.routing.router_policies import policy_named

FAST = {"ttft": 0.0, "itl": 0.0}


def test_answers_are_passed_on() -> None:
    """Whole and streamed, in every API, with the name of the server and without its address."""
    with routed(Behaviour(**FAST)) as router:
        whole = router.chat("hello")
        assert whole.status == 200
        assert whole.json["choices"][0]["message"]["content"] == " word" * 4
        assert whole.headers["x-quire-backend"] == "backend-1"
        streamed = router.chat("hello", stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.count(" word") == 4
        assert streamed.text.endswith("data: [DONE]\n\n")
        ollama = router.request(
            "POST", "/api/generate", {"model": "fake-model", "prompt": "x", "options": {"num_predict": 3}}
        )
        assert ollama.status == 200
        assert str(router.ports[0]) not in str([whole.headers, whole.text, streamed.text])
        models = router.request("GET", "/v1/models").json
        assert [each["id"] for each in models["data"]] == ["fake-model"]


def test_conversations_stay_where_their_beginning_is() -> None:
    """Turns of conversations with long beginnings come back to one server each; the servers share the conversations."""
    with routed(*(Behaviour(**FAST) for _ in range(3))) as router:
        seen: dict[int, set[str]] = {}
        for turn in range(4):
            for talk in range(9):
                text = f"conversation {talk} " * 100 + " more" * 50 * turn
                reply = router.chat(text)
                seen.setdefault(talk, set()).add(reply.headers["x-quire-backend"])
        assert all(len(servers) == 1 for servers in seen.values())
        assert router.service.context.backends.prefixes.size("backend-1") > 0


def test_another_server_is_asked_when_one_is_busy_or_gone() -> None:
    with routed(Behaviour(**FAST, refuse=set(range(100))), Behaviour(**FAST), policy="round-robin") as router:
        replies = [router.chat("hello") for _ in range(6)]
        assert [each.status for each in replies] == [200] * 6
        assert {each.headers["x-quire-backend"] for each in replies} == {"backend-2"}
        router.lose(0)
        replies = [router.chat("hello") for _ in range(6)]
        assert [each.status for each in replies] == [200] * 6


class RefusesLate(FakeLLM):
    """Takes a while to say that it is busy."""

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        for pause, data in super().respond(method, path, body):
            yield pause + 0.05 * (method == "POST"), data


def test_what_is_left_of_a_deadline_is_passed_on() -> None:
    """Servers count from the arrival there. A request waits for a server as long as it has time."""
    busy = RefusesLate(Behaviour(refuse={0, 1}))
    with routed(busy, Behaviour(**FAST), policy="round-robin", hold_seconds=GUARD) as router:
        for fields in ({"deadline_ms": 60_000}, {"max_queue_ms": 60_000.5, "stream": True}):
            router.do(lambda: setattr(router.service.context, "policy", policy_named("round-robin")))
            assert router.chat("hello", **fields).status == 200
            (_, first), (_, second) = busy.seen[-1], router.fakes[1].seen[-1]
            (name,) = fields.keys() - {"stream"}
            assert first[name] == fields[name]
            assert fields[name] - 1e3 * GUARD < second[name] < fields[name] - 50
            assert first | {name: 0} == second | {name: 0}
        for number in (0, 1):
            router.lose(number)
        until(lambda: not any(each.healthy for each in router.backends.all))
        reply = router.chat("hello", deadline_ms=20)
        assert (reply.status, reply.json["error"]["code"]) == (504, "deadline_exceeded")


def test_the_refusal_of_the_last_server_reaches_the_client() -> None:
    busy = Behaviour(**FAST, refuse=set(range(100)))
    with routed(busy, Behaviour(**FAST, refuse=set(range(100)))) as router:
        reply = router.chat("hello")
        assert reply.status == 429
        assert reply.json["error"]["code"] == "queue_full"
        assert sum(len(fake.seen) for fake in router.fakes) == 2


def test_a_stream_that_is_cut_off_ends_with_an_error() -> None:
    with routed(Behaviour(**FAST, cut={0})) as router:
        reply = router.chat("hello", stream=True)
        assert reply.status == 200
        assert "backend_lost" in reply.text
        assert "[DONE]" not in reply.text
        assert router.chat("hello", stream=True).text.endswith("data: [DONE]\n\n")


def test_an_event_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error follows whole events."""
    monkeypatch.setattr("quire.router.relay._EVENT_BYTES", 1000)
    server = RawServer(stream(b'data: {"choices": []}\n\n', b"data: " + bytes(2000), b"\n\n"))
    try:
        with routed(urls=[server.url]) as router:
            first, error, rest = router.chat("hello", stream=True).text.split("\n\n")
            assert first == 'data: {"choices": []}'
            assert "backend_lost" in error
            assert not rest
    finally:
        server.close()


def test_a_server_that_fails_rests_and_comes_back() -> None:
    with routed(Behaviour(**FAST), breaker_failures=1, retries=0) as router:
        backend = router.backends.all[0]
        router.do(lambda: backend.failed("a test", time.monotonic()))
        reply = router.chat("hello")
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_backend")
        assert "retry-after" in reply.headers
        until(lambda: router.chat("hello").status == 200)
        assert "paused" not in router.request("GET", "/health").text


def test_a_server_that_is_gone_is_down_and_up_again() -> None:
    with routed(Behaviour(**FAST)) as router:
        router.lose(0)
        until(lambda: router.request("GET", "/health").status == 503)
        assert "down" in router.request("GET", "/health").json["backends"]["backend-1"]
        assert router.chat("hello").status == 503


def test_many_streams_at_once_are_shared_evenly() -> None:
    with routed(*(Behaviour(ttft=0.02, itl=0.002) for _ in range(4))) as router:
        with concurrent.futures.ThreadPoolExecutor(32) as clients:
            replies = list(clients.map(lambda n: router.chat(f"{n}", tokens=20, stream=True), range(64)))
        assert all(each.text.count(" word") == 20 for each in replies)
        shares = Counter(each.headers["x-quire-backend"] for each in replies)
        assert max(shares.values()) <= 1.25 * 64 / 4 + 2
        # a client may have the end of its stream a moment before the router counts it
        until(lambda: all(each.requests == 0 and each.work == 0 for each in router.backends.all))


def test_a_client_that_hangs_up_ends_the_request_at_the_server() -> None:
    with routed(Behaviour(ttft=0.0, itl=0.01)) as router:
        body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000, "stream": true}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", router.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(100)
            assert router.backends.all[0].requests == 1
        until(lambda: router.backends.all[0].requests == 0)


def test_a_slow_reader_holds_back_its_server_alone() -> None:
    """Megabytes of a stream that nobody reads stay at the server; others are answered meanwhile."""
    with routed(Behaviour(**FAST, per_chunk=20_000)) as router:
        body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1600000, "stream": true}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", router.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(100)
            assert router.chat("hello").status == 200


@pytest.mark.parametrize(
    "path", ["/admin/config", "/v1/files", "/v1/batches", "/sleep", "/nothing", "/flush_cache"]
)
def test_what_concerns_one_server_is_not_passed(path: str) -> None:
    with routed(Behaviour(**FAST)) as router:
        assert router.request("POST", path, {}).status in {404, 405}
        assert not router.fakes[0].seen


def test_keys_are_checked_here_and_not_passed_on() -> None:
    with routed(Behaviour(**FAST), serving={"api_key": ("secret",)}) as router:
        refused = router.chat("hello")
        assert refused.status == 401
        assert router.request("GET", "/health").status == 200
        assert router.request("GET", "/router/backends").status == 401
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        headers = {"authorization": "Bearer secret"}
        assert router.request("POST", "/v1/chat/completions", asked, headers).status == 200


def test_an_unknown_model_is_refused_by_name() -> None:
    with routed(Behaviour(**FAST)) as router:
        reply = router.chat("hello", model="other")
        assert reply.status == 404
        assert "'other'" in reply.json["error"]["message"]
        assert router.chat("hello", model="fake-model").status == 200


def test_metrics() -> None:
    with routed(Behaviour(**FAST), Behaviour(**FAST)) as router:
        for _ in range(3):
            router.chat("hello")
        text = router.request("GET", "/metrics").text
        assert 'quire_router_requests_total{route="/v1/chat/completions",status="200"} 3.0' in text
        assert 'quire_router_backend_up{backend="backend-2"} 1.0' in text
        assert "quire_router_routing_confidence" in text
