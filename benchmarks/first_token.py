"""Two models of the demonstration, in turn: how long each takes to its first token.

    python benchmarks/first_token.py OLD_MODEL NEW_MODEL [--starts 9] [--pairs 30]

"start" is a new process of `quire generate --chat`, from its start to the first text that it prints, with weights that
are packed beforehand. "hi" and "long" are chats of a few and of some 500 tokens with a loaded model, without a prefix
cache. A pair asks both models once, in changing order; the table has the medians, the median difference of the pairs
and their median ratio (new over old), each with a bootstrapped 95 % interval. The same model twice shows how much the
machine moves.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

LONG = " ".join(f"The box number {number} holds a red ball and a blue cup." for number in range(32))
CHATS = {"hi": "hi", "long": f"{LONG} What is in the boxes?"}


def child(model: str, packed: str) -> None:
    """Answer each chat's name on the standard input with the seconds to its first token."""
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(model, enable_prefix_caching=False, progress=False, weight_cache_dir=packed) as llm:
        for line in sys.stdin:
            messages = [{"role": "user", "content": CHATS[line.strip()]}]
            start = time.perf_counter()
            with llm.stream_chat(messages, params) as stream:
                next(stream)
                seconds = time.perf_counter() - start
            print(seconds, flush=True)


def started(model: str, packed: str) -> float:
    """Seconds from the start of a process to the first text that it prints."""
    command = [sys.executable, "-m", "quire", "generate", model, "--chat", "--prompt", "hi", "--quiet"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--max-tokens", "2", "--weight-cache-dir", packed],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},  # an installed Quire has its byte code
    )
    assert process.stdout
    os.read(process.stdout.fileno(), 1)
    seconds = time.perf_counter() - begin
    process.communicate()
    return seconds


class Loaded:
    """A model in a process of its own."""

    def __init__(self, model: str, packed: str) -> None:
        command = [sys.executable, __file__, "--child", model, packed]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def time(self, chat: str) -> float:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(chat + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def in_turn(times: Sequence[Callable[[], float]], pairs: int) -> list[tuple[float, float]]:
    """Seconds of both, a tuple for each pair; the first pair is not counted."""
    found = []
    for pair in range(pairs + 1):
        seconds = {i: times[i]() for i in ((0, 1) if pair % 2 else (1, 0))}
        found.append((seconds[0], seconds[1]))
    return found[1:]


def median(values: list[float]) -> tuple[float, float, float]:
    """With 95 % of the medians of samples drawn from `values` with replacement."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[49], medians[1949]


def report(name: str, times: list[tuple[float, float]]) -> None:
    old, new = (f"{1000 * statistics.median(each):.1f}" for each in zip(*times, strict=True))
    more, *m = (1000 * value for value in median([after - before for before, after in times]))
    ratio, *r = median([after / before for before, after in times])
    print(f"| {name} | {old} ms | {new} ms | {more:+.1f} ms ({m[0]:+.1f} to {m[1]:+.1f}) "
          f"| {ratio:.3f} ({r[0]:.3f} to {r[1]:.3f}) |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--starts", type=int, default=9, help="pairs of new processes")
    parser.add_argument("--pairs", type=int, default=30, help="of each chat")
    args = parser.parse_args()
    models = args.old, args.new
    with tempfile.TemporaryDirectory() as packed:
        print("| first token | old | new | more | ratio |\n|---|--:|--:|--:|--:|")
        report("start", in_turn([partial(started, model, packed) for model in models], args.starts))
        loaded = [Loaded(model, packed) for model in models]
        for chat in CHATS:
            ask = [partial(each.time, chat) for each in loaded]
            report(chat, in_turn(ask, args.pairs))
        for each in loaded:
            each.process.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    else:
        main()
