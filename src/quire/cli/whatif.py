"""Say what a recorded load would have been under other settings: its latencies, rates and goodput, with error bars.

The log is a file of `quire serve --record`, or the latest rows of a running server. It is simulated as it was and as it
would be; how far the first is from what was measured is part of the error bars."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from quire.cli.running_server import add_server_options

if TYPE_CHECKING:
    from quire.bench.simulated_arrivals import RecordedLoad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_options(parser)
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE",
        help="max_num_seqs=32, max_num_batched_tokens, num_blocks, scheduling_policy, enable_prefix_caching=off, "
        "rate=1.5 (load), replicas=2 (machines), data_parallel_size=2 (on this one), router=prefix, slo=…",
    )  # fmt: skip
    parser.add_argument(
        "--like", metavar="FILE",
        help="a log of a server with other threads, weights, cache types or drafts, of any load: fifty steps do",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="simulations of each (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_log_options(parser: argparse.ArgumentParser) -> None:
    """--log or --url, --last, --slo."""
    parser.add_argument("--log", metavar="FILE", help="a log; without it, that of the running server")
    add_server_options(parser)
    parser.add_argument(
        "--last", default="", metavar="TIME", help="only the requests of the last 30s, 10m, 1h of the log"
    )
    parser.add_argument(
        "--goodput", nargs="+", default=(), metavar="SLO", help="objectives in ms: ttft:500 tpot:50"
    )


def recorded_load(args: argparse.Namespace) -> RecordedLoad:
    """The load of --log, or of a running server. Raises LogError, SimulationError, ServerRefusedError, ValueError."""
    from pathlib import Path

    from quire.bench.simulated_arrivals import load_of_log
    from quire.cli.running_server import fetch_log
    from quire.steplog.log_files import read_log, read_rows

    last = seconds_of(args.last) if args.last else float("inf")
    log = read_log(Path(args.log)) if args.log is not None else read_rows(fetch_log(args), args.url)
    return load_of_log(log, last=last)


def seconds_of(text: str) -> float:
    """Seconds of a text like 90s, 10m, 1h or 2d. Raises ValueError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    try:
        value = float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        raise ValueError(f"last: {text!r} is not a time like 90s, 10m or 1h") from None
    if not 0 < value < 1e9:
        raise ValueError(f"last: {text!r} is out of range")
    return value


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from quire.bench.scenario import parse_settings
    from quire.bench.simulated_arrivals import load_of_log
    from quire.bench.what_if import lines, report, what_if
    from quire.objectives import parse_slo
    from quire.steplog.log_files import read_log

    if not 1 <= args.seeds <= 100:
        raise ValueError(f"seeds: {args.seeds} must be from 1 to 100")
    if not args.set and args.like is None:
        raise ValueError("set: --set NAME=VALUE or --like FILE is needed")
    settings = parse_settings(args.set)
    load = recorded_load(args)
    like = None if args.like is None else load_of_log(read_log(Path(args.like)))
    found = what_if(load, settings, parse_slo(args.goodput) if args.goodput else None, args.seeds, like)
    if args.json:
        print(json.dumps({"set": settings} | report(found, load, like)))
    else:
        said = [*([f"a server like that of {Path(args.like).name}"] if like else []), *args.set]
        print("\n".join(lines(found, load, ", ".join(said), like)))
    return 0
