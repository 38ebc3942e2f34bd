"""Measure the sampler over a whole vocabulary: milliseconds per row with several parameters."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from quire import _native
from quire.bench.bounds import measured_row, op_bound
from quire.bench.environment import largest_cache
from quire.bench.limits import LimitsProbe, mean
from quire.executor.base import F32
from quire.executor.sampler import HostSampler
from quire.program.cost import Cost
from quire.program.ops.linear import MAXIMA_COLS
from quire.types import NewSeq, SamplingParams

LOGIT_BYTES = 4
HISTORY = 512  # tokens for penalties
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1.0),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "top-k, top-p, penalties": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5
    ),
    "typical 0.95": SamplingParams(temperature=1.0, typical_p=0.95),
    "mirostat 2": SamplingParams(temperature=1.0, mirostat=2),
    "XTC, DRY": SamplingParams(temperature=1.0, min_p=0.02, xtc_probability=0.5, dry_multiplier=0.8),
    "greedy, 5 logprobs": SamplingParams(temperature=0, logprobs=5),
}


def measure_sampler(
    probe: LimitsProbe, vocab: int, rows: tuple[int, ...], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure every way of sampling at every row count, with the maxima of logits from the head.

    The bound is reading the logits once; ways that only need the largest logit read less.
    """
    core = _native.Executor(probe.isa, probe.threads)
    random = np.random.default_rng(0)
    logits = (random.standard_normal((max(rows), vocab)) * 3).astype(np.float32)
    maxima = _maxima(logits)
    found = []
    for way, params in WAYS.items():
        sampler = HostSampler(vocab, max(rows), executor=core)
        for slot in range(max(rows)):
            history = random.integers(0, vocab, HISTORY).tolist()
            sampler.add(slot, NewSeq(slot, history, HISTORY, params, 0, slot, ()))
        timed: dict[int, list[tuple[float, float]]] = {count: [] for count in rows}  # (seconds, bandwidth)
        for _ in range(rounds):
            before = probe.sample()
            times = {count: _seconds(sampler, logits[:count], maxima[:count], seconds) for count in rows}
            bandwidth = mean(before, probe.sample()).bandwidth
            for count, one in times.items():
                timed[count].append((one, bandwidth))
        alone = statistics.median(one for one, _ in timed[1]) if 1 in timed else None
        for count, samples in timed.items():
            row = _row(way, count, vocab, samples)
            found.append(row | {"scaling": row["seconds"] / alone if alone else None})
    return found


def _maxima(logits: F32) -> F32:
    """Maxima of MAXIMA_COLS neighbours each, as ops.Linear defines them."""
    rows, vocab = logits.shape
    padded = np.pad(logits, ((0, 0), (0, -vocab % MAXIMA_COLS)), constant_values=-np.inf)
    return np.ascontiguousarray(padded.reshape(rows, -1, MAXIMA_COLS).max(axis=2))


def _seconds(sampler: HostSampler, logits: F32, maxima: F32, seconds: float) -> float:
    """Median seconds of one call."""
    rows = len(logits)
    slots = np.arange(rows, dtype=np.int32)
    samples: list[float] = []
    position = HISTORY
    while sum(samples) < seconds or len(samples) < 5:
        positions = np.full(rows, position, np.int32)
        start = time.perf_counter()
        sampler.sample({"logits": logits, "maxima": maxima}, slots, positions)
        samples.append(time.perf_counter() - start)
        position += 1
    return statistics.median(samples[1:])  # the first call touches the scratch


def _row(way: str, rows: int, vocab: int, samples: list[tuple[float, float]]) -> dict[str, Any]:
    cost, cache = Cost(activation_bytes=rows * vocab * LOGIT_BYTES), largest_cache()
    bounds = [op_bound(cost, "f32", bandwidth, {"f32": 1.0}, cache) for _, bandwidth in samples]
    return {
        "format": "f32", "kv": "", "op": "sample", "name": way, "rows": rows, "sequences": rows, "context": 0,
        **measured_row(cost, [one for one, _ in samples], bounds), "copies": 1,
    }  # fmt: skip
