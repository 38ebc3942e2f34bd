"""End the engine of a model in a running server with several; the next request loads it again."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from quire.cli.running_server import add_server_options, ask_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model in requests, or a version such as chat@2")
    parser.add_argument(
        "--now", action="store_true", help="end running requests with an error; else they may finish"
    )
    add_server_options(parser)


def run(args: argparse.Namespace) -> int:
    mode = "abort" if args.now else "wait"
    ask_server(args, "POST", f"/sleep?level=2&hold=false&mode={mode}&model={quote(args.name, safe='')}")
    print(f"{args.name}: stopped")
    return 0
