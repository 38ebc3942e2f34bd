"""Compare two result files: the ratio of every figure, second over first, with 95 % intervals.

Refuses to compare different work. If an interval contains 1, no difference is shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.benches.common import add_report_option, write_page

if TYPE_CHECKING:
    from quire.bench.compare import FigureChange


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="result file: the baseline")
    parser.add_argument("second", type=Path, help="result file compared with it")
    parser.add_argument("--all", action="store_true", help="include figures without a better direction")
    parser.add_argument("--force", action="store_true", help="compare different work anyway")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_report_option(parser, "write both results as one report with plots")


def run(args: argparse.Namespace) -> int:
    from quire.bench.compare import compare, differences
    from quire.bench.results import load

    first, second = load(args.first), load(args.second)
    changes = compare(first, second, force=args.force)
    if not args.all:
        changes = [change for change in changes if first.metrics[change.name].better != "neither"]
    write_page(args, first, second)
    if args.json:
        import dataclasses

        print(json.dumps([dataclasses.asdict(change) for change in changes]))
        return 0
    for line in differences(first, second):
        print(f"note: not the same work: {line}")
    print("\n".join(lines(changes, args.first.name, args.second.name)))
    return 0


def lines(changes: list[FigureChange], first: str, second: str) -> list[str]:
    """Format the changes as a table."""
    from quire.bench.text import aligned, figure

    table = [("", "unit", first, second, "ratio", "95 % interval", "")]
    for one in changes:
        interval = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "–" if one.ratio is None else f"{one.ratio:.3f}"
        table.append(
            (one.name, one.unit, figure(one.first), figure(one.second), ratio, interval, one.verdict)
        )
    return [line.rstrip() for line in aligned(table, left=(0, 1, 6))]
