"""Replicas of a model that hold its experts between them: what their ranks share, and how their steps meet.

Each replica has a scheduler, a cache and steps of its own. In a layer of experts the ranks of a stage of all replicas
meet: each shows the tokens of its step, computes its experts for those of all, and takes back the rows of its own
(ShareTokens, ReturnRows). A row of an expert has the bits that it has alone, whatever others it is computed beside.

So all ranks run programs equally often, in rounds: in each round every replica runs one step. The replica that begins a
step begins a round, and the others come to it: with their next step, or without rows when they are idle.

    round        1    2    3    4
    replica 0    a    b    c    -      (-: without rows)
    replica 1    -    -    d    e

Ranks map one file: a line for each rank, and a place for the rows that it shows. A replica that has left ends the steps
of all others, as its experts are gone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol, cast

from quire import _native
from quire.executor.base import Executor, ExpertLoads, Limits
from quire.executor.expert_places import HeldExperts
from quire.executor.expert_rounds import RoundExchanges, SharedLoads, exchange_bytes
from quire.executor.mapped import shared_bytes
from quire.program.formats import DTYPE_BYTES
from quire.program.memory import max_rows, row_pitch
from quire.program.program import Program
from quire.program.tensors import Buffer

_PAGE = 4096


class SharingExecutor(Protocol):
    """An executor of one rank, whose experts others use."""

    held_experts: HeldExperts

    def share_experts(self, replicas: ExpertReplicas) -> None:
        """Meet the ranks of the other replicas there; after bind."""

    def run_idle(self) -> None:
        """Come to a round without a step."""


def shares_experts(program: Program) -> bool:
    """Whether a program has experts that it shares with other replicas."""
    return any(op.shows for op in program.ops)


def shown_bytes(program: Program, limits: Limits) -> int:
    """Bytes of the rows that a rank shows to those of other replicas; 0 if it shares no experts."""
    found = 0
    for op in program.ops:
        buffers = [program.buffer(getattr(op, field)) for field in op.shows]
        rows = [max_rows(each, limits.max_tokens, limits.max_logit_rows) for each in buffers]
        found = max(found, sum(n * _row_bytes(each) for n, each in zip(rows, buffers, strict=True)))
    return -(-found // _PAGE) * _PAGE


def _row_bytes(buffer: Buffer) -> int:
    pitch, numbers = row_pitch(buffer), 0
    if buffer.dtype == "i8":  # its scale, and two numbers of each group
        numbers = DTYPE_BYTES["f32"] + 2 * DTYPE_BYTES["i32"] * (pitch // buffer.group)
    return pitch * DTYPE_BYTES[buffer.dtype] + numbers


class ExpertReplicas:
    """What one rank sees of the ranks of all replicas; `programs` are those of its own replica, in the order of ranks.

    The ranks of a stage follow each other, those of one replica before those of the next.
    """

    def __init__(
        self, path: str, programs: Sequence[Program], rank: int, limits: Limits, held: HeldExperts, *, crowded: bool
    ) -> None:  # fmt: skip
        """`path`: the file, which is as long as the first of them has made it. `held`: the experts of this rank.
        `crowded`: see SharedRanks."""
        plan = programs[rank].plan
        stage, ranks = plan.pipeline_parallel_rank, plan.expert_ranks
        self.rank = plan.expert_rank
        sizes = [shown_bytes(each, limits) for each in programs]
        stages = [
            sizes[at : at + plan.tensor_parallel_size]
            for at in range(0, len(sizes), plan.tensor_parallel_size)
        ]
        all_sizes = [size for each in stages for size in each * plan.data_parallel_size]
        self._number = number = stage * ranks + self.rank
        header = _native.SharedRanks.HEADER_BYTES
        nbytes = header + sum(all_sizes) + exchange_bytes(programs)
        fd = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if size == header:
                os.ftruncate(fd, nbytes)
            elif size != nbytes:
                raise ValueError("enable_expert_parallel: replicas that share experts run different programs")
            self.ranks = _native.SharedRanks(fd, nbytes, len(all_sizes), number, crowded)
        finally:
            os.close(fd)
        self.shown = self.ranks.address + header + sum(all_sizes[:number])
        self.group = _native.SharedGroup(self.ranks, stage * ranks, ranks, uneven=True)
        memory = shared_bytes(self.ranks, nbytes)[header + sum(all_sizes) :]
        self.exchanges, self._alone = RoundExchanges(held, programs, memory), plan.ranks == 1
        self._entered, self._steps = 0, True
        self._seen = self._waited = 0  # nanoseconds: waits of all rounds, and those of rounds with a step

    def begin(self, *, steps: bool = True) -> None:
        """The leading rank of this replica is about to run a step in the next round, or none."""
        self._count()
        self.exchanges.begin()
        self._steps = steps
        self.ranks.begin_round(self._round)

    def enter(self, *, steps: bool) -> None:
        """This rank is about to run its program in the next round."""
        if self._alone:
            self.begin(steps=steps)
        self._entered += 1
        self.exchanges.enter(self._entered)

    def lead(self, own: ExpertLoads) -> None:
        """This is the leading rank of its replica, whose experts have had so much."""
        self.loads = SharedLoads(own, self.exchanges)

    @property
    def _round(self) -> int:
        return self.exchanges.begun & 0xFFFFFFFF

    @property
    def waited(self) -> float:
        """Seconds in which this rank waited in its steps for others, without rounds in which it had none."""
        self._count()
        return self._waited / 1e9

    def _count(self) -> None:
        """Take the waits since the last round began."""
        before, self._seen = self._seen, self.ranks.waited(self._number)
        if self._steps:
            self._waited += self._seen - before

    def wait(self) -> bool:
        """Wait until another replica has begun a round, or for `rouse`; False when one has left."""
        return self.ranks.await_round(self._round)

    @property
    def behind(self) -> bool:
        """Whether others have begun a round that this replica has not come to."""
        return self.ranks.round != self._round


class IdleRounds:
    """Comes to the rounds of other replicas while this one waits for requests, in a thread.

    `lost`: called, from the thread, when a replica has left.
    """

    def __init__(
        self, executor: SharingExecutor, replicas: ExpertReplicas, lost: Callable[[str], None]
    ) -> None:
        self._executor, self._replicas, self._lost = executor, replicas, lost
        self._busy = threading.Lock()
        self._busy.acquire()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="quire-idle-rounds", daemon=True)
        self._thread.start()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The caller, who runs the steps, runs none in the block."""
        self._busy.release()
        try:
            yield
        finally:
            self._busy.acquire()

    def close(self) -> None:
        """Come to no more rounds."""
        self._closing = True
        self._busy.release()
        while self._thread.is_alive():
            self._replicas.ranks.rouse()
            self._thread.join(0.05)

    def _come_along(self) -> None:
        while self._replicas.wait():
            with self._busy:
                if self._closing:
                    return
                if self._replicas.behind:
                    self._executor.run_idle()

    def _serve(self) -> None:
        try:
            with suppress(RuntimeError):  # a rank has left in the midst of a step
                self._come_along()
        finally:
            if not self._closing:
                self._lost("another replica, which has a part of the experts, has left")


@contextmanager
def idle_rounds(
    executor: Executor, replicas: ExpertReplicas | None, lost: Callable[[str], None]
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """What makes contexts in which an executor comes to the rounds of other replicas, if it shares experts with any."""
    if replicas is None:
        yield nullcontext
        return
    rounds = IdleRounds(cast("SharingExecutor", executor), replicas, lost)
    try:
        yield rounds.idle
    finally:
        rounds.close()
