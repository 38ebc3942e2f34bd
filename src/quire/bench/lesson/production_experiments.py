"""Experiments 1 to 7 on the simulated server: what each change brings, over several seeds, printed as it comes out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from quire.bench.lesson.plant import Plant, settings
from quire.bench.lesson.production import LoadOutcome, outcome
from quire.planner.devices import device
from quire.planner.figure import Figure
from quire.records import dataclass

_SEARCHES = 7


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, its figures, and what has to hold: a sentence, and whether it does."""

    number: int
    title: str
    figures: list[Figure]
    holds: list[tuple[str, bool]]


def _base(**changes: Any) -> Plant:
    given = settings("experiments")
    plant = Plant(model=given["model"], device=device(given["device"]), paging=False, chunking=False)
    return replace(plant, **changes)


def _all(plant: Plant, rate: float | None = None) -> list[LoadOutcome]:
    given = settings("experiments")
    return [outcome(plant, rate or given["rate"], seed) for seed in given["seeds"]]


def _mean(found: list[LoadOutcome], what: Callable[[LoadOutcome], float]) -> float:
    return sum(map(what, found)) / len(found)


def _tps(found: list[LoadOutcome]) -> float:
    return _mean(found, lambda one: one.tokens_per_second)


def _time(found: list[LoadOutcome], name: str) -> float:
    return _mean(found, lambda one: one.mean(name))


def _static() -> Experiment:
    found = _all(_base(batching="static"))
    growth = _mean(found, lambda one: one.growth)
    return Experiment(1, "Static batches", [
        Figure("output", _tps(found), "tokens/s"), Figure("TTFT, mean", _time(found, "ttft"), "ms"),
        Figure("the queue grows by", growth, "sequences", "from the second to the last quarter"),
    ], [("the queue grows", all(one.growth > 1 for one in found))])  # fmt: skip


def _continuous() -> Experiment:
    static, found = _all(_base(batching="static")), _all(_base())
    growth = _mean(found, lambda one: one.growth)
    return Experiment(2, "Continuous batching", [
        Figure("output", _tps(found), "tokens/s", f"{_tps(static):,.0f} with static batches"),
        Figure("TTFT, mean", _time(found, "ttft"), "ms"), Figure("the queue grows by", growth, "sequences"),
    ], [("more tokens a second than static batches", _tps(found) > _tps(static)),
        ("the queue is shorter", growth < _mean(static, lambda one: one.growth))])  # fmt: skip


def _prefix() -> Experiment:
    before, found = _all(_base()), _all(_base(prefix_cache=True))
    step, prefix = _base().step_time(), settings("load")["shared_prefix"]
    own = sum(settings("load")["prompt"]) / 2
    skipped = 1e3 * (step(_prefill(prefix + own)) - step(_prefill(own)))
    return Experiment(3, "Prefix cache", [
        Figure("TTFT, mean", _time(found, "ttft"), "ms", f"{_time(before, 'ttft'):,.0f} ms without"),
        Figure("prefill that is skipped, of a prompt alone", skipped, "ms"),
        Figure("prompt tokens from the cache", 100 * _mean(found, lambda one: one.hit_share), "%"),
    ], [("the first token comes earlier by the prefill that is skipped, at least",
         _time(before, "ttft") - _time(found, "ttft") >= skipped)])  # fmt: skip


def _prefill(tokens: float) -> tuple[float, ...]:
    return (1.0, 0.0, tokens, 0.0, tokens * tokens / 2, 0.0, 0.0, 0.0)


def _decode(rows: int, context: float) -> tuple[float, ...]:
    return (1.0, float(rows), 0.0, rows * context, 0.0, 0.0, 0.0, 0.0)


def _speculation() -> Experiment:
    few = 1.0
    before, found = _all(_base(prefix_cache=True), few), _all(_base(prefix_cache=True, speculation=True), few)
    plain, drafting = _base().step_time(), _base(speculation=True).step_time()
    short, long = (
        sum(settings("load")["prompt"]) / 2 + more for more in (0, settings("load")["shared_prefix"])
    )
    batches = (1, 8, 64, 256)
    gains = {rows: plain(_decode(rows, short)) / drafting(_decode(rows, short)) for rows in batches}
    far = plain(_decode(batches[-1], long)) / drafting(_decode(batches[-1], long))
    tokens = _expected()
    return Experiment(4, "Speculation", [
        Figure("ITL, mean", _time(found, "itl"), "ms", f"{_time(before, 'itl'):.3g} ms without, at {few:g} request/s"),
        Figure("tokens of a step and sequence", tokens, "tokens"),
        *(Figure(f"gain in a batch of {rows}", gain, "×", f"{short:g} tokens each") for rows, gain in gains.items()),
        Figure(f"gain in a batch of {batches[-1]}", far, "×", f"{long:,.0f} tokens each: reads of the cache bind"),
    ], [("tokens come faster", _time(found, "itl") < _time(before, "itl")),
        ("a step gives 2 to 4 tokens", 2 <= tokens <= 4),
        ("the gain shrinks with the batch, of short contexts",
         gains[batches[-1]] < gains[1] and all(gain < gains[1] * 1.001 for gain in gains.values()))])  # fmt: skip


def _expected() -> float:
    from quire.planner.formulas import accepted_length

    given = settings("speculation")
    return accepted_length(given["alpha"], given["gamma"])


def _devices() -> Experiment:
    counts, rate = settings("experiments")["devices"], 100.0
    found = {count: _all(_base(cards=count, prefix_cache=True, paging=True), rate) for count in counts}
    rates = {count: _tps(runs) for count, runs in found.items()}
    alone = {
        count: 1e3 * _base(cards=count).step_time()(_decode(1, settings("load")["shared_prefix"]))
        for count in counts
    }
    pairs = list(itertools.pairwise(counts))
    return Experiment(5, "More cards", [
        *(Figure(f"output of {count}", value, "tokens/s") for count, value in rates.items()),
        *(Figure(f"a token on {count}, alone", value, "ms") for count, value in alone.items()),
    ], [("more cards give more tokens a second", list(rates.values()) == sorted(rates.values())),
        ("by less than 2 × a doubling", all(rates[b] / rates[a] < 2 ** math.log2(b / a) for a, b in pairs)),
        ("a token takes less time", list(alone.values()) == sorted(alone.values(), reverse=True))])  # fmt: skip


def _grows(plant: Plant, rate: float) -> bool:
    """Whether more waits at the end of the load than a batch can take in at once."""
    return _mean([outcome(plant, rate, seed) for seed in settings("experiments")["seeds"][:3]],
                 lambda one: one.growth) > 1  # fmt: skip


def _saturation() -> Experiment:
    plant = _base(prefix_cache=True, paging=True)
    low, high = 1.0, 2.0
    while not _grows(plant, high):
        low, high = high, 2 * high
    for _ in range(_SEARCHES):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _grows(plant, middle) else (middle, high)
    return Experiment(6, "Saturation", [
        Figure("highest stable rate", low, "requests/s", f"it grows at {high:.3g}"),
    ], [("stable at 0.95 ×", not _grows(plant, 0.95 * low)),
        ("growing at 1.05 ×", _grows(plant, 1.05 * high))])  # fmt: skip


def _large() -> Experiment:
    given = settings("experiments")
    cards, rate = max(given["devices"]) // 2, 100.0
    small = _all(_base(cards=cards, prefix_cache=True, paging=True), rate)
    plants = {int8: _base(model=given["large_model"], cards=cards, prefix_cache=True, paging=True, int8=int8)
              for int8 in (False, True)}  # fmt: skip
    rates = {int8: _tps(_all(plant, rate)) for int8, plant in plants.items()}
    room = {int8: plant.cache_tokens for int8, plant in plants.items()}
    return Experiment(7, "A model of 70B", [
        Figure(f"output of {given['model']}", _tps(small), "tokens/s", f"on {cards} cards"),
        Figure(f"output of {given['large_model']}", rates[False], "tokens/s"),
        Figure("with INT8 weights", rates[True], "tokens/s"),
        Figure("cache", room[False], "tokens", f"{room[True]:,} with INT8"),
    ], [("fewer tokens a second than the small model", rates[False] < _tps(small)),
        ("INT8 frees memory for the cache", room[True] > room[False]),
        ("and gives more tokens a second", rates[True] > rates[False])])  # fmt: skip


_EXPERIMENTS = (_static, _continuous, _prefix, _speculation, _devices, _saturation, _large)


def experiment(number: int) -> Experiment:
    """Run one. Raises ValueError for a number that is none."""
    if not 1 <= number <= len(_EXPERIMENTS):
        raise ValueError(f"experiment: {number} must be from 1 to {len(_EXPERIMENTS)}")
    return _EXPERIMENTS[number - 1]()


def factors() -> Iterator[Figure]:
    """What each change alone brings in tokens a second at the rate of the experiments, their product, and all
    together: the lessons' "5 to 10 times, multiplicative", as it comes out."""
    start = _tps(_all(_base(batching="static")))
    changes: dict[str, dict[str, Any]] = {
        "continuous batching": {}, "and prefix cache": {"prefix_cache": True}, "and INT8": {"int8": True},
    }  # fmt: skip
    product, before = 1.0, start
    kept: dict[str, Any] = {}
    for name, change in changes.items():
        kept |= change
        now = _tps(_all(_base(**kept)))
        product *= now / before
        yield Figure(name, now / before, "×", f"{now:,.0f} tokens/s")
        before = now
    yield Figure("their product", product, "×", f"from {start:,.0f} tokens/s")
