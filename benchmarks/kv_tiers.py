"""Time to the first token of a prompt whose blocks are in a tier, beside computing it, by its length.

    python -m benchmarks.kv_tiers SHAPE [--lengths 256 512 1024 2048] [--folder build/kv_tiers] [--rounds 3]

`SHAPE` is a folder with a config.json; weights are random. For each length and round one prompt: computed; with its
blocks in the cache; from host memory, after others have taken its place; and from the file by a new engine, whose pages
of the file were dropped (cold) or not (warm); and from a kv-server in a process of its own, over loopback. The disk's
rate is that of reading the same file in one thread, cold. Then steps of one sequence that decodes, in turns alone and
while the longest prompts are fetched from the file, each of these once a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from quire import LLM, SamplingParams
from quire.types import Request, TokenIds
from quire.worker.disk_tier import DiskTier

_PIECE = 2**22


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


def ready(llm: LLM) -> int:
    """Wait until the tiers know what there is; returns the bytes of a block."""
    tiers = llm._built.core.tiers
    assert tiers is not None
    for tier in tiers.kept:
        while isinstance(tier, DiskTier) and not tier.is_loaded():
            time.sleep(0.01)
        while not tier.works:
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


def decode_delay(
    args: argparse.Namespace, options: dict[str, Any], disk: str, prompts: list[list[int]]
) -> dict[str, list[float]]:
    """Seconds of steps with one decoding row: alone, and while a prompt is fetched from the file (cold)."""
    llm = LLM(args.shape, kv_tiers=disk, **options)
    ready(llm)
    core = llm._built.core
    params = SamplingParams(max_tokens=options["max_model_len"] - 32, ignore_eos=True)
    core.add(Request(request_id="decodes", prompt_token_ids=TokenIds([7] * 16), params=params))
    found: dict[str, list[float]] = {"alone": [], "fetching": []}

    def step(what: str) -> None:
        start = time.perf_counter()
        core.step()
        if core.rows == 1:
            found[what].append(time.perf_counter() - start)

    for _ in range(20):
        core.step()
    for number, prompt in enumerate(prompts):
        drop(args.folder)
        for _ in range(30):
            step("alone")
        asked = SamplingParams(max_tokens=1)
        core.add(Request(request_id=f"fetched {number}", prompt_token_ids=TokenIds(prompt), params=asked))
        core.step()
        assert core.scheduler.fetches, "it is not fetched"
        while core.scheduler.fetches:
            step("fetching")
        for _ in range(3):
            core.step()
    llm.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--folder", type=Path, default=Path("build/kv_tiers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
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
        length: [[rng.randrange(5, 4000) for _ in range(length + 1)] for _ in range(args.rounds)]
        for length in args.lengths
    }
    found: dict[int, dict[str, list[float]]] = {length: {} for length in args.lengths}

    def note(length: int, what: str, seconds: float, cached: int) -> None:
        found[length].setdefault(what, []).append(seconds)
        if (cached >= 0.9 * length) != (what != "computed"):
            print(f"{what}: {cached} of {length} tokens were cached")

    llm = LLM(args.shape, kv_tiers=f"ram=3GiB,{disk}", **options)
    for length, several in prompts.items():
        for prompt in several:
            note(length, "computed", *first_token(llm, prompt))
            note(length, "cached", *first_token(llm, prompt))
            for _ in range(2):  # others take its place
                first_token(llm, [rng.randrange(5, 4000) for _ in range(longest - 2)])
            note(length, "ram", *first_token(llm, prompt))
    llm.close()
    block = 0
    for warm in ("cold", "warm"):
        llm = LLM(args.shape, kv_tiers=disk, **options)
        block = ready(llm)
        first_token(llm, prompts[args.lengths[0]][0])  # the first step of an engine
        for length, several in prompts.items():
            for prompt in several:
                if warm == "cold":
                    drop(args.folder)
                note(length, warm, *first_token(llm, prompt))
        llm.close()
    with kv_server(args.folder) as remote:
        for what in ("sent", "remote"):
            llm = LLM(args.shape, kv_tiers=remote, **options)
            ready(llm)
            first_token(llm, prompts[args.lengths[0]][0])
            for length, several in prompts.items():
                for prompt in several:
                    took = first_token(llm, prompt)
                    if what == "remote":
                        note(length, what, *took)
            llm.close()
    delay = decode_delay(args, options, disk, prompts[max(args.lengths)])
    rate = read_rate(args.folder, block * max(args.lengths) // 16)
    rows = []
    for length, each in found.items():
        seconds = {what: median(values) for what, values in each.items()}
        restored = seconds["cold"] - seconds["cached"]
        rows.append(
            {"length": length, **{what: round(1e3 * value, 2) for what, value in seconds.items()},
             "computed / ram": round(seconds["computed"] / seconds["ram"], 1),
             "computed / cold": round(seconds["computed"] / seconds["cold"], 1),
             "share of the disk's rate": round(length // 16 * block / restored / rate, 2)}
        )  # fmt: skip
    steps = {what: [round(1e3 * median(values), 2), len(values)] for what, values in delay.items()}
    ratios = [value / median(delay["alone"]) for value in delay["fetching"]]
    told = f"median {median(ratios):.3f}, quartiles {quantiles(ratios)[0]:.3f} to {quantiles(ratios)[2]:.3f}"
    if args.json:
        print(json.dumps({"disk_bytes_per_second": rate, "block_bytes": block, "rows": rows}))
        return
    print(f"the disk reads {rate / 1e9:.2f} GB/s; a block of 16 tokens has {block:,} bytes; times in ms")
    print(f"| {' | '.join(rows[0])} |\n|{'--:|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    print(f"steps of one row, in ms, and their number: {steps}; while fetching / alone: {told}")


if __name__ == "__main__":
    main()
