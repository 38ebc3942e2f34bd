"""Untrusted text on a terminal or in a log, with control characters escaped."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape everything in a text that is not shown as itself: line ends, terminal controls, marks that change the
    writing direction, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines; all but the first are indented."""
    return "\n  ".join(printable(line) for line in text.split("\n"))
