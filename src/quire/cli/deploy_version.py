"""Deploy a new version of a model in a running server with several, or go back. See docs/serving-models.md."""

from __future__ import annotations

import argparse
import os
from typing import Any

from quire.cli.running_server import add_server_options, ask_server
from quire.util.sizes import parse_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the model in requests")
    parser.add_argument(
        "path", nargs="?", help="the new version, as the server finds it: a folder, file or name"
    )
    parser.add_argument("--back", action="store_true", help="go back to the version before, which was kept")
    parser.add_argument(
        "--memory", type=parse_size, metavar="SIZE", help="its share; else that of the old one"
    )
    parser.add_argument(
        "--sha256", action="append", default=[], metavar="FILE=DIGEST", help="digest of a file; repeatable"
    )
    parser.add_argument("--canary", metavar="PROMPT", help="ask this before requests go there")
    parser.add_argument("--canary-text", metavar="TEXT", help="the greedy answer that the canary must get")
    parser.add_argument("--no-switch", action="store_true", help="leave it beside the old version")
    parser.add_argument("--swap", action="store_true", help="drain the old one first where both do not fit")
    parser.add_argument("--keep", action="store_true", help="keep the old one for an instant way back")
    add_server_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.back == (args.path is not None):
        raise ValueError("path: give the path of the new version, or --back")
    if args.back:
        made = ask_server(args, "POST", "/admin/models/back", {"name": args.name})
    else:
        made = ask_server(args, "POST", "/admin/models", _body(args))
    print(f"{made['id']}@{made['version']}: {made['state']}")
    return 0


def _body(args: argparse.Namespace) -> dict[str, Any]:
    path = os.path.abspath(args.path) if os.path.exists(args.path) else args.path
    body: dict[str, Any] = {
        "name": args.name, "path": path, "memory": args.memory, "switch": not args.no_switch, "swap": args.swap,
        "keep": args.keep,
    }  # fmt: skip
    for given in args.sha256:
        file, sign, digest = given.partition("=")
        if not sign:
            raise ValueError(f"sha256: {given!r} is not FILE=DIGEST")
        body.setdefault("sha256", {})[file] = digest
    if args.canary is not None:
        body["canary"] = {"prompt": args.canary, "text": args.canary_text}
    elif args.canary_text is not None:
        raise ValueError("canary_text: needs --canary")
    return body
