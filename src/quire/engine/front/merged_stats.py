"""The reports of several engines of one model as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain, zip_longest
from typing import Any

from quire.engine.api import EngineStats
from quire.engine.usage_ledger import UsageTotals

# Equal in all, or counted once for all.
_SAME = {"block_size", "calls", "max_loras", "step_bends", "step_costs", "words"}
_WORST = {"degrade_steps", "expert_load", "length_error", "step_cost_error", "step_cost_spread"}


def merged_stats(reports: Sequence[EngineStats]) -> EngineStats:
    """Counts and gauges are sums, errors the largest ones. Of shares of the machine the sum is that of all engines."""
    return EngineStats(
        **{
            field.name: _merged(field.name, [getattr(report, field.name) for report in reports])
            for field in fields(EngineStats)
        }
    )


def _merged(name: str, values: Sequence[Any]) -> Any:
    if name in _APART:
        return _APART[name](values)
    if name in _SAME:
        return next((value for value in values if value), values[0])
    known = [value for value in values if value is not None]
    if not known:
        return None
    combine = max if name in _WORST else sum
    if isinstance(known[0], Mapping):
        keys = dict.fromkeys(key for value in known for key in value)
        return {key: combine([value.get(key, 0) for value in known]) for key in keys}
    if isinstance(known[0], tuple):
        return tuple(map(combine, zip_longest(*known, fillvalue=0)))
    return combine(known)


def _usage(reported: Sequence[Sequence[UsageTotals]]) -> tuple[UsageTotals, ...]:
    found: dict[tuple[str, str], UsageTotals] = {}
    for line in chain(*reported):
        key = line.account, line.tag
        was = found.get(key, UsageTotals(*key))
        found[key] = UsageTotals(
            *key,
            *(getattr(was, each.name) + getattr(line, each.name) for each in fields(UsageTotals)[2:]),
        )
    return tuple(found.values())


def _of_each(reported: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """A number of each engine; one that did not report it yet has none."""
    return tuple(map(sum, reported)) if any(reported) else ()


_APART: dict[str, Callable[[Sequence[Any]], Any]] = {"usage": _usage, "replica_wait_seconds": _of_each}
