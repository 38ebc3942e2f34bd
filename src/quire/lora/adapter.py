"""An adapter as numbers: what it adds to the matrices of a base model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.executor.stored_adapters import StoredPair
from quire.quant.floats import FloatsOrBits
from quire.records import dataclass

F32 = npt.NDArray[np.float32]


class MatrixRows(Protocol):
    """A matrix in float32 of which ranges of rows are taken: an array, or what a file is read for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> F32: ...


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """W + scale · b @ a in place of a stored matrix W [out, in] (LoRA, arXiv 2106.09685).

    With `magnitude`, each row of that sum is divided by its length and multiplied by its magnitude (DoRA, 2402.09353).
    With `gain`, each row of the sum is multiplied by 1 + gain: see lora.gains.
    For an embedding, `out` are its rows (the vocabulary) and `in` the width of the model.
    """

    a: FloatsOrBits  # [rank, in]
    b: FloatsOrBits  # [out, rank]
    scale: float  # alpha / rank, or alpha / sqrt(rank) for rsLoRA (2312.03732)
    magnitude: F32 | None = None  # [out], DoRA
    gain: F32 | None = None  # [out], DoRA whose lengths are known

    @property
    def rank(self) -> int:
        return len(self.a)

    def kept(self) -> LowRank:
        """The same with a copy of each matrix that lies in a mapped file."""
        a, b = (each if each.flags.writeable else each.copy() for each in (self.a, self.b))
        return replace(self, a=a, b=b)


class AdapterNumbers(Protocol):
    """An adapter that fits its base: all numbers are there, or they are read one part after the other."""

    @property
    def name(self) -> str: ...

    @property
    def modules_to_save(self) -> Mapping[str, MatrixRows]: ...

    @property
    def outline(self) -> Mapping[str, tuple[int, bool]]:
        """By module, its rank and whether it has a magnitude or gain."""

    def each(self, but: Collection[str] = ()) -> Iterable[tuple[str, LowRank]]:
        """The parts by module, once, without some. CheckpointError for numbers that are not finite."""

    def stored(self) -> tuple[int, Mapping[str, StoredPair]]:
        """An open file, and parts that lie in it as they are, by module; their numbers are those of `digest`, and
        finite if those were. (-1, {}) if there are none.
        """

    @property
    def digest(self) -> str:
        """The version. CheckpointError if what it was read from has changed meanwhile."""

    def whole(self) -> Adapter:
        """All of it, in place of `each`."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that fits its base, all numbers finite. Implements AdapterNumbers.

    `parts`: by module name of the base, without ".weight", as in ModelSpec.names; experts have one each. A fused linear
    has one part, whichever of its rows the adapter changes. `modules_to_save`: whole matrices of embedding and head, by
    module name, that replace those of the base before `parts` are added.
    """

    name: str
    digest: str  # of the files
    rank: int  # the greatest of its parts
    parts: Mapping[str, LowRank]
    modules_to_save: Mapping[str, MatrixRows]

    @property
    def outline(self) -> Mapping[str, tuple[int, bool]]:
        return {
            module: (part.rank, part.gain is not None or part.magnitude is not None)
            for module, part in self.parts.items()
        }

    def each(self, but: Collection[str] = ()) -> Iterable[tuple[str, LowRank]]:
        return ((module, part) for module, part in self.parts.items() if module not in but)

    def stored(self) -> tuple[int, Mapping[str, StoredPair]]:
        return -1, {}

    def whole(self) -> Adapter:
        return self

    def kept(self) -> Adapter:
        """The same with copies of the pairs that lie in a mapped file, which others may write to."""
        return replace(self, parts={module: part.kept() for module, part in self.parts.items()})
