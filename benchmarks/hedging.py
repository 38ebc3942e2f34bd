"""What sending late requests to a second server does to the slowest answers, and what it costs.

    python -m benchmarks.hedging [--requests 1500]

Three servers of this script begin to answer after 20 to 30 ms; one request in forty is stuck for a second more, as when
a server swaps, collects garbage or loses a packet. Requests come at random times, 20 a second, through a router in this
process. Shares of work that may be done twice are run one after the other, with the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

from benchmarks.bare_server import BareConnection

from quire.bench.statistics import percentile
from quire.config.routing import RouterConfig
from quire.config.serving import ServingConfig
from quire.router.backends import Backends
from quire.router.router_service import RouterService
from quire.server.run import HttpServer, bind
from quire.util.http_client import Client, Whole, target

RATE, STUCK, STUCK_SECONDS = 20.0, 1 / 40, 1.0
SHARES = (0.0, 0.02, 0.05, 0.1)
EVENT = (
    b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"


class SlowServer(BareConnection):
    """A connection of a server whose answers begin at times that `draw` gives."""

    served = 0

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._waiting: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def posted(self, body: bytes) -> None:
        SlowServer.served += 1
        wait = self._draw.uniform(0.02, 0.03) + STUCK_SECONDS * (self._draw.random() < STUCK)
        answer = HEAD % len(EVENT) + EVENT
        self._waiting = asyncio.get_running_loop().call_later(wait, self.transport.write, answer)


async def run(share: float, requests: int) -> tuple[list[float], float]:
    """Seconds of all answers, and the requests that servers got for each of a client."""
    loop, draw, arrivals = asyncio.get_running_loop(), random.Random(7), random.Random(8)
    listeners = [await loop.create_server(lambda: SlowServer(draw), "127.0.0.1", 0) for _ in range(3)]
    urls = tuple(f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in listeners)
    backends, serving = (
        Backends(RouterConfig(backend=urls, hedge_share=share)),
        ServingConfig(port=0, quiet=True),
    )
    service, sock = RouterService(backends, serving), bind(serving)
    server = HttpServer(service, serving)
    await server.start(sock)
    await backends.start()
    client, seconds = Client(target(f"http://127.0.0.1:{sock.getsockname()[1]}")), list[float]()
    SlowServer.served = 0

    async def ask(number: int) -> None:
        text = f"{number} " + "word " * 200
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}
        ).encode()
        began = time.monotonic()
        answer = Whole()
        await client.post("/v1/chat/completions", body, answer)
        assert answer.status == 200
        seconds.append(time.monotonic() - began)

    tasks = []
    for number in range(requests):
        tasks.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(arrivals.expovariate(RATE))
    await asyncio.gather(*tasks)
    found = seconds, SlowServer.served / requests
    await client.close()
    await backends.stop(0.0)
    await server.stop()
    for listener in listeners:
        listener.close()
    sock.close()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1500)
    asked = parser.parse_args()
    print("| share that may be done twice | p50 | p95 | p99 | p99.5 | requests that servers got, of each |")
    print("|---|---|---|---|---|---|")
    for share in SHARES:
        seconds, sent = asyncio.run(run(share, asked.requests))
        seconds.sort()
        at = [f"{1e3 * percentile(seconds, percent):.0f} ms" for percent in (50, 95, 99, 99.5)]
        print(f"| {share:.0%} | {' | '.join(at)} | {sent:.3f} |", flush=True)


if __name__ == "__main__":
    main()
