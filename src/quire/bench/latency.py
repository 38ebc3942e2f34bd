"""Measure the latency of one batch of simultaneous requests, in an engine in this process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.engine_run import BenchEngine, EngineRun, Judged, Prompts, judge
from quire.bench.limits import LimitsProbe, LimitsSample, mean
from quire.bench.profile import OpTimes
from quire.bench.results import Metric, metric

PERCENTILES = (10, 25, 50, 75, 90, 99)

DEFINITIONS = {
    "latency": "seconds from adding the batch to its last token",
    "ttft": "seconds from adding a request to its first token, median of the batch",
    "tpot": "(latency - ttft) / (output length - 1), of each request, median of the batch",
    "prefill": "prompt tokens of the batch / seconds of the steps without a decoding row",
    "decode": "tokens of the batch's decode steps / their seconds",
    "decode_bandwidth": "bytes of weights and visible keys and values of the decode steps / their seconds",
    "decode_share": "bound of the decode steps on this machine / their seconds: every step takes the longer of moving "
    "its weights, keys and values at the bandwidth and computing at the peaks measured around the iteration",
    "prefill_share": "the same for the steps without decoding rows",
    "engine": "seconds of a decode step outside the native calls (forward and sampling), median",
}


@dataclass(frozen=True, slots=True)
class LatencyAsked:
    """A batch: its size, the tokens per prompt and per output, and the number of runs."""

    batch_size: int
    input_len: int
    output_len: int
    iterations: int
    warmup: int
    seed: int


def measure_latency(
    engine: BenchEngine, probe: LimitsProbe, asked: LatencyAsked
) -> tuple[dict[str, Metric], dict[str, list[dict[str, Any]]]]:
    """Return metrics and tables; limits are sampled before and after each iteration."""
    prompts = Prompts(engine.program.vocab, asked.seed)
    lengths = [asked.output_len] * asked.batch_size
    rows: list[dict[str, Any]] = []
    times = OpTimes(engine.program)
    for number in range(-asked.warmup, asked.iterations):
        batch = prompts.make(asked.batch_size, asked.input_len)
        if number < 0:
            engine.run(batch, lengths)
            continue
        before = probe.sample()
        run = engine.run(batch, lengths)
        limits = mean(before, probe.sample())
        rows.append({"iteration": number, **figures(engine, run, limits)})
        times.add([step for step in run.steps if step.op_seconds], limits)
    tables = {"iterations": rows, "percentiles": percentiles([r["latency"] for r in rows])}
    return metrics(rows), tables | ({"profile": profile} if (profile := times.rows()) else {})


def figures(engine: BenchEngine, run: EngineRun, limits: LimitsSample) -> dict[str, Any]:
    """The figures of one iteration; None if a kind of step did not occur."""
    decode = [step for step in run.steps if step.kind == "decode"]
    prefill = [step for step in run.steps if step.kind == "prefill"]
    first = run.first_tokens()
    last = [output.timings.finished - output.timings.arrival for output in run.outputs]
    counts = [output.usage.completion_tokens for output in run.outputs]
    gaps = [(e - f) / (n - 1) for e, f, n in zip(last, first, counts, strict=True) if n > 1]
    decoding, prefilling = judge(engine.program, decode, limits), judge(engine.program, prefill, limits)
    return {
        "latency": run.seconds,
        "ttft": statistics.median(first),
        "tpot": statistics.median(gaps) if gaps else None,
        "prefill": _rate(prefilling.tokens, prefilling.seconds),
        "decode": _rate(decoding.tokens, decoding.seconds),
        "decode_bandwidth": _rate(decoding.moved, decoding.seconds),
        "decode_share": decoding.share,
        "prefill_share": prefilling.share,
        "engine": statistics.median(step.engine for step in decode) if decode else None,
        "bandwidth": limits.bandwidth,
        "decode_bound": _nearer(decoding),
        "prefill_bound": _nearer(prefilling),
        "phases": phase_seconds(run, "decode"),
    }


def phase_seconds(run: EngineRun, kind: str) -> dict[str, float]:
    """Median seconds of each phase over the steps of a kind."""
    steps = [step for step in run.steps if step.kind == kind]
    names = sorted({name for step in steps for name in step.phases})
    return {name: statistics.median(step.phases.get(name, 0.0) for step in steps) for name in names}


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def _nearer(judged: Judged) -> str | None:
    if not judged.steps:
        return None
    return "compute" if judged.compute_seconds > judged.memory_seconds else "memory"


UNITS: dict[str, tuple[str, Any]] = {
    "latency": ("s", "lower"),
    "ttft": ("s", "lower"),
    "tpot": ("s", "lower"),
    "prefill": ("tokens/s", "higher"),
    "decode": ("tokens/s", "higher"),
    "decode_bandwidth": ("B/s", "higher"),
    "decode_share": ("", "higher"),
    "prefill_share": ("", "higher"),
    "engine": ("s", "lower"),
}


def metrics(rows: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """Metrics over the iterations."""
    return {
        name: metric([row[name] for row in rows if row[name] is not None], unit, better)
        for name, (unit, better) in UNITS.items()
    }


def percentiles(samples: Sequence[float]) -> list[dict[str, Any]]:
    """Percentiles by linear interpolation between the two nearest ranks."""
    import numpy as np

    return [{"percentile": p, "seconds": float(np.percentile(samples, p))} for p in PERCENTILES]


def settings(asked: Any, engine: BenchEngine) -> dict[str, Any]:
    """The requested options, and the choices of the engine."""
    config = engine.built.config
    return {
        **asdict(asked),
        "weights": config.quantized or config.weights,
        "kv": config.kv,
        "threads": config.threads,
        "isa": engine.built.executor.isa,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "architecture": engine.built.model.facts.architecture,
    }
