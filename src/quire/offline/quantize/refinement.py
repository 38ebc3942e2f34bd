"""Rounded weights made better, one value after another: coordinate descent on the error tr(ΔW·H·ΔWᵀ) of the outputs.

With G = ΔW·H, the error of an output is least in code j, all others kept, at the value ŵ_j + G_j / H_jj, which is
rounded to the grid; and in the scale s of a group with the whole numbers q, at s + (q · G) / (qᵀ·H·q), H that of the
group's columns. No step makes the error larger. QuantEase (Behdin et al., arXiv 2309.01885) does so for codes.
The scales of symmetric grids stay: there SmolLM2 loses more with them moved (docs/decisions/0172).

Columns are taken in storage order, whatever order they were rounded in: a group's columns are neighbours there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import SMALLEST_SCALE, Grid, GridKind
from quire.records import dataclass

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

SWEEPS = 3  # more gain little
_BLOCK = 32  # columns whose changes reach the next ones one by one; those of earlier blocks are one product


def refined(
    weight: F32, grid: Grid, codes: U8, gram: GramMatrix, *, added: float, sweeps: int = SWEEPS
) -> tuple[Grid, U8]:
    """Scales and codes of less error, from those that were found for a weight [rows, cols].

    Zeros stay, and scales of symmetric grids. `added`, above 0, is what the diagonal of H gets (`Factor.added`). An
    output keeps what it had if without it that is better, and gets the nearest codes on its new grid where those are.
    """
    state = _State.of(weight, grid, codes, gram.h, np.float32(added))
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
    """A weight by columns: scales and zeros [groups, rows]; whole numbers and ΔW [cols, rows].

    `added` is what H's diagonal gets.
    """

    h: F32
    added: np.float32
    scales: F32
    zeros: F32
    kind: GridKind
    numbers: F32
    delta: F32

    @classmethod
    def of(cls, weight: F32, grid: Grid, codes: U8, h: F32, added: np.float32) -> _State:
        scales, zeros = (np.ascontiguousarray(part.T, np.float32) for part in (grid.scales, grid.zeros))
        size = len(h) // len(scales)
        numbers = np.ascontiguousarray(codes.T, np.float32)
        numbers -= np.repeat(zeros, size, axis=0)
        delta = np.ascontiguousarray(weight.T) - numbers * np.repeat(scales, size, axis=0)
        return cls(h, added, scales, zeros, grid.kind, numbers, delta)

    def improve(self, group: int) -> None:
        """The scale of a group, and then each of its codes."""
        size = len(self.h) // len(self.scales)
        part = slice(group * size, (group + 1) * size)
        slope = self.h[part] @ self.delta
        slope += self.added * self.delta[part]
        if not self.kind.symmetric:
            self._improve_scale(group, part, slope)
        for begin in range(0, size, _BLOCK):
            end = min(begin + _BLOCK, size)
            first = part.start + begin
            before = self.delta[first : part.start + end].copy()
            self._improve_codes(group, first, slope[begin:end])
            before -= self.delta[first : part.start + end]
            slope[end:] -= self.h[part.start + end : part.stop, first : part.start + end] @ before

    def _improve_scale(self, group: int, part: slice, slope: F32) -> None:
        numbers = self.numbers[part]
        turned = self.h[part, part] @ numbers
        turned += self.added * numbers
        wanted, curve = (np.einsum("jr,jr->r", numbers, other) for other in (slope, turned))
        old = self.scales[group]
        new = old + wanted / np.where(curve > 0, curve, np.float32(np.inf))
        step = np.clip(new, SMALLEST_SCALE, 65504).astype(np.float16).astype(np.float32) - old
        step[step * step * curve >= 2 * step * wanted] = 0  # rounded to a float16 it may be worse
        self.scales[group] += step
        self.delta[part] -= step * numbers
        slope -= step * turned

    def _improve_codes(self, group: int, first: int, slope: F32) -> None:
        """The codes of columns from `first` on, as many as `slope` [columns, rows] has; it is used up."""
        scale, low = self.scales[group], -self.zeros[group]
        high = low + np.float32(self.kind.top)
        for at in range(len(slope)):
            j = first + at
            wanted = slope[at] / (self.h[j, j] + self.added)
            wanted /= scale
            wanted += self.numbers[j]
            np.rint(wanted, out=wanted)
            np.clip(wanted, low, high, out=wanted)
            change = wanted - self.numbers[j]
            change *= scale
            self.numbers[j] = wanted
            self.delta[j] -= change
            slope[at + 1 :] -= self.h[first + at + 1 : first + len(slope), j, None] * change

    def result(self, grid: Grid) -> tuple[Grid, U8]:
        size = len(self.h) // len(self.scales)
        codes = (self.numbers + np.repeat(self.zeros, size, axis=0)).T
        scales = np.ascontiguousarray(self.scales.T).astype(np.float16)
        return Grid(grid.kind, scales, grid.zeros), np.ascontiguousarray(codes).astype(np.uint8)
