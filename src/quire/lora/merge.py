"""Adapters merged into the weights of their base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.loader.stacked import Stack
from quire.lora.adapter import F32, Adapter, LowRank, MatrixRows
from quire.lora.base_modules import BaseModules, linears
from quire.lora.gains import check_lengths, lengths_of
from quire.quant.floats import floats
from quire.records import dataclass
from quire.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """What one adapter makes of a module: `scale` times the difference from the base is added."""

    adapter: str
    scale: float
    low: LowRank | None
    whole: MatrixRows | None

    def rows(self, weight: F32, first: int) -> F32:
        """Rows [first, …) of the module with this adapter alone."""
        rows = slice(first, first + len(weight))
        base = weight if self.whole is None else self.whole[rows]
        if self.low is None:
            return base
        low = self.low
        changed: F32 = base + (floats(low.b[rows]) @ floats(low.a)) * np.float32(low.scale)
        if low.magnitude is None:
            return changed
        lengths = lengths_of(changed)
        check_lengths(self.adapter, lengths, first)
        factor: F32 = low.magnitude[rows] / lengths
        return changed * factor[:, None]


class Merge:
    """Changes of the matrices of a base by its adapters: W + Σ scale · (W' - W), W' being W with one adapter.

    `dora` and `modules_to_save` are in W'. Adapters don't see each other's changes.
    """

    def __init__(self, base: BaseModules, adapters: Sequence[tuple[Adapter, float]]) -> None:
        self._stacks = base.stacks
        self._changes: dict[str, list[_Change]] = {}
        for adapter, scale in adapters:
            for module in {**adapter.parts, **adapter.modules_to_save}:
                low, whole = adapter.parts.get(module), adapter.modules_to_save.get(module)
                self._changes.setdefault(module, []).append(_Change(adapter.name, scale, low, whole))

    def of(self, tensor: str) -> MergedTensor | None:
        """What changes a tensor by its name in ModelSpec.names, or in its stacks; None for nothing."""
        stack = self._stacks.get(tensor)
        if stack is not None:
            there = any(
                name.removesuffix(".weight") in self._changes for each in stack.experts for name in each
            )
            return MergedTensor(self._changes, "", stack) if there else None
        module = tensor.removesuffix(".weight")
        return MergedTensor(self._changes, module) if module in self._changes else None

    def unties(self, spec: ModelSpec) -> bool:
        """Whether a tied head has other weights than the embedding afterwards."""
        tables = (spec.names.embed, spec.names.head)
        return spec.tied and any(self.of(name) is not None for name in tables)


@dataclass(frozen=True, slots=True, eq=False)
class MergedTensor:
    """The changes of one tensor: of a module, or of a stack of all experts of a layer."""

    changes: Mapping[str, Sequence[_Change]]
    module: str
    stack: Stack | None = None

    def merged(self, values: F32, first: int, *, turned: bool = False) -> F32:
        """Rows [first, …) of the tensor, float32, with the changes. `turned`: see Stack."""
        if self.stack is None:
            return _changed(values, first, self.changes[self.module])
        values = values.copy()
        for e, expert in enumerate(values, first):
            matrix = expert.T if turned else expert
            for name, rows in linears(self.stack, e):
                changes = self.changes.get(name)
                if changes:
                    matrix[rows] = _changed(np.ascontiguousarray(matrix[rows]), 0, changes)
        return values


def _changed(weight: F32, first: int, changes: Sequence[_Change]) -> F32:
    if len(changes) == 1 and changes[0].scale == 1.0:
        return changes[0].rows(weight, first)
    found = weight.copy()
    for change in changes:
        found += np.float32(change.scale) * (change.rows(weight, first) - weight)
    return found
