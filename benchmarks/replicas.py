"""Replicas beside independent processes, and beside one engine: `python -m benchmarks.replicas [MODEL] [--rounds 9]`.

Tokens a second of many requests at once: of one engine on all cores, of two replicas behind one front, and of two
processes that know nothing of each other and have half of the requests each. All stay loaded, work in turns, and the
figure is the median of the rounds' ratios, with a bootstrapped 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.pairs import interval

from quire import AsyncLLM, SamplingParams
from quire.loader import DEFAULT_MODEL

# name: processes, and the options of each
SETUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "one engine": (1, {"threads": 2}),
    "two replicas": (1, {"threads": 1, "data_parallel_size": 2}),
    "two processes": (2, {"threads": 1}),
}


def child(model: str, setup: str, requests: int, tokens: int) -> None:
    """Answer each line of the standard input, after all requests have been answered, with a line."""
    count, options = SETUPS[setup]

    async def run() -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        async with AsyncLLM(model, memory=2 * 2**30, enable_prefix_caching=False, **options) as llm:
            prompts = [[3 + (row * 7 + k) % 2000 for k in range(40)] for row in range(requests // count)]
            while sys.stdin.readline():
                await llm.generate(prompts, params)
                print("done", flush=True)

    asyncio.run(run())


class Setup:
    """The processes of one way to serve."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        own = [args.model, "--child", name, "--requests", str(args.requests), "--tokens", str(args.tokens)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.replicas", *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(SETUPS[name][0])
        ]  # fmt: skip

    def seconds(self) -> float:
        """Of all requests."""
        start = time.perf_counter()
        for process in self._processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout
            assert process.stdout.readline() == "done\n"
        return time.perf_counter() - start

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--child", choices=SETUPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.child, args.requests, args.tokens)
        return
    setups = {name: Setup(name, args) for name in SETUPS}
    found: dict[str, list[float]] = {name: [] for name in SETUPS}
    for number in range(-1, args.rounds):  # the first warms up
        order = list(setups.items())
        for name, setup in order[number % 3 :] + order[: number % 3]:
            seconds = setup.seconds()
            if number >= 0:
                found[name].append(args.requests * args.tokens / seconds)
    for setup in setups.values():
        setup.close()
    print("| | tokens/s | of two processes | 95 % |\n|---|--:|--:|--:|")
    for name, rates in found.items():
        ratios = [rate / other for rate, other in zip(rates, found["two processes"], strict=True)]
        low, high = interval([[ratio] for ratio in ratios])
        print(
            f"| {name} | {statistics.median(rates):,.0f} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} |"
        )


if __name__ == "__main__":
    main()
