"""The ranks of a model on this host: which there are, and the processes of those that follow this one.

The memory that ranks share has no name: it is a file that only these processes have open, which the kernel removes with
the last of them. A process that ends, or whose heart stands still, ends the wait of all others with its reason. Ranks
on other hosts are led through leading_node.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Literal, cast

from quire import _native
from quire.config.launched import launched
from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.leading_node import LeadingNode
from quire.engine.build.node_place import NodePlace, meet_nodes
from quire.engine.build.opening import Model
from quire.engine.build.rendezvous import gather
from quire.executor.base import Executor, Limits
from quire.executor.expert_replicas import ExpertReplicas, SharingExecutor, shares_experts
from quire.executor.ranked import LeadingRank, leading_rank, rank_memory
from quire.executor.ranked_adapters import RemoteSlots
from quire.program.program import Program
from quire.program.ranks import RankPlan
from quire.types import QuireError, UnsupportedModelError
from quire.util.platform import usable_cores

# What a process holds besides its part of the plan: the interpreter and its modules (45 MiB measured with
# quire-mini), and blocks of weights that are being packed.
PROCESS_BYTES = 80 * 2**20
THREAD_BYTES = 128 * 2**10  # the used part of a thread's stack, and its share of the allocator
TORCH_BYTES = 240 * 2**20  # torch and what it imports; 175 MiB measured
SILENT_SECONDS = 3.0  # the heart of a rank beats 20 times a second
START_SECONDS = 60.0  # until the first beat
_LOOK_SECONDS = 0.25
_END_SECONDS = 2.0


class RankStartError(QuireError):
    """A rank could not start."""


def rank_plans(asked: EngineConfig, stage_layers: tuple[int, ...] = ()) -> tuple[RankPlan, ...]:
    """The plans of all ranks in their order: those of a stage follow each other. `stage_layers`: see RankPlan.

    Raises UnsupportedModelError for options that ranks do not support.
    """
    parallel = asked.parallel
    number, replicas = asked.replica
    if parallel.ranks > 1 or replicas > 1:
        _check(asked)
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    reduce: Literal["exact", "fast"] = "fast" if parallel.tensor_parallel_reduce == "fast" else "exact"
    return tuple(
        RankPlan(
            size, rank, stages, stage, parallel.enable_expert_parallel, reduce, stage_layers, replicas, number
        )
        for stage in range(stages)
        for rank in range(size)
    )


def _check(asked: EngineConfig) -> None:
    chosen = asked.speculation.chosen()
    if chosen is not None and chosen.method == "self":
        raise UnsupportedModelError(
            "speculative_config: the method self is not supported with tensor_parallel_size or pipeline_parallel_size "
            "above 1, nor with replicas that share experts"
        )


def leading_plan(plans: Sequence[RankPlan]) -> RankPlan:
    """That of the rank which leads: the first of the last stage."""
    return plans[-plans[0].tensor_parallel_size]


def other_processes(config: ResolvedConfig) -> dict[str, int]:
    """What the processes of other ranks of a host hold besides the parts of the model, as a part of the memory plan."""
    others = config.asked.parallel.ranks // config.nodes - 1
    return {"ranks": others * process_bytes(config)} if others else {}


def process_bytes(config: ResolvedConfig) -> int:
    """What a process of a rank holds besides its part of the plan."""
    library = TORCH_BYTES if config.asked.execution.executor == "torch" else 0
    return PROCESS_BYTES + library + config.threads * THREAD_BYTES


@contextlib.contextmanager
def started_ranks(
    model: Model, asked: EngineConfig, executor: Executor, programs: Sequence[Program], limits: Limits,
    lost: Callable[[str], None], cores: Sequence[Collection[int]], replicas: str = "",
) -> Iterator[RankProcesses | None]:  # fmt: skip
    """Start the ranks that an executor leads, None if there are no others; they end if the block fails. `cores`: the
    processors that each of them stays on, see util/numa."""
    if not programs:
        yield None
        return
    ranks = RankProcesses(model, asked, programs, limits, lost, cores, replicas=replicas)
    try:
        slots = list(ranks.slots.values())
        lead = cast("LeadingRank", executor).lead
        lead(ranks.ranks, ranks.reason, ranks.expect_end, slots, ranks.nodes, ranks.meeting)
        yield ranks
    except BaseException:
        executor.close()
        ranks.close()
        raise


def shared_experts(
    executor: Executor, programs: Sequence[Program], limits: Limits, threads: int, path: str
) -> ExpertReplicas | None:
    """Have an executor, which leads ranks or is alone, meet those of replicas that share experts; None if none do."""
    plan = programs[0].plan
    if not any(map(shares_experts, programs)):
        return None
    crowded = plan.ranks * plan.data_parallel_size * threads > usable_cores()
    sharing = cast("SharingExecutor", executor)
    rank, held = leading_rank(programs), sharing.held_experts
    replicas = ExpertReplicas(path, programs, rank, limits, held, crowded=crowded)
    sharing.share_experts(replicas)
    return replicas


def rank_digest(program: Program, limits: Limits, model: Model, files: str) -> str:
    """What ranks of one model have in common, and this one's program. `files`: a fingerprint of its weights."""
    from quire import __version__

    parts = (__version__, model.facts.config_sha256, files, limits, program)
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()


class RankProcesses:
    """The processes of all ranks of this host but the leading one, from their start to their end.

    `lost` is called once, from a thread, with the reason why a rank has left; no step can run any more then.
    """

    def __init__(
        self, model: Model, asked: EngineConfig, programs: Sequence[Program], limits: Limits,
        lost: Callable[[str], None] = lambda _: None, cores: Sequence[Collection[int]] = (),
        follows: tuple[NodePlace, Callable[[int, dict[str, str]], None]] | None = None, replicas: str = "",
    ) -> None:  # fmt: skip
        """`replicas`: the file through which they meet those of replicas that share experts, see expert_replicas.
        `follows`: this host among several, if it follows another one, and what takes what its ranks say."""
        self._names = [f"rank {rank} of {len(programs)}" for rank in range(len(programs))]
        self.programs = programs
        self._lost, self._reason = lost, ""
        self._known = threading.Event()  # a reason
        self._changed = threading.Condition()
        self._digests: dict[int, str] = {}
        self._closing = False
        self._started = launched(os.environ, len(programs))
        self.place, self._heard = follows or (meet_nodes(self._started, model, asked, limits), self._hear)
        place = self.place
        self._leader = -1 if place.node else leading_rank(programs)
        nbytes = rank_memory(programs, limits).nbytes
        crowded = len(place.here) * asked.replica[1] * (asked.execution.threads or 1) > usable_cores()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self.slots: dict[int, RemoteSlots] = {}  # for adapters, by rank
        self.nodes: LeadingNode | None = None
        self._memory, self._meeting = _memory(nbytes), -1
        if asked.execution.executor == "torch":  # whose processes meet through a file, without a name as well
            self._meeting = os.memfd_create("quire-meeting", os.MFD_CLOEXEC)
        try:
            self.ranks = _native.SharedRanks(self._memory, nbytes, len(programs), self._leader, crowded)
            if place.connections:
                self.nodes = LeadingNode(place, self.ranks, nbytes, self._heard, self._lose, self._leader)
                for rank in place.elsewhere:
                    self.slots[rank] = RemoteSlots(programs[rank], partial(self.nodes.send_slots, rank))
            for rank, ours in self._connect():
                self._sockets[rank] = ours
                self.slots[rank] = RemoteSlots(programs[rank], ours.sendall)
                peers = {other: sock.fileno() for other, sock in place.peers.get(rank, {}).items()}
                load = {
                    "folder": str(model.folder), "config": asked.values(), "replica": asked.replica,
                    "limits": asdict(limits), "rank": rank,
                    "memory": self._memory if rank in self._processes else f"/proc/{os.getpid()}/fd/{self._memory}",
                    "bytes": nbytes, "crowded": crowded, "cores": sorted(cores[rank]) if cores else [],
                    "nodes": place.count, "peers": list(peers.items()), "meeting": self.meeting,
                    "replicas": replicas,
                }  # fmt: skip
                ours.sendall(json.dumps(load).encode() + b"\n")
        except BaseException:
            self._end()
            raise
        for rank, here in place.peers.items():  # a rank in another process has sockets of its own now
            for sock in here.values() if rank != self._leader else ():
                sock.close()
        self._watcher = threading.Thread(target=self._watch, name="quire-ranks", daemon=True)
        self._watcher.start()

    def _connect(self) -> Iterator[tuple[int, socket.socket]]:
        """Sockets of the other ranks: of those that a launcher has started, or of processes that are started here."""
        others = [rank for rank in self.place.here if rank != self._leader]
        if self._started is not None and not self._started.nodes:
            for number, ours in gather(self._started):
                yield others[number - 1], ours
            return
        for rank in others:
            yield rank, self._start(rank)

    def _start(self, rank: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        # The kernel ends a process with the thread that started it; the end of this one's socket ends it in any case.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "quire.engine.build.rank_process"]
        peers = [sock.fileno() for sock in self.place.peers.get(rank, {}).values()]
        with theirs:
            self._processes[rank] = subprocess.Popen(
                [*command, str(theirs.fileno()), str(parent)],
                pass_fds=(theirs.fileno(), self._memory, *peers),
                stdin=subprocess.DEVNULL,
                process_group=0,  # an interrupt typed at the terminal is for the leading rank only
            )
        return ours

    @property
    def meeting(self) -> str:
        """The path of the file through which executors of torch meet; "" for others, which have the shared memory."""
        return f"/proc/{os.getpid()}/fd/{self._meeting}" if self._meeting >= 0 else ""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def worked(self) -> list[tuple[float, float]]:
        """Seconds in which each rank did what it was told, without those in which it waited for other stages; and those
        of them in which it waited for rows of its own stage."""
        each = range(self.ranks.size)
        return [(self.ranks.worked(rank) / 1e9, self.ranks.waited(rank) / 1e9) for rank in each]

    def reason(self) -> str:
        """Why a rank has left."""
        self._known.wait(_END_SECONDS)
        return self._reason

    def ready(self, files: str, model: Model, limits: Limits) -> None:
        """Wait until all ranks have loaded their weights; arguments as of rank_digest. Raises RankStartError when one
        could not, or has another version, config or weights."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason or len(self._digests) == len(self.programs) - 1)
        if self._reason:
            raise RankStartError(self._reason)
        for rank, digest in self._digests.items():
            if digest != rank_digest(self.programs[rank], limits, model, files):
                raise RankStartError(f"{self._names[rank]}: its version, config or weights are not the same")

    def send_slots(self, rank: int, content: bytes) -> None:
        """Send bytes to the socket of a rank of this host; one that has ended is lost anyway."""
        with contextlib.suppress(OSError):
            self._sockets[rank].sendall(content)

    def expect_end(self) -> None:
        """From now on a rank that ends was told to, and none is watched."""
        self._closing = True
        if self.nodes is not None:
            self.nodes.expect_end()

    def close(self) -> None:
        """End all processes; those that were told to end have a moment for it."""
        self.expect_end()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        self._end()

    def join(self) -> None:
        """Wait until nobody is watched any more: a rank was lost, or they were told to end."""
        self._watcher.join()

    def _end(self) -> None:
        until = time.monotonic() + _END_SECONDS
        for ours in self._sockets.values():
            with contextlib.suppress(OSError):  # one that was told to end does so by itself
                ours.settimeout(0.0 if self._reason else max(0.0, until - time.monotonic()))
                while ours.recv(2**16):
                    pass
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        for process in self._processes.values():
            try:
                process.wait(0 if self._reason else max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for ours in self._sockets.values():
            ours.close()
        if self.nodes is not None:
            self.nodes.close()
        for here in self.place.peers.values():
            for sock in here.values():
                sock.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
        if self._meeting >= 0:
            os.close(self._meeting)
            self._meeting = -1

    def _watch(self) -> None:
        """Look at all sockets and hearts until one has stopped."""
        hearts = dict.fromkeys(self._sockets, (0, 0.0))  # beats, and for how long they were the same
        looked = time.monotonic()
        received = dict.fromkeys(self._sockets, b"")
        with selectors.DefaultSelector() as selector:
            for rank, ours in self._sockets.items():
                selector.register(ours, selectors.EVENT_READ, rank)
            while not self._closing and not self._reason:
                ended = []
                for key, _ in selector.select(_LOOK_SECONDS):
                    try:
                        data = self._sockets[key.data].recv(2**16)
                    except OSError:  # it ended with something unread
                        data = b""
                    received[key.data] += data
                    *lines, received[key.data] = received[key.data].split(b"\n")
                    for line in lines:
                        self._heard(key.data, json.loads(line))
                    if not data:
                        ended.append(key.data)
                for rank in ended:  # after what another one says of why this one ended
                    if not self._closing and not self._reason:
                        self._lose(f"{self._names[rank]} {self._how_ended(rank)}")
                now = time.monotonic()
                passed = min(now - looked, _LOOK_SECONDS)  # more only if this thread did not run
                looked = now
                for rank, (before, silent) in hearts.items():
                    beats = self.ranks.beats(rank)
                    hearts[rank] = beats, silent + passed if beats == before else 0.0
                    if hearts[rank][1] > (SILENT_SECONDS if beats else START_SECONDS):
                        self._lose(f"{self._names[rank]} does not answer")

    def _hear(self, rank: int, message: dict[str, str]) -> None:
        if "settled" in message:
            error = message["settled"]
            self.slots[rank].answer(f"{self._names[rank]}: {error}" if error else "")
            return
        if "failed" in message:
            self._lose(f"{self._names[rank]} {message['failed']}")
        with self._changed:
            self._digests[rank] = message.get("digest", "")
            self._changed.notify_all()

    def _how_ended(self, rank: int) -> str:
        if rank not in self._processes:
            return "has ended"
        try:
            status = self._processes[rank].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        )

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._reason or self._closing:
                return
            self._reason = reason
            self._changed.notify_all()
        self._known.set()
        self.ranks.leave()
        if self.nodes is not None:
            self.nodes.leave(reason)
        for slots in self.slots.values():
            slots.lose(reason)
        for process in self._processes.values():
            process.kill()
        self._lost(reason)


def _memory(nbytes: int) -> int:
    """A file of zeros in memory that nobody can shorten. It is not in /dev/shm, which is small in containers."""
    fd = os.memfd_create("quire-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
