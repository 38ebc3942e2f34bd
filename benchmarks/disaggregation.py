"""Time between tokens while prompts come in bursts: two servers that do all, beside one for prompts, one for answers.

    python -m benchmarks.disaggregation [MODEL] [--rounds 3] [--seconds 12] [--streams 4] [--burst 3] [--every 0.75]
    python -m benchmarks.disaggregation --transfer [--block 1835008]

Both pairs of servers have one thread each, stay loaded behind a `quire router` of their own, and work in turns, each
time with and without prompts. So does a third pair, whose prompts go to a server that shares nothing with the one for
answers: what they cost the answers there, the machine costs, and no way to serve can have less. The fourth time each
of these prompts is then followed by one as long that the server for answers has cached: who divides prompts and answers
has at least the steps of these answers beside the others. Streams are answers of 1,900 tokens, one after the other; a
burst is of prompts of some 1,600 tokens that nobody has seen. Clients, routers and the kv-server share the cores with
the servers.

With --transfer: blocks to a kv-server in another process and back, beside a bare socket to and from another process
with the same blocks, which are read into one place, all over loopback in turns. The server is full, as one is that runs
for long; what the first blocks took, for which it had to get new memory, is told apart. A second server has a Unix
socket, over which contents go through shared memory, and a third one speaks TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.quire_process import quire_port

from quire.loader import DEFAULT_MODEL
from quire.worker.kept_blocks import KeptBlocks
from quire.worker.remote_tier import RemoteTier

OPTIONS = ("--port", "0", "--threads", "1", "--memory", "700MiB", "--max-model-len", "2048")
SETUPS = (
    "two servers that do all",
    "prompts and answers apart",
    "nothing shared but the machine",
    "nothing shared, answers of cached prompts beside",
)
_ROOMS = " ".join(f"Room {n} is painted in colour {n * 7 % 12}." for n in range(122))


@contextlib.contextmanager
def setup(name: str, model: str, key: Path) -> Iterator[tuple[int, int]]:
    """The router of a way to serve, and the port for prompts of bursts."""
    with contextlib.ExitStack() as stack:
        if name != SETUPS[1]:
            ports = [stack.enter_context(quire_port("serve", model, *OPTIONS)) for _ in range(2)]
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            behind = urls if name == SETUPS[0] else urls[:1]
            router = stack.enter_context(quire_port("router", "--port", "0", "--backend", *behind))
            yield router, router if name == SETUPS[0] else ports[1]
            return
        blocks = stack.enter_context(
            quire_port("kv-server", "--port", "0", "--size", "256MiB", "--key-file", str(key))
        )
        tiers = [f"remote=127.0.0.1:{blocks}:{key},role={role}" for role in ("decode", "prefill")]
        ports = [
            stack.enter_context(quire_port("serve", model, *OPTIONS, "--kv-tiers", tier)) for tier in tiers
        ]
        answers, prompts = (f"http://127.0.0.1:{port}" for port in ports)
        router = stack.enter_context(
            quire_port(
                "router", "--port", "0", "--backend", answers, "--prefill", prompts, "--kv-key-file", str(key)
            )
        )
        yield router, router


async def stream(port: int, body: dict[str, Any], until: float) -> list[float]:
    """Times of the events of an answer, up to a time."""
    text = json.dumps(body | {"stream": True, "ignore_eos": True, "temperature": 0}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                 b"content-length: %d\r\n\r\n%s" % (len(text), text))  # fmt: skip
    times, tail = [], b""
    with contextlib.closing(writer):
        while not tail.endswith(b"0\r\n\r\n") and time.perf_counter() < until:
            part = await reader.read(2**16)
            assert part, "closed early"
            times += [time.perf_counter()] * part.count(b'"delta"')
            tail = (tail + part)[-16:]
    return times


async def phase(
    ports: tuple[int, int], args: argparse.Namespace, number: int, *, bursts: bool, cached: bool
) -> tuple[list[float], list[float]]:
    """Gaps between tokens, and times to the first token of the prompts, in seconds. `cached`: with answers of prompts
    that are cached, from the second phase on."""
    port, for_prompts = ports
    gaps: list[float] = []
    firsts: list[float] = []
    until = time.perf_counter() + args.seconds

    async def answers(which: int) -> None:
        while time.perf_counter() < until:
            said = {"role": "user", "content": f"Tell a story of {which} and {number}."}
            times = await stream(port, {"messages": [said], "max_tokens": 1900}, until)
            gaps.extend(after - before for before, after in itertools.pairwise(times))

    async def prompt(which: int) -> None:
        async def ask(at: int, first: str) -> list[float]:
            said = {"role": "user", "content": f"{first}. {_ROOMS}"}
            return await stream(at, {"messages": [said], "max_tokens": 4}, began + 60)

        began = time.perf_counter()
        times = await ask(for_prompts, f"{number} {which} {bursts} {cached}")
        firsts.append(times[0] - began)
        if cached:
            await ask(port, f"The same {which % args.burst}")

    async def prompts() -> None:
        which, tasks = 0, []
        await asyncio.sleep(0.5)
        while time.perf_counter() < until - 1:
            tasks += [asyncio.create_task(prompt(which + each)) for each in range(args.burst)]
            which += args.burst
            await asyncio.sleep(args.every)
        await asyncio.gather(*tasks)

    await asyncio.gather(*map(answers, range(args.streams)), *([prompts()] if bursts else []))
    return gaps, firsts


def compare(args: argparse.Namespace) -> None:
    """The ways to serve in turns."""
    found: dict[tuple[str, bool], list[tuple[float, float, float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        key = Path(folder) / "key"
        key.write_text("a key of a benchmark on this machine alone")
        ports = {name: stack.enter_context(setup(name, args.model, key)) for name in SETUPS[:3]}
        ports[SETUPS[3]] = ports[SETUPS[2]]
        time.sleep(3.0)
        for number in range(-1, args.rounds):  # the first warms up
            for name in SETUPS if number % 2 else SETUPS[::-1]:
                for bursts in (False, True):
                    gaps, firsts = asyncio.run(
                        phase(ports[name], args, number, bursts=bursts, cached=name == SETUPS[3])
                    )
                    row = (
                        statistics.median(gaps), statistics.quantiles(gaps, n=100)[98],
                        statistics.median(firsts) if firsts else 0.0, len(gaps),
                    )  # fmt: skip
                    if number >= 0:
                        found.setdefault((name, bursts), []).append(row)
        metrics = subprocess.run(
            ["curl", "-s", f"http://127.0.0.1:{ports[SETUPS[1]][0]}/metrics"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    print("times in ms: median of rounds (range)\n")
    print(
        "| | prompts | gap p50 | gap p99 | p99 / without prompts | first token of prompts | tokens a second |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    for (name, bursts), rows in found.items():
        p50, p99, first = ([1e3 * row[column] for row in rows] for column in range(3))
        ratios = [row[1] / base[1] for row, base in zip(rows, found[name, False], strict=True)]
        rate = [row[3] / args.seconds for row in rows]
        cells = [
            _told(p50),
            _told(p99),
            _told(ratios),
            _told(first) if bursts else "",
            f"{statistics.median(rate):,.0f}",
        ]
        print(f"| {name} | {'bursts' if bursts else 'none'} | {' | '.join(cells)} |")
    shown = ("quire_router_divided", "quire_router_prefill", "quire_router_prompt_token_")
    print("\n".join(line for line in metrics.splitlines() if line.startswith(shown)))


def _told(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def bare(contents: list[Any], *, back: bool) -> float:
    """Bytes a second over a socket to another process, or from it."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if not child:
        _move(socket.create_connection(listener.getsockname()), contents, send=back)
        os._exit(0)
    sock, _ = listener.accept()
    start = time.perf_counter()
    _move(sock, contents, send=not back)
    took = time.perf_counter() - start
    sock.close()
    listener.close()
    os.waitpid(child, 0)
    return float(sum(each.nbytes for each in contents) / took)


def _move(sock: socket.socket, contents: list[Any], *, send: bool) -> None:
    """Send blocks and wait until they were read, or read as many."""
    room = memoryview(bytearray(contents[0].nbytes))
    for content in contents:
        if send:
            sock.sendall(content)
            continue
        left = room
        while left:
            left = left[sock.recv_into(left) :]
    if send:
        sock.recv(1)
    else:
        sock.sendall(b"!")


def copied(contents: list[Any]) -> float:
    """Bytes a second of a copy in memory, into places that were used before."""
    places = [np.zeros_like(each) for each in contents[:8]]
    start = time.perf_counter()
    for number, content in enumerate(contents):
        np.copyto(places[number % len(places)], content)
    return float(sum(each.nbytes for each in contents) / (time.perf_counter() - start))


def through(tier: KeptBlocks, contents: list[Any], number: int) -> tuple[float, float]:
    """Bytes a second to the kv-server and from it."""
    names = [(b"%08d%08d" % (number, each), 0) for each in range(len(contents))]
    start = time.perf_counter()
    for name, content in zip(names, contents, strict=True):
        while not tier.room:
            time.sleep(0.0002)
        assert tier.reserve(name)
        tier.write(name, content)
    while tier.writes:
        time.sleep(0.0002)
    middle = time.perf_counter()
    for each, name in enumerate(names):
        tier.read(each, name)
    came = 0
    while came < len(names):
        arrived = tier.arrived(len(names))
        assert all(content is not None for _, content in arrived)
        came += len(arrived)
        if not arrived:
            time.sleep(0.0002)
    end = time.perf_counter()
    size = sum(each.nbytes for each in contents)
    return size / (middle - start), size / (end - middle)


def transfer(args: argparse.Namespace) -> None:
    """Rates of moving blocks."""
    rng = np.random.default_rng(1)
    contents = [rng.integers(0, 256, args.block, np.uint8) for _ in range(args.blocks)]
    found: dict[str, list[float]] = {
        "to": [], "from": [], "to, shared memory": [], "from, shared memory": [], "to, TLS": [], "from, TLS": [],
        "bare to": [], "bare from": [], "copied": [],
    }  # fmt: skip
    filling, size = 0.0, args.block * args.blocks * 5 // 4
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text("a key of a benchmark on this machine alone")
        common = ("kv-server", "--size", str(size), "--key-file", str(key))
        path = f"{folder}/kv.sock"
        certificate, own = f"{folder}/cert.pem", f"{folder}/own.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", own, "-out", certificate],
            check=True, capture_output=True,
        )  # fmt: skip
        secured = ("--port", "0", "--ssl-certfile", certificate, "--ssl-keyfile", own)
        with (
            quire_port(*common, "--port", "0") as port,
            quire_port(*common, "--port", "0", "--uds", path),
            quire_port(*common, *secured) as over_tls,
        ):
            tls = ssl.create_default_context(cafile=certificate)
            servers: list[tuple[tuple[str, int] | str, ssl.SSLContext | None]] = [
                (("127.0.0.1", port), None), (path, None), (("127.0.0.1", over_tls), tls)
            ]  # fmt: skip
            tiers = [RemoteTier(at, key.read_bytes(), args.block, b"m" * 64, with_) for at, with_ in servers]
            while not all(tier.works for tier in tiers):
                time.sleep(0.01)
            for number in range(-2, args.rounds):
                rates = (*(rate for tier in tiers for rate in through(tier, contents, number + 2)),
                         bare(contents, back=False), bare(contents, back=True), copied(contents))  # fmt: skip
                filling = filling or rates[0] / rates[6]
                if number >= 0:
                    for name, rate in zip(found, rates, strict=True):
                        found[name].append(rate / 1e9)
            for tier in tiers:
                tier.close()
    for by, way in itertools.product(("", ", shared memory", ", TLS"), ("to", "from")):
        rates_by, bares = found[way + by], found[f"bare {way}"]
        shares = [a / b for a, b in zip(rates_by, bares, strict=True)]
        copies = [a / b for a, b in zip(rates_by, found["copied"], strict=True)]
        print(f"{way} the kv-server{by}: {_told(rates_by)} GB/s, a bare socket {_told(bares)}; "
              f"share of it {_told(shares)}, of a copy in memory {_told(copies)}")  # fmt: skip
    print(f"to it while it fills, once: share {filling:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=str(DEFAULT_MODEL))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--burst", type=int, default=3)
    parser.add_argument("--every", type=float, default=0.75)
    parser.add_argument("--transfer", action="store_true")
    parser.add_argument("--block", type=int, default=1_835_008)
    parser.add_argument("--blocks", type=int, default=128)
    args = parser.parse_args()
    (transfer if args.transfer else compare)(args)


if __name__ == "__main__":
    main()
