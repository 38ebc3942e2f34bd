"""Grids of whole numbers in groups, and rounding to them: what GPTQ, AWQ and rounding to nearest have in common.

    value = scale · (code - zero),    0 <= code < 2^bits, one scale and zero per group of input features of an output

The scale is a float16, the zero a whole number; a symmetric grid has 2^(bits - 1) for all groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.records import dataclass

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

# Shares of the widest range that are tried; fewer bits gain by cutting off more.
_SHARES = {8: (1.0,), 4: (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7), 3: (1.0, 0.93, 0.86, 0.79, 0.72, 0.65, 0.58),
           2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.52, 0.45, 0.38)}  # fmt: skip
SMALLEST_SCALE = np.float32(2.0**-24)  # the least positive float16


@dataclass(frozen=True, slots=True)
class GridKind:
    """Bits of a code, input features of a group (0: all of an output's), and whether all zeros are the middle."""

    bits: int
    group: int
    symmetric: bool

    def size(self, cols: int) -> int:
        """Input features of a group of a weight with so many."""
        return self.group or cols

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales float16 and zeros uint8, both [rows, groups], of a weight."""

    kind: GridKind
    scales: npt.NDArray[np.float16]
    zeros: U8

    def codes(self, weight: F32) -> U8:
        """The nearest codes of a weight [rows, cols]."""
        rows, cols = weight.shape
        groups = weight.reshape(rows, self.scales.shape[1], -1)
        scales = self.scales.astype(np.float32)[..., None]
        steps = np.rint(groups / scales)
        steps += self.zeros[..., None]
        found: U8 = np.clip(steps, 0, self.kind.top).astype(np.uint8)
        return found.reshape(rows, cols)

    def values(self, codes: U8) -> F32:
        """float32 [rows, cols]."""
        rows, cols = codes.shape
        groups = codes.reshape(rows, self.scales.shape[1], -1).astype(np.int16) - self.zeros[..., None]
        found: F32 = groups.astype(np.float32) * self.scales.astype(np.float32)[..., None]
        return found.reshape(rows, cols)

    def columns(self, order: Sequence[int] | npt.NDArray[np.int64]) -> tuple[F32, F32]:
        """Scale and zero of every column in this order, each [cols, rows]."""
        size = self.kind.size(len(order))
        of = np.asarray(order) // size
        return (
            np.ascontiguousarray(self.scales.T.astype(np.float32)[of]),
            np.ascontiguousarray(self.zeros.T.astype(np.float32)[of]),
        )


def find_grid(
    weight: F32, kind: GridKind, h: F32 | None = None, shares: Sequence[float] | None = None
) -> Grid:
    """The grid of least squared error; with the Gram matrix `h` of the inputs, of least error in each group's outputs.

    Of each group the range is cut to some shares of the widest. `shares` are these; one of them fixes the range.
    """
    rows, cols = weight.shape
    size = kind.size(cols)
    scales = np.empty((rows, cols // size), np.float16)
    zeros = np.empty((rows, cols // size), np.uint8)
    blocks = None if h is None else _blocks(h, size)
    step = max(2**18 // cols, 1)
    for at in range(0, rows, step):
        part = weight[at : at + step].reshape(-1, cols // size, size)
        found = _search(part, kind, blocks, tuple(shares or _SHARES[kind.bits]))
        scales[at : at + step], zeros[at : at + step] = found
    return Grid(kind, scales, zeros)


def _blocks(h: F32, size: int) -> F32:
    """The blocks of a matrix on its diagonal: [groups, size, size]."""
    groups = len(h) // size
    at = np.arange(groups)
    return np.ascontiguousarray(h.reshape(groups, size, groups, size)[at, :, at])


def _search(
    w: F32, kind: GridKind, blocks: F32 | None, shares: tuple[float, ...]
) -> tuple[npt.NDArray[np.float16], U8]:
    """Scales and zeros of groups [rows, groups, size]."""
    lowest, highest = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    best = np.full(lowest.shape, np.inf, np.float32)
    scales, zeros = np.zeros(lowest.shape, np.float16), np.zeros(lowest.shape, np.uint8)
    for share in shares:
        scale, zero = _step(lowest, highest, kind, np.float32(share))
        wide = scale.astype(np.float32)
        if len(shares) == 1:
            return scale, zero
        steps = w / wide[..., None]
        np.rint(steps, out=steps)
        low, high = -zero.astype(np.float32), np.float32(kind.top) - zero
        np.clip(steps, low[..., None], high[..., None], out=steps)
        steps *= wide[..., None]
        np.subtract(w, steps, out=steps)
        if blocks is None:
            error = np.einsum("rgs,rgs->rg", steps, steps)
        else:
            across = np.ascontiguousarray(steps.swapaxes(0, 1))
            error = np.einsum("grs,grs->rg", across @ blocks, across)
        better = error < best
        best[better], scales[better], zeros[better] = error[better], scale[better], zero[better]
    unfit = scales == 0  # the importance is zero, or the weights are not finite
    if unfit.any():
        scale, zero = _step(lowest, highest, kind, np.float32(1))
        scales[unfit], zeros[unfit] = scale[unfit], zero[unfit]
    return scales, zeros


def _step(lowest: F32, highest: F32, kind: GridKind, share: np.float32) -> tuple[npt.NDArray[np.float16], U8]:
    """The step and zero of ranges cut to a share."""
    if kind.symmetric:
        # Between the two readings of a symmetric range: the codes reach one step further down than up.
        wide = np.maximum(-lowest, highest * (kind.middle / (kind.middle - 0.5 if kind.bits < 8 else 127.0)))
        scale = wide * (share / kind.middle)
    else:
        scale = (highest - lowest) * (share / kind.top)
    stored = np.clip(scale, SMALLEST_SCALE, 65504).astype(np.float16)
    if kind.symmetric:
        return stored, np.full(stored.shape, kind.middle, np.uint8)
    zero = np.clip(np.rint(-lowest * share / stored.astype(np.float32)), 0, kind.top)
    return stored, zero.astype(np.uint8)
