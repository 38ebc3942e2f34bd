"""All ranks of a model in processes of this host, as one executor: this process is one rank and leads the others.

Ranks map one file in memory. The step's arrays are in it, so a step is one command of a few numbers; so are all ranks'
activations, which others read in place where the programs meet. Ranks that wait sleep.

    step arrays   the worker of the leading rank fills them, all ranks have bound them; twice in a pipeline
    pairs         blocks to copy, and their targets; or where embeddings begin and end
    embeddings    of a step's soft tokens, one after the other
    experts       two that change places, and how many tokens each one has had
    hand-over     what the first half of a pipeline's stages leaves to the second; once for each of the step arrays
    block         a KV block that is copied out or in: the parts of all ranks
    activations   of rank 0, 1, …

A command to run names two steps. The stages of the first half begin one of them, those of the second half end the
other, at the same time; if it is one step, the second half waits for the first:

    command         1     2     3     4
    first half      a     b     c     -
    second half     -     a     b     c

The leading rank is the first of the last stage, whose program leaves the logits. It does not wait for the first half
before it gives out the logits, but before its next command.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from quire import _native
from quire.executor.base import (
    I32,
    U8,
    AdapterSlots,
    Embeddings,
    Executor,
    HalfStep,
    Limits,
    Outputs,
    StepArrays,
    step_array_bytes,
)
from quire.executor.expert_places import HeldExperts, SharedExperts, UncountedExperts, shared_expert_bytes
from quire.executor.expert_replicas import SharingExecutor
from quire.executor.mapped import shared_bytes
from quire.program.memory import kv_block_bytes, plan_arena
from quire.program.program import Program
from quire.program.rank_nodes import RankNodes
from quire.records import dataclass

MemoryPiece = tuple[int, U8]  # of the memory that ranks share: where, and what
PAIRS = 4096  # blocks of one command
_PAGE = 4096


class RankAct(enum.IntEnum):
    """What the leading rank asks the others to do."""

    RUN = 1
    HEAD = 2
    RANGE = 3
    COPY = 4
    STOP_AFTER = 5
    USE_THREADS = 6
    WARM = 7
    READ = 8
    WRITE = 9
    GIVE_PAGES = 10
    CLOSE = 11
    SHOW_EXPERTS = 12
    TAKE_EXPERTS = 13
    COUNT_EXPERTS = 14


class RankLostError(RuntimeError):
    """A rank has ended or does not answer: no step can run any more."""


def leading_rank(programs: Sequence[Program]) -> int:
    """The rank that leads: the first of the last stage."""
    return len(programs) - programs[0].plan.tensor_parallel_size


class RankExecutor(Executor, Protocol):
    """An executor of one rank."""

    @property
    def held_experts(self) -> HeldExperts | UncountedExperts:
        """Those of this rank."""

    def place_activations(self, address: int) -> None:
        """Have activations there, in memory that outlives the executor; before bind."""

    def use(self, arrays: StepArrays) -> None:
        """Later steps are in these arrays, which are like those of bind."""

    def join(self, group: _native.Group) -> None:
        """Meet the other ranks of the program there; after bind."""


class MeetingExecutor(RankExecutor, Protocol):
    """An executor whose library has collectives of its own."""

    def meet(
        self, ranks: _native.SharedRanks, meeting: str, stage: int, size: int, here: int, peers: Iterable[int]
    ) -> None:
        """Meet the ranks stage … stage + size - 1, those of the program, through the file `meeting`, and the sockets of
        `peers` on other hosts; after bind. `here`: all ranks of this host."""


class OtherNodes(Protocol):
    """The hosts that ranks are on besides the one of the leading rank."""

    count: int  # of all hosts
    peers: Mapping[int, int]  # the leading rank's connections to ranks on others, see RankNodes.peers

    def say(self, command: Sequence[int], pieces: Sequence[MemoryPiece]) -> None:
        """Tell them a command, with what has changed in the memory that ranks share."""


class ChangedMemory(Protocol):
    """What the leading rank changes in the memory that ranks share; see node_pieces."""

    def of(self, act: RankAct, numbers: Sequence[int]) -> list[MemoryPiece]:
        """The pieces that a command is about."""


Changes = Callable[[Sequence[Program], Limits, StepArrays, U8, RankNodes], ChangedMemory]


class LeadingRank(Executor, Protocol):
    """An executor that leads other ranks."""

    def lead(
        self,
        ranks: _native.SharedRanks,
        lost: Callable[[], str],
        ending: Callable[[], None],
        others: Sequence[AdapterSlots] = (),
        nodes: OtherNodes | None = None,
        meeting: str = "",
    ) -> None:
        """Lead those ranks; before bind. `lost` says why a rank has left; `ending` is called before they are told to
        end. `others`: their slots for adapters. `nodes`: the other hosts that ranks are on. `meeting`: see
        MeetingExecutor."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Where what ranks share lies in their file: offsets, and the size of all."""

    arrays: int
    pairs: int
    embeddings: int
    experts: int
    handover: int
    blocks: tuple[int, ...]
    activations: tuple[int, ...]
    nbytes: int


def embedding_bytes(programs: Sequence[Program], limits: Limits) -> int:
    """Bytes of the embeddings that a step may have in place of tokens."""
    entry = programs[0].entry
    return 0 if entry is None else 4 * limits.max_tokens * programs[0].buffer(entry.buffer).cols


def handover_bytes(programs: Sequence[Program], limits: Limits) -> int:
    """Bytes of what the first half of the stages leaves to the second, of two steps; without stages there is none."""
    [given] = programs[-1].inputs or [None]
    return 0 if given is None else 2 * 4 * limits.max_tokens * programs[-1].buffer(given.buffer).cols


def rank_memory(programs: Sequence[Program], limits: Limits) -> RankMemory:
    """The memory that the ranks of these programs share."""
    at = arrays = _native.SharedRanks.HEADER_BYTES
    overlaps = programs[0].plan.overlaps
    at += _whole(step_array_bytes(limits, len(programs[0].cache_groups), overlaps=overlaps))
    pairs = at
    at += _whole(2 * 4 * PAIRS)
    embeddings = at
    at += _whole(embedding_bytes(programs, limits))
    experts = at
    at += _whole(shared_expert_bytes(programs))
    handover = at
    blocks = [at + _whole(handover_bytes(programs, limits))]
    for program in programs:
        blocks.append(blocks[-1] + kv_block_bytes(program, limits.block_size))
    at = _whole(blocks[-1])
    activations = []
    for program in programs:
        activations.append(at)
        at += _whole(plan_arena(program, limits.max_tokens, limits.max_logit_rows).total)
    return RankMemory(arrays, pairs, embeddings, experts, handover, tuple(blocks), tuple(activations), at)


def _whole(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def residual_place(
    programs: Sequence[Program], limits: Limits, memory: RankMemory, rank: int
) -> tuple[int, int]:
    """Where a rank that is not of the last stage has the residual stream for the next one, and the columns of it."""
    [given] = programs[-1].inputs
    program = programs[rank]
    [output] = [each for each in program.outputs if each.name == given.name]
    arena = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
    return memory.activations[rank] + arena.offsets[output.buffer], program.buffer(output.buffer).cols


def feature_places(
    programs: Sequence[Program], limits: Limits, memory: RankMemory, rank: int
) -> list[tuple[str, int, int]]:
    """What a rank leaves of tokens for a draft: names, where, and how many columns of float32."""
    program = programs[rank]
    arena = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
    return [
        (each.name, memory.activations[rank] + arena.offsets[each.buffer], program.buffer(each.buffer).cols)
        for each in program.outputs
        if each.name.startswith("features")
    ]


def handover_place(programs: Sequence[Program], limits: Limits, memory: RankMemory, twin: int) -> int:
    """Where the first half of the stages leaves the residual stream of one of two steps."""
    return memory.handover + twin * handover_bytes(programs, limits) // 2


class SharedStep:
    """One rank's view of what ranks share, bound to its executor."""

    def __init__(
        self,
        ranks: _native.SharedRanks,
        programs: Sequence[Program],
        rank: int,
        nodes: int = 1,
        peers: Mapping[int, int] | None = None,
        others: tuple[OtherNodes, Changes] | None = None,
        meeting: str = "",
    ) -> None:
        """`nodes`: how many hosts the ranks are on; `peers`: the sockets of ranks on others, see RankNodes.peers;
        `others`: those hosts, which the leading rank tells what it says, and what finds what it has changed;
        `meeting`: a file through which executors meet, see MeetingExecutor."""
        self.ranks, self.rank, self._meeting = ranks, rank, meeting
        self._programs, self._program = programs, programs[rank]
        self._memory: U8 = np.empty(0, np.uint8)
        plan = self._program.plan
        self.nodes = RankNodes(plan.tensor_parallel_size, plan.pipeline_parallel_size, nodes)
        self._peers, self._others = peers or {}, others
        self._stage = rank - plan.tensor_parallel_rank  # its first rank
        self._first_half = plan.in_first_half
        # Whether it leaves the first half's residual, and whether it takes it; one of the ranks of a node that
        # have it leaves it.
        middle = plan.pipeline_parallel_size // 2
        self._leaves = plan.pipeline_parallel_rank == middle - 1 and rank == self.nodes.here(rank).start
        self._takes = plan.pipeline_parallel_rank == middle > 0
        self.second_half = middle * plan.tensor_parallel_size  # its first rank
        self._residual = (0, 0)  # where that of the stage before is, and its columns

    def prepare(self, executor: RankExecutor, limits: Limits, arrays: StepArrays, *, keep: bool) -> None:
        """Before an executor is bound to these arrays: they move to where all ranks see them, with what they have if
        it is to be kept; so do its activations."""
        memory, ranks, plan = rank_memory(self._programs, limits), self.ranks, self._program.plan
        self._memory = shared_bytes(ranks, memory.nbytes)
        self.block = self._memory[memory.blocks[0] : memory.blocks[-1]]
        self.own_part = self._memory[memory.blocks[self.rank] : memory.blocks[self.rank + 1]]
        self.pairs: I32 = self._memory[memory.pairs :][: 2 * 4 * PAIRS].view(np.int32).reshape(2, PAIRS)
        rows = self._memory[memory.embeddings :][: embedding_bytes(self._programs, limits)].view(np.float32)
        self._embeddings, self._arrays = rows.reshape(limits.max_tokens, -1), arrays
        given = self._memory[memory.handover :][: handover_bytes(self._programs, limits)].view(np.float32)
        self._handover = given.reshape(2, limits.max_tokens, -1)
        experts = self._memory[memory.experts :][: shared_expert_bytes(self._programs)]
        self.experts = SharedExperts(executor.held_experts, self._programs, self.rank, experts)
        arrays.move_to(self._memory[memory.arrays : memory.pairs], keep=keep)
        executor.place_activations(ranks.address + memory.activations[self.rank])
        if self._others is not None:
            self._changed = self._others[1](self._programs, limits, arrays, self._memory, self.nodes)
        self._features = [
            place
            for each in range(0, self._stage, plan.tensor_parallel_size)
            for place in feature_places(self._programs, limits, memory, each)
        ]
        if self._stage:
            taken = self.nodes.taken_from(self.rank)
            self._residual = residual_place(self._programs, limits, memory, taken)

    def join(self, executor: RankExecutor) -> None:
        """After an executor is bound: it meets the other ranks of its stage."""
        size, here = self._program.plan.tensor_parallel_size, self.nodes.here(self.rank)
        if self._meeting and size > 1:
            sockets = self._peers.values()
            meet = cast("MeetingExecutor", executor).meet
            meet(self.ranks, self._meeting, self._stage, size, self.nodes.each, sockets)
        elif self._peers:
            peers = [(rank - self._stage, fd) for rank, fd in self._peers.items()]
            executor.join(_native.SpanningGroup(self.ranks, self._stage, size, here.start, len(here), peers))
        elif size > 1:
            executor.join(_native.SharedGroup(self.ranks, self._stage, size))

    def say(self, act: RankAct, numbers: Sequence[int] = ()) -> None:
        """Tell all ranks what to do."""
        command = (int(act), *numbers, *[0] * (9 - len(numbers)))
        self.ranks.say(command)  # first: the end of a command is told by its number
        if self._others is not None:
            self._others[0].say(command, self._changed.of(act, numbers))

    def show_embeddings(self) -> int:
        """Put those of the step where all ranks see them; returns how many there are."""
        at, given = 0, self._arrays.embeddings
        if len(given) > PAIRS:
            raise ValueError(f"embeddings: {len(given)} in a step are more than {PAIRS}")
        for number, each in enumerate(given):
            self._embeddings[at : at + len(each.rows)] = each.rows
            self.pairs[:, number] = each.start, len(each.rows)
            at += len(each.rows)
        return len(given)

    def _take_embeddings(self, count: int) -> None:
        """Take those that the leading rank shows, if this stage is the one that they enter."""
        self._arrays.embeddings, at = [], 0
        for start, length in self.pairs[:, : count if self._program.entry else 0].T.tolist():
            self._arrays.embeddings.append(Embeddings(start, self._embeddings[at : at + length]))
            at += length

    def run(
        self, executor: RankExecutor, numbers: Sequence[int], run: Callable[[int, int, int], Outputs],
        idle: Callable[[], None] | None = None,
    ) -> Outputs | None:  # fmt: skip
        """Do this rank's part of the command `running` by `run`; None if it has none, or when a rank has left. `idle`
        comes to a round of replicas that share experts, by default as the executor does."""
        shown, first, second = numbers[0], numbers[1:5], numbers[5:9]
        tokens, rows, logit_rows, twin = first if self._first_half else second
        if not tokens:
            if self._program.plan.shares_experts:  # its ranks run programs equally often
                (idle or cast("SharingExecutor", executor).run_idle)()
            return None
        executor.use(self._arrays.twin if twin and self._arrays.twin else self._arrays)
        self._take_embeddings(shown)
        if not self._take_residual(executor, tokens, twin, same=first == second):
            return None
        outputs = run(tokens, rows, logit_rows)
        if self._leaves:
            self._handover[twin, :tokens] = outputs[self._programs[-1].inputs[0].name]
        return outputs

    def features(self, tokens: int) -> Outputs:
        """What stages before this one have left of the step's tokens for a draft, by name; once they are done."""
        return {
            name: self._memory[at : at + tokens * cols * 4].view(np.float32).reshape(tokens, cols)
            for name, at, cols in self._features
        }

    def _take_residual(self, executor: RankExecutor, tokens: int, twin: int, *, same: bool) -> bool:
        """Take what the stage before leaves, for which it waits if that runs the `same` step now; False when a rank has
        left."""
        if not self._stage:
            return True
        before = self.nodes.before(self.rank)
        if (same or not self._takes) and not self.ranks.wait(before.start, len(before)):
            return False
        [given] = self._program.inputs
        rows = self._handover[twin, :tokens]
        if not self._takes:
            at, cols = self._residual
            rows = self._memory[at : at + tokens * cols * 4].view(np.float32).reshape(tokens, cols)
        executor.write(given.buffer, rows)
        return True


def running(shown: int, first: HalfStep | None, second: HalfStep | None) -> tuple[int, ...]:
    """The numbers of a command to run, with so many embeddings: two steps, of zeros if there is none."""
    flat = [shown]
    for half in (first, second):
        flat += (0, 0, 0, 0) if half is None else (*half.size, int(half.twin))
    return tuple(flat)


def follow(executor: RankExecutor, step: SharedStep) -> None:
    """Do what the leading rank does, until it closes or a rank has left."""
    while True:
        command = step.ranks.hear()
        if command is None or command[0] == RankAct.CLOSE:
            return
        step.ranks.finish(_obey(executor, step, RankAct(command[0]), command[1:]))


def _obey(executor: RankExecutor, step: SharedStep, act: RankAct, numbers: Sequence[int]) -> int:
    last_stage = executor.program.plan.is_last_stage
    match act:
        case RankAct.RUN:
            step.run(executor, numbers, executor.run)
        case RankAct.HEAD if last_stage:
            executor.run_head(numbers[0])
        case RankAct.RANGE if last_stage:
            executor.run_range(*numbers[:5])
        case RankAct.COPY:
            executor.copy_blocks(*cast("list[list[int]]", step.pairs[:, : numbers[0]].tolist()))
        case RankAct.STOP_AFTER if last_stage:
            executor.stop_after(None if numbers[0] < 0 else numbers[0])
        case RankAct.USE_THREADS:
            executor.use_threads(numbers[0])
        case RankAct.READ:
            executor.read_blocks(numbers[:1], step.own_part[None])
        case RankAct.WRITE:
            executor.write_blocks(numbers[:1], step.own_part[None])
        case RankAct.GIVE_PAGES:
            executor.give_pages()
        case RankAct.SHOW_EXPERTS | RankAct.TAKE_EXPERTS | RankAct.COUNT_EXPERTS:
            _obey_about_experts(step.experts, act, numbers)
        case RankAct.WARM:
            return executor.warm_blocks(numbers[0]) or 0
        case _:
            pass
    return 0


def _obey_about_experts(experts: SharedExperts, act: RankAct, numbers: Sequence[int]) -> None:
    if act == RankAct.SHOW_EXPERTS:
        experts.show(*numbers[:4])
    elif act == RankAct.TAKE_EXPERTS:
        experts.take(*numbers[:4])
    else:
        experts.count()
