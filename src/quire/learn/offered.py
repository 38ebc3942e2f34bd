"""Parts of the lesson that are made of parts above this room: rooms above offer them, and import them when used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
_LOADS: list[Callable[[], Sequence[object]]] = []


def offer(load: Callable[[], Sequence[object]]) -> None:
    """Have simulations and listings beside those of this room. `load` is called whenever a list is asked for."""
    if load not in _LOADS:
        _LOADS.append(load)


def offered(kind: type[T]) -> list[T]:
    """All of a kind that were offered."""
    return [one for load in _LOADS for one in load() if isinstance(one, kind)]
