"""What is kept of the inputs of a linear over the calibration text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class GramMatrix:
    """H = Σ xᵀx over rows x, and per column the greatest magnitude and the sum of magnitudes.

    The error that a change ΔW of a weight [out, in] makes in its outputs over all rows is tr(ΔW·H·ΔWᵀ).
    """

    def __init__(self, cols: int) -> None:
        self.rows = 0
        self.h: F32 = np.zeros((cols, cols), np.float32)
        self.top: F32 = np.zeros(cols, np.float32)
        self.magnitude: F64 = np.zeros(cols, np.float64)

    @staticmethod
    def nbytes(cols: int) -> int:
        """Bytes of one, while rows are added."""
        return 8 * cols * cols + 12 * cols

    def add(self, x: F32) -> None:
        """Add rows [n, cols]."""
        if not len(x):
            return
        self.rows += len(x)
        self.h += x.T @ x  # numpy computes half of a product with the own transpose
        sizes = np.abs(x)
        np.maximum(self.top, sizes.max(0), out=self.top)
        self.magnitude += sizes.sum(0, dtype=np.float64)

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
