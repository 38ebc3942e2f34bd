"""Simulations that are made of parts above this room: rooms above offer them, and import them when used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.learn.scene import Simulation

_LOADS: list[Callable[[], Sequence[Simulation]]] = []


def offer(load: Callable[[], Sequence[Simulation]]) -> None:
    """Have simulations beside those of this room. `load` is called whenever the list is asked for."""
    if load not in _LOADS:
        _LOADS.append(load)


def offered() -> list[Simulation]:
    """All that were offered."""
    return [one for load in _LOADS for one in load()]
