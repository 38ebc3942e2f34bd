"""A server whose cache is on the disk: killed or stopped, it goes on where it was; and the disk may fail."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.process import Process, gone, running, until
from helpers.server import LiveServer
from quire.loader import DEFAULT_MODEL
from quire.worker.kv_file import PAGE

CHAT = "/v1/chat/completions"
ROOMS = " ".join(f"Room {n} is painted in colour {n * 7 % 12}." for n in range(90))
TEXT, OTHER = f"Answer from what follows. {ROOMS}", f"These are colours of rooms. {ROOMS}"
BODY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def ask(server: Process | LiveServer, text: str = TEXT) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many were cached."""
    reply = server.request("POST", CHAT, BODY | {"messages": [{"role": "user", "content": text}]})
    assert reply.status == 200, reply.text
    usage: Any = reply.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reply.json["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def is_loaded(server: Process, text: str, expected: tuple[str, int]) -> None:
    """The answer is the one that was computed, of blocks that the server found."""
    before = server.metric("quire_disk_tier_loaded_blocks_total")
    said, tokens, cached = ask(server, text)
    assert (said, tokens) == expected
    assert cached >= 0.9 * tokens
    until(lambda: server.metric("quire_disk_tier_loaded_blocks_total") > before + 10)


def test_the_cache_survives_what_ends_its_server(tmp_path: Path) -> None:
    """SIGTERM and SIGKILL; and where bits were flipped meanwhile, it is computed again."""
    model = Path(DEFAULT_MODEL), "--max-model-len", "2048"
    tier = "--kv-tiers", f"disk=64MiB:{tmp_path / 'kv'}"
    expected: dict[str, tuple[str, int]] = {}  # answers that were computed, and the tokens of their prompts
    with running(*model, *tier) as server:
        text, tokens, cached = ask(server)
        expected[TEXT] = text, tokens
        assert cached == 0
        assert server.end()[0] == 0
    with running(*model, *tier) as server:
        is_loaded(server, TEXT, expected[TEXT])
        text, tokens, cached = ask(server, OTHER)
        expected[OTHER] = text, tokens
        assert cached <= 32, "the beginning of all chats"
        blocks = sum(tokens // 16 for _, tokens in expected.values()) - 2
        until(lambda: server.metric("quire_disk_tier_blocks") >= blocks)  # written while nothing runs
        engine = server.engine
        server.end(signal.SIGKILL)
        until(lambda: gone(engine))  # until then it has the file, and the next server would take another
    with running(*model, *tier) as server:
        is_loaded(server, OTHER, expected[OTHER])
        is_loaded(server, TEXT, expected[TEXT])
        assert server.request("POST", "/v1/completions", {"prompt": TEXT, "max_tokens": 1}).status == 200
        assert server.end()[0] == 0
    (file,) = (tmp_path / "kv").iterdir()
    content = bytearray(file.read_bytes())
    for at in range(PAGE, len(content), 3001):
        content[at] ^= 1
    file.write_bytes(content)
    again = LiveServer(model[0], {"max_model_len": 2048, "kv_tiers": tier[1]}, {})
    with contextlib.closing(again):
        assert ask(again) == (*expected[TEXT], 0)
    assert [*(tmp_path / "kv").iterdir()] == [file], "it was this one that it read"


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(pytest.fail.Exception, match=r"file: (Not a directory|File exists)"),
        running(
            Path(DEFAULT_MODEL), "--max-model-len", "2048", "--kv-tiers", f"disk=64MiB:{tmp_path / 'file'}"
        ),
    ):
        pass
