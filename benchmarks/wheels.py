"""Ops in a wheel's native module and in the one that this machine's compiler built, in turn: how their times compare.

    python benchmarks/wheels.py COMPILED/bin/python WHEEL/bin/python [--starts 6] [--rounds 4] [--isa avx2]

Both interpreters have the same Quire installed. Each runs in a process of its own, on one thread, and only one of them
at a time: in a round each times an op, in changing order. Times are the thread's processor time, and each build's
figure is its fastest call of all rounds, so that what else the machine runs counts for little; the same interpreter
twice shows how much it still counts. The places of a process's memory can double the time of an op for as long as it
lives, so the processes are started several times. Weights are in the cache: where memory is the limit, compilers make
no difference.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the parent needs no Quire
    from quire.bench.kernel_programs import Bench

ROWS = (1, 8, 128)
SPILL = 1  # byte of copies, so one copy of a large weight: what a cache can hold, it holds
LEAST = 50e-6  # seconds
LATENT_OPS = ("latent_write", "latent_attend", "head_linear")
EXPERT_OPS = ("route", "dispatch", "experts", "combine")
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 512, "head_dim": 64,
    "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 4096, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip

Timer = Callable[[], float]


def timers(isa: str, seconds: float, only: str) -> Iterator[tuple[str, Timer]]:
    """What to time by name, and how: from inside an interpreter that has Quire."""
    from quire.bench.kernel_programs import Bench, copies_for, with_copies
    from quire.bench.kernels import Asked, _limits, cases
    from quire.engine.build.opening import open_model
    from quire.executor.kinds import native_kind
    from quire.planner.shapes import SHAPES

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
            if only not in f"{case.format} {case.unit.name}":
                continue
            copies = copies_for(case.program, case.unit, case.steps[0], SPILL)
            copied = with_copies(case.program, case.unit, copies)
            bench = Bench(copied, _limits(case), native_kind(1, isa))
            cache = f", cache in {case.kv}" if "attend" in case.unit.kind or "write" in case.unit.kind else ""
            for step in case.steps:
                bench.fill(step)
                what = f"{len(step)}" if step[0].query_len == 1 else f"prompt of {step[0].query_len}"
                yield f"{case.format} {case.unit.name}{cache}|{what}", partial(fastest, bench, seconds)
            bench.close()
    if only in "sampling":
        yield from sampling(isa)


def sampling(isa: str) -> Iterator[tuple[str, Timer]]:
    import numpy as np

    from quire.bench.kernel_sampler import HISTORY, WAYS, _maxima
    from quire.executor.sampler import HostSampler
    from quire.types import NewSeq

    logits = (np.random.default_rng(0).standard_normal((8, 49_152)) * 3).astype(np.float32)
    maxima, slots, positions = _maxima(logits), np.arange(8, dtype=np.int32), np.full(8, HISTORY, np.int32)
    for way, params in WAYS.items():
        sampler = HostSampler(logits.shape[1], 8, isa)
        for slot in range(8):
            sampler.add(slot, NewSeq(slot, list(range(HISTORY)), HISTORY, params, 0, slot, ()))

        def timed(sampler: HostSampler = sampler) -> float:
            return min(
                _seconds(lambda: sampler.sample({"logits": logits, "maxima": maxima}, slots, positions))
                for _ in range(5)
            )

        yield f"sampling, {way}|8", timed


def fastest(bench: Bench, seconds: float) -> float:
    """Of calls that take so long together, at least three: the least time of an op."""
    copies, times = bench.copied.copies, 1
    while (took := _seconds(lambda: bench.run(0, copies), times)) < LEAST:  # less than this says little
        times *= 2
    found = [took]
    while sum(found) < seconds or len(found) < 3:
        bench.new_tokens()
        found.append(_seconds(lambda: bench.run(0, copies), times))
    return min(found) / copies / times


def _seconds(call: Callable[[], object], times: int = 1) -> float:
    start = time.thread_time()
    for _ in range(times):
        call()
    return time.thread_time() - start


def serve(isa: str, seconds: float, only: str) -> None:
    """Of each line read: go to the next thing to time and say its name, or time it."""
    offered = timers(isa, seconds, only)
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
            raise SystemExit(f"{self._process.args!r} ended")
        return answer.strip()


def compare(children: list[Child], rounds: int) -> Iterator[tuple[str, list[float]]]:
    """What was timed, and the least seconds in each child."""
    while True:
        name, other = (child.ask("next") for child in children)
        assert name == other, (name, other)
        if not name:
            return
        best = dict.fromkeys(children, float("inf"))
        for turn in range(rounds):
            for child in children if turn % 2 else children[::-1]:
                best[child] = min(best[child], float(child.ask("time")))
        yield name, list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--starts", type=int, default=6, help="of both processes")
    parser.add_argument("--rounds", type=int, default=4, help="of each op in each start")
    parser.add_argument("--seconds", type=float, default=0.003, help="of an op in one round")
    parser.add_argument("--isa", default="")
    parser.add_argument("--only", default="", help="ops whose format and name have this in them")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.isa, asked.seconds, asked.only)
        return
    options = [f"--isa={asked.isa}", f"--seconds={asked.seconds}", f"--only={asked.only}"]
    best: dict[str, list[float]] = {}
    for start in range(asked.starts):
        for name, seconds in compare([Child(python, options) for python in asked.pythons], asked.rounds):
            best[name] = [min(pair) for pair in zip(seconds, best.get(name, seconds), strict=True)]
            print(f"start {start}, {name}: {seconds[0] / seconds[1]:.3f}", file=sys.stderr, flush=True)
    rows: dict[str, list[str]] = {}
    everything = {name: compiled / wheel for name, (compiled, wheel) in best.items()}
    for name, ratio in everything.items():
        op, _, step = name.partition("|")
        rows.setdefault(op, []).append(f"{ratio:.2f} ({step}: {best[name][0] * 1e6:,.1f} µs)")
    print("| op | speed of the wheel beside the compiler's build (sequences: time of that) |\n|---|---|")
    for op, cells in rows.items():
        print(f"| {op} | {', '.join(cells)} |")
    slow = [name for name, ratio in everything.items() if ratio < 0.98]
    print(f"\n{len(everything)} figures, geometric mean {statistics.geometric_mean(everything.values()):.3f};",
          f"below 0.98: {', '.join(slow) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
