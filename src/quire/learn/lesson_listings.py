"""Listings: short programs that a lesson prints, run with the engine's own parts; rooms above offer them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from itertools import zip_longest

from quire.learn.offered import offered
from quire.records import dataclass
from quire.util.likeness import did_you_mean

ANY = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonListing:
    """A program: its `source`, and the `output` that it must print. `main` gives the function that prints it."""

    name: str
    about: str
    source: str
    output: str
    main: Callable[[], Callable[[], None]]

    def run(self) -> str:
        """What it prints now."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.main()()
        return printed.getvalue()

    def differs(self) -> str:
        """Where what it prints is not `output`, in which a line … stands for any; "" if it is."""
        printed, wanted = self.run().splitlines(), self.output.splitlines()
        for got, want in zip_longest(printed, wanted, fillvalue="no line"):
            if want not in {got, ANY}:
                return f"{got!r} instead of {want!r}"
        return ""


def listings() -> dict[str, LessonListing]:
    """All by name."""
    return {one.name: one for one in sorted(offered(LessonListing), key=lambda one: one.name)}


def listing(name: str) -> LessonListing:
    """The listing of a name. Raises ValueError for an unknown one."""
    known = listings()
    if name not in known:
        raise ValueError(f"name: no listing {name!r}{did_you_mean(name, known)}")
    return known[name]
