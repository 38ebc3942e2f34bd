"""The name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" with the name most like `name`, "" if none is like it."""
    import difflib  # only errors need it

    found = difflib.get_close_matches(name, [*known], 1)
    return f"; did you mean {found[0]}?" if found else ""
