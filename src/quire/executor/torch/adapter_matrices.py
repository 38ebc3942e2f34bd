"""Adapters of low rank, in slots."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.executor.base import F32, Limits, check_adapter
from quire.program.program import Program
from quire.program.tensors import Adapted

Matrices = tuple[Tensor, Tensor]


class AdapterMatrices:
    """A [rank, cols] and B [rows, rank] of each part of a linear in a slot: bfloat16 numbers, held as float32."""

    def __init__(self, program: Program, limits: Limits, device: torch.device) -> None:
        self._program, self._slots, self._device = program, limits.max_loras, device
        self._linears = {each.name: each for each in program.adapted}
        self._held: dict[tuple[int, str, int], Matrices] = {}

    def put(self, slot: int, name: str, part: int, a: F32, b: F32) -> None:
        """Fill a part of a slot; see Runnable.put_adapter."""
        check_adapter(self._program, name, part, a, b)
        self._check(slot)
        self._held[slot, name, part] = self._rounded(a), self._rounded(b)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._check(slot)
        for key in [key for key in self._held if key[0] == slot]:
            del self._held[key]

    def linear(self, name: str) -> Adapted:
        """The linear of that name."""
        return self._linears[name]

    def get(self, slot: int, name: str, part: int) -> Matrices | None:
        """A and B of a part; None if the adapter of the slot leaves it alone."""
        return self._held.get((slot, name, part))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self._held.values())

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self._slots:
            raise ValueError(f"slot: {slot} is not in [0, {self._slots - 1}]")

    def _rounded(self, matrix: F32) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(matrix, np.float32))
        return found.to(torch.bfloat16).float().to(self._device)


def planned_bytes(program: Program, limits: Limits) -> int:
    """The most bytes of all slots."""
    each = (4 * adapted.rank * (adapted.cols + rows) for adapted in program.adapted for rows in adapted.rows)
    return limits.max_loras * sum(each)
