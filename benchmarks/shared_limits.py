"""What several routers admit of one tenant, and what counting together in Redis costs a request.

    python -m benchmarks.shared_limits [--requests 200] [--rounds 5]

Three `quire router` processes in front of a server of this script that answers at once; a redis-server of its own on
the loopback, which has to be on the path. First each router is sent as many requests as the limit would admit, all at
once; in one case Redis is killed when half the limit is used. Then one request at a time, to routers without limits,
with limits of their own and with shared ones, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.bare_server import BareConnection

from quire.bench.statistics import percentile
from quire.config.tenants import key_digest
from quire.util.http_client import Client, Whole, target

ROUTERS = 3
KEY = "qk-benchmark-0123456789012345"
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":4}'
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hello"},"finish_reason":"stop"}]}'


class AtOnce(BareConnection):
    """A connection of a server that answers at once."""

    def posted(self, body: bytes) -> None:
        self.answer(ANSWER)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def listening(port: int) -> None:
    """Wait until somebody listens on a port."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)


async def redis_at(port: int) -> subprocess.Popen[bytes]:
    """A redis-server that keeps nothing on the disk."""
    command = ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    await listening(port)
    return process


@contextlib.asynccontextmanager
async def routers(count: int, limit: int | None, redis: int | None) -> AsyncIterator[list[Client]]:
    """Clients of so many routers, whose tenant has so many requests in a minute."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(AtOnce, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.toml"
        shared = (
            "" if redis is None else f"[shared]\nredis = 'redis://127.0.0.1:{redis}/0'\ninstances = {count}\n"
        )
        limits = "" if limit is None else f"requests_per_minute = {limit}\n"
        file.write_text(f"{shared}[tenants.a]\nkeys = ['sha256:{key_digest(KEY).hex()}']\n{limits}")
        ports = [free_port() for _ in range(count)]
        processes = [
            subprocess.Popen([sys.executable, "-m", "quire", "router", "--backend", url, "--tenants", str(file),
                              "--port", str(port), "--quiet"])
            for port in ports
        ]  # fmt: skip
        for port in ports:
            await listening(port)
        headers = {"authorization": f"Bearer {KEY}"}
        made = [Client(target(f"http://127.0.0.1:{port}", headers)) for port in ports]
        try:
            for client in made:
                while (await client.get("/health"))[0] != 200:
                    await asyncio.sleep(0.05)
            yield made
        finally:
            for client in made:
                await client.close()
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
            server.close()


async def ask(client: Client) -> int:
    """The status of an answer."""
    answer = Whole()
    await client.post("/v1/chat/completions", CHAT, answer)
    return answer.status


async def admitted(limit: int, *, shared: bool, killed: bool = False) -> list[int]:
    """How many requests each router admits, of as many as the limit has."""
    port = free_port()
    redis = await redis_at(port) if shared else None
    try:
        async with routers(ROUTERS, limit, port if shared else None) as clients:
            counts = [0] * ROUTERS

            async def some(router: int, requests: int) -> None:
                for _ in range(requests):
                    counts[router] += await ask(clients[router]) == 200

            first = limit // (2 * ROUTERS) if killed else 0
            await asyncio.gather(*(some(each, first) for each in range(ROUTERS)))
            if killed and redis is not None:
                redis.kill()
                redis.wait()
            await asyncio.gather(*(some(each, limit - first) for each in range(ROUTERS)))
            return counts
    finally:
        if redis is not None:
            redis.kill()
            redis.wait()


async def latencies(requests: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of requests one after the other, by router and round."""
    port = free_port()
    redis = await redis_at(port)
    found: dict[str, list[list[float]]] = {"no limits": [], "own limits": [], "shared limits": []}
    many = 10**9
    try:
        async with routers(1, None, None) as a, routers(1, many, None) as b, routers(1, many, port) as c:
            for turn in range(rounds + 1):
                for name, client in zip(found, (*a, *b, *c), strict=True):
                    seconds = []
                    for _ in range(requests):
                        began = time.perf_counter()
                        assert await ask(client) == 200
                        seconds.append(time.perf_counter() - began)
                    if turn:  # the first one is to warm up
                        found[name].append(sorted(seconds))
    finally:
        redis.kill()
        redis.wait()
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(f"| {ROUTERS} routers, limit {given.limit} in a minute | admitted | by router |\n|---|--:|---|")
    for name, shared, killed in (
        ("each counts for itself", False, False), ("in Redis", True, False),
        ("in Redis, killed when half is used", True, True),
    ):  # fmt: skip
        counts = asyncio.run(admitted(given.limit, shared=shared, killed=killed))
        print(f"| {name} | {sum(counts)} | {', '.join(map(str, counts))} |", flush=True)
    print("\n| router | p50, ms: median (range) | p99, ms: median (range) |\n|---|---|---|")
    for name, rounds in asyncio.run(latencies(given.requests, given.rounds)).items():
        cells = []
        for percent in (50, 99):
            values = sorted(1e3 * percentile(each, percent) for each in rounds)
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
