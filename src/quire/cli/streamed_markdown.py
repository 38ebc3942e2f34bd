"""Markdown on a terminal while it comes: each word is shown when it is complete, and marks become style."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

from quire.cli.markdown_text import MarkdownText
from quire.util.markdown import blocks
from quire.util.printable import printable

_BOLD, _ITALIC, _CODE = "1", "3", "36"
# The beginning of a line that may still become a heading, an item, a fence or a table.
_OPEN = re.compile(r"\s*(#{1,6}|[-*+]|\d{1,3}[.)]?|`{1,2}|)\Z")
_HEADING = re.compile(r"\s*#{1,6} +")
_ITEM = re.compile(r"(\s*)([-*+]|\d{1,3}[.)]) +")
_MARKS = re.compile(r"(`+|\*\*|\*)")


class StreamedMarkdown:
    """Writes what it is fed to a terminal of `width` columns. Text that could control the terminal is escaped."""

    def __init__(self, write: Callable[[str], object], width: int) -> None:
        self._write, self._width = write, max(20, width)
        self._pending = ""  # not decided yet
        self._starts, self._fenced, self._ended = True, False, False
        self._styles: set[str] = set()
        self._column, self._indent, self._space = 0, "", False
        self._table: list[str] = []

    def feed(self, text: str) -> None:
        """Show as much as is decided."""
        self._pending += text
        while self._step():
            pass

    def end(self) -> None:
        """Show the rest, and leave the terminal without style."""
        self._ended = True
        if self._pending:
            self._pending += "\n"
        while self._step():
            pass
        self._close_table()
        self._styles.clear()

    def _step(self) -> bool:
        """Handle one line or word; False if more text must come first."""
        if not self._pending:
            return False
        return self._begin() if self._starts else self._word()

    def _begin(self) -> bool:
        line, newline, rest = self._pending.partition("\n")
        whole = bool(newline)
        if self._fenced or line.lstrip().startswith(("```", "|")):
            if not whole:
                return False
            self._pending = rest
            self._take_line(line)
            return True
        if not whole and _OPEN.match(line):
            return False
        self._close_table()
        self._starts, self._indent = False, ""
        if heading := _HEADING.match(line):
            self._styles = {_BOLD}
            self._pending = self._pending[heading.end() :]
        elif item := _ITEM.match(line):
            self._indent = item[1][:8] + " " * (len(item[2]) + 1)
            self._write(f"{item[1][:8]}{item[2]} ")
            self._column = len(self._indent)
            self._pending = self._pending[item.end() :]
        return True

    def _take_line(self, line: str) -> None:
        """A line of code or of a table, or the begin or end of code."""
        if line.lstrip().startswith("```"):
            self._close_table()
            self._fenced = not self._fenced
        elif self._fenced:
            self._write(f"    {printable(line.expandtabs(4))}\n")
        else:
            self._table.append(line)

    def _close_table(self) -> None:
        if self._table:
            lines = MarkdownText(self._width, styled=True).lines(blocks("\n".join(self._table)))
            self._write("\n".join(lines) + "\n")
            self._table = []

    def _word(self) -> bool:
        match = re.search(r"\s", self._pending)
        if match is None:
            return False
        word, space = self._pending[: match.start()], match[0]
        self._pending = self._pending[match.end() :]
        if word:
            self._show(word)
        if space == "\n":
            self._write("\n")
            self._starts, self._space, self._column = True, False, 0
            self._styles -= {_BOLD, _ITALIC, _CODE}
        else:
            self._space = self._column > len(self._indent)
        return True

    def _show(self, word: str) -> None:
        parts: list[tuple[str, str]] = []  # style and text
        for at, part in enumerate(_MARKS.split(word)):
            if part and not (at % 2 and self._toggled(part, word)):
                parts.append((";".join(sorted(self._styles)), printable(part)))
        size = sum(len(text) for _, text in parts)
        if self._space and self._column + 1 + size > self._width:
            self._write(f"\n{self._indent}")
            self._column = len(self._indent)
        elif self._space:
            self._write(" ")
            self._column += 1
        for style, same in groupby(parts, itemgetter(0)):
            text = "".join(part for _, part in same)
            self._write(f"\x1b[{style}m{text}\x1b[0m" if style else text)
        self._column, self._space = self._column + size, False

    def _toggled(self, mark: str, word: str) -> bool:
        """Whether a mark changes the style; if not it is text: within code, or with nothing beside it."""
        style = _CODE if mark[0] == "`" else _BOLD if mark == "**" else _ITALIC
        if (style != _CODE and _CODE in self._styles) or word == mark:
            return False
        self._styles ^= {style}
        return True
