"""Gaps between tokens, judged in a few numbers, against the rule of `quire bench`, which has them all."""

from __future__ import annotations

import random

import pytest

from engine_async.running import ask
from quire.answers import Timings, Usage
from quire.bench.goodput import misses
from quire.bench.timeline import RequestMetrics
from quire.config.schema import SchedulerOptions
from quire.config.serving import ServingConfig
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.front.card import first_live_config
from quire.engine.front.outlook import Outlook
from quire.engine.front.output import OutputBuilder
from quire.engine.front.stream import LiveRequest
from quire.engine.front.token_gaps import TokenGaps
from quire.engine.host.messages import SAMPLE_BITS
from quire.objectives import SLO

BOUND = SLO(itl=50)


def late(gaps: list[float]) -> bool:
    """As `quire bench` says it."""
    metrics = RequestMetrics(None, None, 1.0, itl=gaps, icl=[], exact=True, send_lag=0.0)
    return misses(BOUND, metrics) == ["itl"]


@pytest.mark.parametrize("seed", range(40))
def test_the_judgement_is_that_of_the_load_generator(seed: int) -> None:
    """Around the bound, with few and many gaps, and tokens that come together."""
    rng, found, gaps, now = random.Random(seed), TokenGaps(0.05), list[float](), 0.0
    share = rng.choice([0.005, 0.01, 0.02, 0.5])  # of gaps that are longer
    assert found.percentile() is None
    last = None
    for _ in range(rng.choice([2, 3, 20, 101, 102, 400])):
        now += rng.uniform(0.0501, 0.2) if rng.random() < share else rng.choice([0.05, rng.uniform(0, 0.05)])
        tokens = rng.choice([1, 1, 1, 3])
        found.came(0, tokens, now)
        gaps += [0.0] * (tokens - 1) + ([now - last] if last is not None else [])
        last = now
        if gaps:
            assert (BOUND.missed({"itl": found.percentile()}) != []) == late(gaps)


def test_samples_have_gaps_of_their_own() -> None:
    found = TokenGaps(0.05)
    for at in range(50):
        found.came(0, 1, 0.04 * at)
        found.came(1, 1, 0.04 * at + 0.02)
    seen = found.percentile()
    assert seen is not None
    assert seen < 0.05


@pytest.mark.parametrize(("gap", "kept"), [(0.04, True), (0.06, False)])
def test_a_class_with_an_itl_is_judged_by_it(gap: float, kept: bool) -> None:
    options = SchedulerOptions(slo=("stream:itl=50ms", "batch:"))
    outlook = Outlook(SchedulerConfig(num_blocks=100), options)
    request = ask("one", [1, 2, 3]).request
    live = LiveRequest(7, request, OutputBuilder(request, None, None, lambda _: None))
    for step in range(20):
        outlook.came([7 << SAMPLE_BITS], [[5]], {7: live}, step * gap)
    live.output.timings = Timings(0.0, 0.001, 0.01, 20 * gap)
    live.output.usage = Usage(prompt_tokens=3, completion_tokens=20)
    outlook.ended(request, live.output)
    assert (outlook.kept["stream"], outlook.missed["stream"]) == (int(kept), int(not kept))
    assert not outlook._gaps  # nothing is kept of a request that has ended
    outlook.came([8 << SAMPLE_BITS], [[5]], {}, 0.0)
    assert not outlook._gaps


def test_an_itl_that_is_changed_live_counts_from_then_on() -> None:
    """One gap of 70 ms among 150 of 10 ms: what is known of it beside 100 ms says nothing beside 50 ms."""
    facts, options = SchedulerConfig(num_blocks=100), SchedulerOptions(slo=("stream:itl=100ms",))
    outlook = Outlook(facts, options)
    request = ask("one", [1, 2, 3]).request
    live = LiveRequest(7, request, OutputBuilder(request, None, None, lambda _: None))
    for step in range(170):
        if step == 150:
            first = first_live_config(facts, options, ServingConfig(), {})
            outlook.configure(facts, first.changed({"slo": ["stream:itl=50ms"]}))
        outlook.came([7 << SAMPLE_BITS], [[5]], {7: live}, 0.01 * step + 0.06 * (step > 20))
    live.output.timings = Timings(0.0, 0.001, 0.01, 2.0)
    live.output.usage = Usage(prompt_tokens=3, completion_tokens=170)
    outlook.ended(request, live.output)
    assert (outlook.kept["stream"], outlook.missed["stream"]) == (1, 0)
