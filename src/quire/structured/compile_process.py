"""Compiles grammars that may be hostile: python -m quire.structured.compile_process FD PARENT APART.

`pool` starts it. Its address space and the processor time of each grammar are limited by the kernel, which ends it in
the middle of whatever it does. It takes what others leave of the processors, or, if APART is 1, a tenth of a busy one.
It ends with its parent, and reads asks from a socket, one at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys

from quire.structured.ask import GrammarError, StructuredOutput
from quire.structured.compile_bounds import PROCESS_BYTES
from quire.util.platform import end_with_parent, resident_bytes

# A process that has kept so much makes room for a new one.
_GROWN = 3 * PROCESS_BYTES // 4
_NICE = 10  # a tenth of a busy processor
_HEAD = struct.Struct("<I")


def send(sock: socket.socket, data: bytes) -> None:
    """Send a JSON text behind its length."""
    sock.sendall(_HEAD.pack(len(data)) + data)


def receive(sock: socket.socket) -> bytes:
    """The next text. Raises EOFError when the other side has gone, TimeoutError after the socket's timeout."""
    (size,) = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 2**16))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _answer(values: dict[str, object]) -> dict[str, object]:
    """What `pool` makes of an ask: a source and what was dropped, or the field and message of a refusal."""
    from quire.structured.compile import compile_grammar

    try:
        made = compile_grammar(StructuredOutput(**values))  # type: ignore[arg-type]
    except GrammarError as error:
        return {"field": error.field, "message": error.message}
    except MemoryError:
        return {"memory": True}
    return {"source": made.grammar.source, "dropped": made.dropped, "seconds": made.seconds}


def _limit_memory() -> None:
    """Let the address space grow until the resident memory could reach its limit."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = mapped + max(0, PROCESS_BYTES - resident_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [one for one in (limit, soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))


def _lower_priority(apart: bool) -> None:
    if not apart and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return
    os.nice(max(0, _NICE - os.nice(0)))
    # With sched_autogroup, priorities count within a session, and sessions get equal shares unless they have one too.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(_NICE))


def main() -> None:
    """Entry point of the process."""
    fd, parent, apart = map(int, sys.argv[1:4])
    seconds = float(sys.argv[4])  # of processor time for a grammar
    end_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Before the limits, which are for what a grammar adds.
    for module in ("llguidance", "quire.structured.compile", "quire.structured.json_schema"):
        importlib.import_module(module)
    _limit_memory()
    _lower_priority(bool(apart))  # a start takes a tenth of a second, which a busy machine would make many
    with socket.socket(fileno=fd) as sock, contextlib.suppress(EOFError, ConnectionError):
        send(sock, b"")
        grown = False
        while not grown:
            values = json.loads(receive(sock))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            answer = _answer(values)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(sock, json.dumps(answer).encode())
            grown = "memory" in answer or resident_bytes() > _GROWN


if __name__ == "__main__":
    main()
