"""List the models of a running server with several, their versions, states and memory."""

from __future__ import annotations

import argparse
import json

from quire.cli.running_server import add_server_options, ask_server
from quire.util.printable import printable
from quire.util.sizes import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    found = ask_server(args, "GET", "/admin/models")
    if args.json:
        print(json.dumps(found))
        return 0
    current = set(found["current"].values())
    rows = [("NAME", "STATE", "MEMORY", "PATH", "")]
    for of, body in found["versions"].items():
        rows.append(
            (of, body["state"], format_size(body["memory"]), body["root"], "current" if of in current else "")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(printable(line.rstrip()))
    print(f"\nfree: {format_size(found['free'])}")
    return 0
