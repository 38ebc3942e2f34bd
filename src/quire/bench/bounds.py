"""The least time that work can take on a machine, and the limit that binds (roofline: Williams et al. 2009).

Memory time counts the bytes that must come from memory: weights, and keys and values read and written, divided by the
measured read bandwidth. Activations count if they exceed the largest cache. If they fit and would still take longest,
no measured limit applies: the bound is called "cache", and there is no share to report.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from quire.program.cost import Cost, StepCost, peak_of
from quire.program.program import Program
from quire.records import dataclass

By = Literal["memory", "compute", "cache"]
NOISE = 0.05  # of a limit, which is measured itself


@dataclass(frozen=True, slots=True)
class Bound:
    """Least seconds and the limit that binds; `peak` names the compute limit."""

    seconds: float
    by: By
    peak: str

    def share(self, seconds: float) -> float | None:
        """The share of the limit that work of `seconds` reached; None if the limit is a cache."""
        return None if self.by == "cache" else self.seconds / seconds


def op_bound(cost: Cost, peak: str, bandwidth: float, compute: Mapping[str, float], cache: int) -> Bound:
    """The bound of one op. `bandwidth` in bytes/s, `compute` in operations/s by format, `cache` in bytes."""
    streamed = cost.weight_bytes + cost.kv_read_bytes + cost.kv_written_bytes
    resident = cost.activation_bytes
    if resident > cache:
        streamed, resident = streamed + resident, 0
    times: dict[By, float] = {
        "compute": cost.flops / compute[peak],
        "memory": streamed / bandwidth,
        "cache": resident / bandwidth,
    }
    by = max(times, key=lambda name: times[name])
    return Bound(times[by], by, peak)


def step_bound(
    program: Program, cost: StepCost, bandwidth: float, compute: Mapping[str, float]
) -> tuple[float, float]:
    """(compute seconds, memory seconds) of a whole step. The longer is the bound of an engine that overlaps both.

    Each op computes at its own peak. Memory time covers weights, keys and values; activations stay in caches.
    """
    computing = sum(
        c.flops / compute[peak_of(program, op)] for op, c in zip(program.ops, cost.ops, strict=True)
    )
    total = cost.total
    moved = total.weight_bytes + total.kv_read_bytes + total.kv_written_bytes
    return computing, moved / bandwidth


def measured_row(cost: Cost, seconds: Sequence[float], bounds: Sequence[Bound]) -> dict[str, Any]:
    """Figures of work of a cost: seconds and bounds round by round, medians, and the share of the limit."""
    median = statistics.median(seconds)
    middle = sorted(bounds, key=lambda bound: bound.seconds)[len(bounds) // 2]
    shares = [bound.share(one) for bound, one in zip(bounds, seconds, strict=True)]
    known = [share for share in shares if share is not None]
    return {
        "seconds": median,
        "samples": list(seconds),
        "flops": cost.flops,
        "bytes": cost.bytes,
        "bytes_per_second": cost.bytes / median,
        "flops_per_second": cost.flops / median,
        "bound": middle.by,
        "bound_seconds": middle.seconds,
        "peak": middle.peak,
        "share": statistics.median(known) if known else None,
    }


def beaten(shares: Iterable[float | None]) -> list[str]:
    """A note if work was faster than its bound, by the shares of the bound that it reached. No work can be."""
    known = [share for share in shares if share is not None]
    over = [share for share in known if share > 1 + NOISE]
    if not over:
        return []
    return [
        f"{len(over)} of {len(known)} shares are beyond the bound, up to {max(over):.0%}: weights stayed in a cache, "
        "or the limits were measured while the machine was slower"
    ]
