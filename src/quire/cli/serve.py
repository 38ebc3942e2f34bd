"""Serve the OpenAI API over HTTP. docs/server.md explains every option and route."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.elsewhere import ALWAYS, CALLED, REFUSED, explain
from quire.cli.options import add_config_options, add_model_argument, named_model, nearest, value_type
from quire.config.schema import SIZES, EngineConfig
from quire.config.serving import ServingConfig
from quire.types import CheckpointError
from quire.util.platform import available_memory
from quire.util.strict_json import parse_json_object

if TYPE_CHECKING:
    from quire.engine.spawn import Spawned

_EXTRA = ("config", "gpu_memory_utilization", "model")
# Options that say the same thing in two ways: one source may give only one side.
_EXCLUSIVE = (({"gpu_memory_utilization"}, {"memory"}), ({"uds"}, {"host", "port"}))


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        flag = rest[-1]
        parser.error(f"{flag} {explain(flag.removeprefix('--'))}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, default=argparse.SUPPRESS)
    parser.add_argument(
        "--config", metavar="FILE", help="options from a TOML or JSON file; those of the command line win"
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=argparse.SUPPRESS, metavar="F",
        help="--memory as a share of what is available",
    )  # fmt: skip
    for name in (*REFUSED, *ALWAYS, *CALLED):
        parser.add_argument(
            f"--{name}", nargs="?", action=_Refuse, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    add_config_options(parser, EngineConfig, "engine", explicit_only=True)
    add_config_options(parser, ServingConfig, "server", explicit_only=True)


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name != "config"}
    model, engine_config, serving = settings(
        given, {} if args.config is None else read_config(Path(args.config))
    )
    return _serve(model, engine_config, serving)


def settings(given: dict[str, Any], file: dict[str, Any]) -> tuple[str, EngineConfig, ServingConfig]:
    """The model and its configs from the command line and a config file; the command line wins.

    Raises ValueError naming the option that contradicts another, or is out of range.
    """
    for sides in _EXCLUSIVE:
        for source, options in (("command line", given), ("config file", file)):
            if all(side & options.keys() for side in sides):
                names = " and ".join(sorted(set.union(*sides) & options.keys()))
                raise ValueError(f"{names}: the {source} gives both; give one")
        if any(side & given.keys() for side in sides):
            file = {name: value for name, value in file.items() if name not in set.union(*sides)}
    options = file | given
    share = options.pop("gpu_memory_utilization", None)
    if share is not None:
        if not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: {share:g} is not in (0, 1]")
        options["memory"] = int(share * available_memory())
    model = named_model(options.pop("model", None))
    engine = {f.name for f in dataclasses.fields(EngineConfig)}
    chosen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    return (
        model,
        EngineConfig(**{name: value for name, value in chosen.items() if name in engine}),
        ServingConfig(**{name: value for name, value in chosen.items() if name not in engine}),
    )


def read_config(path: Path) -> dict[str, Any]:
    """The options of a TOML or JSON file, by field name. Raises ValueError for anything that is not an option."""
    try:
        data = path.read_bytes()
        json_file = path.suffix != ".toml"
        values: dict[str, Any] = (
            parse_json_object(data, path.name) if json_file else tomllib.loads(data.decode())
        )
    except (OSError, ValueError, CheckpointError) as error:
        raise ValueError(f"config: {path}: {error}") from None
    known = {f.name: f for schema in (EngineConfig, ServingConfig) for f in dataclasses.fields(schema)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known and name not in _EXTRA[1:]:
            why = explain(name.replace("_", "-")) or f"is unknown{nearest(name, [*known, *_EXTRA[1:]])}"
            raise ValueError(f"config: {path}: {key!r} {why}")
        if name in found:
            raise ValueError(f"config: {path}: {key!r} is given twice")
        found[name] = _checked(key, value, known.get(name), path)
    return found


def _checked(key: str, value: Any, field: dataclasses.Field[Any] | None, path: Path) -> Any:
    """A file's value as its option wants it."""
    if field is None:
        kind: Any = str if key == "model" else float
    else:
        kind = bool if isinstance(field.default, bool) else value_type(field)
    if field is not None and field.default == ():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in values):
            return values
    elif field is not None and field.name in SIZES and isinstance(value, str):
        return _size(key, value, path)
    elif kind is float and type(value) in {int, float}:
        return float(value)
    elif type(value) is (int if field is not None and field.name in SIZES else kind):
        return value
    raise ValueError(f"config: {path}: {key}: {value!r} is not of the right type")


def _size(key: str, text: str, path: Path) -> int:
    from quire.util.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"config: {path}: {key}: {error}") from None


def _serve(model: str, config: EngineConfig, serving: ServingConfig) -> int:
    from quire.engine.spawn import Spawned

    with closing(Spawned()) as spawned:  # its imports take as long as ours: they run side by side
        return _serve_with(spawned, model, config, serving)


def _serve_with(spawned: Spawned, model: str, config: EngineConfig, serving: ServingConfig) -> int:
    gc.disable()  # nothing that is imported is garbage, and looking for it takes a tenth of the time
    import uvloop

    from quire.engine.async_engine import AsyncEngine
    from quire.server.access import read_keys
    from quire.server.logs import ServerLog
    from quire.server.run import address, bind, serve
    from quire.util.progress import ByteProgress

    gc.freeze()  # modules are not looked through again
    gc.enable()
    read_keys(serving)  # a key file that cannot be read ends the start here
    sock = bind(serving)
    try:
        with ServerLog(serving), ByteProgress("loading weights", "saving packed weights") as bar:
            engine = AsyncEngine(model, config, serving, progress=bar, spawned=spawned)

            def announce() -> None:
                gc.freeze()  # nor is the vocabulary
                for line in (*engine.memory_lines, *(f"note: {text}" for text in engine.card.notices)):
                    print(f"  {line}", file=sys.stderr)
                print(
                    f"quire: serving {engine.card.name} at {address(serving, sock)}",
                    file=sys.stderr,
                    flush=True,
                )

            return uvloop.run(serve(engine, serving, sock, announce))
    finally:
        sock.close()
        if serving.uds is not None:
            Path(serving.uds).unlink(missing_ok=True)
