"""Figures that the documents about inference print, beside the right ones: `worked.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from quire.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """A published figure. `command`: the words behind `quire calc`; `figure`: the label of its result.

    `right` is that result as text, and `note` says what is wrong with what is `printed`. What is no calculation has no
    command.
    """

    place: str
    printed: str
    right: str
    command: str = ""
    figure: str = ""
    note: str = ""


@cache
def worked_figures() -> tuple[Worked, ...]:
    """All cases, in the order of the file."""
    text = Path(__file__).with_name("worked.toml").read_text()
    return tuple(Worked(**case) for case in tomllib.loads(text)["case"])
