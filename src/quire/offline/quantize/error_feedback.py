"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after another, and those to come make up for it.

With H = R·Rᵀ, R upper triangular, the error tr(ΔW·H·ΔWᵀ) is the squared norm of ΔW·R, whose column j is

    Σ_{i < j} Δ_i R_ij + Δ_j R_jj,

so that the best value of column j after those before it is w_j + Σ_{i < j} Δ_i R_ij / R_jj, which is rounded. This is
the paper's update by the inverse of H, without the inverse (Chen et al., arXiv 2507.18553).

With `desc_act` the columns of largest diagonal come first. Scales and zeros are those of the columns' groups in storage
order, found before ("static groups"), so that the order leaves no trace in the checkpoint.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import Grid
from quire.records import dataclass

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_BLOCK = 32  # columns whose sums are made one by one; those of earlier blocks are one product


@dataclass(frozen=True, slots=True)
class Factor:
    """R, upper triangular, with R·Rᵀ = H in an order of columns, `added` on the diagonal of H."""

    r: F32
    order: npt.NDArray[np.int64]
    added: float

    @classmethod
    def of(cls, gram: GramMatrix, *, damping: float = 0.01, desc_act: bool = True) -> Factor:
        """That of a Gram matrix. `damping` times the mean of its diagonal is added to the diagonal."""
        cols = len(gram.h)
        order = np.argsort(-np.diagonal(gram.h), kind="stable") if desc_act else np.arange(cols)
        backwards = order[::-1]
        turned = gram.h[np.ix_(backwards, backwards)].astype(np.float64)
        mean, places, added = float(np.trace(turned)) / cols, np.arange(cols), 0.0
        while True:
            more = damping * mean or 1.0
            turned[places, places] += more
            added += more
            try:
                r = np.ascontiguousarray(np.linalg.cholesky(turned)[::-1, ::-1], np.float32)
                return cls(r, order, added)
            except np.linalg.LinAlgError:  # fewer rows than columns were seen, in float32 sums
                damping *= 10


def gptq_codes(weight: F32, grid: Grid, gram: GramMatrix, factor: Factor) -> U8:
    """Codes of a weight [rows, cols] on the grid, for inputs of that Gram matrix.

    An output for which rounding to nearest has the smaller error keeps that: the error of no output is above it.
    """
    nearest = grid.codes(weight)
    found = np.empty((weight.shape[1], len(weight)), np.uint8)
    found[factor.order] = _feed_back(
        np.ascontiguousarray(weight.T[factor.order]), factor.r, grid, factor.order
    )
    codes = np.ascontiguousarray(found.T)
    worse = gram.error(weight - grid.values(codes)) > gram.error(weight - grid.values(nearest))
    codes[worse] = nearest[worse]
    return codes


def _feed_back(weight: F32, factor: F32, grid: Grid, order: npt.NDArray[np.int64]) -> U8:
    """Codes [cols, rows] of a weight [cols, rows], both in this order."""
    cols, rows = weight.shape
    scales, zeros = grid.columns(order)
    top = np.float32(grid.kind.top)
    codes, delta = np.empty((cols, rows), np.uint8), np.empty((cols, rows), np.float32)
    for begin in range(0, cols, _BLOCK):
        end = min(begin + _BLOCK, cols)
        sums = np.ascontiguousarray(factor[:begin, begin:end].T) @ delta[:begin]
        for j in range(begin, end):
            at = j - begin
            wanted = sums[at]
            wanted /= factor[j, j]
            wanted += weight[j]
            wanted /= scales[j]
            np.rint(wanted, out=wanted)
            wanted += zeros[j]
            np.clip(wanted, 0, top, out=wanted)
            codes[j] = wanted
            wanted -= zeros[j]
            wanted *= scales[j]
            np.subtract(weight[j], wanted, out=delta[j])
            sums[at + 1 :] += factor[j, j + 1 : end, None] * delta[j]
    return codes
