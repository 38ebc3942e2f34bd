"""The time of a step op by op, each compared with its limit.

The native executor measures every op on its first thread, including waiting for other threads. Time outside the ops has
separate lines, so the lines add up to the step:

    native    the rest of the forward call: planning the step, waking the threads, iterating over the ops
    sample    logits to tokens: a native call
    engine    everything else: scheduling, filling the arrays of the step, processing its tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.bounds import By, op_bound
from quire.bench.engine_run import EngineStep
from quire.bench.environment import largest_cache
from quire.bench.kernel_programs import kind_of, name_of
from quire.bench.limits import LimitsSample
from quire.program.cost import peak_of, step_cost
from quire.program.program import Program

OUTSIDE = ("native", "sample", "engine")  # no ops

DEFINITIONS = {
    "profile.seconds": "seconds per step in ops of this kind and name: mean over the steps of a kind",
    "profile.share": "share of the seconds of the step",
    "profile.waiting": "share of the seconds of the op in which a thread waited for others at its end, on average",
    "profile.limit_share": "bound of the ops on this machine (each by memory or compute) / their seconds; none if a "
    "bound is a cache",
    "profile.bound": "the limit that binds for most of these seconds",
}


class OpTimes:
    """Accumulates profiled steps; `table` has them."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._names = [(kind_of(op), name_of(program, op)) for op in program.ops]
        self._peaks = [peak_of(program, op) for op in program.ops]
        self._cache = largest_cache()
        self._kinds: dict[str, _Kind] = {}

    def add(self, steps: Sequence[EngineStep], limits: LimitsSample) -> None:
        """Add those of the steps that were profiled, with the limits measured around them."""
        for step in (step for step in steps if step.op_seconds):
            kind = self._kinds.setdefault(step.kind, _Kind())
            kind.steps += 1
            kind.tokens += step.tokens
            kind.wall += step.wall
            kind.outside["native"] += step.phases.get("forward", 0.0) - sum(step.op_seconds)
            kind.outside["sample"] += step.phases.get("sample", 0.0)
            kind.outside["engine"] += step.wall - step.native
            cost = step_cost(self._program, step.rows, step.logit_rows)
            for index, (name, one) in enumerate(zip(self._names, cost.ops, strict=True)):
                if not step.op_seconds[index]:
                    continue  # the head of a step without logits
                bound = op_bound(one, self._peaks[index], limits.bandwidth, limits.compute, self._cache)
                line = kind.lines.setdefault(name, _Line())
                line.count += 1
                line.seconds += step.op_seconds[index]
                line.waited += step.op_waited[index]
                line.bounds[bound.by] = line.bounds.get(bound.by, 0.0) + bound.seconds

    def table(self) -> dict[str, list[dict[str, Any]]]:
        """The table "profile", if steps were profiled: one row per kind of step and op; times are per step."""
        names = [name for name in ("prefill", "mixed", "decode") if name in self._kinds]
        rows = [row for name in names for row in self._kinds[name].rows(name)]
        return {"profile": rows} if rows else {}


class _Line:
    def __init__(self) -> None:
        self.count = 0
        self.seconds = self.waited = 0.0
        self.bounds: dict[By, float] = {}  # least seconds of its ops by limit

    @property
    def by(self) -> By:
        """The limit for most of its time; "cache", and no share, if any op is bound by a cache."""
        return "cache" if "cache" in self.bounds else max(self.bounds, key=lambda by: self.bounds[by])

    @property
    def limit_share(self) -> float | None:
        return None if self.by == "cache" else sum(self.bounds.values()) / self.seconds


class _Kind:
    """Steps of one kind."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.wall = 0.0
        self.outside = dict.fromkeys(OUTSIDE, 0.0)  # seconds
        self.lines: dict[tuple[str, str], _Line] = {}

    def rows(self, step: str) -> list[dict[str, Any]]:
        both = {"step": step, "steps": self.steps, "tokens": self.tokens / self.steps}
        found: list[dict[str, Any]] = [
            {
                **both,
                "op": op,
                "name": name,
                "count": line.count / self.steps,
                "seconds": line.seconds / self.steps,
                "share": line.seconds / self.wall,
                "waiting": line.waited / line.seconds,
                "bound": line.by,
                "limit_share": line.limit_share,
            }
            for (op, name), line in self.lines.items()
        ]
        found.sort(key=lambda row: -row["seconds"])
        none = {"count": 1, "waiting": None, "bound": None, "limit_share": None}
        for op, seconds in self.outside.items():
            rest = {"seconds": seconds / self.steps, "share": seconds / self.wall}
            found.append({**both, "op": op, "name": "", **rest, **none})
        return found


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Format the table."""
    head = f"{'op':>12} {'name':<20} {'count':>6} {'ms/step':>8} {'share':>6} {'waiting':>7} {'limit':>7} {'share':>6}"
    text: list[str] = []
    last = None
    for row in rows:
        if row["step"] != last:
            last = row["step"]
            text += ["", f"{last} steps: {row['steps']} of {row['tokens']:.1f} tokens", head]
        text.append(
            f"{row['op']:>12} {row['name']:<20} {row['count']:>6.0f} {row['seconds'] * 1e3:>8.3f} {row['share']:>6.1%} "
            f"{_percent(row['waiting']):>7} {row['bound'] or '-':>7} {_percent(row['limit_share']):>6}"
        )
    return text


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
