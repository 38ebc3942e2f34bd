"""Adapters that lie in a file as a slot takes them: read and packed in one call, without Python between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

STORED_TYPES = frozenset({"F32", "BF16"})


class StoredMatrix(NamedTuple):
    """A matrix as a file has it: from byte `begin` on, row by row, in one of STORED_TYPES."""

    begin: int
    dtype: str


class StoredPair(NamedTuple):
    """A and B as a file has them, and what B is multiplied by; see AdapterSlots.put_adapter."""

    a: StoredMatrix
    b: StoredMatrix
    rank: int
    scale: float


@runtime_checkable
class TakesStored(Protocol):
    """AdapterSlots that read A and B from a file."""

    def put_stored(self, slot: int, file: int, pairs: Sequence[tuple[str, int, StoredPair]]) -> None:
        """`put_adapter` for each of these names and parts, with what lies in an open file.

        Raises ValueError for what does not fit, and RuntimeError if the file cannot be read or ends before.
        """
