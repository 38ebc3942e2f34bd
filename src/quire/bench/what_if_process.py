"""What-if in a process of its own: python -m quire.bench.what_if_process, with a line of JSON and a log as its input.

The line has `set` (what-if; without it the simulator is checked against the log), `last` in seconds, `slo`, `seeds`,
`least` requests of a check, the limits `memory` in bytes and `seconds` of CPU, and in `like` the bytes of a second log
behind the first, of the server that the requests are to meet. It runs when no other process wants
the processor. Writes a JSON object: the `report` of the what-if, the `errors` of a check, or an `error`; and the
`seconds` of CPU that it took.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

from quire.bench.simulated_arrivals import load_of_log
from quire.bench.what_if import errors, report, what_if
from quire.objectives import parse_slo
from quire.steplog.log_files import read_rows
from quire.types import QuireError
from quire.util.platform import end_with_parent, resident_exactly

_LEAST_STEPS = 200  # of a fit that is worth a check


def main() -> None:
    """Entry point of the process."""
    end_with_parent(os.getppid())
    _be_idle()
    line, log = sys.stdin.buffer.readline(), sys.stdin.buffer.read()
    asked = json.loads(line)
    _limit(asked["memory"], asked["seconds"])
    try:
        answer = _check(asked, log) if asked["set"] is None else _what_if(asked, log)
    except (QuireError, ValueError) as error:
        answer = {"error": str(error)}
    except MemoryError:
        answer = {"error": "the simulation needs more memory than --simulator-memory"}
    print(json.dumps(answer | {"seconds": time.process_time()}))


def _be_idle() -> None:
    """Give way to every other process."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _limit(memory: int, seconds: int) -> None:
    """Bound what this process may have: its pages, those of the code that it shares with others included."""
    taken = resident_exactly()
    for kind, most in (
        (resource.RLIMIT_DATA, max(0, memory - taken) + _data_bytes()),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))


def _data_bytes() -> int:
    """What counts for RLIMIT_DATA so far."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


def _what_if(asked: dict[str, Any], log: bytes) -> dict[str, Any]:
    first = len(log) - asked.get("like", 0)
    load = load_of_log(read_rows(log[:first]), last=asked["last"])
    like = load_of_log(read_rows(log[first:])) if first < len(log) else None
    slo = parse_slo(asked["slo"]) if asked["slo"] else None
    return report(what_if(load, asked["set"], slo, asked["seeds"], like), load, like)


def _check(asked: dict[str, Any], log: bytes) -> dict[str, Any]:
    """Nothing where the log has too few requests or steps."""
    load = load_of_log(read_rows(log), last=asked["last"])
    if len(load.records) < asked["least"] or load.fit.steps < _LEAST_STEPS:
        return {"errors": {}, "requests": len(load.records)}
    return {"errors": errors(load, asked["seeds"]), "requests": len(load.records)}


if __name__ == "__main__":
    main()
