"""Two models in one server: what sharing the cores costs and gives, and versions that are swapped under load.

    python -m benchmarks.models turns [--rounds 5] [--seconds 3] [--streams 1,8] [--model DIR --memory 3GiB]
    python -m benchmarks.models swaps [--swaps 100] [--streams 16] [--model DIR --other DIR --memory 3GiB]

`turns`: the engines of two models in one process, as a server has them, once sharing the cores and once each with
threads on all of them, and streams on both at once. The share of an engine is its rate of tokens beside the other,
divided by its rate alone at that load; the sum of both is 1 when nothing is lost. Alone is measured with all threads.
The kinds of rounds take turns. CPU is that of the engine processes per token, which includes what threads spin.

`swaps`: a server whose clients stream greedy answers one after the other, while versions replace each other: a model
and the same one with an adapter merged, which answers otherwise. Counts requests that failed, and answers that are not
those of the version which they name. Gaps between tokens are those that clients see, quiet and meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import field
from itertools import count
from pathlib import Path

from quire.config.schema import EngineConfig
from quire.engine.api import GenerateAsk
from quire.engine.front.async_engine import AsyncEngine
from quire.records import dataclass
from quire.server.fleet.shadows import text_of
from quire.types import Request, SamplingParams, TokenIds
from quire.util.sizes import parse_size

MEMORY = 600 * 2**20
ON = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True)
ADMIN = "for-administrators"
_numbers = count()


async def stream(engine: AsyncEngine, made: list[int], at: int) -> None:
    """Ask one thing after the other; counts the tokens in `made[at]`."""
    while True:
        request = Request(
            request_id=str(next(_numbers)), prompt_token_ids=TokenIds(range(40, 48)), params=ON,
            arrival=time.monotonic(),
        )  # fmt: skip
        running = engine.generate(GenerateAsk(request=request))
        try:
            async for delta in running:
                made[at] += len(delta.token_ids)
        finally:
            running.cancel()


def cpu_seconds(engines: list[AsyncEngine]) -> float:
    """CPU time that the processes of engines have used."""
    ticks = 0
    for engine in engines:
        stat = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def rates(engines: list[AsyncEngine], streams: int, seconds: float) -> tuple[list[float], float]:
    """Tokens per second of each engine while all of them have so many streams, and their CPU seconds per token."""
    made = [0] * len(engines)
    tasks = [
        asyncio.create_task(stream(engine, made, at))
        for at, engine in enumerate(engines)
        for _ in range(streams)
    ]
    try:
        while min(made) < 8 * streams:
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
        began, before, cpu = time.perf_counter(), list(made), cpu_seconds(engines)
        await asyncio.sleep(seconds)
        passed = time.perf_counter() - began
        used = (cpu_seconds(engines) - cpu) / max(1, sum(made) - sum(before))
        return [(after - first) / passed for after, first in zip(made, before, strict=True)], used
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure_turns(model: str, memory: int, loads: list[int], rounds: int, seconds: float) -> None:
    """Print a row for each load. `memory`: bytes of each of four engines."""
    config = EngineConfig(memory=memory, max_num_seqs=max(loads), enable_prefix_caching=False)
    async with contextlib.AsyncExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        pairs: dict[str, list[AsyncEngine]] = {}
        for name, cores in (("with", str(Path(place) / "cores")), ("without", "")):
            pairs[name] = [AsyncEngine(model, config, cores=cores) for _ in range(2)]
            for engine in pairs[name]:
                await engine.start()
                stack.push_async_callback(engine.stop, 0.0)
        print(
            "| streams each | alone, tokens/s | sum of shares, sharing the cores | not | helps | CPU a token |"
        )
        print("|--:|--:|--:|--:|--:|--:|")
        for load in loads:
            alone: list[float] = []
            used: dict[str, list[float]] = defaultdict(list)
            sums: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):
                singles = [await rates([engine], load, seconds) for engine in pairs["without"]]
                single = [found[0] for found, _ in singles]
                order = sorted(pairs, reverse=bool(number % 2))
                both = {name: await rates(pairs[name], load, seconds) for name in order}
                if number:  # the first one warms up
                    alone += single
                    used["alone"] += [cpu for _, cpu in singles]
                    for name, (found, cpu) in both.items():
                        used[name].append(cpu)
                        sums[name].append(sum(rate / of for rate, of in zip(found, single, strict=True)))
            shown = [
                f"{statistics.median(sums[name]):.3f} ({min(sums[name]):.3f} to {max(sums[name]):.3f})"
                for name in ("with", "without")
            ]
            ratio = statistics.median(a / b for a, b in zip(sums["with"], sums["without"], strict=True))
            costs = ", ".join(
                f"{name} {statistics.median(used[name]) * 1e6:.0f} µs"
                for name in ("alone", "with", "without")
            )
            print(
                f"| {load} | {statistics.median(alone):.0f} | {' | '.join(shown)} | {ratio:.2f} × | {costs} |",
                flush=True,
            )


@dataclass(slots=True)
class Seen:
    """What clients saw: seconds between tokens, texts by version, and failures by their words."""

    gaps: list[float] = field(default_factory=list)
    texts: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    failed: list[str] = field(default_factory=list)
    answers: int = 0


async def exchange(
    port: int, verb: str, path: str, body: object, seen: Seen | None = None
) -> tuple[bytes, bytes]:
    """Send a request; returns the head and the body of the answer, as they came. Gaps between reads go to `seen`."""
    data = json.dumps(body).encode()
    head = (
        f"{verb} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"authorization: Bearer {ADMIN}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + data)
        answered = await reader.readuntil(b"\r\n\r\n")
        pieces, last = [], 0.0
        while piece := await reader.read(65536):
            now = time.perf_counter()
            if seen is not None and b"data: {" in piece:
                if last:
                    seen.gaps.append(now - last)
                last = now
            pieces.append(piece)
        return answered, b"".join(pieces)
    finally:
        writer.close()


async def client(port: int, seen: Seen) -> None:
    """Ask for one answer after the other."""
    body = {
        "model": "chat", "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    while True:
        try:
            head, answer = await exchange(port, "POST", "/v1/completions", body, seen)
        except (OSError, asyncio.IncompleteReadError) as error:
            seen.failed.append(repr(error))
            continue
        version = re.search(rb"x-quire-deployment: (\S+)", head)
        if b" 200 " not in head.splitlines()[0] or b"[DONE]" not in answer or version is None:
            seen.failed.append((head + answer)[:300].decode("utf-8", "replace"))
            continue
        seen.answers += 1
        seen.texts[version[1].decode()].add(text_of(answer))


async def watched(port: int, streams: int, work: asyncio.Future[None]) -> Seen:
    """What clients see until some work is done."""
    seen = Seen()
    tasks = [asyncio.create_task(client(port, seen)) for _ in range(streams)]
    await work
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def measure_swaps(port: int, models: list[str], streams: int, swaps: int, seconds: float) -> None:
    """Print what clients saw quiet, and during the swaps."""

    async def swap_all() -> None:
        await asyncio.sleep(1.0)
        for number in range(swaps):
            path = models[(number + 1) % len(models)]
            head, answer = await exchange(port, "POST", "/admin/models", {"name": "chat", "path": path})
            if b" 200 " not in head.splitlines()[0]:
                raise RuntimeError((head + answer).decode())

    await watched(port, streams, asyncio.ensure_future(asyncio.sleep(2.0)))
    quiet = await watched(port, streams, asyncio.ensure_future(asyncio.sleep(seconds)))
    began = time.perf_counter()
    busy = await watched(port, streams, asyncio.ensure_future(swap_all()))
    passed = time.perf_counter() - began
    first = {text for texts in quiet.texts.values() for text in texts}
    expected = {text for name in ("chat@1", "chat@2") for text in busy.texts[name]} | first
    mixed = [name for name, texts in busy.texts.items() if len(texts) != 1 or not texts <= expected]
    odd = {text for name, texts in busy.texts.items() if int(name[5:]) % 2 for text in texts}
    print(
        f"{swaps} swaps in {passed:.0f} s, {streams} streams, {busy.answers} answers of {len(busy.texts)} versions"
    )
    print(
        f"failed: {len(busy.failed)} {busy.failed[:2]}; versions whose answers differ: {len(mixed)} {mixed[:3]}"
    )
    print(f"texts of both models: {len(expected)}; of the first one's versions: {len(odd)}")
    print("| gaps between tokens | quiet | while versions are swapped |\n|---|--:|--:|")
    for share in (50, 99):
        values = [statistics.quantiles(seen.gaps, n=100)[share - 1] * 1e3 for seen in (quiet, busy)]
        print(f"| p{share} | {values[0]:.1f} ms | {values[1]:.1f} ms |")
    print(f"| most | {max(quiet.gaps) * 1e3:.0f} ms | {max(busy.gaps) * 1e3:.0f} ms |")


def serve_and_swap(model: str, asked: argparse.Namespace) -> None:
    """Start the server with a model, make the other version, and measure."""
    with tempfile.TemporaryDirectory() as place:
        other, file = Path(asked.other or Path(place) / "other"), Path(place) / "models.toml"
        quire = [sys.executable, "-m", "quire"]
        merged = ["convert", model, str(other), "--merge-adapter", asked.adapter, "--quiet"]
        if not asked.other:
            subprocess.run([*quire, *merged], check=True)
        file.write_text(f'[chat]\npath = "{model}"\nmemory = {asked.memory}\n')
        options = [
            "--models",
            str(file),
            "--memory",
            str(2 * asked.memory + 2**30),
            "--port",
            "0",
            "--admin-api-key",
            ADMIN,
        ]
        server = subprocess.Popen([*quire, "serve", *options], stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if started := re.search(r"serving .*:(\d+)$", line.rstrip()):
                    work = measure_swaps(
                        int(started[1]), [model, str(other)], asked.streams, asked.swaps, asked.seconds
                    )
                    asyncio.run(work)
                    break
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    turns, swaps = kinds.add_parser("turns"), kinds.add_parser("swaps")
    turns.add_argument("--rounds", type=int, default=5)
    turns.add_argument("--seconds", type=float, default=3.0)
    turns.add_argument("--streams", default="1,8")
    turns.add_argument("--memory", type=parse_size, default=MEMORY)
    swaps.add_argument("--swaps", type=int, default=100)
    swaps.add_argument("--streams", type=int, default=16)
    swaps.add_argument("--seconds", type=float, default=10.0)
    swaps.add_argument("--adapter", default="quire-mini:pirate")
    swaps.add_argument("--other", default="", help="another version, in place of an adapter")
    swaps.add_argument("--memory", type=parse_size, default=MEMORY)
    for each in (turns, swaps):
        each.add_argument("--model", default="quire-mini")
    asked = parser.parse_args()
    if asked.kind == "turns":
        loads = [int(load) for load in asked.streams.split(",")]
        asyncio.run(measure_turns(asked.model, asked.memory, loads, asked.rounds, asked.seconds))
    else:
        serve_and_swap(asked.model, asked)


if __name__ == "__main__":
    main()
