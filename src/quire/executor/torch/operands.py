"""The tensors that an op names in a step, and the definition of each kind of op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.executor.torch.cache import CacheRow, Location, Rotation
from quire.executor.torch.group import Group
from quire.executor.torch.state import State
from quire.executor.torch.step import DeviceStep
from quire.executor.torch.weights import Weights, quantize_rows
from quire.program.op import Op
from quire.program.program import Program

_Kind = TypeVar("_Kind", bound=Op)
_DEFINITIONS: dict[type[Op], Callable[[Operands, Any], None]] = {}


class Operands:
    """Finds the tensors that the ops of one step name."""

    def __init__(
        self, program: Program, weights: Weights, state: State, step: DeviceStep, logit_rows: Tensor,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        self.program, self.weights, self.state, self.group = program, weights, state, group
        self.step, self.logit_rows = step, logit_rows
        self._rows = {"tokens": len(step.positions), "logits": len(logit_rows)}

    def buffer(self, name: str) -> Tensor:
        """The rows of a buffer that this step uses."""
        found = self.program.buffer(name)
        return self.state.buffers[name][: self._rows[found.rows] * found.per]

    def optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self.buffer(name)

    @contextmanager
    def rounding(self, name: str) -> Iterator[Tensor]:
        """Where an op leaves the float32 rows of a buffer: the buffer, or rows that are rounded to it when it is i8."""
        found, to = self.program.buffer(name), self.buffer(name)
        if found.dtype != "i8":
            yield to
            return
        rows = torch.empty_like(to)
        yield rows
        to.copy_(quantize_rows(rows, found.group, rotated=found.rotated))

    def rotation(self, rope: int | None) -> Rotation | None:
        """Angles of the step's tokens."""
        return None if rope is None else self.state.rotations[rope].at(self.step.positions)

    def locations(self, layer: int) -> Location:
        """Where the cache of a layer takes the step's tokens."""
        return self.step.locations[self.program.kv_layers[layer].group]

    def rows_of(self, layer: int) -> tuple[CacheRow, ...]:
        """The step's sequences with their blocks of a layer's cache."""
        return self.step.rows[self.program.kv_layers[layer].group]


def defines(
    kind: type[_Kind],
) -> Callable[[Callable[[Operands, _Kind], None]], Callable[[Operands, _Kind], None]]:
    """Register the definition of a kind of op."""

    def put(definition: Callable[[Operands, _Kind], None]) -> Callable[[Operands, _Kind], None]:
        _DEFINITIONS[kind] = definition
        return definition

    return put


def run_op(operands: Operands, op: Op) -> None:
    """Compute one op of a step. Raises NotImplementedError for a kind without a definition."""
    if type(op) not in _DEFINITIONS:
        raise NotImplementedError(f"no definition of {type(op).__name__} is known here")
    _DEFINITIONS[type(op)](operands, op)
