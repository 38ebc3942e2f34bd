"""Microseconds a row of the native sampler by mode, beside numpy's argmax and sorting in torch.

    python benchmarks/sampler.py > benchmarks/results/sampler.md

One thread. Each figure is the fastest of several repetitions of a batch of rows, divided by the rows. The
logits are "peaked" (a language model's: few tokens hold most of the probability) or "flat" (tens of thousands
share it).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from quire import _native
from quire.executor.sampler import HostSampler
from quire.types import NewSeq, SamplingParams

VOCAB = 151_936
ROWS = 8
CONTEXT = 2000

MODES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top-k 5000, top-p 0.95": SamplingParams(temperature=0.8, top_k=5000, top_p=0.95),
    "penalties, top-p 0.9": SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2
    ),
    "allowed tokens, greedy": SamplingParams(temperature=0.0, allowed_token_ids=range(0, VOCAB, 2)),
    "greedy, 20 logprobs": SamplingParams(temperature=0.0, logprobs=20),
}


def make_logits(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "flat":
        return rng.normal(0, 0.8, (ROWS, VOCAB)).astype(np.float32)
    x = rng.normal(0, 2.5, (ROWS, VOCAB)).astype(np.float32)
    for row in x:
        row[rng.choice(VOCAB, 40, replace=False)] += np.linspace(16, 4, 40, dtype=np.float32)
    return x


def fastest(run: Callable[[], object], repeats: int = 15, inner: int = 4) -> float:
    """Microseconds a row."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        best = min(best, (time.perf_counter() - start) / inner)
    return best / ROWS * 1e6


def native(logits: np.ndarray, params: SamplingParams, isa: str) -> float:
    sampler = HostSampler(VOCAB, ROWS, isa)
    rng = np.random.default_rng(1)
    for slot in range(ROWS):
        tokens = rng.integers(0, VOCAB, CONTEXT).tolist()
        sampler.add(slot, NewSeq(slot, tokens, CONTEXT // 2, params, 0, slot, ()))
    slots, positions = np.arange(ROWS, dtype=np.int32), np.full(ROWS, CONTEXT, np.int32)
    return fastest(lambda: sampler.sample({"logits": logits}, slots, positions))


def torch_sorting(logits: np.ndarray) -> dict[str, float]:
    """The usual way: softmax and multinomial over whole rows, top-k and top-p by sorting them."""
    x = torch.from_numpy(logits)

    def plain() -> torch.Tensor:
        return torch.multinomial(torch.softmax(x / 0.8, -1), 1)

    def top_k() -> torch.Tensor:
        scaled = x / 0.8
        floor = torch.topk(scaled, 50).values[:, -1:]
        return torch.multinomial(torch.softmax(scaled.masked_fill(scaled < floor, -torch.inf), -1), 1)

    def top_p() -> torch.Tensor:
        ordered, ids = torch.sort(x / 0.8)
        remove = ordered.softmax(-1).cumsum(-1) <= 0.1
        remove[:, -1] = False
        ordered.masked_fill_(remove, -torch.inf)
        return torch.multinomial(torch.softmax(x.scatter(1, ids, ordered), -1), 1)

    return {
        "greedy": fastest(lambda: x.argmax(-1), 8, 2),
        "temperature": fastest(plain, 8, 2),
        "top-k 50": fastest(top_k, 8, 2),
        "top-p 0.9": fastest(top_p, 5, 1),
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(line.split(":")[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def call_overhead() -> float:
    """Microseconds of one call on one row of sixteen tokens: what does not depend on the vocabulary."""
    sampler = HostSampler(16, 1)
    sampler.add(0, NewSeq(0, [], 0, SamplingParams(temperature=0.0), 0, 0, ()))
    logits, zero = np.zeros((1, 16), np.float32), np.zeros(1, np.int32)
    return fastest(lambda: sampler.sample({"logits": logits}, zero, zero), 15, 2000) * ROWS


def main() -> None:
    torch.set_num_threads(1)
    isas = _native.supported_isas()
    print("# Sampler\n")
    print(
        f"Microseconds a row, vocabulary {VOCAB:,}, {ROWS} rows a call, one thread, fastest of several runs."
    )
    versions = f"numpy {np.__version__}, torch {torch.__version__} (CPU)"
    print(f"{cpu_name()}; {versions}. Made by `benchmarks/sampler.py`.\n")
    for kind in ("peaked", "flat"):
        logits = make_logits(kind)
        others = torch_sorting(logits)
        print(f"## {kind.capitalize()} logits\n")
        print("| mode | " + " | ".join(isas) + " | torch |")
        print("|---|" + "--:|" * (len(isas) + 1))
        for name, params in MODES.items():
            cells = [f"{native(logits, params, isa):.0f}" for isa in isas]
            other = f"{others[name]:.0f}" if name in others else ""
            print(f"| {name} | " + " | ".join(cells) + f" | {other} |", flush=True)
        argmax = fastest(lambda rows=logits: [int(row.argmax()) for row in rows])
        print(f"\nnumpy argmax: {argmax:.0f}.\n")
    print(f"One call with one row of 16 tokens takes {call_overhead():.1f} µs: the cost of calling.")


if __name__ == "__main__":
    main()
