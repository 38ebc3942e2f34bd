"""How many servers a load needs: the forecast, the rule with its bounds, and requests that wait for a server."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.fake_llm import Behaviour, FakeLLM, Socket
from helpers.process import until
from helpers.routed import Routed, routed
from helpers.server import GUARD
from quire.routing.servers_needed import BIN, BUSY, ScalingBounds, ScalingRule, ServersNeeded, WorkForecast

FAST = {"ttft": 0.0, "itl": 0.0}


@pytest.mark.parametrize("slope", [-3.0, 0.0, 5.0])
def test_a_steady_trend_is_forecast(slope: float) -> None:
    made = WorkForecast(60.0)
    for second in range(1200):
        made.add(10_000 + slope * second, second)
    assert made.rate(1200) == pytest.approx(10_000 + slope * 1260, rel=0.06)


def test_what_nobody_asks_for_is_forgotten() -> None:
    made = WorkForecast(60.0)
    for second in range(300):
        made.add(1000.0, second)
    assert made.rate(300) == pytest.approx(1000.0, rel=0.05)
    assert made.rate(900) < 1.0
    assert made.rate(1e9) == 0.0


def test_margins_cover_what_forecasts_miss() -> None:
    """Bursts that no trend announces make it ask for more than the mean; of most bins it has enough."""
    noise, made, short = random.Random(5), WorkForecast(30.0), 0
    rates = [noise.expovariate(1 / 1000) for _ in range(2000)]
    for number, rate in enumerate(rates):
        made.add(rate * BIN, number * BIN)
        short += sum(rates[max(number - 5, 0) : number + 1]) / min(number + 1, 6) > made.rate(
            number * BIN + 1
        )
    assert short < 0.4 * len(rates)
    assert made.rate(len(rates) * BIN) < 2500


def test_servers_that_a_load_needs() -> None:
    needed = ServersNeeded(level=2.0, start=60.0)
    needed.answered(1000, 1.0)
    assert needed.token_seconds == pytest.approx(1e-3)
    assert needed.servers(0.0, 0, 1, now=0.0) == 0.0
    assert needed.servers(0.0, 1, 1, now=0.0) == 1.0
    assert needed.servers(0.0, 0, 1, now=BIN / 2) == 1.0, "one that has just ended counts"
    assert needed.servers(0.0, 0, 1, now=2 * BIN) == 0.0
    for second in range(600):
        needed.arrived(3000.0, 100.0 + second)
    assert needed.servers(0.0, 9, 4, now=700.0) == pytest.approx(3.0 / BUSY, rel=0.05)
    assert needed.backlog(6000, 3) == pytest.approx(2.0)
    in_time, late = needed.servers(7000, 9, 4, now=700.0), needed.servers(128_000, 9, 4, now=700.0)
    assert in_time == pytest.approx(3.0 / BUSY, rel=0.05), "within the level"
    assert late == pytest.approx(4.0 + 2.0, rel=0.05), "two more would have done it once they are there"


def test_fewer_run_only_after_a_while_and_none_after_longer() -> None:
    rule = ScalingRule(ScalingBounds(0, 8, down=30.0, idle=100.0), running=2, now=0.0)
    seen = [
        rule.servers(needed, float(now))
        for now, needed in enumerate([1.0] * 10 + [5.2] + [1.0] * 60 + [0.0] * 120)
    ]
    assert seen[:10] == [2] * 10, "nothing is known of the time before"
    assert seen[10:41] == [6] * 31
    assert seen[41:71] == [1] * 30
    assert seen[169] == 1
    assert seen[170] == 0, "100 s after the last request"
    assert rule.servers(1.0, 300.0) == 1


def test_bounds_are_kept_whatever_is_needed() -> None:
    """Never beyond the bounds, never fewer than are needed, and a need that wavers changes nothing."""
    noise = random.Random(3)
    for _ in range(200):
        least = noise.randint(0, 3)
        bounds = ScalingBounds(
            least, least + noise.randint(1, 5), noise.uniform(1, 60), noise.uniform(1, 200)
        )
        rule, now = ScalingRule(bounds, least, 0.0), 0.0
        for _ in range(100):
            now += noise.expovariate(1.0)
            needed = noise.choice([0.0, noise.uniform(0, 9)])
            found = rule.servers(needed, now)
            assert bounds.least <= found <= bounds.most
            assert found >= min(needed - 0.05, bounds.most) or needed < 1
    rule = ScalingRule(ScalingBounds(1, 8), 3, 0.0)
    assert {rule.servers(2.9 if now % 7 else 1.2, float(now)) for now in range(600)} == {3}


def serve_late(router: Routed) -> None:
    """Let the server at the router's only address answer from now on."""
    fake = FakeLLM(Behaviour(**FAST))

    async def listen() -> None:
        port = router.backends.all[0].client.server.port
        router.listeners.append(await router.loop.create_server(lambda: Socket(fake), "127.0.0.1", port))

    router.do(lambda: router.loop.create_task(listen()))


def test_requests_wait_for_a_server_that_starts() -> None:
    with routed(Behaviour(**FAST), hold_seconds=300.0, retries=0) as router, ThreadPoolExecutor(8) as clients:
        router.lose(0)
        until(lambda: not router.backends.all[0].healthy)
        assert router.request("GET", "/health").status == 200, "it can take requests"
        asked = [clients.submit(router.chat, "hello", stream=number % 2 > 0) for number in range(8)]
        until(lambda: router.backends.held == 8)
        text = router.request("GET", "/metrics").text
        assert "quire_router_held_requests 8.0" in text
        assert "quire_router_replicas_needed 1.0" in text
        assert router.request("GET", "/health").json["replicas_needed"] == 1.0
        assert router.chat("hello", model="unknown").status == 404, "no server will have it"
        serve_late(router)
        assert [each.result().status for each in asked] == [200] * 8
        until(lambda: (router.backends.held, router.backends.running) == (0, 0))


def test_answers_that_took_no_time_teach_nothing() -> None:
    needed = ServersNeeded(level=2.0, start=60.0)
    needed.answered(1000, 0.0)
    assert needed.token_seconds == pytest.approx(1e-3)
    with routed(Behaviour(**FAST)) as router:
        backend = router.backends.all[0]
        router.do(lambda: router.backends.need(backend).answered(100.0, 0.0))
        router.do(router.backends._measure)
        assert (backend.distance, backend.queued) == (0.0, 0.0)


def test_a_router_whose_checks_end_ends() -> None:
    """It would go on with what it knew: whoever keeps it running starts it again."""

    def wrong() -> None:
        raise ZeroDivisionError

    with routed(Behaviour(**FAST)) as router:
        failed = asyncio.run_coroutine_threadsafe(router.backends.failed(), router.loop)
        router.do(lambda: setattr(router.backends, "_measure", wrong))
        failed.result(GUARD)


def test_groups_of_servers_have_loads_of_their_own(tmp_path: Path) -> None:
    """What is asked of one model says nothing of the servers of another, and who waits counts for those it could be."""
    with routed(Behaviour(**FAST)) as there:
        file = tmp_path / "backends.toml"
        urls = {"a": f"http://127.0.0.1:{there.ports[0]}", "b": "http://127.0.0.1:9"}
        file.write_text("".join(
            f'[[backend]]\nname = "{name}"\nurl = "{url}"\ngroup = "{name}s"\nmodels = ["{name}"]\n'
            for name, url in urls.items()
        ))  # fmt: skip
        with routed(backends_file=str(file), hold_seconds=300.0) as router, ThreadPoolExecutor(1) as clients:

            def needed() -> dict[str, float]:
                found: dict[str, float] = router.request("GET", "/health").json["needed"]
                return found

            assert needed() == {"as": 0.0, "bs": 0.0}
            assert router.chat("hello", model="a").status == 200
            assert needed() == {"as": 1.0, "bs": 0.0}
            asked = clients.submit(router.chat, "hello", model="b")
            until(lambda: needed() == {"as": 1.0, "bs": 1.0})
            assert router.request("GET", "/health").json["replicas_needed"] == 2.0
            router.do(lambda: setattr(router.backends, "draining", True))
            assert asked.result().status == 503


def test_nobody_waits_for_ever_nor_when_the_router_ends() -> None:
    with routed(urls=["http://127.0.0.1:9"], hold_seconds=0.05) as router:
        reply = router.chat("hello")
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_backend")
    with routed(urls=["http://127.0.0.1:9"], hold_seconds=300.0) as router, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(router.chat, "hello")
        until(lambda: router.backends.held == 1)
        asyncio.run_coroutine_threadsafe(router.backends.stop(GUARD), router.loop).result(GUARD)
        assert router.backends.held == 0, "it was told before the checks ended"
        assert asked.result().status == 503


def test_a_server_that_is_back_is_asked_at_once() -> None:
    """Whatever it was paused for was before it went down."""
    with routed(Behaviour(**FAST), breaker_failures=1) as router:
        backend = router.backends.all[0]

        def down() -> None:
            for _ in range(9):
                backend.failed("a test", 1e12)
            backend.healthy = False

        router.do(down)
        until(lambda: router.chat("hello").status == 200)


def test_what_waits_is_counted_and_what_answers_take_is_learned() -> None:
    with routed(Behaviour(ttft=0.02, itl=0.0)) as router:
        for stream in (True, False):
            assert router.chat("hello " * 500, stream=stream).status == 200
        until(lambda: router.backends.running == 0)
        assert router.backends.all[0].waiting == 0.0
        assert 0 < router.backends.need(router.backends.all[0]).token_seconds < 1.0
        text = router.request("GET", "/metrics").text
        assert "quire_router_prefill_backlog_seconds 0.0" in text
