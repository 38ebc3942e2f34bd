"""Write result files as one HTML page with plots: no scripts, no external resources, light and dark."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="result file of quire bench")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="page to write")


def run(args: argparse.Namespace) -> int:
    from quire.bench.html_report import write_report
    from quire.bench.results import load

    write_report([load(path) for path in args.results], args.output)
    return 0
