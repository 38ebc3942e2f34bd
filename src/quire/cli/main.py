"""The `quire` command. It imports only the modules of the subcommand, so that --help answers at once."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire import __version__
from quire.util import startup_spans as _startup  # noqa: F401  first: its import is where start-up's clock begins
from quire.util.standard_error import say

if TYPE_CHECKING:
    from quire.cli.parser import Parser

# name -> (module, one line of help)
COMMANDS = {
    "serve": ("quire.cli.serve", "serve the OpenAI API over HTTP"),
    "generate": ("quire.cli.generate", "generate from a prompt"),
    "chat": ("quire.cli.chat", "chat with a model"),
    "run": ("quire.cli.run", "chat with a model by its name, fetching it if it is not here"),
    "pull": ("quire.cli.pull", "fetch a model from a hub into the store"),
    "list": ("quire.cli.list_models", "list the models on this machine"),
    "show": ("quire.cli.show", "show a model's source, files and contents"),
    "rm": ("quire.cli.rm", "remove models from the store"),
    "ps": ("quire.cli.ps", "list the models of a running server"),
    "top": ("quire.cli.top", "watch the requests, steps and cache of a running server"),
    "stop": ("quire.cli.stop", "end the engine of a model in a running server"),
    "deploy": (
        "quire.cli.deploy_version",
        "put a new version of a model in place of another in a running server",
    ),
    "batch": ("quire.cli.batch", "run a file of requests in OpenAI's batch format"),
    "convert": ("quire.cli.convert", "convert a model to safetensors or GGUF, or to another number format"),
    "calibrate": ("quire.cli.calibrate", "find the scales of an fp8 KV cache on a text"),
    "quantize": ("quire.cli.quantize", "make a quantized checkpoint: GPTQ, AWQ, SmoothQuant, FP8, GGUF"),
    "inspect": ("quire.cli.inspect", "show what a model contains, costs and computes"),
    "prune": ("quire.cli.prune", "make a smaller or sparser checkpoint of a model"),
    "eval": ("quire.cli.eval", "measure a model's quality: perplexity, loss against another, tasks"),
    "tokenize": ("quire.cli.tokenize", "show the tokens of a text, or the text of tokens"),
    "router": ("quire.cli.router", "pass requests on to servers, each to the one that answers it soonest"),
    "kv-server": ("quire.cli.kv_server", "keep KV blocks in memory for engines that share them"),
    "stack": ("quire.cli.stack", "run a router, servers and their tiers on this machine, from one file"),
    "tenants": ("quire.cli.tenants", "make keys of tenants, and check a file of tenants"),
    "verify": ("quire.cli.verify", "check a model's files: digests, damaged weights, mismatched parts"),
    "train-router": ("quire.cli.train_router", "train what tells easy requests from hard ones, for a router"),
    "train-draft": ("quire.cli.train_draft", "train a draft for speculative decoding"),
    "calc": ("quire.cli.calc", "compute a bound, a size or a time from numbers, a model or a device"),
    "doctor": ("quire.cli.doctor", "look for what slows this machine or a running server down"),
    "explain": ("quire.cli.explain", "say where the time of a request went"),
    "cache": ("quire.cli.cache", "say why prompts were not in the prefix cache"),
    "replay": ("quire.cli.replay", "run a log again, and compare every step"),
    "sim": ("quire.cli.sim", "simulate a server: the real scheduler on a virtual clock"),
    "plan": ("quire.cli.plan", "plan a deployment: what fits, how it is spread, how many replicas"),
    "advise": ("quire.cli.advise", "walk the decision tree of a deployment"),
    "cost": ("quire.cli.deploy_cost", "say what it costs to serve a model, or what a running server costs"),
    "tune": ("quire.cli.tune", "find the settings that serve a recorded load best"),
    "whatif": ("quire.cli.whatif", "say what a recorded load would be under other settings"),
    "reference": ("quire.cli.reference", "show an algorithm of inference in plain numpy"),
    "learn": ("quire.cli.learn", "read and run a lesson about inference"),
    "bench": ("quire.cli.bench", "measure kernels, the engine, or a server"),
    "config": ("quire.cli.config_explain", "explain the options: effect, default, what they move"),
    "completions": ("quire.cli.completions", "print a completion script for a shell"),
}
# The result file of a benchmark contains its command line, which must therefore be complete.
READ_ENVIRONMENT = ("serve", "generate", "chat", "run", "convert", "calibrate", "inspect", "verify", "eval")
_ENVIRONMENT = (
    "Each option has an environment variable: QUIRE_MAX_MODEL_LEN is the default of --max-model-len."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 the model or request was refused, 2 bad usage."""
    _open_closed_streams()
    _buffer_output()
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    if not args or args[0] not in COMMANDS:
        return _no_command(args)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would cost as much as numpy's import
    parser = command_parser(args[0])
    options = parser.parse_args(args[1:])
    if getattr(options, "quiet", False):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    else:
        _name_unknown_variables(args[0], parser)
    from quire.types import QuireError

    try:
        status = int(_command(args[0]).run(options))
        sys.stdout.flush()
        return status
    except QuireError as error:
        say(f"quire: {error}")
    except ValueError as error:
        # an invalid option: the message starts with the field, which is the name of the option
        say(f"quire: {error}")
        return 2
    except KeyboardInterrupt:
        say("")
        return 130
    except (RuntimeError, BlockingIOError) as error:
        if not _refused_thread(error):
            raise
        print(
            "quire: cannot start another thread or process: raise the process limit (ulimit -u, or the pids limit of"
            " the container), or lower --threads",
            file=sys.stderr,
        )
    except BrokenPipeError:
        if not _reader_left():
            raise
    return 1


def _refused_thread(error: BaseException) -> bool:
    """Whether fork or the start of a thread failed at a process limit."""
    return isinstance(error, BlockingIOError) or "can't start new thread" in str(error)


def command_parser(name: str) -> Parser:
    """Return the parser of a command, with its options."""
    from quire.cli.parser import Parser

    command, environment = _command(name), name in READ_ENVIRONMENT
    parser = Parser(
        prog=f"quire {name}",
        description=command.__doc__,
        environment=environment,
        epilog=_ENVIRONMENT if environment else None,
    )
    command.add_arguments(parser)
    return parser


def _command(name: str) -> Any:
    return importlib.import_module(COMMANDS[name][0])


def _no_command(args: list[str]) -> int:
    """Handle `quire` without a command: print the help, or the error."""
    if args and not args[0].startswith("-"):
        from quire.cli.parser import nearest

        say(
            f"quire: unknown command: {args[0]}{nearest(args[0], COMMANDS)}\n(quire --help lists the commands)"
        )
        return 2
    _parser().parse_args(args or ["--help"])
    return 0


def _name_unknown_variables(name: str, parser: Parser) -> None:
    """Warn of variables that look like options but belong to no command."""
    from quire.config.env import VARIABLES, option_variables

    if name not in READ_ENVIRONMENT:
        return
    found, known = option_variables(), set(parser.variables())
    if found.keys() <= known:
        return
    for other in READ_ENVIRONMENT:
        known |= command_parser(other).variables().keys()
    from quire.cli.parser import nearest

    for variable in sorted(found.keys() - known):
        hint = nearest(variable, {*known, *VARIABLES})
        say(f"quire: the environment variable {variable} is unknown and ignored{hint}")


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device; otherwise the next open file would take their place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  as long as the process lasts


def _buffer_output() -> None:
    """Give standard output a buffer where PYTHONUNBUFFERED took it away. Without one the interpreter writes a text
    once, and loses what a pipe does not take then, as when a signal interrupts it."""
    text = sys.__stdout__
    if text is None or sys.stdout is not text or not isinstance(text.buffer, io.RawIOBase):
        return
    encoding, errors = text.encoding, text.errors
    raw = text.detach()  # else it would be closed with the first of both
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=True)
    setattr(sys, "__stdout__", sys.stdout)  # noqa: B010  what keeps it as long as the process lasts


def _reader_left() -> bool:
    """Whether the reader of standard output has gone, as under `| head`; silences the interpreter about it."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="quire",
        description="LLM inference and serving: native CPU kernels, paged KV cache, the same bits whatever the load.",
        usage="quire COMMAND [OPTION …]",
        epilog=f"commands:\n{listing}\n\nquire help COMMAND explains a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
