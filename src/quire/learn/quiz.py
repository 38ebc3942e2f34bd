"""The questions of the lesson. Answers that are numbers come from the calculators."""

from __future__ import annotations

import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from quire.planner.calculators import CALCULATORS
from quire.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, its choices in an order that stays, the right one, why, and the simulation that shows it."""

    chapter: int
    text: str
    choices: tuple[str, ...]
    right: str
    why: str
    simulation: str


@cache
def questions() -> tuple[Question, ...]:
    """All questions by chapter."""
    return tuple(
        _question(row) for row in tomllib.loads(Path(__file__).with_name("quiz.toml").read_text())["question"]
    )


def _question(row: dict[str, Any]) -> Question:
    right = row.get("right") or _computed(row)
    choices = [right, *row["wrong"]]
    random.Random(row["chapter"]).shuffle(choices)
    return Question(
        chapter=row["chapter"], text=row["text"], choices=tuple(choices), right=right, why=row["why"],
        simulation=row["simulation"],
    )  # fmt: skip


def _computed(row: dict[str, Any]) -> str:
    figures = CALCULATORS[row["calculator"]].figures(row["values"])
    return next(one.shown() for one in figures if one.label == row["figure"])
