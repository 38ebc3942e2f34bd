"""Ops in a wheel's native module and in the one that this machine's compiler built, in turn: how their times compare.

    python benchmarks/wheels.py COMPILED/bin/python WHEEL/bin/python [--rounds 15] [--isa avx2]

Both interpreters have the same Quire installed. Each runs in a process of its own, on one thread, and only one of them
at a time: a round times an op once in each, in changing order. Times are the thread's processor time and the ratio is
the median of the rounds' own, so that what else the machine runs counts for little. The same interpreter twice shows
how much it still counts. Weights fit the cache: where memory is the limit, no compiler makes a difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROWS = (1, 8, 256)
SPILL = 1 << 20  # bytes of an op's copies: they stay in the cache
LATENT_OPS = ("latent_write", "latent_attend", "head_linear")
EXPERT_OPS = ("route", "dispatch", "experts", "combine")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512, "head_dim": 64,
    "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 4096, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip

Timer = Callable[[], float]


def timers(isa: str, seconds: float) -> Iterator[tuple[str, Timer]]:
    """What to time by name, and how: from inside an interpreter that has Quire."""
    from quire.bench.kernel_programs import Bench, copies_for, with_copies
    from quire.bench.kernels import Asked, _limits, cases, unit_seconds
    from quire.bench.shapes import SHAPES
    from quire.engine.opening import open_model

    formats, caches = ("bf16", "f16", "f32", "int8", "int4"), ("bf16", "f16", "f32", "int8")
    for config, asked in (
        (SHAPES["smollm2-135m"], Asked(ROWS, (512,), formats, caches)),
        (SHAPES["deepseek-v2-lite-dense"], Asked(ROWS, (512,), ("bf16",), ("bf16",), LATENT_OPS)),
        (EXPERTS, Asked(ROWS, (512,), formats, ("bf16",), EXPERT_OPS)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model = open_model(folder, tokenizer=False)
        for case in cases(model, asked):
            copies = copies_for(case.program, case.unit, case.steps[0], SPILL)
            bench = Bench(with_copies(case.program, case.unit, copies), _limits(case), threads=1, isa=isa)
            cache = f", cache in {case.kv}" if "attend" in case.unit.kind or "write" in case.unit.kind else ""
            for step in case.steps:
                bench.fill(step)
                what = f"{len(step)}" if step[0].query_len == 1 else f"prompt of {step[0].query_len}"
                yield (
                    f"{case.format} {case.unit.name}{cache}|{what}",
                    lambda bench=bench: unit_seconds(bench, seconds, time.thread_time),
                )
            bench.close()
    yield from sampling(isa)


def sampling(isa: str) -> Iterator[tuple[str, Timer]]:
    import numpy as np

    from quire.bench.kernel_sampler import HISTORY, WAYS, _maxima
    from quire.types import NewSeq
    from quire.worker.sampler import Sampler

    logits = (np.random.default_rng(0).standard_normal((8, 49_152)) * 3).astype(np.float32)
    maxima, slots, positions = _maxima(logits), np.arange(8, dtype=np.int32), np.full(8, HISTORY, np.int32)
    for way, params in WAYS.items():
        sampler = Sampler(logits.shape[1], 8, isa)
        for slot in range(8):
            sampler.add(slot, NewSeq(slot, list(range(HISTORY)), HISTORY, params, 0, slot, ()))

        def timed(sampler: Sampler = sampler) -> float:
            found = []
            for _ in range(5):
                start = time.thread_time()
                sampler.sample(logits, slots, positions, maxima=maxima)
                found.append(time.thread_time() - start)
            return statistics.median(found)

        yield f"sampling, {way}|8", timed


def serve(isa: str, seconds: float) -> None:
    """Of each line read: go to the next thing to time and say its name, or time it."""
    offered = timers(isa, seconds)
    for line in sys.stdin:
        if line == "next\n":
            name, timer = next(offered, ("", float))
            print(name, flush=True)
        else:
            print(timer(), flush=True)


class Child:
    def __init__(self, python: str, options: list[str]) -> None:
        command = [python, "-P", __file__, "--serve", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args} ended")
        return answer.strip()


def compare(children: list[Child], rounds: int) -> Iterator[tuple[str, float, list[float]]]:
    """Name, the compiled module's seconds, and its time over the wheel's in each round: above 1, the wheel is faster."""
    while True:
        name, other = (child.ask("next") for child in children)
        assert name == other, (name, other)
        if not name:
            return
        pairs = []
        for turn in range(rounds + 1):
            order = children if turn % 2 else children[::-1]
            taken = {child: float(child.ask("time")) for child in order}
            pairs.append([taken[child] for child in children])
        pairs = pairs[1:]  # the first warms caches up
        yield name, statistics.median(a for a, _ in pairs), [a / b for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.003, help="of an op in one round")
    parser.add_argument("--isa", default="")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.isa, asked.seconds)
        return
    options = [f"--isa={asked.isa}", f"--seconds={asked.seconds}"]
    rows: dict[str, list[str]] = {}
    everything: dict[str, float] = {}
    for name, seconds, ratios in compare([Child(python, options) for python in asked.pythons], asked.rounds):
        op, _, step = name.partition("|")
        low, everything[name], high = statistics.quantiles(ratios, n=4)
        cell = f"{everything[name]:.3f} ({low:.2f} to {high:.2f}; {step}: {seconds * 1e6:,.0f} µs)"
        print(f"{op}: {cell}", file=sys.stderr, flush=True)
        rows.setdefault(op, []).append(f"{everything[name]:.2f} ({step}: {seconds * 1e6:,.0f} µs)")
    print("| op | speed of the wheel beside the compiler's build (sequences: time of that) |\n|---|---|")
    for op, cells in rows.items():
        print(f"| {op} | {', '.join(cells)} |")
    slow = [name for name, ratio in everything.items() if ratio < 0.98]
    print(f"\n{len(everything)} figures, geometric mean {statistics.geometric_mean(everything.values()):.3f};",
          f"below 0.98: {', '.join(slow) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
