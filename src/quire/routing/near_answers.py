"""Answers by the vector of their question: the nearest one of the same kind, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from quire.records import dataclass
from quire.routing.question_marks import same_marks

Vector = NDArray[np.float32]
# Bytes of an answer beside its vector and its text: the entry with its digests, and its places in two dictionaries,
# whose tables stay as large as they were with the most answers. Measured: 620 to 780 of both.
ENTRY, TABLES = 640, 512
_FREE_ROW = 40  # bytes of a row's number in the list of those that are free
MOST_OF_KEY = 4096  # answers; the oldest goes when there are more: so long takes a look at all
_SLICE = 512  # vectors that are copied at a time
_SAME = 0.9999  # the cosine of a question with itself


@dataclass(slots=True)
class _Kept:
    key: bytes
    marks: bytes
    row: int
    answer: bytes
    maker: str
    until: float


@dataclass(frozen=True, slots=True)
class Near:
    """An answer that was kept, and the cosine of its question with the one that is asked."""

    answer: bytes
    similarity: float


class NearAnswers:
    """Answers are found among those of the same key alone, whose question has the same marks. `key` is a digest of all
    that has to be equal. Times are in seconds of any clock.

    No more than `size` bytes: one half for vectors, taken with the first one, the other half for answers. The ones that
    were not given for the longest time go first.
    """

    def __init__(self, size: int, threshold: float, seconds: float) -> None:
        self._size, self._threshold, self._seconds = size, threshold, seconds
        self._vectors: NDArray[np.float32] | None = None  # [rows, numbers], made for the first vector
        self._free: list[int] = []
        self._fixed = 0  # bytes of both
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by row, those given last at the end
        self._rows: dict[bytes, list[int]] = {}  # by key
        self._answers = 0  # bytes
        self._most = 0  # answers at a time
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held(self) -> int:
        """Bytes that are taken."""
        return self._fixed + self._answers + TABLES * self._most

    def find(self, key: bytes, vector: Vector, marks: bytes, maker: str | None, now: float) -> Near | None:
        """The answer to the nearest question of a key, if it is as near as it has to be and has these marks. One made
        by other weights than `maker` is none, if that is known."""
        for row, similarity in self._nearest(key, vector, self._threshold):
            kept = self._kept[row]
            if kept.until <= now or maker not in (None, kept.maker):
                self._drop(row)
            elif same_marks(kept.marks, marks):
                self._kept.move_to_end(row)
                return Near(kept.answer, similarity)
        return None

    def keep(self, key: bytes, vector: Vector, marks: bytes, answer: bytes, maker: str, now: float) -> None:
        """Keep an answer, made by the weights that `maker` names; it replaces the one to the same question. All vectors
        have one length. An answer that is too long is not kept.
        """
        if self._vectors is None:
            rows = max(1, self._size // 2 // (4 * len(vector) + _FREE_ROW))
            self._vectors = np.zeros((rows, len(vector)), np.float32)
            self._free = list(range(rows - 1, -1, -1))
            self._fixed = self._vectors.nbytes + rows * _FREE_ROW
        cost = ENTRY + len(answer)
        if self._fixed + TABLES * max(self._most, 1) + cost > self._size:
            return
        for row, _ in self._nearest(key, vector, _SAME):
            if same_marks(self._kept[row].marks, marks):
                self._drop(row)
        same = self._rows.get(key, [])
        if len(same) >= MOST_OF_KEY:
            self.evicted += 1
            self._drop(same[0])
        while self._kept and (not self._free or self._with_one_more() + cost > self._size):
            self.evicted += 1
            self._drop(next(iter(self._kept)))
        row = self._free.pop()
        self._vectors[row] = vector
        self._kept[row] = _Kept(key, marks, row, answer, maker, now + self._seconds)
        self._rows.setdefault(key, []).append(row)
        self._answers += cost
        self._most = max(self._most, len(self._kept))

    def _with_one_more(self) -> int:
        """Bytes that are taken with the tables for one more answer."""
        return self._fixed + self._answers + TABLES * max(self._most, len(self._kept) + 1)

    def _nearest(self, key: bytes, vector: Vector, least: float) -> list[tuple[int, float]]:
        """Rows of a key with a cosine of at least so much, and it; the nearest first."""
        rows = self._rows.get(key)
        if not rows or self._vectors is None:
            return []
        found: list[tuple[int, float]] = []
        for begin in range(0, len(rows), _SLICE):
            part = rows[begin : begin + _SLICE]
            cosines = self._vectors[part] @ vector
            found += [(part[i], float(cosines[i])) for i in np.flatnonzero(cosines >= least)]
        return sorted(found, key=lambda each: -each[1])

    def _drop(self, row: int) -> None:
        kept = self._kept.pop(row)
        rows = self._rows[kept.key]
        rows.remove(row)
        if not rows:
            del self._rows[kept.key]
        self._free.append(row)
        self._answers -= ENTRY + len(kept.answer)
