"""Adapters of low rank, and parameters that they replace, in slots."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.executor.base import F32, Limits, check_adapter, check_own_rows
from quire.executor.torch.weights import TORCH_DTYPES, rounded
from quire.program.memory import adapter_layout, param_bytes
from quire.program.program import Program
from quire.program.tensors import Adapted, AdapterShape
from quire.quant.floats import FloatsOrBits, floats
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Matrices:
    """A [rank, cols] and B [rows, rank] of a part: bfloat16 numbers, held as float32; and its gain [rows]."""

    a: Tensor
    b: Tensor
    gain: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(int(each.nbytes) for each in (self.a, self.b, self.gain) if each is not None)


class AdapterMatrices:
    """What adapters have in each slot."""

    def __init__(self, program: Program, limits: Limits, device: torch.device) -> None:
        self._program, self._slots, self._device = program, limits.max_loras, device
        self._linears = {each.name: each for each in program.adapted}
        self._layout, self._free = adapter_layout(program), limits.adapter_pages
        self._opened: dict[int, tuple[AdapterShape, int]] = {}  # by slot, with its pages
        self._held: dict[tuple[int, str, int], Matrices] = {}
        self._own: dict[tuple[int, str], Tensor] = {}

    def open(self, slot: int, shape: AdapterShape) -> None:
        """Have a slot hold what an adapter of this shape has; see Runnable.open_adapter."""
        self.clear(slot)
        pages = self._layout.pages(shape.parts, shape.own)
        if pages > self._free:
            raise RuntimeError(f"the adapter takes {pages} pages of the pool, of which {self._free} are free")
        self._free -= pages
        self._opened[slot] = shape, pages

    def put(
        self, slot: int, name: str, part: int, a: FloatsOrBits, b: FloatsOrBits, gain: F32 | None
    ) -> None:
        """Fill a part of a slot; see Runnable.put_adapter."""
        check_adapter(self._linears, name, part, a, b, gain)
        self._check(slot)
        if self._shape(slot).parts.get(name, {part: None})[part] != (len(a), gain is not None):
            raise ValueError(f"{name}: not the rank that the slot was opened for, or other gains")
        gains = None if gain is None else torch.from_numpy(gain.copy()).to(self._device)
        self._held[slot, name, part] = Matrices(self._rounded(a), self._rounded(b), gains)

    def put_rows(self, slot: int, name: str, first: int, rows: F32) -> None:
        """Fill rows of a parameter of a slot; see Runnable.put_own_rows."""
        param = check_own_rows(self._program, name, first, rows).param
        self._check(slot)
        if name not in self._shape(slot).own:
            raise ValueError(f"{name}: rows that a slot does not have")
        if (slot, name) not in self._own:
            shape = param.rows, param.cols
            self._own[slot, name] = torch.zeros(shape, dtype=TORCH_DTYPES[param.dtype], device=self._device)
        source = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
        self._own[slot, name][first : first + len(rows)] = rounded(param, source)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._check(slot)
        for key in [key for key in self._held if key[0] == slot]:
            del self._held[key]
        for own in [own for own in self._own if own[0] == slot]:
            del self._own[own]
        self._free += self._opened.pop(slot, (None, 0))[1]

    def linear(self, name: str) -> Adapted:
        """The linear of that name."""
        return self._linears[name]

    def get(self, slot: int, name: str, part: int) -> Matrices | None:
        """A and B of a part; None if the adapter of the slot leaves it alone."""
        return self._held.get((slot, name, part))

    def own(self, slot: int, name: str | None) -> Tensor | None:
        """The parameter of that name in a slot; None where the adapter has none."""
        return None if name is None else self._own.get((slot, name))

    @property
    def nbytes(self) -> int:
        held = sum(matrices.nbytes for matrices in self._held.values())
        return held + sum(int(own.nbytes) for own in self._own.values())

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot: {slot} is not in [0, {self._slots - 1}]")

    def _shape(self, slot: int) -> AdapterShape:
        return self._opened[slot][0] if slot in self._opened else AdapterShape({}, [])

    def _rounded(self, matrix: FloatsOrBits) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(floats(matrix)))
        return found.to(torch.bfloat16).float().to(self._device)


def planned_bytes(program: Program, limits: Limits) -> int:
    """The most bytes of all slots: bfloat16 is held as float32, and parameters as torch has them."""
    if not limits.max_loras:
        return 0
    widest = max(
        (TORCH_DTYPES[own.param.dtype].itemsize * own.param.rows * own.param.cols / param_bytes(own.param)
         for own in program.owned), default=0,
    )  # fmt: skip
    return math.ceil(max(2, widest) * limits.adapter_pages * adapter_layout(program).page_bytes)
