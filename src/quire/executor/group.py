"""Where ranks meet whose programs have collectives, for executors in Python; csrc/group.h is the native one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]


class Group(Protocol):
    """The ranks of a program."""

    size: int

    def exchange(self, rank: int, mine: Rows) -> Sequence[Rows]:
        """What every rank shows, in the order of ranks. RuntimeError when one has left."""


class LocalGroup:
    """Ranks in threads of this process. Implements Group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._shown: list[Rows] = [np.empty(0)] * size
        self._meeting = threading.Barrier(size)

    def exchange(self, rank: int, mine: Rows) -> Sequence[Rows]:
        """See Group.exchange."""
        try:
            self._shown[rank] = mine.copy()
            self._meeting.wait()
            found = list(self._shown)
            self._meeting.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank has left the group") from None
        return found

    def leave(self) -> None:
        """End the wait of all other ranks: this one will not come."""
        self._meeting.abort()
