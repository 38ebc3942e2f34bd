"""Requests that are sent to a second server when the first is late: when, how many, and what becomes of the other."""

from __future__ import annotations

import random

import pytest

from helpers.fake_llm import Behaviour
from helpers.process import until
from helpers.routed import Routed, routed
from quire.routing.hedging import Hedging

FAST = {"ttft": 0.0, "itl": 0.0}
NEVER = 600.0


def learned(share: float = 0.1) -> Hedging:
    """A rule that has seen answers begin in time."""
    made = Hedging(share)
    for _ in range(1000):
        made.began(1.0, 1.0)
    return made


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 1.0])
def test_no_more_than_a_share_of_the_work_is_done_twice(share: float) -> None:
    noise, made, twice, total = random.Random(4), learned(share), 0.0, 0.0
    for _ in range(5000):
        work = noise.expovariate(1 / 500)
        made.came(work)
        total += work
        if noise.random() < 0.7 and made.take(work):
            twice += work
    assert twice <= share * total
    assert share == 0 or twice > 0.5 * min(share, 0.7) * total


def test_one_in_twenty_is_late() -> None:
    noise, made, late = random.Random(5), Hedging(0.1), 0
    for number in range(20_000):
        seconds = noise.expovariate(1.0) * 1.5 + 1.0
        late += number > 2000 and seconds > (made.delay(1.0) or 0.0)
        made.began(seconds, 1.0)
    assert 0.03 < late / 18_000 < 0.08


def test_nothing_is_late_before_answers_have_come_or_without_a_share() -> None:
    assert Hedging(0.1).delay(1.0) is None
    assert learned(0.0).delay(1.0) is None
    assert learned().delay(2.0) == pytest.approx(2.0)


def eager(router: Routed) -> None:
    """Whatever has not begun after some 150 ms is late from now on."""

    def set_up() -> None:
        made = router.service.context.hedging
        for _ in range(1000):
            made.began(0.0, 1.0)
        made.came(1e6)
        router.backends.need(router.backends.all[0]).answered(1e6, 2e3)

    router.do(set_up)


@pytest.mark.parametrize("stream", [True, False])
def test_the_second_server_answers_and_the_first_one_hears_that_it_need_not(stream: bool) -> None:
    with routed(Behaviour(ttft=NEVER), Behaviour(**FAST), hedge_share=1.0, policy="round-robin") as router:
        eager(router)
        replies = [router.chat("hello", stream=stream) for _ in range(4)]
        assert [each.status for each in replies] == [200] * 4
        assert {each.headers["x-quire-backend"] for each in replies} == {"backend-2"}
        assert all(each.text.count(" word") == 4 for each in replies)
        metrics = router.service.context.metrics
        assert 1 <= metrics.hedges_won <= metrics.hedged, "some began at the slow one"
        until(lambda: all(each.requests == 0 and each.work == 0 for each in router.backends.all))
        assert router.backends.all[0].answers["failed"] == 0
        assert router.backends.all[0].waiting == 0
        won = metrics.hedges_won
        seeds = [ask.get("seed") for fake in router.fakes for _, ask in fake.seen]
        assert stream == (None not in seeds)
        text = router.request("GET", "/metrics").text
        assert f"quire_router_hedges_won_total {won}.0" in text


def test_a_second_server_that_is_busy_or_gone_does_not_end_the_request() -> None:
    """The first one still answers, and the refusal is nobody's."""
    busy = Behaviour(**FAST, refuse=set(range(100)))
    with routed(Behaviour(ttft=1.0), busy, hedge_share=1.0) as router:
        eager(router)
        router.do(lambda: setattr(router.backends.all[1], "weight", 1e-6))  # never the first choice
        reply = router.chat("hello")
        assert (reply.status, reply.headers["x-quire-backend"]) == (200, "backend-1")
        metrics = router.service.context.metrics
        assert (metrics.hedged, metrics.hedges_won) == (len(router.fakes[1].seen), 0)
        router.lose(1)
        assert router.chat("hello").status == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1/embeddings", {}), ("/v1/responses", {}), ("/v1/completions", {"idempotency-key": "k"})],
)
def test_what_must_not_be_done_twice_is_not(path: str, headers: dict[str, str]) -> None:
    with routed(Behaviour(ttft=0.2), Behaviour(ttft=0.2), hedge_share=1.0) as router:
        eager(router)
        router.request("POST", path, {"model": "fake-model", "prompt": "x", "input": "x"}, headers)
        assert sum(len(fake.seen) for fake in router.fakes) == 1
