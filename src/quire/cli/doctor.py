"""Look for what slows this machine or a running server down, with the numbers that show it, and what to try."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.running_server import add_client_key, fetch_metrics

if TYPE_CHECKING:
    from quire.bench.doctor.cause import Cause
    from quire.bench.metrics_page import MetricsPage

_WATCHED = 1.0  # seconds, without a server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", help="a server, for instance http://127.0.0.1:8000 (default: none)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S",
                        help="watch the server for so long (default: 10)")  # fmt: skip
    parser.add_argument(
        "--measure", action="store_true", help="measure the memory bandwidth too: a busy second"
    )
    add_client_key(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, also for bug reports")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when there is a problem."""
    import msgspec

    from quire.bench.doctor.live_rules import diagnose, where_to_look
    from quire.bench.doctor.machine_rules import examine, machine_state
    from quire.bench.doctor.metrics_window import Window
    from quire.bench.environment import Watch, environment
    from quire.config.env import cache_folder

    if not 0.5 <= args.seconds <= 3600:
        raise ValueError(f"seconds: {args.seconds:g} must be from 0.5 to 3600")
    before, began, watch = server_page(args), time.monotonic(), Watch()
    _wait(args.seconds if args.url else _WATCHED, quiet=args.json)
    noise, after, ended = watch.stop(), server_page(args), time.monotonic()
    facts = machine_state(noise, cache_folder() or Path.home(), _bandwidth() if args.measure else 0.0)
    groups, look = {"machine": list(examine(facts))}, None
    if args.url:
        window = Window(before, after, ended - began)
        groups["server"], look = diagnose(window), where_to_look(window)
    if args.json:
        report: dict[str, Any] = {"environment": environment(), "facts": facts, **groups, "look": look}
        print(msgspec.json.encode(report).decode())
    else:
        if look is not None:
            print(
                f"95 % of first tokens within {look['ttft_p95_ms']:g} ms, of gaps within {look['itl_p95_ms']:g} ms: "
                f"{look['says']}"
            )
        for group, found in groups.items():
            print(f"{group}: {'nothing found' if not found else ''}".rstrip())
            for one in found:
                print(_lines(one))
    return int(any(one.problem for found in groups.values() for one in found))


def _lines(cause: Cause) -> str:
    numbers = ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
        for name, value in cause.evidence.items()
    )
    tries = "".join(f"\n      try {suggestion}" for suggestion in cause.suggestions)
    return f"  {'!' if cause.problem else '-'} {cause.name}: {cause.says}\n      {numbers}{tries}"


def server_page(args: argparse.Namespace) -> MetricsPage:
    """The metrics of the server that is asked about; nothing without one. Raises ServerRefusedError."""
    from quire.bench.metrics_page import read_page

    return read_page(fetch_metrics(args)) if args.url else {}


def _wait(seconds: float, *, quiet: bool) -> None:
    end, shown = time.monotonic() + seconds, not quiet and sys.stderr.isatty()
    while (left := end - time.monotonic()) > 0:
        if shown:
            print(f"\rwatching, {left:.0f} s to go ", end="", file=sys.stderr, flush=True)
        time.sleep(min(1.0, left))
    if shown:
        print("\r\033[K", end="", file=sys.stderr)


def _bandwidth() -> float:
    """Bytes a second that all threads read from memory."""
    from quire.bench.limits import LimitsProbe
    from quire.config import env

    probe = LimitsProbe(env.isa(), 0)
    probe.sample()
    return probe.samples[0].bandwidth
