"""What open control rooms cost a server: output tokens a second without and with many of them, in turns.

python -m benchmarks.dashboards [--viewers 100] [--streams 8] [--seconds 8] [--rounds 4]
                               MODEL, or -- MODEL options of quire serve
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import suppress

PORT = 8971


async def _ask(
    path: str, body: dict[str, object] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=2**22)
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer


async def _stream(seed: int, counts: list[int], end: float) -> None:
    """One answer after the other, each of 64 tokens."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        prompt = [rng.randrange(3, 250) for _ in range(32)]
        body: dict[str, object] = {
            "prompt": prompt,
            "max_tokens": 64,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "logprobs": 1,  # an event for each token: those of random weights may have no text
        }
        reader, writer = await _ask("/v1/completions", body)
        while time.monotonic() < end and (line := await reader.readline()):
            counts[0] += line.startswith(b"data: {")
        writer.close()


async def _view(counts: list[int]) -> None:
    reader, writer = await _ask("/v1/overview?stream=true")
    try:
        while data := await reader.read(65536):
            counts[0] += len(data)
    finally:
        writer.close()


async def _measure(streams: int, viewers: int, seconds: float) -> tuple[float, int]:
    """Tokens a second, and bytes that the viewers got."""
    seen, tokens = [0], [0]
    watching = [asyncio.create_task(_view(seen)) for _ in range(viewers)]
    await asyncio.sleep(1.5)
    began = time.monotonic()
    await asyncio.gather(*(_stream(seed, tokens, began + seconds) for seed in range(streams)))
    took = time.monotonic() - began
    for task in watching:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*watching)
    return tokens[0] / took, seen[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    command = [sys.executable, "-m", "quire", "serve", args.model, "--port", str(PORT), *args.options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_rounds(args))
    finally:
        server.terminate()
        server.wait()


async def _rounds(args: argparse.Namespace) -> None:
    for _ in range(600):
        with suppress(OSError):
            reader, writer = await _ask("/health/ready")
            line = await reader.readline()
            writer.close()
            if b"200" in line:
                break
        await asyncio.sleep(0.2)
    await _measure(args.streams, 0, 2.0)
    ratios = []
    for number in range(args.rounds):
        found: dict[int, float] = {}
        for viewers in ((0, args.viewers), (args.viewers, 0))[number % 2]:
            found[viewers], seen = await _measure(args.streams, viewers, args.seconds)
            print(
                f"{viewers:4d} viewers: {found[viewers]:8.1f} tokens/s, {seen / 1e6:.1f} MB to them",
                flush=True,
            )
        ratios.append(found[args.viewers] / found[0])
    print(
        f"ratio, median of {len(ratios)}: {statistics.median(ratios):.4f}  ({min(ratios):.4f} to {max(ratios):.4f})"
    )


if __name__ == "__main__":
    main()
