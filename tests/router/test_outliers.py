"""Servers that are far worse than the others get no requests for a while, and come back by probes; others never do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_llm import Behaviour
from helpers.process import until
from helpers.raw_server import RawServer, answer
from helpers.routed import routed
from helpers.server import GUARD
from quire.config.routing import RouterConfig
from quire.router.backend_server import BackendServer
from quire.router.backends import Backends
from quire.routing.outliers import Rest, ServerRecord, is_late, outliers

FAST: dict[str, Any] = {"ttft": 0.0, "itl": 0.0}


def record(answers: int, failing: float, times: float, expected: float = 0.5) -> ServerRecord:
    made = ServerRecord()
    for number in range(answers):
        made.ended(failed=number < answers * failing)
        made.began(expected * times, expected)
    return made


def test_one_is_compared_with_the_others() -> None:
    good = {f"good-{n}": record(40, 0.0, 1.0) for n in range(3)}
    assert outliers(good, 3) == []
    slow, failing = record(40, 0.0, 6.0), record(40, 0.5, 1.0)
    assert outliers(good | {"slow": slow}, 1) == [("slow", "slow")]
    assert outliers(good | {"failing": failing}, 1) == [("failing", "failing")]
    both = good | {"slow": slow, "failing": failing}
    assert sorted(outliers(both, 5)) == [("failing", "failing"), ("slow", "slow")]
    assert len(outliers(both, 1)) == 1
    assert outliers(both, 0) == []
    assert outliers({"slow": slow}, 1) == [], "there is nobody to compare it with"


def test_where_all_are_bad_none_is_an_outlier() -> None:
    assert outliers({str(n): record(40, 0.6, 9.0) for n in range(5)}, 5) == []


def test_few_answers_and_short_times_prove_nothing() -> None:
    good = {str(n): record(40, 0.0, 1.0) for n in range(3)}
    assert outliers(good | {"new": record(29, 1.0, 9.0)}, 4) == []
    quick = {str(n): record(40, 0.0, 1.0, 0.001) for n in range(3)}
    assert outliers(quick | {"ten times": record(40, 0.0, 10.0, 0.001)}, 4) == [], "nine milliseconds"


@pytest.mark.parametrize("seed", range(20))
def test_noise_ejects_nobody_and_a_slow_one_is_found(seed: int) -> None:
    """Times of one kind for all, far from even, and one request in twenty that fails."""
    generator = random.Random(seed)
    records = {str(n): ServerRecord() for n in range(6)}
    for _ in range(4000):
        name = generator.choice([*records])
        expected = generator.uniform(0.05, 3.0)
        records[name].began(expected * generator.lognormvariate(0.0, 0.7), expected)
        records[name].ended(failed=generator.random() < 0.05)
        assert outliers(records, 6) == []
    for count in range(100):
        expected = generator.uniform(0.05, 3.0)
        records["3"].began(8 * expected * generator.lognormvariate(0.0, 0.7), expected)
        if found := outliers(records, 6):
            assert found == [("3", "slow")]
            assert count > 3, "one answer is no reason"
            return
    pytest.fail("it was not found")


def test_a_rest_ends_with_probes() -> None:
    rest = Rest(3)
    assert rest.begin(100.0, as_outlier=True) == 10.0
    assert not rest.takes(109.9, 0)
    assert rest.takes(110.0, 0)
    assert not rest.takes(110.0, 5.0), "one at a time"
    assert rest.began(105.0, late=True) == 0.0, "one that was sent before"
    assert rest.began(111.0, late=True) == 20.0, "twice as long"
    assert [rest.began(131.0 + n, late=False) for n in range(3)] == [0.0] * 3
    assert rest.takes(134.0, 5.0), "it is back"
    assert rest.begin(200.0, as_outlier=True) == 10.0


def test_a_breaker_rests_as_before() -> None:
    rest = Rest(2)
    assert rest.failed(1.0) == 0.0
    rest.succeeded()
    assert rest.failed(2.0) == 0.0
    assert rest.failed(3.0) == 1.0
    assert not rest.is_over(3.9)
    assert [rest.failed(3.0 + n / 10) for n in range(6)] == [0.0] * 6, "requests that were in flight"
    assert rest.failed(4.1) == 2.0
    assert [rest.failed(100.0 * n) for n in range(1, 6)] == [4.0, 8.0, 16.0, 30.0, 30.0]
    rest.succeeded()
    assert rest.is_over(0.0)
    assert rest.failed(1000.0) == 0.0


def test_lateness_of_a_probe() -> None:
    others = [record(5, 0.0, 2.0)]
    assert is_late(9.0, 1.0, others)
    assert not is_late(7.0, 1.0, others), "the others are twice as late as expected, too"
    assert not is_late(0.2, 0.001, [])


def known(*models: str, share: float = 0.34, count: int = 3) -> Backends:
    urls = tuple(f"http://127.0.0.1:{port}" for port in range(1, count + 1))
    found = Backends(RouterConfig(backend=urls, max_ejected=share))
    for each, model in zip(found.all, models or ("m",) * count, strict=True):
        each.healthy, each.models = True, [{"id": model}]
        each.record = record(40, 0.0, 1.0)
    return found


def test_no_more_than_a_share_is_ejected() -> None:
    found = known(count=6)
    for each in found.all[:4]:
        each.record = record(40, 0.9, 1.0)
    found.judge(1.0)
    assert sum(not each.is_available(1.0) for each in found.all) == 0, "four of six are bad: who is usual?"
    found = known(count=6)
    for each in found.all[:2]:
        each.record = record(40, 0.9, 1.0)
    found.all[5].healthy = False
    found.judge(1e12)
    out = [each for each in found.all if each.rest.as_outlier]
    assert len(out) == 1, "one is down already"
    assert found.available("m") == [each for each in found.all[:5] if each is not out[0]]
    assert out[0].state(1e12).startswith("paused: its answers fail far more often")
    found.judge(1e12 + 1)
    assert len([each for each in found.all if each.rest.as_outlier]) == 1


def test_servers_of_other_models_are_not_the_others() -> None:
    found = known("small", "small", "small", "large", "large", "large", count=6)
    for each in found.all[3:]:
        each.record = record(40, 0.0, 12.0)
    found.judge(1.0)
    assert all(each.is_available(1.0) for each in found.all)


def test_nobody_is_ejected_with_a_share_of_none() -> None:
    found = known(share=0.0)
    found.all[0].record = record(40, 1.0, 20.0)
    found.judge(1.0)
    assert all(each.is_available(1.0) for each in found.all)


def test_one_that_is_ejected_answers_when_nobody_else_does() -> None:
    found = known()
    bad = found.all[0]
    bad.eject("slow", 1e12)
    assert bad not in found.available("m")
    for each in found.all[1:]:
        each.healthy = False
    assert found.available("m") == [bad]
    bad.rest.begin(1e12, as_outlier=False)
    assert found.available("m") == [], "one that does not answer at all is not asked"


def test_a_server_that_is_back_is_judged_anew() -> None:
    found = known()
    bad: BackendServer = found.all[0]
    bad.record = record(40, 0.9, 1.0)
    found.judge(1.0)
    assert bad.rested == {"failing": 1}
    assert bad.record.answers == 0
    assert bad.takes(12.0)
    for _ in range(3):
        bad.began(0.1, 0.1, [], 12.0)
    assert bad.state(12.0) == "ready"


def test_one_that_fails_is_left_out_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It answers, and says that it is well, but no request succeeds; then it works again."""
    monkeypatch.setattr("quire.routing.outliers._OUTLIER_PAUSES", (0.05, 0.05))
    monkeypatch.setattr("quire.routing.outliers._SLOW_SECONDS", GUARD)  # this machine may be slow
    refusal, good = answer(503, b"{}"), answer(200, b'{"choices": [], "usage": {"prompt_tokens": 1}}')
    bad = RawServer(refusal)
    try:
        with routed(
            Behaviour(**FAST), Behaviour(**FAST), urls=[bad.url], policy="round-robin", health_timeout=GUARD
        ) as router:
            until(lambda: all(each.healthy for each in router.backends.all))
            server = router.backends.all[0]

            def ask() -> bool:
                assert router.chat("hello").status == 200, "others answer"
                return server.rested["failing"] > 0

            until(ask)
            assert len(bad.asked) >= 30
            bad.answers(good)
            until(lambda: ask() and router.do(lambda: server.state(1e12)) == "ready")
            text = router.request("GET", "/metrics").text
            assert 'quire_router_backend_rests_total{backend="backend-1",why="failing"}' in text
    finally:
        bad.close()
