"""Which weights of a linear become zero, and what the others become.

    magnitude   the smallest weights of a linear
    wanda       of each output, the weights of smallest |w| · |x|, x over the calibration text (arXiv 2306.11695)
    sparsegpt   in blocks of columns, the weights whose removal costs least; later columns make up for the error of
                those before (arXiv 2301.00774), as in GPTQ

With a pattern N:M, N of every M neighbouring input features of an output stay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.offline.quantize.error_feedback import Factor
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.recipe import Pattern

F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

_BLOCK = 128  # columns whose mask SparseGPT chooses at a time, a multiple of every M of a pattern


def smallest(scores: F32, sparsity: float, pattern: Pattern | None) -> Mask:
    """True at the least of the scores [rows, cols]: a share `sparsity` of all, or M - N of every M in a row."""
    if pattern is not None:
        kept, size = pattern
        groups = scores.reshape(len(scores), -1, size)
        least = np.argsort(groups, axis=-1, kind="stable")[..., : size - kept]
        in_groups = np.zeros(groups.shape, np.bool_)
        np.put_along_axis(in_groups, least, True, -1)
        return in_groups.reshape(scores.shape)
    count = round(sparsity * scores.size)
    mask = np.zeros(scores.size, np.bool_)
    if count:
        mask[np.argpartition(scores.reshape(-1), count - 1)[:count]] = True
    return mask.reshape(scores.shape)


def magnitude(weight: F32, sparsity: float, pattern: Pattern | None) -> F32:
    """The weight [rows, cols] without its smallest elements."""
    return np.where(smallest(np.abs(weight), sparsity, pattern), np.float32(0), weight)


def wanda(weight: F32, gram: GramMatrix, sparsity: float, pattern: Pattern | None) -> F32:
    """The weight without, of each output, the elements that add least."""
    scores = np.abs(weight) * np.sqrt(gram.importance)
    if pattern is not None:
        return np.where(smallest(scores, sparsity, pattern), np.float32(0), weight)
    count = round(sparsity * weight.shape[1])
    found = weight.copy()
    np.put_along_axis(found, np.argsort(scores, axis=1, kind="stable")[:, :count], np.float32(0), 1)
    return found


def sparsegpt(weight: F32, factor: Factor, sparsity: float, pattern: Pattern | None) -> F32:
    """The weight with a share of zeros, the others changed so that its outputs change least.

    `factor` has the columns in storage order. With H = R·Rᵀ, column j is best at w_j + Σ_{i < j} Δ_i R_ij / R_jj, and
    its removal costs the square of that times R_jj²: the paper's w² / [H⁻¹]_jj of the columns from j on.
    """
    r, w = factor.r, np.ascontiguousarray(weight.T)
    cols, rows = w.shape
    delta, found = np.empty((cols, rows), np.float32), np.empty((cols, rows), np.float32)
    for begin in range(0, cols, _BLOCK):
        end = min(begin + _BLOCK, cols)
        sums = np.ascontiguousarray(r[:begin, begin:end].T) @ delta[:begin]
        diagonal = np.diagonal(r)[begin:end, None]
        costs = np.square((w[begin:end] + sums / diagonal) * diagonal)
        gone = smallest(np.ascontiguousarray(costs.T), sparsity, pattern).T
        for j in range(begin, end):
            at = j - begin
            best = w[j] + sums[at] / r[j, j]
            found[j] = np.where(gone[at], np.float32(0), best)
            np.subtract(w[j], found[j], out=delta[j])
            sums[at + 1 :] += r[j, j + 1 : end, None] * delta[j]
    return np.ascontiguousarray(found.T)
