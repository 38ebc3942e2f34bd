"""Two builds of Quire, in turn: how the times of whole generations compare, with intervals.

    python benchmarks/pairs.py BEFORE/bin/python AFTER/bin/python [--formats bf16 int8 int4] [--starts 8] [--pairs 2]

Both stay loaded, each in a process of its own, and only one of them works at a time. A pair runs a workload once with
each, in changing order; the figure is the median ratio of the pairs' times, before over after (above 1 the second build
is faster), with a bootstrapped 95 % interval. Where the system places weights in memory moves a process by several
percent for its whole life, so both processes are started anew several times, in changing order, from weights that are
packed beforehand; the interval draws whole starts, since pairs of one start are not independent. The same interpreter
twice shows how much the machine moves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time

# name: prompts, tokens of each prompt, tokens of each answer
WORKLOADS = {
    "decode": (1, 16, 48),
    "prefill": (1, 512, 1),
    "8 requests": (8, 32, 32),
    "32 requests": (32, 32, 16),
}

# writes the checkpoint, with the Quire of the second build
WRITE = """import sys; from pathlib import Path; from quire.bench.random_checkpoint import write_checkpoint
from quire.planner.shapes import SHAPES; write_checkpoint(Path(sys.argv[1]), SHAPES[sys.argv[2]])"""


def child(folder: str, weights: str, packed: str, threads: int | None) -> None:
    """Answer each workload's name on the standard input with its seconds."""
    from quire import LLM, SamplingParams

    quantization = "none" if weights == "bf16" else weights
    rng = random.Random(0)
    with LLM(
        folder, threads=threads, quantization=quantization, max_model_len=1024, enable_prefix_caching=False,
        progress=False, weight_cache_dir=packed,
    ) as llm:  # fmt: skip
        for line in sys.stdin:
            count, length, answer = WORKLOADS[line.strip()]
            prompts = [[rng.randrange(3, 250) for _ in range(length)] for _ in range(count)]
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            print(time.perf_counter() - start, flush=True)


class Build:
    def __init__(self, python: str, folder: str, weights: str, packed: str, threads: int | None) -> None:
        command = [python, __file__, "--child", folder, weights, packed, json.dumps(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def time(self, workload: str) -> float:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def interval(starts: list[list[float]]) -> tuple[float, float]:
    """95 % of the medians of samples drawn from the starts' ratios, whole starts with replacement."""
    rng = random.Random(0)
    samples = (rng.choices(starts, k=len(starts)) for _ in range(2000))
    medians = sorted(statistics.median(itertools.chain.from_iterable(sample)) for sample in samples)
    return medians[49], medians[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--starts", type=int, default=8, help="of both processes")
    parser.add_argument("--pairs", type=int, default=2, help="of each workload in each start")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([args.after, "-c", WRITE, folder, args.shape], check=True)
        print("| weights | workload | before | after | ratio | 95 % |\n|---|---|--:|--:|--:|--:|", flush=True)
        for weights in args.formats:
            for workload, times in measure(args, folder, weights).items():
                report(weights, workload, times)


def measure(
    args: argparse.Namespace, folder: str, weights: str
) -> dict[str, list[list[tuple[float, float]]]]:
    """Seconds of both builds by workload: for each start a list of pairs."""
    pythons = args.before, args.after
    times: dict[str, list[list[tuple[float, float]]]] = {workload: [] for workload in args.workloads}
    for start in range(-1, args.starts):
        builds: dict[int, Build] = {}
        for i in turns(start):
            builds[i] = Build(pythons[i], folder, weights, f"{folder}/packed{i}", args.threads)
            builds[i].time("decode")  # loaded, and in the first start packed
        for workload in args.workloads if start >= 0 else ():
            for i in turns(start):
                builds[i].time(workload)  # warm
            pairs = [{i: builds[i].time(workload) for i in turns(pair)} for pair in range(args.pairs)]
            times[workload].append([(seconds[0], seconds[1]) for seconds in pairs])
        for build in builds.values():
            build.close()
    return times


def turns(count: int) -> tuple[int, int]:
    return (0, 1) if count % 2 else (1, 0)


def report(weights: str, workload: str, times: list[list[tuple[float, float]]]) -> None:
    starts = [[before / after for before, after in pairs] for pairs in times]
    low, high = interval(starts)
    before, after = (
        f"{statistics.median(each):.3f} s" for each in zip(*itertools.chain(*times), strict=True)
    )
    ratio = statistics.median(itertools.chain(*starts))
    print(
        f"| {weights} | {workload} | {before} | {after} | {ratio:.3f} | {low:.3f} to {high:.3f} |", flush=True
    )
    print(
        f"{weights} {workload}, starts:",
        *(f"{statistics.mean(each):.3f}" for each in starts),
        file=sys.stderr,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
    else:
        main()
