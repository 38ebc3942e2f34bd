"""A host (node) with ranks of a model that is led from another one: `quire serve … --node-rank 1`.

It joins the leading node, starts the ranks of this host, and passes on what they are told and what they leave; see
leading_node. When the leading node ends or does not answer, the ranks end, and this one joins again.
"""

from __future__ import annotations

import json
import queue
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from quire.config.launched import Launched
from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.assemble import choose, choose_ranks, machine_facts
from quire.engine.build.leading_node import COMMAND, RANK, RESULT, SOME
from quire.engine.build.node_frames import LOOK_SECONDS, BadFrameError, NodeConnection, NodeFrame, Said
from quire.engine.build.node_place import Joined, join_nodes
from quire.engine.build.opening import Model, open_model
from quire.engine.build.rank_processes import RankProcesses, process_bytes
from quire.engine.build.tasks import for_task
from quire.executor.base import Limits
from quire.executor.kinds import executor_kind
from quire.executor.mapped import shared_bytes
from quire.executor.node_pieces import LeftPieces
from quire.executor.ranked import RankAct, rank_memory
from quire.program.program import Program
from quire.types import MemoryBudgetError, QuireError
from quire.util.numa import rank_cores
from quire.util.sizes import format_size

_AGAIN_SECONDS = 0.5


def follow_node(at: Launched, name: str, asked: EngineConfig, *, quiet: bool = False) -> NoReturn:
    """Be that node until this process is ended. Raises RendezvousError if it is refused, and the errors of a model
    that is not there."""
    model = for_task(open_model(name, tokenizer=False), asked)
    while True:
        try:
            joined = join_nodes(at, model, asked)
        except OSError:  # the leading node ended meanwhile
            time.sleep(_AGAIN_SECONDS)
            continue
        if not quiet:
            print(f"quire: node {at.number} of {at.world} has joined", file=sys.stderr, flush=True)
        try:
            reason = _follow(joined, model)
        except (QuireError, ValueError, MemoryError) as error:
            joined.leader.tell(Said.LOST, f"{type(error).__name__}: {error}".encode())
            joined.leader.close()
            raise
        if not quiet:
            print(f"quire: node {at.number}: {reason}", file=sys.stderr, flush=True)


def _follow(joined: Joined, model: Model) -> str:
    """Start the ranks of this host, and do what the leading node says; returns why it ended."""
    config, limits, place = joined.config, joined.limits, joined.place
    model = for_task(model, config)
    programs = choose_ranks(model, config, machine_facts())
    resolved = choose(model, config, machine_facts())[0]
    _check_memory(resolved, programs, limits, place.node)
    cores = rank_cores(len(programs), place.count)
    node = FollowingNode(joined.leader)
    ranks = RankProcesses(model, config, programs, limits, node.lose, cores, (place, node.pass_on))
    try:
        return node.serve(ranks, SharedHere(programs, limits, place.here))
    finally:
        ranks.ranks.leave()
        ranks.close()
        joined.leader.close()


def _check_memory(config: ResolvedConfig, programs: tuple[Program, ...], limits: Limits, node: int) -> None:
    """Raises MemoryBudgetError if the ranks of this host do not fit its bound."""
    kind = executor_kind(config, programs)
    needed = sum(kind.planned_bytes(programs[-programs[0].plan.tensor_parallel_size], limits).values())
    processes = 1 + config.asked.parallel.ranks // config.nodes  # this one, and its ranks
    needed += processes * process_bytes(config)
    if needed > config.memory:
        sizes = format_size(needed), format_size(config.memory)
        raise MemoryBudgetError(
            f"memory: the ranks of node {node} need {sizes[0]}, and its bound is {sizes[1]}"
        )


class SharedHere:
    """What ranks of a host share: their programs and limits, and which ranks they are."""

    def __init__(self, programs: tuple[Program, ...], limits: Limits, here: range) -> None:
        self.programs, self.limits, self.here = programs, limits, here
        self.nbytes = rank_memory(programs, limits).nbytes


class FollowingNode:
    """What a node passes on between the leading node and its own ranks."""

    def __init__(self, leader: NodeConnection) -> None:
        self._leader = leader
        self._reason, self._ended = "", threading.Event()

    def lose(self, reason: str) -> None:
        """A rank of this host has left."""
        self._reason = self._reason or reason
        self._leader.tell(Said.LOST, reason.encode())  # before anybody closes the connection
        self._end(reason)
        self._leader.close()

    def pass_on(self, rank: int, message: dict[str, str]) -> None:
        """Tell the leading node what a rank says."""
        try:
            self._leader.send(Said.HEARD, json.dumps({**message, "rank": rank}).encode())
        except OSError as error:
            self._end(f"the leading node has closed its connection: {error.strerror or error}")

    def serve(self, ranks: RankProcesses, shared: SharedHere) -> str:
        """Pass on commands until the leading node or a rank has ended; returns the reason."""
        memory = shared_bytes(ranks.ranks, shared.nbytes)
        stages = []
        nodes = ranks.place.nodes
        for first in range(shared.here.start, shared.here.stop, len(nodes.here(shared.here.start))):
            left = LeftPieces(shared.programs, shared.limits, nodes, nodes.here(first), memory)
            stages.append(_Stage(self, self._leader, ranks, left))
        threads = [threading.Thread(target=self._watch, daemon=True)]
        threads += [threading.Thread(target=stage.run, daemon=True) for stage in stages]
        for thread in threads:
            thread.start()
        try:
            while (frame := self._leader.receive(memory)) is not None:
                if not self._obey(frame, ranks, stages):
                    break
            self._end("the leading node has closed its connection")
        except (BadFrameError, ValueError, KeyError, struct.error) as error:
            self._end(f"the leading node says what is not understood: {error}")
        ranks.ranks.leave()
        for stage in stages:
            stage.commands.put(None)
        self._ended.set()
        for thread in threads:
            thread.join()
        return self._reason

    def _obey(self, frame: NodeFrame, ranks: RankProcesses, stages: Sequence[_Stage]) -> bool:
        match frame.kind:
            case Said.COMMAND:
                command = COMMAND.unpack(frame.text)
                if command[0] == RankAct.CLOSE:
                    ranks.expect_end()
                ranks.ranks.say(command)
                if command[0] == RankAct.CLOSE:
                    ranks.close()
                    self._end("the model was closed")
                    return False
                for stage in stages:
                    stage.commands.put(command)
            case Said.LEFT:
                _, first, count = SOME.unpack(frame.text)
                if first + count > ranks.ranks.size:
                    raise ValueError(f"ranks {first} to {first + count - 1}")
                for rank in range(first, first + count):
                    ranks.ranks.finished(rank, 0, 0, 0)
            case Said.SLOTS:
                (rank,) = RANK.unpack_from(frame.text)
                ranks.send_slots(rank, frame.text[RANK.size :])
            case Said.LOST:
                self._end(f"the leading node ends: {frame.text.decode(errors='replace')}")
                return False
            case _:
                raise ValueError(f"a frame of kind {frame.kind}")
        return True

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._ended.set()

    def _watch(self) -> None:
        """End when the leading node does not answer."""
        looked = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS):
            passed, looked = time.monotonic() - looked, time.monotonic()
            if self._leader.silent_after(passed):
                self._end("the leading node does not answer")
        self._leader.close()


class _Stage:
    """The ranks of one stage on this host: tells the leading node when they are done, with what they leave."""

    def __init__(
        self, node: FollowingNode, leader: NodeConnection, ranks: RankProcesses, left: LeftPieces
    ) -> None:
        self._node, self._leader, self._ranks, self._left = node, leader, ranks, left
        self.commands: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Until there are no more commands."""
        failed = True
        try:
            self._run()
            failed = False
        finally:
            if failed:
                self._node.lose("what its ranks leave could not be passed on")

    def _run(self) -> None:
        ranks, here = self._ranks.ranks, self._left.here
        while (command := self.commands.get()) is not None:
            if not ranks.wait(here.start, len(here)):
                return
            act = RankAct(command[0])
            pieces = self._left.of(act, command[1:])
            # The next stage waits for what a step leaves, and for nothing else.
            to = self._left.node if pieces and act == RankAct.RUN else 0
            text = SOME.pack(to, here.start, len(here))
            for rank in here:
                text += RESULT.pack(ranks.result(rank), ranks.worked(rank), ranks.waited(rank))
            try:
                self._leader.send(Said.DONE, text, pieces)
            except OSError:  # whoever receives says why
                return
