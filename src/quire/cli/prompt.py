"""The input line of a chat: history, cursor keys, completion and pasted lines, with readline if available."""

from __future__ import annotations

import contextlib
import os
import sys
from types import ModuleType, TracebackType

from quire.config.env import cache_folder

COMMANDS = {
    "/help": "show this list",
    "/clear": "start the conversation over",
    "/drop": "forget the oldest turn",
    "/system": "TEXT: another system message, and the conversation from the start; without TEXT: none",
    "/model": "NAME: go on with another model; without NAME: which one answers",
    "/save": "FILE: write the conversation as Markdown, or as JSON messages if it ends in .json",
    "/exit": "exit, like Ctrl-D",
    '"""': "begins and ends a multi-line message",
    "Ctrl-C": "ends the answer, or clears the input line",
}
LEAVE = frozenset(("/exit", "/quit", "/bye"))
_FENCE = '"""'
_HISTORY_LINES = 1000


class ChatInput:
    """Reads messages from the terminal, or line by line from another standard input.

    With `keep`, the input history is saved for the next chat in a file that only its owner can read.
    """

    def __init__(self, *, keep: bool) -> None:
        self.interactive = sys.stdin.isatty()
        self._readline = _readline() if self.interactive else None
        folder = cache_folder()
        self._file = folder / "chat_history" if keep and folder is not None else None

    def __enter__(self) -> ChatInput:
        if self._readline is not None and self._file is not None:
            with contextlib.suppress(OSError):  # the first chat has no history
                self._readline.read_history_file(str(self._file))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._readline is not None and self._file is not None:
            self._readline.set_history_length(_HISTORY_LINES)
            with contextlib.suppress(OSError):  # the history is optional
                self._file.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self._file, os.O_CREAT | os.O_WRONLY, 0o600))
                self._readline.write_history_file(str(self._file))

    def read(self) -> str | None:
        """Read the next message or command; None at the end of input."""
        line = self._line("> ")
        if line is None or not line.startswith(_FENCE):
            return line
        lines = [line.removeprefix(_FENCE)]
        while not lines[-1].endswith(_FENCE) and (more := self._line("… ")) is not None:
            lines.append(more)
        return "\n".join(lines).removesuffix(_FENCE)

    def result(self, function: str) -> str | None:
        """Read the result of a called function; None at the end of input."""
        return self._line(f"{function} returns> ")

    def ask(self, question: str) -> str:
        """Ask and return the first letter of the answer in lower case, "" for none. It is not saved."""
        try:
            answer = input(question)
        except (EOFError, KeyboardInterrupt):
            print()
            return ""
        if answer and self._readline is not None:
            self._readline.remove_history_item(self._readline.get_current_history_length() - 1)
        return answer.strip().lower()[:1]

    def _line(self, prompt: str) -> str | None:
        while True:
            try:
                return input(prompt if self.interactive else "")
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                print("\n(Ctrl-D exits)")
            except EOFError:
                if self.interactive:
                    print()
                return None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python built without readline
        return None

    def complete(text: str, state: int) -> str | None:
        found = [name for name in COMMANDS if name.startswith("/") and name.startswith(text)]
        return found[state] if text.startswith("/") and state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    return readline
