"""Servers of one model with several versions of its weights: which one clients get, and that they get no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helpers.fake_llm import Behaviour, FakeLLM, whole
from helpers.process import until
from helpers.routed import Routed, routed
from quire.routing.settled_weights import SettledWeights

HEADER = b"content-type: "


class Versioned(FakeLLM):
    """A server that says which weights it has."""

    def __init__(self, version: str) -> None:
        super().__init__(Behaviour(ttft=0.0, itl=0.0), version)
        self.version = version

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        if path == "/v1/models":
            yield 0.0, whole(200, {"data": [{"id": "fake-model", "version": self.version}]})
            return
        named = f"x-quire-model-version: {self.version}\r\n".encode() + HEADER
        for pause, data in super().respond(method, path, body):
            yield pause, data.replace(HEADER, named) if method == "POST" else data


def versions(router: Routed, count: int = 8, **headers: str) -> set[str]:
    """The versions of some answers."""
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    replies = [router.request("POST", "/v1/chat/completions", body, headers) for _ in range(count)]
    assert {each.status for each in replies} == {200}
    return {each.headers["x-quire-model-version"] for each in replies}


def goes(router: Routed, number: int) -> None:
    """A server is gone."""
    router.lose(number)
    until(lambda: not router.backends.all[number].healthy)


def test_a_version_stays_until_another_one_has_more() -> None:
    settled = SettledWeights()
    assert settled.of("m") is None
    assert settled.settle("m", {"a": 2.0, "b": 2.0}) == "a"
    assert settled.settle("m", {"a": 1.0, "b": 1.0}) == "a"
    assert settled.settle("m", {}) == "a", "nobody is there: nothing is known"
    assert settled.settle("m", {"b": 1.0}) == "b"
    assert settled.settle("m", {"a": 1.0, "b": 1.0}) == "b", "one that was gone changes nothing twice"
    assert settled.changes == 1
    seen = [settled.settle("update", {"old": 10.0 - new, "new": float(new)}) for new in range(11)]
    assert seen == ["old"] * 6 + ["new"] * 5, "one server after the other changes it once"


@pytest.mark.parametrize("weights", ["one", "any"])
def test_clients_get_one_version(weights: str) -> None:
    servers = [Versioned("fp_1"), Versioned("fp_2"), Versioned("fp_1")]
    with routed(*servers, weights=weights, policy="round-robin") as router:
        assert versions(router) == ({"fp_1"} if weights == "one" else {"fp_1", "fp_2"})
        assert router.backends.skewed() == {"fake-model": ["fp_1", "fp_2"]}
        assert 'quire_router_skewed_models{model="fake-model"} 2.0' in router.request("GET", "/metrics").text
        assert versions(router, **{"x-quire-model-version": "fp_2"}) == {"fp_2"}, "who asks for one gets it"
        if weights == "one":
            goes(router, 0)
            assert versions(router) == {"fp_1"}
            goes(router, 2)
            assert versions(router) == {"fp_2"}, "the other place is better than none"
            assert "quire_router_weights_changes_total 1.0" in router.request("GET", "/metrics").text


def test_servers_that_say_nothing_of_their_weights_settle_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As long as another one does: nobody knows what they would answer with. That is said once of each."""
    others = [Versioned(""), Versioned("")]
    with routed(*others, Versioned("fp_1"), weights="one", policy="round-robin") as router:
        assert versions(router) == {"fp_1"}
        assert not any(each.seen for each in others)
        for name in ("backend-1", "backend-2"):
            assert caplog.text.count(f"{name} gets no requests for fake-model: with --weights one") == 1
        goes(router, 2)
        assert {router.chat("hello", model="fake-model").status for _ in range(4)} == {200}


class Nameless(FakeLLM):
    """A server that names no models, and so may have any."""

    def __init__(self) -> None:
        super().__init__(Behaviour(ttft=0.0, itl=0.0))

    def respond(self, method: str, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        if path == "/v1/models":
            yield 0.0, whole(404, {})
        else:
            yield from super().respond(method, path, body)


def test_names_that_clients_make_up_are_not_kept() -> None:
    with routed(Nameless(), weights="one") as router:
        assert {router.chat("hello", model=f"made-up-{number}").status for number in range(20)} == {200}
        assert set(router.backends.settled._settled) <= {""}


def test_a_stream_does_not_go_on_with_other_weights() -> None:
    """Also if its events do not say which weights they are of."""
    cut = Versioned("fp_1")
    cut.behaviour.cut = {0}
    with routed(cut, Versioned("fp_2"), policy="round-robin") as router:
        reply = router.chat("hello", stream=True, tokens=8)
        assert "backend_lost" in reply.text
        assert "[DONE]" not in reply.text
        assert len(router.fakes[1].seen) == 1


def test_who_asks_for_a_version_gets_no_other() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with routed(Versioned("fp_1")) as router:
        reply = router.request("POST", "/v1/chat/completions", body, {"x-quire-model-version": "fp_9"})
        assert (reply.status, reply.json["error"]["code"]) == (409, "version_not_available")
        assert not router.fakes[0].seen


def test_an_answer_of_other_weights_is_not_passed_on() -> None:
    """A server was updated since it was asked for its models: its answer itself says so."""
    servers = [Versioned("fp_1"), Versioned("fp_1")]
    with routed(*servers, weights="one", policy="round-robin", health_interval=3600.0) as router:
        assert versions(router) == {"fp_1"}
        servers[0].version = "fp_2"
        before = len(servers[0].seen)
        assert versions(router) == {"fp_1"}
        assert len(servers[0].seen) == before + 1, "it is asked no more"
        assert "quire_router_other_weights_total 1.0" in router.request("GET", "/metrics").text


def test_places_are_asked_for_a_version() -> None:
    """A router passes on to a router which weights an answer has to have."""
    with ExitStack() as stack:
        other = stack.enter_context(routed(Versioned("fp_1")))
        mixed = stack.enter_context(routed(Versioned("fp_2"), Versioned("fp_1"), policy="round-robin"))
        urls = [f"http://127.0.0.1:{each.port}" for each in (other, mixed)]
        top = stack.enter_context(routed(urls=urls, policy="round-robin"))
        until(lambda: all(each.healthy for each in top.backends.all))
        assert versions(top, **{"x-quire-model-version": "fp_1"}) == {"fp_1"}
        assert top.request("GET", "/router/backends").json["data"][0]["versions"] == ["fp_1"]
        assert versions(top) == {"fp_1", "fp_2"}
