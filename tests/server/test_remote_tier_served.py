"""Servers that share a kv-server: what one has computed the other need not, with the same text."""

from __future__ import annotations

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.kv_servers import kv_server
from helpers.process import Process, running, until
from quire.loader import DEFAULT_MODEL

ROOMS = " ".join(f"Room {n} is painted in colour {n * 7 % 12}." for n in range(90))
TEXTS = (f"Answer from what follows. {ROOMS}", f"These are colours of rooms. {ROOMS}")
MODEL = (Path(DEFAULT_MODEL), "--max-model-len", "2048")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "kv.key"
    path.write_bytes(base64.b64encode(os.urandom(32)) + b"\n")
    return path


def ask(server: Process, text: str) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many were cached."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.text
    usage: Any = reply.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply.json["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.mark.parametrize("returns", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_a_second_server_need_not_compute_what_the_first_has(key: Path, returns: bool) -> None:
    """And goes on when the kv-server hangs; also when it is killed, and comes back."""
    with kv_server(key) as (process, port), ExitStack() as servers, ThreadPoolExecutor(2) as starts:
        tiers = ("--kv-tiers", f"remote=127.0.0.1:{port}:{key}")
        first, second = starts.map(lambda _: servers.enter_context(running(*MODEL, *tiers)), range(2))
        until(lambda: first.metric("quire_remote_tier_failed") == 0)
        one, two = (ask(first, text) for text in TEXTS)
        blocks = one[1] // 16 + two[1] // 16 - 2
        until(lambda: second.metric("quire_remote_tier_blocks") >= blocks)
        assert first.metric("quire_remote_tier_saved_blocks_total") >= blocks
        found = ask(second, TEXTS[0])
        assert found[:2] == one[:2]
        assert found[2] >= 0.9 * one[1]
        until(lambda: second.metric("quire_remote_tier_loaded_blocks_total") >= 0.9 * one[1] // 16)
        assert second.metric("quire_remote_tier_damaged_blocks_total") == 0
        process.send_signal(signal.SIGSTOP)  # it hangs, and its connections stay
        found = ask(second, TEXTS[1])
        assert found[:2] == two[:2]
        assert found[2] <= 32, "the beginning of all chats"
        until(lambda: second.metric("quire_remote_tier_failed") == 1)
        if returns:
            process.kill()
            process.wait()
            with kv_server(key, port) as (other, _):
                until(lambda: second.metric("quire_remote_tier_failed") == 0)
                other.send_signal(signal.SIGTERM)
                assert other.wait() == 0


def test_a_key_that_cannot_be_read_is_told_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(pytest.fail.Exception, match=r"kv_tiers: remote: .*No such file"),
        running(*MODEL, "--kv-tiers", f"remote=127.0.0.1:1:{tmp_path}/none"),
    ):
        pass
