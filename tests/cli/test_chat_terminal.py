"""quire chat at a terminal: a pseudo-terminal types what a person would, keys and all."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

GUARD = 120.0
UP, TAB, CTRL_C, CTRL_D = "\033[A", "\t", "\003", "\004"
PROMPT = r"> $"


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, folder: Path, home: Path, *options: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "QUIRE_CACHE_DIR": str(home), "TERM": "dumb", "INPUTRC": os.devnull}
        command = [sys.executable, "-m", "quire", "chat", str(folder), "--max-model-len", "128", *options]
        self.process = subprocess.Popen(  # whose terminal this is, so that Ctrl-C means what it does at one
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  one system call
        )  # fmt: skip
        os.close(slave)
        self._bytes = b""

    @property
    def text(self) -> str:
        """What came and was not expected yet."""
        return self._bytes.decode("utf-8", "ignore")  # its last character may have come in part

    def expect(self, pattern: str) -> str:
        """Read until the text since the last call matches; returns that text."""
        while not re.search(pattern, self.text):
            ready, _, _ = select.select([self._master], [], [], GUARD)
            assert ready, f"{pattern!r} never came, but {self.text!r}"
            try:
                data = os.read(self._master, 4096)
            except OSError:  # the terminal's other end is closed
                data = b""
            assert data, f"{pattern!r} never came, but {self.text!r}"
            self._bytes += data
        found, self._bytes = self.text, b""
        return found

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C until the text matches. Python's reading of a line misses a signal that comes while it takes
        characters, and sees it at the next key.
        """
        for _ in range(int(GUARD)):
            self.type(CTRL_C)
            if self._comes(pattern, 2.0):
                return
        raise AssertionError(f"{pattern!r} never came, but {self.text!r}")

    def _comes(self, pattern: str, seconds: float) -> bool:
        while not re.search(pattern, self.text):
            if not select.select([self._master], [], [], seconds)[0]:
                return False
            self._bytes += os.read(self._master, 4096)
        return True

    def say(self, text: str) -> str:
        """Type a line; returns the output up to the next prompt."""
        self.type(text + "\r")
        return self.expect(PROMPT)

    def leave(self) -> int:
        self.type(CTRL_D)
        return self.process.wait(GUARD)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(folder: Path, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(folder, tmp_path, "--max-tokens", "8", "--ignore-eos")
    opened.expect(PROMPT)
    yield opened
    opened.close()


def test_commands_rates_and_the_end(terminal: Terminal) -> None:
    assert re.search(r"8 tokens, the first after [\d.]+ s, then [\d.]+ tokens/s", terminal.say("hello"))
    assert "/clear" in terminal.say("/help")
    assert "unknown command /foo; see /help" in terminal.say("/foo bar")
    assert "no earlier turn" not in terminal.say("/drop")
    assert "no earlier turn to drop" in terminal.say("/drop")
    terminal.type("/cl" + TAB)
    terminal.expect("/clear")
    terminal.say("")
    terminal.type("half a line")
    terminal.expect("half a line")
    terminal.interrupt("Ctrl-D exits")
    terminal.type("hello\r")
    terminal.expect(r"tokens/s(.|\n)*> $")  # the prompt too: a Ctrl-D before it would be another line's
    assert terminal.leave() == 0


def test_a_conversation_is_saved_and_begins_anew(terminal: Terminal, tmp_path: Path) -> None:
    terminal.say("/system Be brief.")
    terminal.say("hello")
    assert "3 messages in" in terminal.say(f"/save {tmp_path}/a.json")
    assert "File exists" in terminal.say(f"/save {tmp_path}/a.json")
    assert "3 messages in" in terminal.say(f"/save {tmp_path}/a.md")
    assert "needs the name of a file" in terminal.say("/save")
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [one["role"] for one in saved] == ["system", "user", "assistant"]
    assert saved[0]["content"] == "Be brief."
    assert (
        (tmp_path / "a.md")
        .read_text()
        .startswith("**system**\n\nBe brief.\n\n**user**\n\nhello\n\n**assistant**")
    )


def test_another_model_goes_on_with_the_conversation(
    terminal: Terminal, folder: Path, tmp_path: Path
) -> None:
    terminal.say("hello")
    assert str(folder) in terminal.say("/model")
    assert "no such" in terminal.say("/model ./nothing-there")
    assert "/help lists" in terminal.say(f"/model {folder}")
    terminal.say("and again")
    file = tmp_path / "saved.json"
    terminal.say(f"/save {file}")
    said = [one["content"] for one in json.loads(file.read_text()) if one["role"] == "user"]
    assert said == ["hello", "and again"]


def test_history_lasts_and_belongs_to_its_owner(folder: Path, tmp_path: Path) -> None:
    first = Terminal(folder, tmp_path, "--max-tokens", "2")
    first.expect(PROMPT)
    first.say("remember me")
    assert first.leave() == 0
    first.close()
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600
    second = Terminal(folder, tmp_path, "--max-tokens", "2")
    second.expect(PROMPT)
    second.type(UP)
    second.expect("remember me")
    second.close()


def test_a_full_context_is_asked_about(terminal: Terminal) -> None:
    for _ in range(20):
        terminal.type("a rather long message\r")
        if "Drop the oldest" in terminal.expect(f"{PROMPT}|cancel\\? \\[d/c/N\\] $"):
            break
    else:
        pytest.fail("the context never filled")
    assert "tokens/s" in terminal.say("d")
    assert terminal.leave() == 0


def test_a_message_of_several_lines(terminal: Terminal) -> None:
    terminal.type('"""one\r')
    terminal.expect("… $")
    terminal.type("two\r")
    terminal.expect("… $")
    assert "tokens/s" in terminal.say('three"""')
