"""Drives an executor as the scheduler and worker would: slots, ragged rows, blocks in shuffled order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.executor.base import F32, Executor, Limits, StepArrays
from quire.program.op import writes
from quire.program.ops.attention import RopeWrite
from quire.program.program import Program

UNREADABLE = -1  # in block tables, wherever a step has no business to look


@dataclass(frozen=True)
class StepSize:
    """Arguments of Executor.run, and which sequence owns which of the step's tokens."""

    num_tokens: int
    num_rows: int
    num_logit_rows: int
    tokens_of: Mapping[int, slice]


@dataclass
class _Sequence:
    tokens: Sequence[int]
    slot: int
    computed: int = 0
    blocks: list[dict[int, int]] = field(
        default_factory=list
    )  # per cache group: place in the table -> block id


class Stepper:
    """Holds the arrays, the free blocks and some sequences; `fill` describes the next step to executors.

    Block ids, slots and the order of rows are random. Blocks behind a window are given back at once, and the
    table entries of all blocks that a step cannot read are made invalid.
    """

    def __init__(self, program: Program, limits: Limits, seed: int = 0) -> None:
        self.program, self.limits = program, limits
        self.arrays = StepArrays(limits, len(program.cache_groups))
        self._random = np.random.default_rng(seed)
        self._free = self._random.permutation(limits.num_blocks).tolist()
        self._slots = self._random.permutation(limits.max_rows).tolist()
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = itertools.count()

    def add(self, tokens: Sequence[int]) -> int:
        """Start a sequence; returns its number."""
        number = next(self._numbers)
        self._sequences[number] = _Sequence(
            tokens, self._slots.pop(), blocks=[{} for _ in self.program.cache_groups]
        )
        return number

    def drop(self, number: int) -> None:
        """End a sequence: its blocks and its slot are free."""
        sequence = self._sequences.pop(number)
        self._slots.append(sequence.slot)
        for held in sequence.blocks:
            self._free += held.values()

    def fill(self, counts: Mapping[int, int]) -> StepSize:
        """Write a step of the next counts[sequence] tokens of each; each row's last token wants logits."""
        arrays, start, tokens_of = self.arrays, 0, {}
        order = self._random.permutation(list(counts)).tolist()
        for row, number in enumerate(order):
            sequence, count = self._sequences[number], counts[number]
            first, stop = sequence.computed, sequence.computed + count
            assert stop <= len(sequence.tokens)
            tokens_of[number] = here = slice(start, start + count)
            arrays.token_ids[here] = sequence.tokens[first:stop]
            arrays.positions[here] = range(first, stop)
            arrays.slots[row] = sequence.slot
            arrays.query_start[row : row + 2] = here.start, here.stop
            arrays.logit_rows[row] = here.stop - 1
            self._map_blocks(sequence, first, stop)
            sequence.computed, start = stop, here.stop
        return StepSize(start, len(order), len(order), tokens_of)

    def logits(self, executor: Executor, size: StepSize) -> F32:
        """Run the filled step; logits [num_tokens, vocab] of every token, in slices of max_logit_rows."""
        found, limit = [], self.limits.max_logit_rows
        for first in range(0, size.num_tokens, limit):
            rows = range(first, min(first + limit, size.num_tokens))
            self.arrays.logit_rows[: len(rows)] = rows
            made = (
                executor.run_head(len(rows))
                if first
                else executor.run(size.num_tokens, size.num_rows, len(rows))
            )
            found.append(made["logits"].copy())
        return np.concatenate(found)

    def step(self, executor: Executor, counts: Mapping[int, int]) -> dict[int, F32]:
        """Fill and run a step; logits of every token by sequence."""
        size = self.fill(counts)
        logits = self.logits(executor, size)
        return {number: logits[tokens] for number, tokens in size.tokens_of.items()}

    def _map_blocks(self, sequence: _Sequence, first: int, stop: int) -> None:
        size = self.limits.block_size
        for group, held, table in zip(
            self.program.cache_groups, sequence.blocks, self.arrays.block_tables, strict=True
        ):
            seen = max(0, first - group.window + 1) if group.window else 0
            for place in [p for p in held if (p + 1) * size <= seen]:
                self._free.insert(0, held.pop(place))
            for place in range(first // size, -(-stop // size)):
                if place not in held:
                    held[place] = self._free.pop()
            table[sequence.slot] = UNREADABLE
            for place, block in held.items():
                table[sequence.slot, place] = block


@dataclass(frozen=True)
class BufferDifference:
    """How far two executors are apart in one buffer, just after an op wrote it."""

    op_index: int
    op: str
    buffer: str
    rms: float  # root mean square of the difference
    scale: float  # root mean square of the first executor's values
    max_abs: float

    @property
    def relative(self) -> float:
        return self.rms / max(self.scale, 1e-30)


def compare_buffers(a: Executor, b: Executor, size: StepSize) -> list[BufferDifference]:
    """Run a step in both executors op by op and compare each buffer after every op that writes it; after the last op,
    of a step that ran from the beginning to the end.

    Both must be bound to the arrays that hold the step. Running a step again is harmless: it writes the same
    keys and values to the same places.
    """
    found, last = [], len(a.program.ops) - 1
    for index, op in enumerate(a.program.ops):
        for executor in (a, b):
            if index < last:
                executor.run_range(size.num_tokens, size.num_rows, size.num_logit_rows, index, index + 1)
            else:
                executor.run(size.num_tokens, size.num_rows, size.num_logit_rows)
        for name in writes(op):
            buffer = a.program.buffer(name)
            rows = size.num_tokens if buffer.rows == "tokens" else size.num_logit_rows
            left, right = (e.read(name, rows * buffer.per) for e in (a, b))
            if isinstance(op, RopeWrite):  # keys and values go to the cache; what the buffer keeps is q
                left, right = left[:, : op.shape.q_cols], right[:, : op.shape.q_cols]
            far = left - right
            rms, scale = (float(np.sqrt(np.square(x).mean())) for x in (far, left))
            largest = float(np.abs(far).max())
            found.append(BufferDifference(index, type(op).__name__, name, rms, scale, largest))
    return found


def first_difference(found: Sequence[BufferDifference], tolerance: float) -> BufferDifference | None:
    """The first buffer that is apart by more than `tolerance` of its values, root mean square, or by NaN."""
    return next((d for d in found if not d.relative <= tolerance), None)
