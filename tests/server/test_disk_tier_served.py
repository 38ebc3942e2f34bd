"""A server whose cache is on the disk: killed or stopped, it goes on where it was; and the disk may fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.process import Process, running, until
from quire.loader import DEFAULT_MODEL
from quire.worker.kv_file import PAGE

CHAT = "/v1/chat/completions"
TEXT = "Answer from what follows. " + " ".join(
    f"Room {n} is painted in colour {n * 7 % 12}." for n in range(90)
)
BODY = {
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def tier(tmp_path: Path) -> tuple[str, ...]:
    return "--kv-tiers", f"disk=64MiB:{tmp_path / 'kv'}"


def ask(server: Process) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many were cached."""
    reply = server.request("POST", CHAT, BODY)
    assert reply.status == 200, reply.text
    usage: Any = reply.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply.json["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[str, int]]:
    with running(Path(DEFAULT_MODEL), "--max-model-len", "2048") as server:
        text, tokens, _ = ask(server)
        yield text, tokens


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_cache_survives(expected: tuple[str, int], tier: tuple[str, ...], how: signal.Signals) -> None:
    with running(Path(DEFAULT_MODEL), "--max-model-len", "2048", *tier) as server:
        assert ask(server) == (*expected, 0)
        if how == signal.SIGKILL:  # blocks are written while nothing runs
            cached = server.metric("quire_kv_blocks_cached")
            assert cached > 0
            until(lambda: server.metric("quire_disk_tier_saved_blocks_total") >= cached)
        os.kill(server.process.pid, how)
        server.process.wait()
    with running(Path(DEFAULT_MODEL), "--max-model-len", "2048", *tier) as server:
        text, tokens, cached = ask(server)
        assert text == expected[0]
        assert cached >= 0.9 * tokens
        assert server.metric("quire_disk_tier_loaded_blocks_total") > 10
        assert server.request("POST", "/v1/completions", {"prompt": TEXT, "max_tokens": 1}).status == 200


def test_flipped_bits_are_computed_again(
    expected: tuple[str, int], tier: tuple[str, ...], tmp_path: Path
) -> None:
    with running(Path(DEFAULT_MODEL), "--max-model-len", "2048", *tier) as server:
        ask(server)
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait()
    (file,) = (tmp_path / "kv").iterdir()
    content = bytearray(file.read_bytes())
    for at in range(PAGE, len(content), 3001):
        content[at] ^= 1
    file.write_bytes(content)
    with running(Path(DEFAULT_MODEL), "--max-model-len", "2048", *tier) as server:
        text, _, cached = ask(server)
        assert (text, cached) == (expected[0], 0)


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(pytest.fail.Exception, match=r"file: (Not a directory|File exists)"),
        running(
            Path(DEFAULT_MODEL), "--max-model-len", "2048", "--kv-tiers", f"disk=64MiB:{tmp_path / 'file'}"
        ),
    ):
        pass
