"""A server at its memory bound, under mixes made to break it: in a control group of that size where one can be made.

The small mix runs in the suite, the heavy one in `make test-memory`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.cgroup import memory_group
from helpers.process import Process, gone, resident
from helpers.server import GUARD, read_all, request_bytes
from quire.config.shipped import DEFAULT_MODEL, shipped_models

MIB = 2**20
ANSWERS = {200, 400, 413, 429, 503, 504}
Ask = tuple[str, dict[str, Any] | bytes]


class Bound:
    """A server in a group of its bound, and the most that its processes held together."""

    def __init__(self, process: Process) -> None:
        self.process, self.peak, self.seen = process, 0, Counter[int]()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            with contextlib.suppress(OSError, ValueError):
                held = resident(self.process.process.pid) + resident(self.process.engine)
                self.peak = max(self.peak, held)

    def close(self) -> None:
        self._ended.set()
        self._watch.join()

    def send(
        self, path: str, body: dict[str, Any] | bytes, headers: str = "", version: str = "1.1"
    ) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.process.port), timeout=GUARD)
        with contextlib.suppress(OSError):  # refused before it was whole
            sock.sendall(
                request_bytes(path, body, headers=headers + "connection: close\r\n", version=version)
            )
        return sock

    def ask(self, path: str, body: dict[str, Any] | bytes, headers: str = "", version: str = "1.1") -> None:
        with contextlib.closing(self.send(path, body, headers, version)) as sock:
            answer = read_all(sock)
            if answer:  # none: refused while it was still being sent
                self.seen[int(answer[9:12])] += 1

    def together(self, clients: int, of: Callable[[int], Ask], **how: Any) -> None:
        """So many clients at once."""
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(self.ask, *of(i), **how) for i in range(clients)]:
                done.result(GUARD)


@contextlib.contextmanager
def bounded(folder: Path, bound: int, *options: str) -> Iterator[Bound]:
    """A server whose bound is enforced by the kernel, or, where that is not allowed, watched."""
    with memory_group(bound) as group:
        process = Process(
            folder, "--port", "0", "--memory", str(bound), *options, before=group and group.join
        )
        state = Bound(process)
        try:
            yield state
            engine = process.engine
            assert not gone(engine)
            assert process.ready()
            state.close()
            print(f"peak {state.peak / MIB:.1f} MiB of {bound / MIB:.0f}", dict(state.seen))
            assert state.peak <= bound
            assert set(state.seen) <= ANSWERS, state.seen
            assert state.seen[200]
            if group is not None:
                print(f"charged to the group at most {group.peak / MIB:.1f} MiB")
                assert group.kills == 0
        finally:
            state.close()
            process.process.kill()
            process.process.communicate()
            while not all(gone(pid) for pid in {process.process.pid}):
                time.sleep(0.01)
            time.sleep(0.2)  # its engine goes with it


def ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(300, 4000), k=count)


def completions(**fields: Any) -> Ask:
    return "/v1/completions", {"temperature": 2.0, "ignore_eos": True} | fields


def mix(server: Bound, scale: int) -> None:
    """Every way to make a server hold much, one after another and beside streams that are not read."""
    window = 250 * scale
    idle = [socket.create_connection(("127.0.0.1", server.process.port)) for _ in range(40 * scale)]
    stream = {"stream": True, "logprobs": 20, "n": 4, "max_tokens": window}
    unread = [server.send(*completions(prompt=ids(5, i), **stream)) for i in range(2 * scale)]
    whole = {"logprobs": 64, "max_tokens": window // 2}
    unread += [server.send(*completions(prompt=ids(5, i), **whole)) for i in range(scale)]
    server.together(
        4, lambda i: completions(prompt=[ids(window, i)] * (8 * scale), prompt_logprobs=64, max_tokens=1)
    )
    server.together(
        2 * scale, lambda i: completions(prompt=[ids(window, i)] * 2, prompt_logprobs=64, max_tokens=1)
    )
    server.together(scale, lambda i: completions(prompt=ids(9, i), n=8, logprobs=64, max_tokens=window // 4))
    server.together(
        4 * scale, lambda i: completions(prompt=ids(window, i), echo=True, logprobs=9, max_tokens=1)
    )
    server.together(4, lambda i: completions(prompt="x", n=128, max_tokens=4))
    many: list[Ask] = [
        ("/v1/completions", {"prompt": [ids(100, 1)] * (200 * scale), "max_tokens": 1, "n": 128}),
        ("/v1/completions", {"prompt": "a, " * (100_000 * scale), "max_tokens": 1}),
        ("/v1/completions", {"prompt": [[999] * 200] * (50 * scale), "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é🦊" * 20_000 * scale}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * (2000 * scale)}),
        ("/v1/chat/completions", b'{"messages":[' + b"[]," * (40_000 * scale) + b"[]]}"),
        ("/tokenize", {"prompt": "tokens " * (20_000 * scale)}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2, "allowed_token_ids": list(range(4000))}),
    ]
    server.together(2 * len(many), lambda i: many[i % len(many)])
    server.together(2, lambda i: completions(prompt="x", stream=True, max_tokens=window // 2), version="1.0")
    fresh = 2 * scale  # prompts that no block is known of: the prefix cache is filled and goes round
    server.together(
        fresh, lambda i: completions(prompt=[ids(window, 100 * i + k) for k in range(4)], max_tokens=2)
    )
    server.together(2 * scale, lambda i: ("/v1/completions", json.dumps({"prompt": "x"}).encode()))
    for sock in (*idle, *unread):
        sock.close()


@pytest.fixture(scope="module")
def model() -> Path:
    return shipped_models()[DEFAULT_MODEL]


def test_a_small_mix_stays_under_the_bound(model: Path) -> None:
    options = ("--max-model-len", "512", "--request-memory", "12MiB", "--max-connections", "500")
    with bounded(model, 150 * MIB, *options) as server:
        mix(server, 1)


@pytest.mark.memory
@pytest.mark.parametrize(("bound", "requests"), [(400, None), (400, "120MiB"), (2048, None)])
def test_a_heavy_mix_stays_under_the_bound(model: Path, bound: int, requests: str | None) -> None:
    options = () if requests is None else ("--request-memory", requests)
    with bounded(model, bound * MIB, "--max-model-len", "2048", *options) as server:
        for _ in range(3):
            mix(server, 7)
