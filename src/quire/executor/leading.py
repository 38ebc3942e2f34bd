"""What an executor that leads the ranks of a model does besides its own part; see executor/ranked.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from quire import _native
from quire.executor.base import (
    I64,
    U8,
    AdapterSlots,
    Executor,
    ExecutorKind,
    ExpertLoads,
    HalfStep,
    Limits,
    Outputs,
    StepArrays,
)
from quire.executor.expert_places import HeldExperts, shared_expert_bytes
from quire.executor.expert_replicas import ExpertReplicas
from quire.executor.expert_rounds import exchange_bytes
from quire.executor.node_pieces import ChangedPieces, elsewhere_bytes
from quire.executor.plans import StepSize
from quire.executor.ranked import (
    PAIRS,
    OtherNodes,
    RankAct,
    RankLostError,
    SharedStep,
    embedding_bytes,
    handover_bytes,
    leading_rank,
    running,
)
from quire.program.memory import kv_block_bytes
from quire.program.program import Program
from quire.program.rank_nodes import RankNodes
from quire.records import dataclass

OwnExecutor: Any = object  # its methods are those of the other base of the class that it is mixed into


@dataclass(frozen=True, slots=True)
class RankedKind:
    """Executors that lead ranks, whose `programs` are in the order of ranks; see ExecutorKind.

    What it plans is of all ranks of a host together, of the one with the most where there are several `nodes`. Other
    programs, such as those of drafts, run on the leading rank alone.
    """

    own: ExecutorKind  # the executors of single ranks
    leading: Callable[
        [Program, tuple[Program, ...]], Executor
    ]  # one that leads ranks which run these programs
    programs: tuple[Program, ...]
    nodes: int = 1

    @property
    def layout(self) -> str:
        """The layout of packed weights; see ExecutorKind."""
        return self.own.layout

    def held(self, program: Program) -> Sequence[Program]:
        """Those of all ranks, if the leading one runs it."""
        return self.programs if program == self.programs[leading_rank(self.programs)] else (program,)

    def planned_bytes(self, program: Program, limits: Limits) -> dict[str, int]:
        """What all ranks of a host will hold, by part."""
        if program != self.programs[leading_rank(self.programs)]:
            return self.own.planned_bytes(program, limits)
        found = [self.own.planned_bytes(each, limits) for each in self.programs]
        hosts = self._hosts
        planned = {part: max(sum(found[rank][part] for rank in here) for here in hosts) for part in found[0]}
        planned["activations"] += embedding_bytes(self.programs, limits) + shared_expert_bytes(self.programs)
        planned["activations"] += handover_bytes(self.programs, limits) + exchange_bytes(self.programs)
        if self.nodes > 1:  # what others leave here, in the place that it has there
            planned["activations"] += elsewhere_bytes(self.programs, limits, self._spread)
        return planned

    @property
    def _spread(self) -> RankNodes:
        plan = self.programs[0].plan
        return RankNodes(plan.tensor_parallel_size, plan.pipeline_parallel_size, self.nodes)

    @property
    def _hosts(self) -> list[range]:
        """The ranks of each host."""
        return [self._spread.ranks_of(node) for node in range(self.nodes)]

    def block_bytes(self, program: Program, block_size: int) -> int:
        """Bytes of a KV block on all ranks of a host."""
        if program != self.programs[leading_rank(self.programs)]:
            return kv_block_bytes(program, block_size)
        found = [kv_block_bytes(each, block_size) for each in self.programs]
        return max(sum(found[rank] for rank in here) for here in self._hosts)

    def sampler_bytes(self, program: Program, limits: Limits) -> int:
        """The most bytes that its sampler will ever hold."""
        return self.own.sampler_bytes(program, limits)

    def make(self, program: Program, beside: Executor | None = None) -> Executor:
        """An executor without weights; see ExecutorKind. The one that leads runs after `lead`."""
        if beside is not None:
            return self.own.make(program, beside)
        return self.leading(program, self.programs)


class Leads(OwnExecutor):  # type: ignore[misc]
    """The executor of the leading rank: what it does, all ranks do. Mixed into a class of executors of one rank."""

    def __init__(self, programs: tuple[Program, ...], program: Program, *own: Any, **more: Any) -> None:
        """`programs`: those of all ranks; the rest is what makes an executor of one."""
        super().__init__(program, *own, **more)
        self._programs = programs
        self._led: SharedStep | None = None
        self._lost: Callable[[], str] = lambda: ""
        self._ending: Callable[[], None] = lambda: None
        self._within = False  # a command that this rank is not done with
        self._others: Sequence[AdapterSlots] = ()
        self._sharing: ExpertReplicas | None = None

    def lead(
        self,
        ranks: _native.SharedRanks,
        lost: Callable[[], str],
        ending: Callable[[], None],
        others: Sequence[AdapterSlots] = (),
        nodes: OtherNodes | None = None,
        meeting: str = "",
    ) -> None:
        """Lead those ranks; see LeadingRank."""
        self._others, self._ending, self._lost = others, ending, lost
        count, peers = (nodes.count, nodes.peers) if nodes is not None else (1, {})
        told = None if nodes is None else (nodes, ChangedPieces)
        own = leading_rank(self._programs)
        self._led = SharedStep(ranks, self._programs, own, count, peers, told, meeting)

    @property
    def _shared(self) -> SharedStep:
        if self._led is None:
            raise RuntimeError("a leading executor runs after lead")
        return self._led

    @contextmanager
    def _all(self, act: RankAct, *numbers: int) -> Iterator[None]:
        """All ranks do what this one does in the block; the first half of the stages may still run a step after it.
        Raises RankLostError if one has left."""
        ranks = self._shared.ranks
        self._settle()
        self._within = True
        self._shared.say(act, numbers)
        try:
            yield
        except RuntimeError:
            if ranks.left:
                raise self._error() from None
            raise
        ranks.finish(0)
        self._within = False
        self._settle(self._shared.second_half if act == RankAct.RUN else 0)

    def _settle(self, first: int = 0) -> None:
        """Wait until all ranks from this one on have done what they were told last."""
        ranks = self._shared.ranks
        if ranks.left or not ranks.wait(first, ranks.size - first):
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
        size = StepSize(num_tokens, num_rows, num_logit_rows)
        step = HalfStep(size, twin=False)
        return self._run(running(self._shared.show_embeddings(), step, step))

    @property
    def overlaps(self) -> bool:
        """Whether there are stages; see Runnable.overlaps."""
        overlaps: bool = self.program.plan.overlaps
        return overlaps

    def run_halves(self, first: HalfStep | None, second: HalfStep | None) -> Outputs:
        """Halves of two steps at a time; see Overlapping.run_halves."""
        return self._run(running(0, first, second))

    def share_experts(self, replicas: ExpertReplicas) -> None:
        """Meet the ranks of other replicas there; see SharingExecutor."""
        super().share_experts(replicas)
        replicas.lead(self)
        self._sharing = replicas

    def run_idle(self) -> None:
        """All ranks come to a round without a step; see SharingExecutor."""
        self._run(running(0, None, None))

    def _run(self, numbers: tuple[int, ...]) -> Outputs:
        shared, run = self._shared, super().run
        # Not this class's, which is a command to all; also of a model without experts, which shares none.
        idle = super().run_idle if self.program.plan.shares_experts else None
        if self._sharing is not None:
            self._sharing.begin(steps=numbers[-4] > 0)
        with self._all(RankAct.RUN, *numbers):
            outputs = shared.run(self, numbers, run, idle)
            if outputs is None and numbers[-4]:
                raise self._error()
        return {**(outputs or {}), **shared.features(numbers[-4])}

    @property
    def experts(self) -> ExpertLoads:
        """Those of all ranks, where they are counted; see Runnable.experts."""
        if self._sharing is not None:
            return self._sharing.loads
        return self if isinstance(self.held_experts, HeldExperts) else super().experts

    @property
    def ranks(self) -> int:
        """Ranks that hold whole experts; see ExpertLoads."""
        return self._shared.experts.ranks

    @property
    def move(self) -> bool:
        """Whether these may change places; see ExpertLoads."""
        return self._shared.experts.move

    def take_pairs(self) -> Mapping[int, I64]:
        """What the experts of all ranks have had; see ExpertLoads.take_pairs."""
        experts = self._shared.experts
        with self._all(RankAct.COUNT_EXPERTS):
            experts.count()
        return {layer: pairs.copy() for layer, pairs in experts.pairs.items()}

    @property
    def placed(self) -> Mapping[int, Sequence[int]]:
        """The experts at the places of each layer; see ExpertLoads.placed."""
        return self._shared.experts.placed

    def swap(self, layer: int, one: int, other: int) -> None:
        """Let two experts change places; see ExpertLoads.swap."""
        self._move(layer, one, other, 0)

    def copy(self, layer: int, one: int, other: int) -> None:
        """Have an expert at another place, too; see ExpertLoads.copy."""
        self._move(layer, one, other, 1)

    def _move(self, *numbers: int) -> None:
        experts = self._shared.experts
        with self._all(RankAct.SHOW_EXPERTS, *numbers):
            experts.show(*numbers)
        with self._all(RankAct.TAKE_EXPERTS, *numbers):
            experts.take(*numbers)

    def run_head(self, num_logit_rows: int) -> Outputs:
        """The head for other rows of the same step; see Runnable.run_head."""
        with self._all(RankAct.HEAD, num_logit_rows):
            outputs: Outputs = super().run_head(num_logit_rows)
        return outputs

    def run_range(self, num_tokens: int, num_rows: int, num_logit_rows: int, begin: int, end: int) -> None:
        """Only some ops, of the last stage; see Inspectable.run_range."""
        with self._all(RankAct.RANGE, num_tokens, num_rows, num_logit_rows, begin, end):
            super().run_range(num_tokens, num_rows, num_logit_rows, begin, end)

    def copy_blocks(self, blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks inside the cache; see Runnable.copy_blocks."""
        for at in range(0, len(blocks), PAIRS):
            some = blocks[at : at + PAIRS], targets[at : at + PAIRS]
            self._shared.pairs[:, : len(some[0])] = some
            with self._all(RankAct.COPY, len(some[0])):
                super().copy_blocks(*some)

    def stop_after(self, op_index: int | None) -> None:
        """End later runs after this op of the last stage; see Inspectable.stop_after."""
        with self._all(RankAct.STOP_AFTER, -1 if op_index is None else op_index):
            super().stop_after(op_index)

    def use_threads(self, count: int) -> None:
        """Run steps with so many threads of each rank; see Runnable.use_threads."""
        with self._all(RankAct.USE_THREADS, count):
            super().use_threads(count)

    def warm_blocks(self, count: int) -> int | None:
        """Bring in no pages of blocks from this one on; see Runnable.warm_blocks."""
        with self._all(RankAct.WARM, count):
            found = super().warm_blocks(count)
        ranks = self._shared.ranks
        return None if found is None else max([found, *map(ranks.result, range(ranks.size))])

    @property
    def adapter_slots(self) -> Sequence[AdapterSlots]:
        """Those of all ranks; see Runnable.adapter_slots."""
        return (self, *self._others)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on all ranks; see Runnable.block_bytes."""
        return len(self._shared.block)

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        """Copy KV blocks out, with the parts of all ranks; see Runnable.read_blocks."""
        for block, content in zip(blocks, into, strict=True):
            with self._all(RankAct.READ, block):
                super().read_blocks([block], self._shared.own_part[None])
            content[:] = self._shared.block

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        """Copy KV blocks in: the opposite of read_blocks."""
        for block, given in zip(blocks, content, strict=True):
            self._shared.block[:] = given
            with self._all(RankAct.WRITE, block):
                super().write_blocks([block], self._shared.own_part[None])

    def give_pages(self) -> None:
        """Give back pages of all ranks that can be had again; see Runnable.give_pages."""
        with self._all(RankAct.GIVE_PAGES):
            super().give_pages()

    def close(self) -> None:
        """Free everything, and tell the other ranks to end."""
        if self._led is not None:
            with suppress(RankLostError):
                # The first half of the stages may still run a step, whose command must not be changed. Where this rank
                # was interrupted in one, the others may wait for it: they are ended after a moment.
                if not self._within:
                    self._settle()
                self._ending()
                self._led.say(RankAct.CLOSE)
        self._led, self._sharing = None, None
        super().close()
