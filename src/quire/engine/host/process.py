"""The engine process: python -m quire.engine.host.process FD PARENT_PID [CORES], started by engine/host.

CORES: the file by which the engines of a server share the cores (core_shares). One that starts or ends takes its part,
as one that computes does: the others' threads would else meet at barriers, and wait for the one that lost its core.

It depends on its parent: it ends when the socket closes, and on Linux the kernel ends it with its parent. The parent
handles interrupts and termination signals: it drains, then sends Stop.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":  # the imports below take most of the start-up time
    gc.disable()  # imported objects are not garbage
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would disturb the kernels
    from quire.engine.host import core_shares  # before them: they are what disturbs the steps of others

    _cores = core_shares.CoreShares(sys.argv[3]) if len(sys.argv) > 3 else None
    if _cores is not None:
        _cores.begin()
else:  # whoever has it run calls main()
    _cores = None

from quire.engine.build.adapter_room import with_room_for
from quire.engine.build.assemble import Built, build
from quire.engine.build.disk_tiers import engine_fingerprint
from quire.engine.build.load_weights import weights_fingerprint
from quire.engine.build.opening import open_model
from quire.engine.host.borrowing import RoomInUse
from quire.engine.host.channel import Channel, ChannelClosedError
from quire.engine.host.core_shares import CoreShares
from quire.engine.host.loop import EngineLoop
from quire.engine.host.messages import Fatal, Load, LoadProgress, Ready, Stop
from quire.executor.expert_replicas import idle_rounds
from quire.types import QuireError
from quire.util.numa import stay_on
from quire.util.platform import end_with_parent
from quire.util.startup_spans import Startup

_PROGRESS_SECONDS = 0.1


def serve(
    sock: socket.socket, lost: Callable[[str], None] = lambda _: None, cores: CoreShares | None = None
) -> None:
    """Load the model of the first command, then run its engine until a Stop command or until the parent goes away.

    `lost`: called once when another rank of the model has ended or hangs, with the reason. `cores`: its part of the
    cores, which it takes while it loads, computes, and ends.
    """
    channel, startup = Channel(sock), Startup("engine")
    try:
        first = channel.receive(wait=True)
        if any(isinstance(command, Stop) for command in first):
            return
        if not isinstance(first[0], Load) or len(first) > 1:
            raise TypeError(f"{type(first[-1]).__name__} arrived before the engine was ready")
        built = _load(first[0], channel, startup, lost)
        if built is None:
            return
        if cores is not None:
            cores.end()
            cores.bind(built.config.threads, built.executor.use_threads)
        try:
            startup.mark("ready")
            channel.send(_ready(built, startup, named=first[0].named))
            room = _room(built, channel) if first[0].lent is not None else None
            with idle_rounds(built.executor, built.sharing, lost) as idle:
                EngineLoop(built.core, channel, cores, built.give_pages, room, idle).run()
        finally:
            if cores is not None:
                cores.bind(1, lambda _: None)  # ranks may wait for a step that has failed: they hear no more
                cores.begin()  # until the process is gone
            built.close()
    except ChannelClosedError:
        pass
    finally:
        channel.close()


def _load(command: Load, channel: Channel, startup: Startup, lost: Callable[[str], None]) -> Built | None:
    due = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due or done == total:
            due = now + _PROGRESS_SECONDS
            channel.send(LoadProgress(done, total))

    stay_on(command.near)
    try:
        model = open_model(command.folder, tokenizer=False, startup=startup)
        config = with_room_for(command.config, command.adapters, model.facts.spec)
        return build(
            model, config, progress, beside=command.beside, startup=startup, lent=command.lent or 0, lost=lost,
            replicas=command.replicas,
        )  # fmt: skip
    except (QuireError, ValueError, OSError, MemoryError) as error:
        channel.send(Fatal(type(error).__name__, str(error)))
        return None


def _room(built: Built, channel: Channel) -> RoomInUse:
    """What other models may lend it, and borrow of it."""
    executors = [each for each in (built.executor, built.draft) if each is not None]
    kv = built.plan.parts["kv"]
    room = RoomInUse(channel, built.core.scheduler.pool, kv, executors, built.core.swap)
    room.begin()
    return room


def _ready(built: Built, startup: Startup, *, named: bool) -> Ready:
    bits = engine_fingerprint(built.model, built.config, [built.program], copies=True) if named else b""
    return Ready(
        scheduler=built.core.scheduler.config,
        vocab=built.program.vocab,
        eos_token_ids=tuple(built.model.facts.generation.eos_token_ids),
        notices=tuple(built.notices()),
        memory_bound=built.plan.bound,
        memory_parts=dict(built.plan.parts),
        memory_lines=tuple(built.plan.lines()),
        memory_areas=tuple(built.areas()),
        startup=startup.spans,
        ids=built.program.ids,
        embed_dim=built.embed_dim,
        blocks="" if built.core.tiers is None else built.core.tiers.fingerprint.hex(),
        weights=weights_fingerprint(built.model, built.config.asked, copies=True),
        bits=bits.hex(),
        shares=built.sharing is not None,
    )


def main() -> None:
    """Entry point of the engine process."""
    gc.freeze()  # excludes modules from garbage collection
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent)
    with socket.socket(fileno=fd) as sock:
        serve(sock, _end, _cores)


def _end(reason: str) -> None:
    """End the process at once: the supervisor starts it again, with all ranks."""
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
