"""Say why prompts were not in the prefix cache: of one request, or of the latest ones of a key together."""

from __future__ import annotations

import argparse
import json
from urllib.parse import quote

from quire.cli.explain import miss_lines
from quire.cli.running_server import add_client_options, ask_as_client
from quire.util.printable import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=("explain", "top"), help="explain ID: one request; top: what lost most"
    )
    parser.add_argument("id", nargs="?", help="the id of an answer")
    add_client_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.steplog.misses import ADVICE

    if args.what == "explain":
        if args.id is None:
            raise ValueError("id: `quire cache explain` needs the id of an answer")
        found = ask_as_client(args, f"/v1/requests/{quote(args.id, safe='')}/explain")["cache"]
        nothing = "nothing was missed: all whole blocks of the prompt were cached"
        lines = miss_lines(found) if found else [nothing]
        if found and found["changes"]:
            lines.append(f"  try     {ADVICE.get(found['changes'], '')}")
    else:
        found = ask_as_client(args, "/v1/cache/misses")
        lost = ", ".join(f"{tokens} {kind}" for kind, tokens in found["lost_tokens"].items())
        lines = [f"tokens of prompts that were not in the cache: {lost or 'none'}"]
        for one in found["templates"]:
            lines += [
                f"{one['requests']:>5} requests lost {one['lost_tokens']} tokens: {one['changes']} changes at token "
                f"{one['differs_at']}; {ADVICE.get(one['changes'], '')}",
                f"        {one['ours']!r}",
            ]
    print(json.dumps(found) if args.json else "\n".join(map(printable, lines)))
    return 0
