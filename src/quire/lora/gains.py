"""DoRA (arXiv 2402.09353) as a gain of each output: the lengths of rows are taken once, when an adapter is read.

    W' = d · (W + s B A) = W + s B A + (d - 1) · (W + s B A)        d = m / |W + s B A|, a number for each row

so a linear of any format adds the product of two thin matrices, and d - 1 times all of it but the bias. The lengths are
those of the checkpoint's weights, as it stores them: neither rounding at load nor packing changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from quire.loader.load import LoadRules, load, widened
from quire.loader.source import Array, Source
from quire.lora import BLOCK_BYTES
from quire.lora.adapter import F32, Adapter, LowRank
from quire.lora.base_modules import BaseModules
from quire.program.tensors import Param, Part
from quire.quant import GroupCodes
from quire.quant.floats import floats
from quire.records import dataclass
from quire.types import CheckpointError

_ROWS = 32  # whose sums with a product are there at a time


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The stored weights of a base: how to open them, and the rules they were loaded by."""

    open: Callable[[], AbstractContextManager[Source]]
    rules: LoadRules

    def with_gains(self, adapter: Adapter, base: BaseModules) -> Adapter:
        """The same adapter with gains in the place of magnitudes. Raises CheckpointError for a row of length 0."""
        dora = {name: part for name, part in adapter.parts.items() if part.magnitude is not None}
        if not dora:
            return adapter
        params = [
            Param(name, "linear", (Part(f"{name}.weight", *base.shapes[name]),), "f32") for name in dora
        ]
        lengths = _Lengths(dora)
        names, rules = base.spec.names, self.rules.of_rank(base.params)
        rules = replace(rules, twins={names.head: names.embed, **rules.twins})  # a tied head
        with self.open() as source:
            load(params, source, lengths, rules=rules, block_bytes=BLOCK_BYTES)
        gained = {name: _gained(adapter.name, name, part, lengths.found[name]) for name, part in dora.items()}
        return replace(adapter, parts={**adapter.parts, **gained})


class _Lengths:
    """A Sink that takes the lengths of the rows of W + scale · b @ a by module."""

    def __init__(self, parts: dict[str, LowRank]) -> None:
        self._parts = {name: (floats(part.a), floats(part.b), part.scale) for name, part in parts.items()}
        self.found = {name: np.zeros(len(part.b), np.float32) for name, part in parts.items()}

    def put(self, param: Param, row_offset: int, data: Array, dtype: str) -> None:
        a, b, scale = self._parts[param.name]
        for first in range(0, len(data), _ROWS):
            some = data[first : first + _ROWS]
            rows = slice(row_offset + first, row_offset + first + len(some))
            changed = widened(some, dtype) + (b[rows] @ a) * np.float32(scale)
            self.found[param.name][rows] = lengths_of(changed)

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        del row_offset, given
        raise AssertionError(f"{param.name} is float32 and takes no codes")


def lengths_of(rows: F32) -> F32:
    """The length of each row [rows]."""
    found: F32 = np.sqrt(np.einsum("rc,rc->r", rows, rows))
    return found


def check_lengths(adapter: str, lengths: F32, first: int = 0) -> None:
    """Raise CheckpointError for a row of length 0, which DoRA divides by."""
    if not lengths.all():
        row = first + int(np.argmin(lengths))
        raise CheckpointError(f"{adapter}: DoRA divides row {row} by its length, which is 0")


def _gained(adapter: str, module: str, part: LowRank, lengths: F32) -> LowRank:
    check_lengths(f"{adapter}: {module}", lengths)
    assert part.magnitude is not None
    gain = part.magnitude / lengths - np.float32(1)
    if not np.isfinite(gain).all():
        raise CheckpointError(f"{adapter}: {module}: a row is too short to be divided by its length")
    return replace(part, magnitude=None, gain=gain)
