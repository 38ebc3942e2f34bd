"""A rank's process: python -m quire.engine.build.rank_process FD PARENT_PID, started by engine/build/rank_processes.

It holds its part of a model and does what the leading rank does. It ends when its socket closes. A launcher may have
started it, too: then it joins the leading rank.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from typing import Any, BinaryIO, cast

if __name__ == "__main__":  # the imports below take most of the start-up time
    gc.disable()  # imported objects are not garbage
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would disturb the kernels

from quire import _native
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, choose_ranks, load_rank, machine_facts
from quire.engine.build.load_weights import weights_fingerprint
from quire.engine.build.opening import open_model
from quire.engine.build.rank_processes import rank_digest
from quire.engine.build.tasks import for_task
from quire.executor.base import Limits, StepArrays
from quire.executor.expert_replicas import ExpertReplicas, SharingExecutor, shares_experts
from quire.executor.kinds import executor_kind
from quire.executor.ranked import RankExecutor, SharedStep, follow
from quire.executor.ranked_adapters import obey_frames
from quire.types import QuireError
from quire.util.numa import stay_on
from quire.util.platform import end_with_parent


def main() -> None:
    """Entry point of the process."""
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if int(sys.argv[2]):
        end_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(leader: socket.socket) -> None:
    """Load what the leading rank says, and do what it does; ends the process."""
    frames = leader.makefile("rb")
    load = json.loads(frames.readline() or b"null")
    if load is None:
        os._exit(1)
    memory = load["memory"] if isinstance(load["memory"], int) else os.open(load["memory"], os.O_RDWR)
    ranks = _native.SharedRanks(memory, load["bytes"], _size(load), load["rank"], load["crowded"])
    os.close(memory)
    ready: Future[RankExecutor] = Future()
    threading.Thread(target=_hear, args=(leader, frames, ready), daemon=True).start()
    try:
        _serve(load, ranks, leader, ready)
    except (QuireError, ValueError, OSError, MemoryError, RuntimeError) as error:
        if not ranks.left:  # else that is why
            _send(leader, failed=f"{type(error).__name__}: {error}")
            ranks.leave()
        os._exit(1)
    # To a launcher this end is a failure if a rank has left. The kernel frees memory faster than its owners would.
    os._exit(1 if ranks.left else 0)


def _size(load: dict[str, Any]) -> int:
    return EngineConfig(**load["config"]).parallel.ranks


def _serve(
    load: dict[str, Any], ranks: _native.SharedRanks, leader: socket.socket, ready: Future[RankExecutor]
) -> None:
    asked = EngineConfig(replica=tuple(load["replica"]), **load["config"])
    limits, rank = Limits(**load["limits"]), load["rank"]
    model = for_task(open_model(load["folder"], tokenizer=False), asked)
    programs = choose_ranks(model, asked, machine_facts())
    program, config = programs[rank], choose(model, asked, machine_facts())[0]
    stay_on(load["cores"])
    executor = cast("RankExecutor", executor_kind(config).make(program))
    nodes = load["nodes"]
    step = SharedStep(ranks, programs, rank, nodes, dict(load["peers"]), meeting=load["meeting"])
    load_rank(model, program, config, executor)
    arrays = StepArrays(limits, len(program.cache_groups), overlaps=program.plan.overlaps)
    step.prepare(executor, limits, arrays, keep=False)
    executor.bind(limits, arrays)
    step.join(executor)
    if any(map(shares_experts, programs)):
        sharing = cast("SharingExecutor", executor)
        held, crowded = sharing.held_experts, load["crowded"]
        replicas = ExpertReplicas(load["replicas"], programs, rank, limits, held, crowded=crowded)
        sharing.share_experts(replicas)
    ready.set_result(executor)
    files = weights_fingerprint(model, asked, copies=nodes > 1)
    _send(leader, digest=rank_digest(program, limits, model, files))
    follow(executor, step)


def _send(leader: socket.socket, **message: str) -> None:
    leader.sendall(json.dumps(message).encode() + b"\n")


def _hear(leader: socket.socket, frames: BinaryIO, ready: Future[RankExecutor]) -> None:
    """Take adapters while steps run; end this process when the leading rank closes its socket, whatever else runs."""
    try:
        obey_frames(frames, ready.result, lambda error: _send(leader, settled=error))
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
