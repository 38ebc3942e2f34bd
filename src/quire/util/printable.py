"""Text of strangers on a terminal or in a log: shown as what it is, never obeyed."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text on one line, with everything that does not show as itself escaped: line ends, terminal controls, marks
    that turn the direction of writing, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same for text that may have several lines; all but the first are indented."""
    return "\n  ".join(printable(line) for line in text.split("\n"))
