"""Decode of one sequence against the machine's memory bandwidth, and what the engine adds outside the executor.

    python benchmarks/decode.py [--shape qwen3-0.6b] [--dtype bfloat16] [--json]

Rounds alternate: measure the bandwidth, decode 128 tokens after a prompt of 128, measure again. A round's share is
the bytes a step must move (weights and the visible KV, by program/cost) over its time and over the mean bandwidth
around it. The engine's share is the wall time of its steps that was not spent in the executor's call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from shapes import SHAPES, write

from quire import LLM, SamplingParams, _native
from quire.program.cost import Row, step_cost

PROMPT, OUTPUT = 128, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write(args.shape, Path(folder))
        with LLM(
            model, load_format="random", dtype=args.dtype, threads=args.threads, max_model_len=2048
        ) as llm:
            result = {"shape": args.shape, "dtype": args.dtype, **measure(llm, args.rounds)}
    if args.json:
        print(json.dumps(result))
        return
    rounds = result.pop("rounds")
    print("| round | bandwidth GB/s | tokens/s | GB/s | share of bandwidth | engine share of a step |")
    print("|---|---|---|---|---|---|")
    for i, r in enumerate(rounds):
        print(
            f"| {i + 1} | {r['bandwidth']:.1f} | {r['tokens_per_second']:.2f} | {r['moved']:.1f} | {r['share']:.1%} "
            f"| {r['engine_share']:.2%} |"
        )
    print(json.dumps(result))


def measure(llm: LLM, rounds: int) -> dict[str, object]:
    built = llm.built
    probe = _native.Executor(built.config.isa, built.config.threads)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    program = built.program
    found = []
    for number in range(rounds + 1):
        before = probe.measure_bandwidth(1 << 30)
        engine, forward, wall = [], [], []
        stream = llm.stream([(number * 7919 + i * 104729) % 100000 for i in range(PROMPT)], params)
        next(stream)
        last = time.perf_counter()
        for _ in stream:
            now = time.perf_counter()
            wall.append(now - last)
            last = now
            forward.append(built.core.last_phases["forward"])
            engine.append(wall[-1] - forward[-1])
        after = probe.measure_bandwidth(1 << 30)
        if number == 0:  # warm-up: pages touched, threads awake
            continue
        middle = step_cost(program, [Row(1, PROMPT + OUTPUT // 2)], 1).total
        step = statistics.median(wall)
        bandwidth = (before + after) / 2
        found.append(
            {
                "bandwidth": bandwidth / 1e9,
                "tokens_per_second": 1 / step,
                "moved": (middle.weight_bytes + middle.kv_read_bytes) / step / 1e9,
                "share": (middle.weight_bytes + middle.kv_read_bytes) / step / bandwidth,
                "engine_share": statistics.median(engine) / step,
                "engine_ms": statistics.median(engine) * 1e3,
            }
        )
    medians = {key: statistics.median(r[key] for r in found) for key in found[0]}
    return {"isa": probe.isa, "threads": probe.threads, "median": medians, "rounds": found}


if __name__ == "__main__":
    main()
