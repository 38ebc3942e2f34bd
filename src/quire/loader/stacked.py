"""Experts that a checkpoint stacks in one tensor, read as one tensor per expert."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from quire.loader.source import Array, CodesSource, PrefetchingSource, Source, TensorInfo
from quire.program.formats import WeightFormat
from quire.quant.groups import GroupCodes
from quire.records import dataclass
from quire.spec import ModelSpec, MoE
from quire.types import CheckpointError


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor [experts, rows, cols], or [experts, rows] for biases, with every expert of a layer.

    `experts` are, per expert, the names of the tensors in its rows: one after the other, or alternating if
    `interleaved`. `transposed` stacks are [experts, cols, rows] unless they are quantized.
    """

    name: str
    rows: int
    cols: int  # 0: biases
    experts: tuple[tuple[str, ...], ...]
    transposed: bool = False
    interleaved: bool = False

    def shape(self, info: TensorInfo) -> tuple[int, ...]:
        """The required shape of the tensor."""
        inner = (self.rows, self.cols) if self.cols else (self.rows,)
        return (len(self.experts), *(inner[::-1] if self.turned(info) else inner))

    def turned(self, info: TensorInfo) -> bool:
        return self.transposed and not info.stored


def stacks_of(spec: ModelSpec) -> Iterator[Stack]:
    """The tensors that may contain the experts of a model's layers."""
    names, layout = spec.names, spec.stacks
    for i, layer in enumerate(spec.layers):
        moe = layer.mlp
        if not isinstance(moe, MoE):
            continue
        for stacked, rows, cols, group in (
            (layout.gate_up, 2 * moe.width, spec.dim, (names.expert_gate, names.expert_up)),
            (layout.down, spec.dim, moe.width, (names.expert_down,)),
        ):
            turns = layout.interleaved and len(group) > 1
            for suffix, ending, inner in (("", "weight", cols), ("_bias", "bias", 0)):
                tensors = tuple(
                    tuple(f"{name.format(i=i, e=e)}.{ending}" for name in group)
                    for e in range(moe.router.experts)
                )
                transposed = layout.transposed and bool(inner)
                yield Stack(stacked.format(i=i) + suffix, rows, inner, tensors, transposed, turns)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows first, first + step, … of one expert of a stack."""

    stack: Stack
    expert: int
    first: int
    step: int
    count: int

    def of(self, start: int, stop: int) -> slice:
        return slice(self.first + start * self.step, self.first + (stop - 1) * self.step + 1, self.step)


class Unstacked:
    """`source` with the experts of `stacks` as separate tensors. Implements Source.

    Raises CheckpointError for a stack with the wrong shape.
    """

    def __init__(self, source: Source, stacks: Iterable[Stack]) -> None:
        self._source = source
        self._codes_source = source if isinstance(source, CodesSource) else None
        there = set(source.names())
        taken: set[str] = set()
        self._rows: dict[str, _Rows] = {}
        self._last_floats: tuple[tuple[str, int], Array] | None = None
        self._last_codes: tuple[tuple[str, int], GroupCodes] | None = None
        for stack in stacks:
            if stack.name not in there:
                continue
            info = source.info(stack.name)
            if info.shape != stack.shape(info):
                raise CheckpointError(
                    f"tensor {stack.name}: shape {list(info.shape)}, but the config implies {list(stack.shape(info))}"
                )
            taken.add(stack.name)
            for e, tensors in enumerate(stack.experts):
                count = stack.rows // len(tensors)
                for k, name in enumerate(tensors):
                    first, step = (k, len(tensors)) if stack.interleaved else (k * count, 1)
                    self._rows[name] = _Rows(stack, e, first, step, count)
        both = self._rows.keys() & there
        if both:
            raise CheckpointError(
                f"tensor {min(both)} exists separately and in {self._rows[min(both)].stack.name}"
            )
        self._names = [name for name in source.names() if name not in taken] + list(self._rows)

    def names(self) -> Iterable[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        rows = self._rows.get(name)
        if rows is None:
            return self._source.info(name)
        info, cols = self._source.info(rows.stack.name), rows.stack.cols
        shape = (rows.count, cols) if cols else (rows.count,)
        stored = info.stored_bytes * rows.count // (len(rows.stack.experts) * rows.stack.rows)
        return replace(info, name=name, shape=shape, stored_bytes=stored)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        rows = self._rows.get(name)
        if rows is None:
            return self._source.read(name, start, stop)
        start, stop = self.info(name).rows(start, stop)
        info = self._source.info(rows.stack.name)
        expert = self._floats(rows)
        return np.ascontiguousarray((expert.T if rows.stack.turned(info) else expert)[rows.of(start, stop)])

    def packed(self, name: str) -> WeightFormat | None:
        """See CodesSource; None if the source has no codes."""
        rows = self._rows.get(name)
        stored = name if rows is None else rows.stack.name
        return self._codes_source.packed(stored) if self._codes_source is not None else None

    def read_codes(self, name: str, start: int, stop: int) -> GroupCodes:
        source, rows = self._codes_source, self._rows.get(name)
        assert source is not None
        if rows is None:
            return source.read_codes(name, start, stop)
        expert, part = self._codes(source, rows), rows.of(start, stop)
        offsets, factors = (None if x is None else x[part] for x in (expert.offsets, expert.factors))
        return GroupCodes(expert.codes[part], expert.scales[part], offsets, factors)

    def prefetch(self, name: str, start: int, stop: int) -> None:
        if isinstance(self._source, PrefetchingSource):
            rows = self._rows.get(name)
            if rows is None:
                self._source.prefetch(name, start, stop)
            else:
                self._source.prefetch(rows.stack.name, rows.expert, rows.expert + 1)

    def release(self, name: str) -> None:
        rows = self._rows.get(name)
        self._source.release(name if rows is None else rows.stack.name)

    def _floats(self, rows: _Rows) -> Array:
        """One expert of a stack, converted once for all its parts."""
        key = rows.stack.name, rows.expert
        if self._last_floats is None or self._last_floats[0] != key:
            self._last_floats = key, self._source.read(key[0], rows.expert, rows.expert + 1)[0]
        return self._last_floats[1]

    def _codes(self, source: CodesSource, rows: _Rows) -> GroupCodes:
        """The same as codes."""
        key = rows.stack.name, rows.expert
        if self._last_codes is None or self._last_codes[0] != key:
            self._last_codes = key, source.read_codes(key[0], rows.expert, rows.expert + 1)
        return self._last_codes[1]
