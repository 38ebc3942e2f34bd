"""What every executor does: hold weights, caches and buffers, and run a program for one step.

A step is described by StepArrays: preallocated int32 arrays that the worker fills and the executor has bound
once, so that a step itself passes three integers.

    query_start   0      3   4        9          row b of the step owns tokens query_start[b] … query_start[b+1]-1
    token_ids     a b c  d   e f g h i
    positions     0 1 2  41  16 17 18 19 20      position of each token in its sequence
    slots         2      0   5                   row b's line in each group's block table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.program.memory import kv_block_bytes
from quire.program.program import Entry, Program
from quire.program.tensors import Param
from quire.quant import GroupCodes
from quire.records import dataclass
from quire.types import UnsupportedModelError

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Outputs = Mapping[str, F32]  # what a step left, by the names of Program.outputs


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes an executor is built for; a step never exceeds them.

    max_tokens: tokens in one step. max_rows: sequences in one step, and slots of the block tables.
    max_logit_rows: rows of one head run. max_len: positions of one sequence. num_blocks: KV blocks, each of
    block_size tokens (a multiple of 16) for layers_per_group layers, or of their states.
    """

    max_tokens: int
    max_rows: int
    max_logit_rows: int
    max_len: int
    num_blocks: int
    block_size: int = 16

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Soft tokens of a step: tokens start, start + 1, … have these rows [tokens, dim] in place of the embeddings of
    their ids, which are placeholders. No multiplier of embeddings applies to them."""

    start: int
    rows: F32


class StepArrays:
    """The step's int32 arrays, allocated once: what a worker fills and an executor reads.

    `embeddings` are those of the step's soft tokens, none in most steps.
    """

    def __init__(self, limits: Limits, num_groups: int) -> None:
        self.token_ids: I32 = np.zeros(limits.max_tokens, np.int32)
        self.positions: I32 = np.zeros(limits.max_tokens, np.int32)
        self.query_start: I32 = np.zeros(limits.max_rows + 1, np.int32)
        self.slots: I32 = np.zeros(limits.max_rows, np.int32)
        self.logit_rows: I32 = np.zeros(limits.max_logit_rows, np.int32)
        self.embeddings: list[Embeddings] = []
        # [group][slot, k]: block id of tokens k·block_size …; only entries a step can read need be valid. In a group of
        # states that block has those after the last token computed of its own.
        self.block_tables: tuple[I32, ...] = tuple(
            np.zeros((limits.max_rows, limits.blocks_per_row), np.int32) for _ in range(num_groups)
        )


def step_array_bytes(limits: Limits, num_groups: int) -> int:
    """Bytes of StepArrays of these limits."""
    words = 2 * limits.max_tokens + 2 * limits.max_rows + 1 + limits.max_logit_rows
    return 4 * (words + num_groups * limits.max_rows * limits.blocks_per_row)


def check_program(program: Program) -> None:
    """Raise UnsupportedModelError for a program that no executor can run, before its weights are loaded."""
    if program.state_layers:
        layers = ", ".join(str(layer.layer) for layer in program.state_layers)
        raise UnsupportedModelError(
            f"layers {layers} keep a state for each sequence, and no executor has ops for states"
        )


def check_embeddings(program: Program, embeddings: Sequence[Embeddings], num_tokens: int) -> Entry:
    """Where they enter the program. Raises ValueError for rows of another shape, beyond the step's tokens, or of a
    program that takes none."""
    if program.entry is None:
        raise ValueError("embeddings: the program takes none")
    dim = program.buffer(program.entry.buffer).cols
    for given in embeddings:
        if given.rows.dtype != np.float32 or given.rows.ndim != 2 or given.rows.shape[1] != dim:
            raise ValueError(
                f"embeddings: {given.rows.dtype} {list(given.rows.shape)} is not float32 [tokens, {dim}]"
            )
        if given.start < 0 or given.start + len(given.rows) > num_tokens:
            last = given.start + len(given.rows) - 1
            raise ValueError(f"embeddings: tokens {given.start} to {last} are not in the step's {num_tokens}")
    return program.entry


def check_blocks(program: Program, limits: Limits, blocks: Sequence[int], content: U8) -> None:
    """Raise ValueError when read_blocks or write_blocks cannot be called so."""
    if blocks and not 0 <= min(blocks) <= max(blocks) < limits.num_blocks:
        raise ValueError(f"blocks: {list(blocks)} are not all in [0, {limits.num_blocks - 1}]")
    shape = len(blocks), kv_block_bytes(program, limits.block_size)
    if content.shape != shape or content.dtype != np.uint8:
        raise ValueError(f"content: {content.dtype} {list(content.shape)} is not uint8 {list(shape)}")


class Executor(Protocol):
    """Runs a Program. Life: construct(program) → put every part → bind(limits, arrays) → run/run_head …

    Raises MemoryBudgetError from bind when an arena cannot be had, ValueError for a step beyond the limits.
    """

    program: Program

    def put(self, param: Param, row_offset: int, data: np.ndarray, dtype: str) -> None:
        """Take one checkpoint part: raw [rows, cols] or [rows] in "F32", "F16" or "BF16" (as uint16)."""

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        """Take rows of a weight in groups that come quantized, in the format that `param.groups` says.

        ValueError, naming the parameter, for other shapes, types, codes out of range or scales that are not finite.
        """

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        """Allocate cache and buffers, and remember the arrays. Called once, after all parts are put."""

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int) -> Outputs:
        """One whole step: body over the tokens, head over arrays.logit_rows.

        Returns the program's outputs, valid until the next run or run_head: those of logit rows [num_logit_rows, cols],
        others [num_tokens, cols].
        """

    def run_head(self, num_logit_rows: int) -> Outputs:
        """The head again for other arrays.logit_rows of the same step (prompt logprobs in slices)."""

    def read(self, buffer: str, rows: int) -> F32:
        """The first rows of a buffer after the last run, as float32. For tests; see `stop_after`."""

    def stop_after(self, op_index: int | None) -> None:
        """Make later runs end after that op of Program.ops (None: run all), so buffers can be compared."""

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        """Copy KV blocks out: into[i] is the content of blocks[i], as many bytes as memory.kv_block_bytes says.

        Only an executor of the same kind with the same program and block size can make use of them. ValueError for a
        block that does not exist or an array of another shape.
        """

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        """Copy KV blocks in: the opposite of read_blocks."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held by part: weights, kv, activations, tables."""

    def close(self) -> None:
        """Give everything back."""
