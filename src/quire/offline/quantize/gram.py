"""What is kept of the inputs of a linear over the calibration text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


_ROWS = 2048  # that are multiplied at a time: a short product spends its time on the sum


class CrossSum:
    """C = Σ lᵀx over rows l [out] and x [cols] that belong together."""

    def __init__(self, out: int, cols: int) -> None:
        self._sum: F32 = np.zeros((out, cols), np.float32)
        self._waiting: list[tuple[F32, F32]] = []

    @staticmethod
    def nbytes(out: int, cols: int) -> int:
        """Bytes of one, with rows that wait and a product."""
        return 8 * out * cols + 8 * _ROWS * (out + cols)

    @property
    def sum(self) -> F32:
        """C [out, cols]; not while another thread reads it first."""
        if self._waiting:
            left, right = (np.concatenate(rows) for rows in zip(*self._waiting, strict=True))
            self._waiting.clear()
            self._sum += left.T @ right
        return self._sum

    def add(self, left: F32, right: F32) -> None:
        """Add rows [n, out] and [n, cols]."""
        self._waiting.append((left, right))
        if sum(len(rows) for rows, _ in self._waiting) >= _ROWS:
            _ = self.sum


class GramMatrix:
    """H = Σ xᵀx over rows x, and per column the greatest magnitude and the sum of magnitudes.

    The error that a change ΔW of a weight [out, in] makes in its outputs over all rows is tr(ΔW·H·ΔWᵀ).
    """

    def __init__(self, cols: int, h: F32 | None = None, *, sizes: bool = True) -> None:
        """`sizes`: whether magnitudes are kept beside H."""
        self.rows, self._sizes = 0, sizes
        self._h: F32 = np.zeros((cols, cols), np.float32) if h is None else h
        self._waiting: list[F32] = []
        self.top: F32 = np.zeros(cols, np.float32)
        self.magnitude: F64 = np.zeros(cols, np.float64)

    @staticmethod
    def nbytes(cols: int) -> int:
        """Bytes of one, with rows that wait."""
        return 8 * cols * cols + 12 * cols

    @property
    def h(self) -> F32:
        """H; not while another thread reads it first."""
        if self._waiting:
            rows = np.concatenate(self._waiting)
            self._waiting.clear()
            self._h += rows.T @ rows  # numpy computes half of a product with the own transpose
        return self._h

    def add(self, x: F32) -> None:
        """Add rows [n, cols]."""
        if not len(x):
            return
        self.rows += len(x)
        self._waiting.append(x)
        if self._sizes:
            sizes = np.abs(x)
            np.maximum(self.top, sizes.max(0), out=self.top)
            self.magnitude += sizes.sum(0, dtype=np.float64)
        if sum(map(len, self._waiting)) >= min(_ROWS, self._h.shape[0]):
            _ = self.h

    @property
    def importance(self) -> F32:
        """The mean square of each column, the importance matrix of llama.cpp; ones if no rows were seen."""
        if not self.rows:
            return np.ones(len(self.top), np.float32)
        found: F32 = np.maximum(np.diagonal(self.h) / np.float32(self.rows), np.float32(0))
        return found

    def error(self, delta: F32) -> F32:
        """The error of each output [out] of a change [out, in] of the weight; without rows, the sum of squares."""
        if not self.rows:
            found: F32 = np.square(delta).sum(1, dtype=np.float32)
            return found
        found = np.einsum("ij,ij->i", delta @ self.h, delta)
        return np.maximum(found, np.float32(0))
