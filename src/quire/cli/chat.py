"""Talk to a model. Type a message and press return; /clear starts over, /exit or end of input leaves."""

from __future__ import annotations

import argparse
import sys

from quire.cli.generate import engine_fields
from quire.cli.options import (
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    named_model,
    sampling_params,
)
from quire.cli.report import notice
from quire.types import RequestError
from quire.util.printable import printable_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", help="system message")
    parser.add_argument("--quiet", action="store_true", help="no progress and no memory report")
    add_sampling_options(parser)
    add_engine_options(parser, seed=False)


def run(args: argparse.Namespace) -> int:
    from quire.llm import LLM

    start = [{"role": "system", "content": args.system}] if args.system else []
    with LLM(
        named_model(args.model, quiet=args.quiet), progress=not args.quiet, **engine_fields(args)
    ) as llm:
        if not args.quiet:
            notice(llm)
        params = sampling_params(args, llm.default_params())
        messages = list(start)
        while (line := _ask()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                messages = list(start)
                continue
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            reply = ""
            try:
                for delta in llm.stream_chat(messages, params):
                    reply += delta.text
                    print(delta.text, end="", flush=True)
            except KeyboardInterrupt:
                pass  # what was said so far stays in the conversation
            except RequestError as error:
                messages.pop()
                print(f"quire: {printable_lines(str(error))}", file=sys.stderr)
                continue
            print()
            messages.append({"role": "assistant", "content": reply})
    return 0


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
