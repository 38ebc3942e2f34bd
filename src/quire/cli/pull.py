"""Fetch a model into the store: from a hub, or from a folder or GGUF file. Prints its path.

The name is organisation/name, with the type or name of a GGUF file after ":" (organisation/name:Q4_K_M) and a branch,
tag or commit after "@". An interrupted pull goes on where it stopped. HF_ENDPOINT is the address of a mirror, HF_TOKEN
the token for private and gated models, QUIRE_STORE the folder of the store.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options import size
from quire.types import CheckpointError, RequestError
from quire.util.progress import ByteProgress
from quire.util.sizes import format_size, parse_size
from quire.util.standard_error import say

if TYPE_CHECKING:
    from quire.store.pulling import Pulled
    from quire.store.references import ModelReference

_MAX_CONNECTIONS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="hub name, folder or GGUF file")
    parser.add_argument(
        "--quantization", metavar="TYPE", help="the GGUF file of this type, as after a colon: Q4_K_M"
    )
    parser.add_argument(
        "--revision", metavar="R", help="branch, tag or commit, as after an @ (default: main)"
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="name of a folder or file in the store (default: that of the folder or file)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but the path")
    add_pull_options(parser)


def add_pull_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that fetch models."""
    group = parser.add_argument_group("store")
    group.add_argument(
        "--store-limit",
        type=size,
        metavar="SIZE",
        help="refuse what makes the store larger (default: QUIRE_STORE_LIMIT)",
    )
    group.add_argument(
        "--connections", type=int, default=4, metavar="N",
        help=f"connections that fetch at once, 1 to {_MAX_CONNECTIONS} (default: 4)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from quire.store.references import ModelReference

    path = Path(args.model).expanduser()
    if path.exists():
        if args.quantization or args.revision:
            raise RequestError(
                "model", f"{path} is a file or folder, which has no --quantization or --revision"
            )
        pulled = _pull(args, ModelReference.parse(args.name or _own_name(path)), path)
    else:
        if args.name is not None:
            raise RequestError(
                "name", f"{args.model} is of a hub, and keeps its name; --name is for folders and files"
            )
        pulled = pull_named(args, _reference(args))
    print(pulled.path)
    return 0


def pull_named(args: argparse.Namespace, reference: ModelReference) -> Pulled:
    """Fetch a model of the hub, with the options of `add_pull_options`. Raises CheckpointError."""
    return _pull(args, reference, None)


def _pull(args: argparse.Namespace, reference: ModelReference, path: Path | None) -> Pulled:
    from quire.store.model_store import ModelStore
    from quire.store.pulling import PullOptions, pull, pull_local

    if not 1 <= args.connections <= _MAX_CONNECTIONS:
        raise RequestError("connections", f"{args.connections} is not in [1, {_MAX_CONNECTIONS}]")
    with ByteProgress(f"pulling {reference}", enabled=not args.quiet) as bar:
        tell = (lambda _: None) if args.quiet else (lambda text: say(f"quire: {text}"))
        limit = _limit() if args.store_limit is None else args.store_limit
        options = PullOptions(args.connections, limit, bar, tell)
        store = ModelStore()
        pulled = (
            pull(store, reference, options) if path is None else pull_local(store, path, reference, options)
        )
    if not args.quiet:
        say("\n".join(f"quire: {line}" for line in _summary(pulled)))
    return pulled


def _limit() -> int | None:
    """QUIRE_STORE_LIMIT in bytes. Raises ValueError naming the variable."""
    text = os.environ.get("QUIRE_STORE_LIMIT")
    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise ValueError(f"QUIRE_STORE_LIMIT: {error}") from None


def _summary(pulled: Pulled) -> list[str]:
    files = pulled.manifest.files
    done = f"{pulled.manifest.reference}: {len(files)} files, {format_size(pulled.manifest.size)}"
    if pulled.fetched:
        rate = pulled.fetched / max(pulled.seconds, 1e-3)
        done += f"; {format_size(pulled.fetched)} fetched in {pulled.seconds:.1f} s ({format_size(rate)}/s)"
    lines = [f"{done}, verified"]
    if pulled.freed.files:
        lines.append(f"the version before has freed {format_size(pulled.freed.size)}")
    return lines


def _reference(args: argparse.Namespace) -> ModelReference:
    from quire.store.references import ModelReference

    found = ModelReference.parse(args.model)
    for option, given, text in (
        ("quantization", found.tag, args.quantization), ("revision", found.revision, args.revision)
    ):  # fmt: skip
        if text and given and text != given:
            raise RequestError(option, f"{text} contradicts {given} in {args.model}")
    tag, revision = args.quantization or found.tag, args.revision or found.revision
    return ModelReference.parse(f"{found.name}{tag and f':{tag}'}{revision and f'@{revision}'}")


def _own_name(path: Path) -> str:
    """The name of a folder or file, as far as a name of the store can have it."""
    name = path.resolve().name.removesuffix(".gguf")
    try:
        from quire.store.references import ModelReference

        return str(ModelReference.parse(name))
    except CheckpointError:
        raise RequestError("name", f"{name} cannot be a name in the store; choose one with --name") from None
