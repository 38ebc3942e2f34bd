"""All ranks of a model in processes of this host, as one executor: this process is one rank and leads the others.

Ranks map one file in memory. The step's arrays are in it, so a step is one command of a few numbers; so are all ranks'
activations, which others read in place where the programs meet. Ranks that wait sleep.

    step arrays   the worker of the leading rank fills them, all ranks have bound them
    pairs         blocks to copy, and their targets
    block         a KV block that is copied out or in: the parts of all ranks
    activations   of rank 0, 1, …

Stages of a pipeline follow each other within a step. The leading rank is the first of the last stage, whose program
leaves the logits.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import numpy as np

from quire import _native
from quire.executor.base import I32, U8, Executor, Limits, Outputs, StepArrays, step_array_bytes
from quire.executor.native import NativeExecutor, NativeKind
from quire.program.memory import kv_block_bytes, plan_arena
from quire.program.program import Program
from quire.records import dataclass

_PAIRS = 4096  # blocks of one command
_PAGE = 4096


class _Act(enum.IntEnum):
    RUN = 1
    HEAD = 2
    RANGE = 3
    COPY = 4
    STOP_AFTER = 5
    USE_THREADS = 6
    WARM = 7
    READ = 8
    WRITE = 9
    CLOSE = 10


class RankLostError(RuntimeError):
    """A rank has ended or does not answer: no step can run any more."""


def leading_rank(programs: Sequence[Program]) -> int:
    """The rank that leads: the first of the last stage."""
    return len(programs) - programs[0].plan.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class RankedKind:
    """Executors that lead ranks of this host, whose `programs` are in the order of ranks; see ExecutorKind.

    What it plans is of all ranks together. Other programs, such as those of drafts, run on the leading rank alone.
    """

    threads: int
    isa: str
    programs: tuple[Program, ...]

    @property
    def own(self) -> NativeKind:
        """The executors of single ranks."""
        return NativeKind(self.threads, self.isa)

    @property
    def layout(self) -> str:
        """The layout of packed weights; see ExecutorKind."""
        return self.own.layout

    def _held(self, program: Program) -> tuple[Program, ...]:
        return self.programs if program == self.programs[leading_rank(self.programs)] else (program,)

    def planned_bytes(self, program: Program, limits: Limits) -> dict[str, int]:
        """What all ranks will hold, by part."""
        found = [self.own.planned_bytes(each, limits) for each in self._held(program)]
        return {part: sum(each[part] for each in found) for part in found[0]}

    def block_bytes(self, program: Program, block_size: int) -> int:
        """Bytes of a KV block on all ranks."""
        return sum(kv_block_bytes(each, block_size) for each in self._held(program))

    def sampler_bytes(self, program: Program, limits: Limits) -> int:
        """The most bytes that its sampler will ever hold."""
        return self.own.sampler_bytes(program, limits)

    def make(self, program: Program, beside: Executor | None = None) -> NativeExecutor:
        """An executor without weights; see ExecutorKind. The one that leads runs after `lead`."""
        if beside is not None:
            return self.own.make(program, beside)
        return LeadingExecutor(program, self)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Where what ranks share lies in their file: offsets, and the size of all."""

    arrays: int
    pairs: int
    blocks: tuple[int, ...]
    activations: tuple[int, ...]
    nbytes: int


def rank_memory(programs: Sequence[Program], limits: Limits) -> RankMemory:
    """The memory that the ranks of these programs share."""
    at = arrays = _native.SharedRanks.HEADER_BYTES
    at += _whole(step_array_bytes(limits, len(programs[0].cache_groups)))
    pairs = at
    at += _whole(2 * 4 * _PAIRS)
    blocks = [at]
    for program in programs:
        blocks.append(blocks[-1] + kv_block_bytes(program, limits.block_size))
    at = _whole(blocks[-1])
    activations = []
    for program in programs:
        activations.append(at)
        at += _whole(plan_arena(program, limits.max_tokens, limits.max_logit_rows).total)
    return RankMemory(arrays, pairs, tuple(blocks), tuple(activations), at)


def _whole(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


class SharedStep:
    """One rank's view of what ranks share, bound to its executor."""

    def __init__(self, ranks: _native.SharedRanks, programs: Sequence[Program], rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._programs, self._program = programs, programs[rank]
        self._memory: U8 = np.empty(0, np.uint8)
        self._stage = rank - self._program.plan.tensor_parallel_rank  # its first rank
        self._residual = 0  # where that of the stage before is

    def prepare(self, executor: NativeExecutor, limits: Limits, arrays: StepArrays, *, keep: bool) -> None:
        """Before an executor is bound to these arrays: they move to where all ranks see them, with what they have if
        it is to be kept; so do its activations."""
        memory, ranks, plan = rank_memory(self._programs, limits), self.ranks, self._program.plan
        mapped = (ctypes.c_uint8 * memory.nbytes).from_address(ranks.address)
        mapped.owner = ranks  # type: ignore[attr-defined]  # mapped for as long as an array is in it
        self._memory = np.ctypeslib.as_array(mapped)
        self.block = self._memory[memory.blocks[0] : memory.blocks[-1]]
        self.own_part = self._memory[memory.blocks[self.rank] : memory.blocks[self.rank + 1]]
        self.pairs: I32 = self._memory[memory.pairs :][: 2 * 4 * _PAIRS].view(np.int32).reshape(2, _PAIRS)
        arrays.move_to(self._memory[memory.arrays : memory.pairs], keep=keep)
        executor.place_activations(ranks.address + memory.activations[self.rank])
        size = plan.tensor_parallel_size
        if self._stage:
            before = self._programs[self.rank - size]
            arena = plan_arena(before, limits.max_tokens, limits.max_logit_rows)
            [output] = [each for each in before.outputs if each.name == self._program.inputs[0].name]
            self._residual = memory.activations[self.rank - size] + arena.offsets[output.buffer]

    def join(self, executor: NativeExecutor) -> None:
        """After an executor is bound: it meets the other ranks of its stage."""
        size = self._program.plan.tensor_parallel_size
        if size > 1:
            executor.join(_native.SharedGroup(self.ranks, self._stage, size))

    def take_residual(self, executor: NativeExecutor, tokens: int) -> bool:
        """Wait for the stage before, and take what it leaves; False when a rank has left."""
        if not self._stage:
            return True
        size = self._program.plan.tensor_parallel_size
        if not self.ranks.wait(self._stage - size, size):
            return False
        [given] = self._program.inputs
        cols = self._program.buffer(given.buffer).cols
        rows = self._memory[self._residual :][: tokens * cols * 4].view(np.float32).reshape(tokens, cols)
        executor.write(given.buffer, rows)
        return True


class LeadingExecutor(NativeExecutor):
    """The executor of the leading rank: what it does, all ranks do."""

    def __init__(self, program: Program, kind: RankedKind) -> None:
        super().__init__(program, threads=kind.own.threads, isa=kind.own.isa)
        self.programs = kind.programs
        self._step: SharedStep | None = None
        self._lost: Callable[[], str] = lambda: ""

    def lead(self, ranks: _native.SharedRanks, lost: Callable[[], str]) -> None:
        """Lead those ranks; before bind. `lost` says why a rank has left."""
        self._step, self._lost = SharedStep(ranks, self.programs, leading_rank(self.programs)), lost

    @property
    def _shared(self) -> SharedStep:
        if self._step is None:
            raise RuntimeError("a leading executor runs after lead")
        return self._step

    def _all(self, act: _Act, *numbers: int) -> None:
        """Give a command to the other ranks."""
        if self._shared.ranks.left:
            raise self._error()
        self._shared.ranks.say((int(act), *numbers, *[0] * (5 - len(numbers))))

    def _finish(self) -> None:
        """Wait until all ranks have finished the command."""
        ranks = self._shared.ranks
        ranks.finish(0)
        if not ranks.wait(0, ranks.size):
            raise self._error()

    def _error(self) -> RankLostError:
        return RankLostError(self._lost() or "a rank has left")

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        """See Runnable.bind; the arrays move to where all ranks see them."""
        self._shared.prepare(self, limits, arrays, keep=True)
        super().bind(limits, arrays)
        self._shared.join(self)

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int, first_op: int = 0) -> Outputs:
        """One step on all ranks; see Runnable.run."""
        assert not first_op, "what a stage takes is filled by the step itself"
        self._all(_Act.RUN, num_tokens, num_rows, num_logit_rows)
        try:
            if not self._shared.take_residual(self, num_tokens):
                raise self._error()
            found = super().run(num_tokens, num_rows, num_logit_rows)
        except RuntimeError:
            if self._shared.ranks.left:
                raise self._error() from None
            raise
        self._finish()
        return found

    def run_head(self, num_logit_rows: int) -> Outputs:
        """The head for other rows of the same step; see Runnable.run_head."""
        self._all(_Act.HEAD, num_logit_rows)
        found = super().run_head(num_logit_rows)
        self._finish()
        return found

    def run_range(self, num_tokens: int, num_rows: int, num_logit_rows: int, begin: int, end: int) -> None:
        """Only some ops, of the last stage; see Inspectable.run_range."""
        self._all(_Act.RANGE, num_tokens, num_rows, num_logit_rows, begin, end)
        super().run_range(num_tokens, num_rows, num_logit_rows, begin, end)
        self._finish()

    def copy_blocks(self, blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks inside the cache; see Runnable.copy_blocks."""
        for at in range(0, len(blocks), _PAIRS):
            some = blocks[at : at + _PAIRS], targets[at : at + _PAIRS]
            self._shared.pairs[:, : len(some[0])] = some
            self._all(_Act.COPY, len(some[0]))
            super().copy_blocks(*some)
            self._finish()

    def stop_after(self, op_index: int | None) -> None:
        """End later runs after this op of the last stage; see Inspectable.stop_after."""
        self._all(_Act.STOP_AFTER, -1 if op_index is None else op_index)
        super().stop_after(op_index)
        self._finish()

    def use_threads(self, count: int) -> None:
        """Run steps with so many threads of each rank; see Runnable.use_threads."""
        self._all(_Act.USE_THREADS, count)
        super().use_threads(count)
        self._finish()

    def warm_blocks(self, count: int) -> int | None:
        """Bring in no pages of blocks from this one on; see Runnable.warm_blocks."""
        self._all(_Act.WARM, count)
        found = super().warm_blocks(count)
        self._finish()
        ranks = self._shared.ranks
        return max([found or 0, *map(ranks.result, range(ranks.size))])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on all ranks; see Runnable.block_bytes."""
        return len(self._shared.block)

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        """Copy KV blocks out, with the parts of all ranks; see Runnable.read_blocks."""
        for block, content in zip(blocks, into, strict=True):
            self._all(_Act.READ, block)
            super().read_blocks([block], self._shared.own_part[None])
            self._finish()
            content[:] = self._shared.block

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        """Copy KV blocks in: the opposite of read_blocks."""
        for block, given in zip(blocks, content, strict=True):
            self._shared.block[:] = given
            self._all(_Act.WRITE, block)
            super().write_blocks([block], self._shared.own_part[None])
            self._finish()

    def close(self) -> None:
        """Free everything, and end the other ranks."""
        if self._step is not None and not self._step.ranks.left:
            with suppress(RankLostError):
                self._all(_Act.CLOSE)
        self._step = None
        super().close()


def follow(executor: NativeExecutor, step: SharedStep) -> None:
    """Do what the leading rank does, until it closes or a rank has left."""
    while True:
        command = step.ranks.hear()
        if command is None or command[0] == _Act.CLOSE:
            return
        step.ranks.finish(_obey(executor, step, _Act(command[0]), command[1:]))


def _obey(executor: NativeExecutor, step: SharedStep, act: _Act, numbers: Sequence[int]) -> int:
    last_stage = executor.program.plan.is_last_stage
    match act:
        case _Act.RUN:
            if step.take_residual(executor, numbers[0]):
                executor.run(numbers[0], numbers[1], numbers[2])
        case _Act.HEAD if last_stage:
            executor.run_head(numbers[0])
        case _Act.RANGE if last_stage:
            executor.run_range(*numbers)
        case _Act.COPY:
            executor.copy_blocks(*cast("list[list[int]]", step.pairs[:, : numbers[0]].tolist()))
        case _Act.STOP_AFTER if last_stage:
            executor.stop_after(None if numbers[0] < 0 else numbers[0])
        case _Act.USE_THREADS:
            executor.use_threads(numbers[0])
        case _Act.READ:
            executor.read_blocks(numbers[:1], step.own_part[None])
        case _Act.WRITE:
            executor.write_blocks(numbers[:1], step.own_part[None])
        case _Act.WARM:
            return executor.warm_blocks(numbers[0]) or 0
        case _:
            pass
    return 0
