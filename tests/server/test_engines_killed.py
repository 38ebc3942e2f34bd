"""Engines that share KV blocks with others of their host are killed in the middle of it: the others go on, nothing of
the dead ones is left, and no text changes."""

from __future__ import annotations

import concurrent.futures
import http.client
import os
import random
import signal
import time
from pathlib import Path

import pytest

from helpers.kv_servers import kv_server
from helpers.process import Process, children, descriptors, gone, running, until
from helpers.server import GUARD
from quire.loader import DEFAULT_MODEL

pytestmark = pytest.mark.chaos

ROOMS = " ".join(f"Room {n} is painted in colour {n * 7 % 12}." for n in range(60))
NUMBERS = range(8)


def attempt(server: Process, number: int) -> str | None:
    """The answer of a server that may be killed meanwhile."""
    message = {"role": "user", "content": f"{number}. {ROOMS}"}
    asked = {"messages": [message], "max_tokens": 24, "seed": number, "temperature": 0.8, "ignore_eos": True}
    try:
        reply = server.request("POST", "/v1/chat/completions", asked)
    except (OSError, http.client.HTTPException):
        return None
    return str(reply.json["choices"][0]["message"]["content"]) if reply.status == 200 else None


def answer(server: Process, number: int) -> str:
    found = attempt(server, number)
    assert found is not None
    return found


def areas(pid: int) -> int:
    """Parts of memory that a process shares with engines."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:quire kv")


@pytest.mark.parametrize("whole", [False, True], ids=["its engine", "all of it"])
def test_an_engine_that_is_killed_leaves_nothing_to_others(tmp_path: Path, whole: bool) -> None:
    """kill -9 of an engine alone, whose server starts another one, or of the server with it, while blocks come and go
    through memory that it shares with a server of blocks."""
    key, path, rng = tmp_path / "key", tmp_path / "kv.sock", random.Random(whole)
    key.write_bytes(b"a key that all of them have")
    options = (Path(DEFAULT_MODEL), "--max-model-len", "2048", "--kv-tiers", f"remote={path}:{key}")
    with kv_server(key, 0, "--uds", str(path)) as (blocks, _):
        alone = descriptors(blocks.pid), areas(blocks.pid)
        with running(*options) as survivor, concurrent.futures.ThreadPoolExecutor(8) as clients:
            until(lambda: survivor.metric("quire_remote_tier_failed") == 0)
            expected = {}
            for turn in range(3):
                with running(*options) as victim:
                    until(lambda victim=victim: victim.metric("quire_remote_tier_failed") == 0)  # type: ignore[misc]
                    mine = [turn * 100 + number for number in NUMBERS]
                    asked = [clients.submit(attempt, victim, number) for number in mine]
                    others = [clients.submit(answer, survivor, number) for number in mine[::-1]]
                    concurrent.futures.wait(asked, GUARD, concurrent.futures.FIRST_COMPLETED)
                    time.sleep(rng.uniform(0, 0.2))
                    engine = victim.engine
                    os.kill(victim.process.pid if whole else engine, signal.SIGKILL)
                    until(lambda engine=engine: gone(engine))  # type: ignore[misc]
                    expected |= dict(zip(mine[::-1], (each.result(GUARD) for each in others), strict=True))
                    for each, number in zip(asked, mine, strict=True):
                        assert each.result(GUARD) in {None, expected[number]}
                    if not whole:  # another engine in its place has what the dead one had written
                        until(lambda engine=engine: children(victim.process.pid) not in ([], [engine]))  # type: ignore[misc]
                        until(victim.ready)
                        assert [answer(victim, number) for number in mine] == [
                            expected[number] for number in mine
                        ]
            assert {number: answer(survivor, number) for number in expected} == expected
            assert survivor.metric("quire_remote_tier_damaged_blocks_total") == 0
            with running(*options) as fresh:
                until(lambda: fresh.metric("quire_remote_tier_blocks") > 0)
                assert {number: answer(fresh, number) for number in expected} == expected
                until(lambda: fresh.metric("quire_remote_tier_loaded_blocks_total") > 0)
                assert fresh.metric("quire_remote_tier_damaged_blocks_total") == 0
        until(lambda: (descriptors(blocks.pid), areas(blocks.pid)) == alone)
        blocks.send_signal(signal.SIGTERM)
        assert blocks.wait(GUARD) == 0
    assert not path.exists()
