"""The slots for adapters of a native executor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from quire import _native
from quire.executor.base import F32, AdapterSlots, check_adapter, check_own_rows
from quire.executor.stored_adapters import StoredPair
from quire.program.program import Program
from quire.program.tensors import Adapted, AdapterShape
from quire.quant.floats import FloatsOrBits

_NUMBERS = {np.dtype(np.float32): _native.DType.f32, np.dtype(np.uint16): _native.DType.bf16}
_STORED = {"F32": _native.DType.f32, "BF16": _native.DType.bf16}


class NativeAdapters:
    """The part of a native executor that takes adapters. Implements AdapterSlots and TakesStored."""

    program: Program
    _core: _native.Executor

    @cached_property
    def _linears(self) -> dict[str, Adapted]:
        return {each.name: each for each in self.program.adapted}

    @property
    def adapter_slots(self) -> Sequence[AdapterSlots]:
        """Its own; see Runnable.adapter_slots."""
        return (self,)

    def settle_adapters(self) -> None:
        """Nothing: what was put is there; see AdapterSlots."""

    def open_adapter(self, slot: int, shape: AdapterShape) -> None:
        """Give a slot the pages for an adapter; see Runnable.open_adapter."""
        self._core.open_adapter(slot, shape.parts, shape.own)

    def put_adapter(
        self,
        slot: int,
        name: str,
        part: int,
        a: FloatsOrBits,
        b: FloatsOrBits,
        gain: F32 | None = None,
        scale: float = 1.0,
    ) -> None:
        """Fill a part of a slot; see Runnable.put_adapter."""
        check_adapter(self._linears, name, part, a, b, gain)
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        gains = None if gain is None else np.ascontiguousarray(gain, np.float32)
        at = 0 if gains is None else gains.ctypes.data
        types = [_NUMBERS[each.dtype] for each in (a, b)]
        self._core.put_adapter(
            slot, name, part, a.ctypes.data, types[0], b.ctypes.data, types[1], scale, at, len(a)
        )

    def put_stored(self, slot: int, file: int, pairs: Sequence[tuple[str, int, StoredPair]]) -> None:
        """Fill parts of a slot from a file; see TakesStored."""
        found = [
            _native.StoredPair(name, part, rank, a.begin, _STORED[a.dtype], b.begin, _STORED[b.dtype], scale)
            for name, part, (a, b, rank, scale) in pairs
        ]
        self._core.put_stored(slot, file, found)

    def put_own_rows(self, slot: int, name: str, first: int, rows: F32) -> None:
        """Fill rows of a parameter in a slot; see Runnable.put_own_rows."""
        check_own_rows(self.program, name, first, rows)
        rows = np.ascontiguousarray(rows, np.float32)
        self._core.put_own_rows(slot, name, first, rows.ctypes.data, *rows.shape)

    def clear_adapter(self, slot: int) -> None:
        """Empty a slot; see Runnable.clear_adapter."""
        self._core.clear_adapter(slot)
