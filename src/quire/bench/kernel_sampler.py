"""The sampler over a whole vocabulary, as a kernel: milliseconds a row for each way of sampling."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from quire import _native
from quire.bench.limits import LimitsProbe, mean
from quire.types import NewSeq, SamplingParams
from quire.worker.sampler import Sampler

LOGIT_BYTES = 4
HISTORY = 512  # tokens that penalties see
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1.0),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "top-k, top-p, penalties": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5
    ),
    "greedy, 5 logprobs": SamplingParams(temperature=0, logprobs=5),
}


def measure_sampler(
    probe: LimitsProbe, vocab: int, rows: tuple[int, ...], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Figures of every way at every row count. The bound is reading the logits once from memory."""
    core = _native.Executor(probe.isa, probe.threads)
    random = np.random.default_rng(0)
    logits = (random.standard_normal((max(rows), vocab)) * 3).astype(np.float32)
    found = []
    for way, params in WAYS.items():
        sampler = Sampler(vocab, max(rows), executor=core)
        for slot in range(max(rows)):
            history = random.integers(0, vocab, HISTORY).tolist()
            sampler.add(slot, NewSeq(slot, history, HISTORY, params, 0, slot, ()))
        alone: float | None = None
        for count in rows:
            shares, times = [], []
            for _ in range(rounds):
                before = probe.sample()
                one = _seconds(sampler, logits[:count], seconds)
                bandwidth = mean(before, probe.sample()).bandwidth
                times.append(one)
                shares.append(count * vocab * LOGIT_BYTES / bandwidth / one)
            middle = statistics.median(times)
            alone = middle if count == 1 else alone
            found.append(
                _row(way, count, vocab, times, shares) | {"scaling": middle / alone if alone else None}
            )
    return found


def _seconds(sampler: Sampler, logits: np.ndarray, seconds: float) -> float:
    """Median seconds of one call."""
    rows = len(logits)
    slots = np.arange(rows, dtype=np.int32)
    samples: list[float] = []
    position = HISTORY
    while sum(samples) < seconds or len(samples) < 5:
        positions = np.full(rows, position, np.int32)
        start = time.perf_counter()
        sampler.sample(logits, slots, positions)
        samples.append(time.perf_counter() - start)
        position += 1
    return statistics.median(samples[1:])  # the first call touches the scratch


def _row(way: str, rows: int, vocab: int, times: list[float], shares: list[float]) -> dict[str, Any]:
    seconds, moved = statistics.median(times), rows * vocab * LOGIT_BYTES
    share = statistics.median(shares)
    return {
        "format": "f32", "kv": "", "op": "sample", "name": way, "rows": rows, "sequences": rows, "context": 0,
        "seconds": seconds, "samples": times, "flops": 0, "bytes": moved,
        "bytes_per_second": moved / seconds, "flops_per_second": 0.0,
        "bound": "memory", "bound_seconds": share * seconds, "peak": "f32", "share": share, "copies": 1,
    }  # fmt: skip
