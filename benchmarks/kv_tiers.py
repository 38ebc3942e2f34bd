"""Time to the first token of a prompt whose blocks are in a tier, beside computing it, by its length.

    python -m benchmarks.kv_tiers SHAPE [--lengths 256 512 1024 2048] [--rounds 3] [--pairs 16] [--folder FOLDER]

`SHAPE` is a folder with a config.json; weights are random. For each length and round one prompt: computed; with its
blocks in the cache; from host memory, after others have taken its place; from the file by a new engine, whose pages of
the file were dropped (cold) or not (warm); from a kv-server in a process of its own, over loopback; and from a Redis,
if there is one, over a Unix socket. The disk's rate is that of reading the same file in one thread, cold. Then steps of
one sequence that decodes, in pairs: alone, before and after, and while one of the longest prompts is fetched from the
file (cold), or from host memory. With --delays these alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.pairs import interval

from quire import LLM, SamplingParams
from quire.types import Request, TokenIds
from quire.worker.disk_tier import DiskTier

_PIECE = 2**22
Prompts = dict[int, list[list[int]]]  # by length
ALONE = 16  # steps before a fetch, and after it


class Delay(NamedTuple):
    """Seconds of steps alone and while a prompt is fetched: means, the longest one, and how many these were."""

    alone: float
    fetching: float
    longest: float
    steps: int


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and tokens of the prompt that were cached."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - start, output.usage.cached_tokens


def drop(folder: Path) -> None:
    """Have the pages of the files read from the disk again."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_rate(folder: Path, size: int) -> float:
    """Bytes a second of reading the first `size` bytes of contents, cold."""
    drop(folder)
    (path,) = folder.iterdir()
    into, start, done = bytearray(_PIECE), time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        while done < size and (got := file.readinto(into)):
            done += got
    return done / (time.perf_counter() - start)


def ready(llm: LLM, blocks: int = 0) -> int:
    """Wait until the tiers know what there is, so many blocks at least; returns the bytes of a block."""
    tiers = llm._built.core.tiers
    assert tiers is not None
    for tier in tiers.kept:
        while isinstance(tier, DiskTier) and not tier.is_loaded():
            time.sleep(0.01)
        while not tier.works or len(tier) < blocks:
            time.sleep(0.01)
    return tiers.kept[0].block_bytes


@contextlib.contextmanager
def kv_server(folder: Path) -> Iterator[str]:
    """A server of blocks in a process of its own, as a tier."""
    key = folder.parent / "kv_tiers.key"
    key.write_text("a key of a benchmark on this machine alone")
    command = [sys.executable, "-m", "quire.cli.main", "kv-server", "--size", "4GiB", "--port", "0"]
    process = subprocess.Popen([*command, "--key-file", str(key)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield f"remote=127.0.0.1:{process.stderr.readline().rpartition(':')[2].strip()}:{key}"
    finally:
        process.kill()
        process.wait()
        key.unlink()


def decode_delay(llm: LLM, prompts: list[list[int]], pairs: int, folder: Path | None) -> list[Delay]:
    """Pairs: steps with one decoding row alone, and while a prompt is fetched, from the first step that knows of it.
    Prompts take each other's place, so each is fetched in its turn. The pages of files in `folder` are dropped before.
    """
    core = llm._built.core
    row = SamplingParams(max_tokens=len(prompts[0]) - 16, ignore_eos=True)

    def steps(count: int) -> list[float]:
        return [_seconds(core.step) for _ in range(count)]

    found: list[Delay] = []
    for number in range(-len(prompts), pairs):  # the first ones are computed
        core.add(Request(request_id="decodes", prompt_token_ids=TokenIds([7] * 16), params=row))
        steps(6)
        if folder is not None:
            drop(folder)
        before = steps(ALONE)
        prompt = TokenIds(prompts[number % len(prompts)])
        core.add(Request(request_id="fetched", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)))
        fetching = steps(1)
        while core.scheduler.fetches:
            fetching += steps(1)
        while core.scheduler.num_running > 1 or core.scheduler.num_waiting:
            core.step()  # what is left of the prompt, and its token
        alone = [*before, *steps(ALONE)]
        core.abort("decodes")
        if number >= 0 and len(fetching) > 2:
            found.append(Delay(mean(alone), mean(fetching), max(fetching), len(fetching)))
        while core.has_work() or (core.tiers is not None and core.tiers.saving):
            core.step()  # blocks are saved while nothing runs
    return found


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis that keeps nothing on the disk, as a tier."""
    path = folder.parent.resolve() / "kv_tiers.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--maxmemory", "4gb"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            if process.poll() is not None:
                raise OSError("redis-server has ended")
            time.sleep(0.01)
        yield f"remote=unix://{path}"
    finally:
        process.kill()
        process.wait()
        path.unlink(missing_ok=True)


class Found:
    """Times until the first token, and shares of prompts that were cached, by length and where blocks were."""

    def __init__(self) -> None:
        self.seconds: dict[int, dict[str, list[float]]] = {}
        self.cached: dict[str, list[float]] = {}

    def note(self, length: int, what: str, llm: LLM, prompt: list[int]) -> None:
        """Time a prompt."""
        seconds, cached = first_token(llm, prompt)
        self.seconds.setdefault(length, {}).setdefault(what, []).append(seconds)
        self.cached.setdefault(what, []).append(cached / (length // 16 * 16))

    def rows(self, block: int, rate: float) -> list[dict[str, float]]:
        """Medians by length: ms, how many times as fast as computing, the share of the disk's rate (bytes a second)."""
        found = []
        for length, each in self.seconds.items():
            seconds = {what: median(values) for what, values in each.items()}
            restored = seconds["cold"] - seconds["cached"]
            row: dict[str, float] = {"length": length}
            row |= {what: round(1e3 * value, 2) for what, value in seconds.items()}
            for what in ("ram", "cold", "remote", *(["redis"] if "redis" in seconds else [])):
                row[f"computed / {what}"] = round(seconds["computed"] / seconds[what], 1)
            row["share of the disk's rate"] = round(length // 16 * block / restored / rate, 2)
            found.append(row)
        return found


def restores(args: argparse.Namespace, options: dict[str, Any], disk: str, prompts: Prompts) -> Found:
    """Prompts that are computed, and found in each place."""
    found, longest = Found(), max(prompts)
    each = [(length, prompt) for length, several in prompts.items() for prompt in several]
    rng = random.Random(2)
    with LLM(args.shape, kv_tiers=f"ram=3GiB,{disk}", **options) as llm:
        first_token(llm, [7] * longest)  # the first step of an engine
        for length, prompt in each:
            found.note(length, "computed", llm, prompt)
            found.note(length, "cached", llm, prompt)
            for _ in range(2):  # others take its place
                first_token(llm, [rng.randrange(5, 4000) for _ in range(longest)])
            found.note(length, "ram", llm, prompt)
    for warm in ("cold", "warm"):
        with LLM(args.shape, kv_tiers=disk, **options) as llm:
            ready(llm)
            first_token(llm, [7] * longest)
            for length, prompt in each:
                if warm == "cold":
                    drop(args.folder)
                found.note(length, warm, llm, prompt)
    for what, server in (("remote", kv_server), ("redis", redis_server)):
        if what == "redis" and not shutil.which("redis-server"):
            continue
        with server(args.folder) as tier:
            with LLM(args.shape, kv_tiers=tier, **options) as llm:
                ready(llm)
                for _, prompt in each:
                    first_token(llm, prompt)
            with LLM(args.shape, kv_tiers=tier, **options) as llm:
                ready(llm, blocks=sum(length // 16 for length, _ in each))
                first_token(llm, [7] * longest)
                for length, prompt in each:
                    found.note(length, what, llm, prompt)
    return found


def delays(
    args: argparse.Namespace, options: dict[str, Any], disk: str, prompts: list[list[int]]
) -> dict[str, list[Delay]]:
    """Pairs of steps alone and while a prompt is fetched from the file, and from host memory."""
    longest, found = options["max_model_len"], dict[str, list[Delay]]()
    # Of two prompts that take each other's place, beside what the decoding row comes to.
    held = options | {"num_kv_blocks": longest // 16 + 24}
    for what, tiers in (("cold", disk), ("ram", f"ram=1GiB,{disk}")):
        with LLM(args.shape, kv_tiers=tiers, **held) as llm:
            ready(llm)
            folder = args.folder if what == "cold" else None
            found[what] = decode_delay(llm, prompts[:2], args.pairs, folder)
    return found


def report(found: Found, block: int, rate: float) -> None:
    """Print the table of times, and the shares that were cached."""
    rows = found.rows(block, rate)
    print(f"the disk reads {rate / 1e9:.2f} GB/s; a block of 16 tokens has {block:,} bytes; times in ms")
    print(f"| {' | '.join(rows[0])} |\n|{'--:|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    for what, shares in found.cached.items():
        print(
            f"{what}: {mean(shares):.1%} of the prompts' whole blocks were cached, {min(shares):.1%} at least"
        )


def report_delays(delay: dict[str, list[Delay]]) -> None:
    """Print what fetching takes from steps."""
    for what, pairs in delay.items():
        ratios = [pair.fetching / pair.alone for pair in pairs]
        low, high = interval([[ratio] for ratio in ratios])
        alone, fetching, longest = (1e3 * median(each) for each in [*zip(*pairs, strict=True)][:3])
        print(
            f"steps of one row while a prompt is fetched, {what}: {alone:.2f} ms alone, {fetching:.2f} meanwhile, "
            f"the longest {longest:.2f}; ratio {median(ratios):.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs), "
            f"{median([pair.steps for pair in pairs]):.0f} steps"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--folder", type=Path, default=Path("build/kv_tiers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=16, help="of steps alone and while a prompt is fetched")
    parser.add_argument("--delays", action="store_true", help="no times to the first token")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    longest = max(args.lengths) + 16
    options = {
        "load_format": "random", "dtype": args.dtype, "max_model_len": longest, "max_num_seqs": 2, "progress": False,
        "num_kv_blocks": 2 * longest // 16, "memory": 8 * 2**30,
    }  # fmt: skip
    disk = f"disk=10GiB:{args.folder}"
    rng = random.Random(1)
    prompts = {
        length: [[rng.randrange(5, 4000) for _ in range(length + 1)] for _ in range(max(2, args.rounds))]
        for length in args.lengths
    }
    if not args.delays:
        found = restores(args, options, disk, prompts)
        with LLM(args.shape, kv_tiers=disk, **options) as llm:
            block = ready(llm)
        report(found, block, read_rate(args.folder, block * max(args.lengths) // 16))
    report_delays(delays(args, options, disk, prompts[max(args.lengths)]))
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
