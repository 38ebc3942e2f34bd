"""The pause of a stream whose server is killed with SIGKILL: behind the ids of its output, and from the first token on.

    python -m benchmarks.lost_streams [MODEL] [--rounds 3] [--streams 4] [--tokens 100 400 1200] [--lists]

Two servers behind a `quire router`, round robin; when every stream has that many tokens, one server is killed. In turns
with a key that router and servers share, and without one. The pause is that of the streams of the killed server, from
their last event before to their first one after; each text is compared with that of the other server alone. Clients,
router and servers share the cores. With --lists, log-probabilities of two samples are asked for, and compared too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.quire_process import quire_process

from quire.loader import DEFAULT_MODEL

OPTIONS = ("--port", "0", "--threads", "1", "--memory", "700MiB", "--max-model-len", "2048")
WAYS = ("behind the ids", "from the first token on")
BEHIND = 600  # tokens after the cut: streams begin at different times


class Client:
    """One stream: its server, the times and the contents of its events."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.server, self.tokens, self.times = "", 0, list[float]()
        self.choices: dict[int, tuple[str, list[Any]]] = {}

    async def run(self, port: int) -> None:
        """Read to the end."""
        text = json.dumps(self.body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))  # fmt: skip
        with contextlib.closing(writer):
            async for line in reader:
                if line.startswith(b"x-quire-backend: "):
                    self.server = line[17:].strip().decode()
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.tokens = event["usage"]["completion_tokens"]  # an event may have several
        if not event["choices"]:
            return
        self.times.append(time.perf_counter())
        for choice in event["choices"]:
            had, scores = self.choices.get(choice["index"], ("", []))
            said = (choice.get("logprobs") or {}).get("content") or []
            self.choices[choice["index"]] = had + (choice["delta"].get("content") or ""), scores + said


async def cut(
    ports: tuple[int, ...], router: int, killed: int, args: argparse.Namespace, tokens: int
) -> tuple[list[float], int]:
    """The pauses of streams whose server is killed at so many tokens, and how many answers were another text."""
    asked: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0,
        "min_tokens": tokens + BEHIND,  # no token of the end, which would have no event
        "max_tokens": tokens + BEHIND,
    }
    if args.lists:
        asked |= {"logprobs": True, "top_logprobs": 1, "n": 2, "temperature": 1, "seed": 5}
    said = [[{"role": "user", "content": f"Tell story {number}."}] for number in range(args.streams)]
    clients = [Client(asked | {"messages": each}) for each in said]
    tasks = [asyncio.create_task(client.run(router)) for client in clients]
    while any(client.tokens < tokens * (1 + bool(args.lists)) for client in clients):
        assert not any(task.done() for task in tasks), "they have ended before the cut"
        await asyncio.sleep(0.001)
    at = time.perf_counter()
    os.kill(killed, signal.SIGKILL)
    await asyncio.gather(*tasks)
    lost = [client for client in clients if client.server == "backend-1"]
    pauses = [
        min(t for t in client.times if t > at) - max(t for t in client.times if t <= at) for client in lost
    ]
    alone = [Client(client.body) for client in lost]
    for client in alone:
        await client.run(ports[1])
    different = sum(one.choices != other.choices for one, other in zip(alone, lost, strict=True))
    return pauses, different


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 400, 1200])
    parser.add_argument("--lists", action="store_true")
    args = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "router.key"
        key.write_bytes(os.urandom(32))
        for _ in range(args.rounds):
            for tokens in args.tokens:
                for way in WAYS:
                    with contextlib.ExitStack() as stack:
                        keyed = way == WAYS[0]
                        own = ["--router", f"key={key}"] if keyed else []
                        servers = [
                            stack.enter_context(quire_process("serve", args.model, *OPTIONS, *own))
                            for _ in "12"
                        ]
                        ports = tuple(port for port, _ in servers)
                        urls = [f"http://127.0.0.1:{port}" for port in ports]
                        known = ["--kv-key-file", str(key)] if keyed else []
                        command = [
                            "router",
                            "--port",
                            "0",
                            "--policy",
                            "round-robin",
                            *known,
                            "--backend",
                            *urls,
                        ]
                        router, _ = stack.enter_context(quire_process(*command))
                        pauses, wrong = asyncio.run(cut(ports, router, servers[0][1].pid, args, tokens))
                        found.setdefault((way, tokens), []).extend(pauses)
                        different += wrong
    print(
        "| tokens at the cut | "
        + " | ".join(f"{way}: median (least to most), ms" for way in WAYS)
        + " | ratio |"
    )
    print("|--:|--:|--:|--:|")
    for tokens in args.tokens:
        columns = [found[way, tokens] for way in WAYS]
        told = [
            f"{1e3 * statistics.median(c):.0f} ({1e3 * min(c):.0f} to {1e3 * max(c):.0f})" for c in columns
        ]
        ratio = statistics.median(columns[1]) / statistics.median(columns[0])
        print(f"| {tokens} | {' | '.join(told)} | {ratio:.1f} |")
    print(f"{different} of {sum(map(len, found.values()))} streams had another text than the other server's")


if __name__ == "__main__":
    main()
