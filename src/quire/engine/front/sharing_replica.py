"""A replica among those of a server that share the experts of a model, as its engine sees the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # its module needs the native one, which a server without replicas does without
    from quire.engine.host.replica_files import ReplicaFiles


class Sharer(Protocol):
    """The engine of a replica."""

    @property
    def shares_experts(self) -> bool:
        """Whether its model has experts to share; False before its first start."""

    @property
    def cpu_seconds(self) -> float:
        """Of its process so far, as far as they are known."""


class SharingReplica:
    """Replica `number` of those with these engines, which meet in `files`. A model without experts shares none."""

    def __init__(self, number: int, engines: Sequence[Sharer], files: ReplicaFiles) -> None:
        self._number, self._engines, self._files = number, engines, files

    @property
    def _shares(self) -> bool:
        return any(each.shares_experts for each in self._engines)

    def join(self) -> str:
        """The path of the file for a start that is about to be."""
        return self._files.join(self._number)

    def died(self) -> bool:
        """It has died. Returns whether that is because another one has, whose experts it needs."""
        return self._shares and self._files.left(self._number)

    def cpu_of_others(self) -> float:
        """Seconds of processors that those have used which a step of this one may wait for."""
        others = (*self._engines[: self._number], *self._engines[self._number + 1 :])
        return sum(each.cpu_seconds for each in others) if self._shares else 0.0
