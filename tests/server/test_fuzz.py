"""A live server under hostile bytes: all other clients are served as before. `make test-fuzz`."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path

import pytest
from test_hostile_bytes import ENDLESS, FRAGMENTS, pieces

from helpers.process import descriptors, resident, running, until
from helpers.server import GUARD

ROUNDS, ATTACKERS = 150, 8
ALLOWANCE = (
    48 * 2**20
)  # what the server's process may grow by: what it grows by when it first serves, and buffers


def attack(port: int, seed: int, rounds: int) -> None:
    """Streams without end, and fragments in any order and cut anywhere; some connections are left half way."""
    draw = random.Random(seed)
    for _ in range(rounds):
        if draw.random() < 0.4:
            start, unit, _ = ENDLESS[draw.choice(list(ENDLESS))]
            reads = list(
                pieces(start, unit, draw.choice([1, 100, 2**16]), draw.choice([10**3, 10**5, 10**6]))
            )[:3000]
        else:
            data = b"".join(draw.choices([*FRAGMENTS, draw.randbytes(50)], k=draw.randint(1, 40)))
            cuts = sorted(draw.choices(range(len(data) + 1), k=draw.randint(0, 20)))
            reads = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
            for read in reads:
                sock.sendall(read)
                if draw.random() < 0.01:
                    break
            if draw.random() < 0.7:
                while sock.recv(2**16):
                    pass


@pytest.mark.fuzz
def test_others_are_served_meanwhile(folder: Path) -> None:
    options = ("--header-timeout", "2", "--reader-timeout", "2", "--api-key", "k", "--access-log")
    with running(folder, *options, files=400) as server:
        key = {"authorization": "Bearer k"}
        body = {"prompt": "Once", "max_tokens": 20, "seed": 3, "temperature": 1.0, "ignore_eos": True}
        expected = server.request("POST", "/v1/completions", body, key).json["choices"]
        attack(server.port, 0, 20)
        held, memory = descriptors(server.process.pid), resident(server.process.pid)
        attackers = [
            threading.Thread(target=attack, args=(server.port, seed, ROUNDS))
            for seed in range(1, 1 + ATTACKERS)
        ]
        log: list[str] = []
        assert server.process.stderr is not None
        threading.Thread(target=lambda: log.extend(server.process.stderr or ()), daemon=True).start()
        for thread in attackers:
            thread.start()
        rounds = 0
        while any(thread.is_alive() for thread in attackers):
            assert server.request("GET", "/health").status == 200
            assert server.request("POST", "/v1/completions", body, key).json["choices"] == expected
            rounds += 1
        for thread in attackers:
            thread.join(GUARD)
        assert rounds > 10
        until(lambda: descriptors(server.process.pid) <= held)
        assert resident(server.process.pid) < memory + ALLOWANCE
        server.process.terminate()
        assert server.process.wait(GUARD) == 0
        assert not [line for line in log if "Traceback" in line or " error " in line], log[-20:]
