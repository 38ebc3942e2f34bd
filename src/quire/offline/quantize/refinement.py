"""Rounded weights made better, one value after another: coordinate descent on the error tr(ΔW·H·ΔWᵀ) of the outputs.

With G = ΔW·H, the error of an output is least in code j, all others kept, at the value ŵ_j + G_j / H_jj, which is
rounded to the grid; and in the scale s of a group with the whole numbers q, at s + (q · G) / (qᵀ·H·q), H that of the
group's columns. No step makes the error larger. QuantEase (Behdin et al., arXiv 2309.01885) does so for codes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import SMALLEST_SCALE, Grid
from quire.records import dataclass

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SWEEPS = 2  # more gain little


def refined(
    weight: F32, grid: Grid, codes: U8, gram: GramMatrix, *, damping: float, sweeps: int = SWEEPS
) -> tuple[Grid, U8]:
    """Scales and codes of less error, from those that were found for a weight [rows, cols]; zeros stay.

    `damping` times the mean of its diagonal is added to H's. An output keeps what it had if without damping that is
    better, and gets the nearest codes on its new grid where those are.
    """
    added = np.float32(damping * float(np.trace(gram.h)) / len(gram.h))
    state = _State.of(weight, grid, codes, gram.h, added)
    for _ in range(sweeps):
        for group in range(len(state.scales)):
            state.improve(group)
    made, found = state.result(grid)
    error, near = gram.error(weight - made.values(found)), made.codes(weight)
    nearest = gram.error(weight - made.values(near))
    better = nearest < error
    found[better] = near[better]
    worse = np.minimum(error, nearest) > gram.error(weight - grid.values(codes))
    found[worse], made.scales[worse] = codes[worse], grid.scales[worse]
    return made, found


@dataclass(frozen=True, slots=True)
class _State:
    """A weight by columns: scales and zeros [groups, rows]; whole numbers, ΔW and G [cols, rows].

    `added` is what H's diagonal gets.
    """

    h: F32
    added: np.float32
    scales: F32
    zeros: F32
    top: int
    numbers: F32
    delta: F32
    slope: F32

    @classmethod
    def of(cls, weight: F32, grid: Grid, codes: U8, h: F32, added: np.float32) -> _State:
        scales, zeros = (np.ascontiguousarray(part.T, np.float32) for part in (grid.scales, grid.zeros))
        size = len(h) // len(scales)
        numbers = np.ascontiguousarray(codes.T, np.float32)
        numbers -= np.repeat(zeros, size, axis=0)
        delta = np.ascontiguousarray(weight.T) - numbers * np.repeat(scales, size, axis=0)
        slope = h @ delta
        slope += added * delta
        return cls(h, added, scales, zeros, grid.kind.top, numbers, delta, slope)

    def improve(self, group: int) -> None:
        """The scale of a group and then each of its codes."""
        size = len(self.h) // len(self.scales)
        part = slice(group * size, (group + 1) * size)
        h = self.h[part, part] + self.added * np.eye(size, dtype=np.float32)
        numbers, delta = self.numbers[part], self.delta[part]
        before, slope = delta.copy(), self.slope[part].copy()
        self._improve_scale(group, h, numbers, delta, slope)
        scale, low = self.scales[group], -self.zeros[group]
        high = low + np.float32(self.top)
        for j in range(size):
            wanted = slope[j] / (h[j, j] * scale)
            wanted += numbers[j]
            np.rint(wanted, out=wanted)
            np.clip(wanted, low, high, out=wanted)
            change = (wanted - numbers[j]) * scale
            numbers[j] = wanted
            delta[j] -= change
            slope -= h[j, :, None] * change
        before -= delta
        self.slope[...] -= self.h[:, part] @ before
        self.slope[part] -= self.added * before

    def _improve_scale(self, group: int, h: F32, numbers: F32, delta: F32, slope: F32) -> None:
        turned = h @ numbers
        wanted, curve = (np.einsum("jr,jr->r", numbers, part) for part in (slope, turned))
        step = wanted / np.where(curve > 0, curve, np.float32(np.inf))
        old = self.scales[group]
        new = np.clip(old + step, SMALLEST_SCALE, 65504).astype(np.float16).astype(np.float32)
        step = new - old
        step[step * step * curve >= 2 * step * wanted] = 0  # rounded to a float16 it may be worse
        self.scales[group] += step
        delta -= step * numbers
        slope -= step * turned

    def result(self, grid: Grid) -> tuple[Grid, U8]:
        size = len(self.h) // len(self.scales)
        codes = (self.numbers + np.repeat(self.zeros, size, axis=0)).T
        scales = np.ascontiguousarray(self.scales.T).astype(np.float16)
        return Grid(grid.kind, scales, grid.zeros), np.ascontiguousarray(codes).astype(np.uint8)
