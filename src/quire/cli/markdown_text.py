"""Markdown on a terminal: wrapped lines, with weight and colour where the terminal has them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from quire.util.markdown import MarkdownNode
from quire.util.printable import printable

_STYLES = {"strong": "1", "emphasis": "3", "code": "36", "number": "1", "link": "4", "heading": "1"}
_ESCAPES = {code: f"\x1b[{code}m" for code in _STYLES.values()}


class MarkdownText:
    """Makes lines of blocks, at most `width` wide; `styled` ones carry the escapes of a terminal."""

    def __init__(self, width: int = 100, *, styled: bool = False) -> None:
        self._width, self._styled = width, styled

    def lines(self, nodes: Sequence[MarkdownNode]) -> list[str]:
        """All blocks, with an empty line between them."""
        found: list[str] = []
        for node in nodes:
            found += [*([""] if found else []), *self.block(node)]
        return found

    def block(self, node: MarkdownNode) -> Iterator[str]:
        """The lines of one block."""
        kind = node["kind"]
        if kind == "heading":
            yield self._style("heading", self.inline(node["inline"]))
        elif kind == "paragraph":
            yield from self.wrapped(self.inline(node["inline"]))
        elif kind == "list":
            for number, item in enumerate(node["items"], 1):
                mark = f"{number}. " if node["ordered"] else "- "
                yield from self.wrapped(self.inline(item), first=mark, rest=" " * len(mark))
        elif kind == "fence":
            yield from (f"    {printable(line)}" for line in node["text"].expandtabs(4).split("\n"))
        elif kind == "table":
            yield from self.table([self.inline(cell) for cell in node["head"]],
                                  [[self.inline(cell) for cell in row] for row in node["rows"]])  # fmt: skip

    def inline(self, nodes: Sequence[MarkdownNode]) -> str:
        """The text of a line, not wrapped."""
        return "".join(self._part(node) for node in nodes)

    def _part(self, node: MarkdownNode) -> str:
        text = self.inline(node["inline"]) if "inline" in node else printable(node["text"].replace("\n", " "))
        if node["kind"] == "link" and not self._styled and ":" in node["href"]:
            text = f"{text} ({printable(node['href'])})"
        return self._style(node["kind"], text)

    def _style(self, kind: str, text: str) -> str:
        if not self._styled or kind not in _STYLES:
            return text
        # Each word for itself, so that a line may end between any two.
        return " ".join(f"{_ESCAPES[_STYLES[kind]]}{word}\x1b[0m" if word else "" for word in text.split(" "))

    def wrapped(self, text: str, first: str = "", rest: str = "") -> Iterator[str]:
        """The lines of a text, behind `first` and `rest`. Escapes take no room."""
        line, used, empty = first, len(first), True
        for word in text.split():
            size = len(self._bare(word))
            if not empty and used + 1 + size > self._width:
                yield line
                line, used, empty = rest, len(rest), True
            line += word if empty else f" {word}"
            used += size if empty else size + 1
            empty = False
        yield line

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
        """Columns if they fit; else each row as lines of `column: cell`."""
        every = [head, *rows]
        widths = [max(len(self._bare(row[i])) for row in every) for i in range(len(head))]
        if sum(widths) + 2 * (len(widths) - 1) > self._width:
            for row in rows:
                for at, (name, cell) in enumerate(zip(head, row, strict=True)):
                    if cell:
                        yield from self.wrapped(
                            f"{name}: {cell}" if name else cell, "  " if at else "- ", "    "
                        )
            return
        for at, row in enumerate(every):
            cells = [
                cell + " " * (width - len(self._bare(cell))) for cell, width in zip(row, widths, strict=True)
            ]
            yield "  ".join(cells).rstrip()
            if not at:
                yield "  ".join("-" * width for width in widths)

    def _bare(self, text: str) -> str:
        if self._styled:
            for escape in (*_ESCAPES.values(), "\x1b[0m"):
                text = text.replace(escape, "")
        return text


def indented(lines: Sequence[str]) -> list[str]:
    """Lines with a margin."""
    return textwrap.indent("\n".join(lines), "  ").split("\n")
