"""Options that all benchmark commands share, and how they report a result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.bench.results import Result

BUSY_CPUS = 0.1  # timings are doubtful if other processes use more than this


def add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add("--json", action="store_true", help="print the result file's JSON instead of text")
    add("--save", "--output-json", type=Path, metavar="FILE", help="write the result file")


def add_report_option(parser: argparse.ArgumentParser, text: str = "write a report with plots") -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)


def add_trace_options(add: Callable[..., object]) -> None:
    """A trace of requests; `add` is the method of a parser, or of a group of it."""
    add("--trace", type=Path, metavar="PATH",
        help="requests of a trace: Mooncake, Alibaba, Azure, BurstGPT, ServeGen, or lengths")  # fmt: skip
    add("--trace-format", metavar="timed-trace[:TOKENS[:SECONDS]]",
        help="JSON lines are a timed trace of vLLM: tokens of a hash (default: 16), unit of times (1)")  # fmt: skip


def write_page(args: argparse.Namespace, *results: Result) -> None:
    """Write results as a page with plots, if requested."""
    if args.html is not None:
        from quire.bench.html_report import write_report

        write_report(results, args.html)


def finish(args: argparse.Namespace, result: Result, text: Sequence[str]) -> None:
    """Save and print a result; `text` is the readable form, printed before the machine's limits."""
    from quire.bench import limits, results

    if args.save is not None:
        results.save(result, args.save)
    if args.json:
        print(results.to_json(result))
        return
    print("\n".join(text))
    if result.limits is not None:
        print("\n".join(["", *limits.lines(result.limits)]))
    env, noise = result.environment, result.noise
    print(f"  {env.cpu}, {env.usable_cores} of {env.cores} cores{', virtual' if env.virtual else ''}")
    if noise is not None and noise.others + noise.stolen > BUSY_CPUS:
        print(
            f"note: other processes used {noise.others:.2f} CPUs during the run, and the hypervisor {noise.stolen:.2f}",
            file=sys.stderr,
        )


def shown(model: str) -> str:
    """Return the name of a model for a result, without folders of this machine."""
    return Path(model).name if "/" in model and Path(model).exists() else model


def count(text: str) -> int:
    """Argument type: an integer of at least one."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
