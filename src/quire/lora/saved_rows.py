"""Whole matrices of an adapter's file, which are read a block at a time: they may be larger than all else together."""

from __future__ import annotations

import numpy as np

from quire.loader.safetensors import SafetensorsFile
from quire.lora.adapter import F32
from quire.quant.floats import to_float32


class SavedRows:
    """A matrix of an open file, which stays mapped as long as this is there. Implements MatrixRows."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self._file, self._info = file, file.info(name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._info.shape

    def __getitem__(self, rows: slice, /) -> F32:
        first, stop, _ = rows.indices(self._info.shape[0])
        data = np.array(self._file.read(self._info.name, first, stop))  # aligned
        self._file.release(self._info.name)
        found: F32 = np.ascontiguousarray(to_float32(data, self._info.dtype))
        return found
