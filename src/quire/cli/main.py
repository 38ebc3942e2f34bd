"""The `quire` command. Only what a subcommand needs is imported, so that --help answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence

from quire import __version__
from quire.util import startup as _startup  # noqa: F401  first: its import is where start-up's clock begins

# name -> (module, one line of help)
COMMANDS = {
    "serve": ("quire.cli.serve", "serve the OpenAI API over HTTP"),
    "generate": ("quire.cli.generate", "generate from a prompt"),
    "chat": ("quire.cli.chat", "talk to a model"),
    "convert": ("quire.cli.convert", "write a model as safetensors or GGUF, or in other numbers"),
    "inspect": ("quire.cli.inspect", "show what a model is, what it costs and what would be computed"),
    "verify": ("quire.cli.verify", "check a model's files: digests, damaged weights, parts that do not fit"),
    "bench": ("quire.cli.bench", "measure kernels, the engine, or a server"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 the model or request was refused, 2 bad usage."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not args or args[0] not in COMMANDS:
        parser.parse_args(args or ["--help"])
        return 0
    from quire.cli.options import Parser

    command = importlib.import_module(COMMANDS[args[0]][0])
    sub = Parser(prog=f"quire {args[0]}", description=command.__doc__)
    command.add_arguments(sub)
    options = sub.parse_args(args[1:])
    from quire.types import QuireError

    try:
        status = int(command.run(options))
        sys.stdout.flush()
        return status
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
    except ValueError as error:
        # a choice that cannot be met: the message starts with the field, which is the option's name
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_left():
            raise
    return 1


def _reader_left() -> bool:
    """Whether nobody reads what is printed any more, as under `| head`; the interpreter then says nothing about it."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="quire",
        description="LLM inference and serving: native CPU kernels, paged KV cache, the same bits whatever the load.",
        epilog=f"commands:\n{listing}\n\nquire COMMAND --help explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), help="what to do", metavar="COMMAND")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
