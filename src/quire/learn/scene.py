"""What a simulation is: controls, and what it shows for their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from quire.planner.figure import Figure
from quire.records import dataclass
from quire.util.likeness import did_you_mean

Value = float | str | bool
NumbersFrom = Literal["calculators", "engine", "simulator"]  # where the numbers come from


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A value that a reader may change: one of `choices`, or a number from `least` to `most`.

    Numbers are whole ones where `step` is. A control whose default is a bool is a switch.
    """

    name: str
    label: str
    default: Value
    choices: tuple[str, ...] = ()
    least: float = 0.0
    most: float = 0.0
    step: float = 1.0
    unit: str = ""

    def read(self, text: str) -> Value:
        """The value that a text means. Raises ValueError, naming the control and its limits."""
        if self.choices:
            if text not in self.choices:
                raise ValueError(f"{self.name}: {text!r} must be one of {', '.join(self.choices)}")
            return text
        if isinstance(self.default, bool):
            if text not in {"true", "false"}:
                raise ValueError(f"{self.name}: {text!r} must be true or false")
            return text == "true"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:
            raise ValueError(f"{self.name}: {text!r} must be a number from {self.least:g} to {self.most:g}")
        if self.step % 1:
            return value
        if value % 1:
            raise ValueError(f"{self.name}: {text} must be a whole number")
        return int(value)


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """A line or a group of bars: a value for each x, which is a number or a name."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """ChartSeries in one picture. `levels` are horizontal lines with a name."""

    title: str
    kind: Literal["lines", "bars"]
    x: str
    y: str
    series: Sequence[ChartSeries]
    levels: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class Cells:
    """Places in a row, each with its owner: 0 is free, −1 is held but unused, others are sequences from 1 on."""

    title: str
    owners: Sequence[int]
    names: Sequence[str]  # of the owners from 1 on


@dataclass(frozen=True, slots=True)
class Flow:
    """Places in a circle, and arrows from one to another, each with what goes along it. `moments`: from a time in ms
    on something is at a place, so that it can be played again."""

    title: str
    places: Sequence[str]
    arrows: Sequence[tuple[int, int, str]]
    moments: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a simulation shows: figures first, then pictures, tables, and a remark."""

    figures: Sequence[Figure]
    charts: Sequence[Chart] = ()
    cells: Sequence[Cells] = ()
    tables: Sequence[Table] = ()
    remark: str = ""
    flows: Sequence[Flow] = ()

    def beside(self, other: Scene) -> Scene:
        """This one, and behind it another."""
        return Scene(
            [*self.figures, *other.figures], [*self.charts, *other.charts], [*self.cells, *other.cells],
            [*self.tables, *other.tables], " ".join(filter(None, (self.remark, other.remark))),
            [*self.flows, *other.flows],
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As JSON values; figures also as people read them."""
        figures = [one._asdict() | {"shown": one.shown()} for one in self.figures]
        return {
            "figures": figures, "charts": [asdict(one) for one in self.charts],
            "cells": [asdict(one) for one in self.cells], "tables": [asdict(one) for one in self.tables],
            "flows": [asdict(one) for one in self.flows], "remark": self.remark,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One simulation. `run` takes a value for each control by its name. `speed`: of a replay of its lines, 0 where
    nothing happens over time."""

    number: int
    name: str
    title: str
    about: str
    source: NumbersFrom
    controls: tuple[Control, ...]
    run: Callable[..., Scene]
    speed: int = 0

    def scene(self, given: Mapping[str, str]) -> Scene:
        """What it shows; controls that are not given have their defaults.

        Raises ValueError for an unknown control, a value out of range, or values that do not go together.
        """
        return self.run(**self.values(given))

    def values(self, given: Mapping[str, str]) -> dict[str, Value]:
        """A value for each control. Raises ValueError as `scene`."""
        values = {one.name: one.default for one in self.controls}
        known = {one.name: one for one in self.controls}
        for name, text in given.items():
            if name not in known:
                raise ValueError(f"{name}: {self.name} has no such control{did_you_mean(name, known)}")
            values[name] = known[name].read(text)
        return values
