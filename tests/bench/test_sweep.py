"""The search for the knee on servers whose capacity is known."""

from __future__ import annotations

import asyncio

import pytest

from quire.bench.sweep import Knee, Point, curve, find_knee


def server(capacity: float, seen: list[float]) -> object:
    """Meets every objective up to its capacity; beyond it goodput falls."""

    async def measure(rate: float) -> Point:
        seen.append(rate)
        share = 1.0 if rate <= capacity else max(0.0, 2 - rate / capacity) * 0.5
        return Point(rate, share * rate, share, share >= 0.9, {})

    return measure


@pytest.mark.parametrize("start", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("capacity", [0.7, 5.3, 31.0])
def test_bisection_finds_the_capacity(capacity: float, start: float) -> None:
    seen: list[float] = []
    knee: Knee = asyncio.run(find_knee(server(capacity, seen), start, tolerance=0.05, most=20))  # type: ignore[arg-type]
    assert knee.highest_served is not None
    assert knee.lowest_unserved is not None
    assert knee.highest_served <= capacity < knee.lowest_unserved <= knee.highest_served * 1.0501
    assert knee.best.rate == knee.highest_served
    assert len(seen) == len(set(seen)) <= 16
    assert [point.rate for point in knee.points] == sorted(seen)
    assert not knee.notes()


def test_the_knee_is_the_highest_goodput_not_the_highest_load() -> None:
    knee = asyncio.run(curve(server(4.0, []), [6.0, 2.0, 4.0, 5.0]))  # type: ignore[arg-type]
    assert knee.best.rate == 4.0
    assert (knee.highest_served, knee.lowest_unserved) == (4.0, 5.0)


def test_ends_without_a_bracket_say_so() -> None:
    most = asyncio.run(find_knee(server(1e9, []), 1.0, most=4))  # type: ignore[arg-type]
    assert len(most.points) == 4
    assert any("the knee is higher" in note for note in most.notes())
    none = asyncio.run(find_knee(server(1e-9, []), 1.0, most=4))  # type: ignore[arg-type]
    assert none.highest_served is None
    assert any("no measured load met" in note for note in none.notes())


def test_noise_is_reported() -> None:
    points = [Point(1, 1, 1, True, {}), Point(2, 1, 0.5, False, {}), Point(4, 4, 1, True, {})]

    async def measure(rate: float) -> Point:
        return next(point for point in points if point.rate == rate)

    knee = asyncio.run(curve(measure, [1, 2, 4]))
    assert any("noisy" in note for note in knee.notes())


@pytest.mark.parametrize(
    ("options", "says"),
    [({"start": 0}, "start-rate"), ({"tolerance": 0}, "tolerance"), ({"most": 1}, "max-points")],
)
def test_searches_that_make_no_sense(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        asyncio.run(find_knee(server(1, []), **{"start": 1.0, **options}))  # type: ignore[arg-type]
