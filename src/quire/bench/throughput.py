"""Measure the throughput of many requests through an engine in this process, over the whole run."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from quire.bench.engine_run import (
    BenchEngine,
    EngineRun,
    EngineStep,
    Figures,
    Prompts,
    Tables,
    iterations,
    judge,
    metrics_of,
)
from quire.bench.limits import LimitsProbe, LimitsSample
from quire.bench.profile import OpTimes
from quire.bench.results import Metric
from quire.program.program import Program
from quire.records import dataclass

FIGURES: Figures = {
    "requests": ("requests/s", "higher", "requests / seconds from adding the first to the last token of the last"),
    "output": ("tokens/s", "higher", "output tokens / the same seconds"),
    "total": ("tokens/s", "higher", "prompt and output tokens / the same seconds"),
    "share": ("", "higher", "bound of the run's steps on this machine / seconds of the run: every step takes the "
              "longer of moving its weights, keys and values at the bandwidth and computing at the peaks measured "
              "around the run"),
    "engine": ("s", "lower", "seconds of a step outside the native calls (forward and sampling), median over all "
               "steps"),
    "engine_of_full": ("s", "lower", "the same over the steps with the most rows"),
    "ttft": ("s", "lower", "seconds from adding a request to its first token, including queueing, median"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThroughputAsked:
    """The work: number of prompts, their lengths (`ratio` around the means), concurrency, and iterations."""

    num_prompts: int
    input_len: int
    output_len: int
    ratio: float
    concurrency: int | None
    iterations: int
    warmup: int
    seed: int


def measure(
    engine: BenchEngine, probe: LimitsProbe, asked: ThroughputAsked
) -> tuple[dict[str, Metric], Tables]:
    """Return metrics and tables."""
    prompts = Prompts(engine.program.vocab, asked.seed)

    def run(warm: bool) -> EngineRun:
        inputs = prompts.lengths(asked.num_prompts, asked.input_len, asked.ratio)
        outputs = prompts.lengths(asked.num_prompts, asked.output_len, asked.ratio)
        batch = [prompts.make(1, length)[0] for length in inputs]
        if not warm:
            return engine.run(batch, outputs, asked.concurrency)
        # A few requests touch the pages and wake the threads.
        count = min(asked.num_prompts, asked.concurrency or 4)
        return engine.run(batch[:count], [min(4, n) for n in outputs[:count]])

    tables: Tables = {"iterations": [], "composition": [], "steps": []}
    times = OpTimes(engine.program)
    for number, one, limits in iterations(probe, asked.iterations, asked.warmup, run):
        found = {
            "iterations": [figures(engine, one, limits)],
            "composition": composition(engine, one, limits),
            "steps": [step_row(engine.program, step, limits) for step in one.steps],
        }
        for name, rows in found.items():
            tables[name] += [{"iteration": number, **row} for row in rows]
        times.add(one.steps, limits)
    return metrics_of(tables["iterations"], FIGURES), tables | times.table()


def figures(engine: BenchEngine, run: EngineRun, limits: LimitsSample) -> dict[str, Any]:
    """The figures of one iteration."""
    judged = judge(engine.program, run.steps, limits)
    most = max(len(step.rows) for step in run.steps)
    full = [step.engine for step in run.steps if len(step.rows) == most]
    return {
        "seconds": run.seconds,
        "requests": len(run.outputs) / run.seconds,
        "output": run.output_tokens / run.seconds,
        "total": (run.output_tokens + run.prompt_tokens) / run.seconds,
        "share": judged.bound_seconds / run.seconds,
        "bound_output": run.output_tokens / judged.bound_seconds,
        "memory_seconds": judged.memory_seconds,
        "compute_seconds": judged.compute_seconds,
        "engine": statistics.median(step.engine for step in run.steps),
        "engine_of_full": statistics.median(full),
        "most_rows": most,
        "ttft": statistics.median(run.first_tokens()),
        "bandwidth": limits.bandwidth,
    }


def composition(engine: BenchEngine, run: EngineRun, limits: LimitsSample) -> list[dict[str, Any]]:
    """The steps of a run by kind: number, contents, duration, and bound."""
    found = []
    for kind in ("prefill", "mixed", "decode"):
        steps = [step for step in run.steps if step.kind == kind]
        if not steps:
            continue
        judged = judge(engine.program, steps, limits)
        each = Counter(judge(engine.program, [step], limits).bound for step in steps)
        found.append(
            {
                "kind": kind,
                "steps": judged.steps,
                "rows": statistics.mean(len(step.rows) for step in steps),
                "tokens": judged.tokens,
                "seconds": judged.seconds,
                "bound_seconds": judged.bound_seconds,
                "bound": each.most_common(1)[0][0],  # of most of the steps
                "share": judged.share,
                "engine_seconds": judged.engine_seconds,
            }
        )
    return found


def step_row(program: Program, step: EngineStep, limits: LimitsSample) -> dict[str, Any]:
    """One step as plain values, for plots: its contents and seconds, what it computed and moved, the limit that is
    nearer, and the share of it that the step reached."""
    decoding, judged = sum(row.query_len for row in step.decoding), judge(program, [step], limits)
    return {
        "begin": step.begin,
        "seconds": step.wall,
        "forward": step.phases.get("forward", 0.0),
        "engine": step.engine,
        "rows": len(step.rows),
        "decode_tokens": decoding,
        "prefill_tokens": step.tokens - decoding,
        "context_tokens": sum(row.context_len for row in step.rows),
        "kind": step.kind,
        "flops": judged.flops,
        "bytes": judged.moved,
        "bound": judged.bound,
        "share": judged.share,
    }
