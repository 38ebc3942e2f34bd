"""Serve the OpenAI API over HTTP. docs/server.md explains every option and route."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.config_file import read_config
from quire.cli.kv_quality import check_kv_quality
from quire.cli.node_options import add_node_options, use_node_options
from quire.cli.options import add_config_options, add_model_argument, named_model
from quire.cli.parallel_auto import add_parallel_option, with_parallel
from quire.cli.parser import Parser, take_foreign_options
from quire.config.kv_events import parse_kv_events
from quire.config.launched import launched
from quire.config.schema import OPTIONS, EngineConfig
from quire.config.serving import ServingConfig
from quire.config.shipped import shipped_adapters
from quire.util.platform import memory_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.engine.host.spawn import Spawned

_REPLICAS_OF_HOSTS = (
    "data_parallel_size: a launcher, or several hosts, have the ranks of one replica; start a server for each, and "
    "quire router before them"
)
# Options that set the same thing: one source may use only one side.
_EXCLUSIVE = (({"gpu_memory_utilization"}, {"memory"}), ({"uds"}, {"host", "port"}))
# With one of these, the adapters of a shipped model are not served unless they are named.
ADAPTER_OPTIONS = frozenset(("enable_lora", "lora_modules", "max_lora_rank"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, default=argparse.SUPPRESS)
    parser.add_argument(
        "more_models", nargs="*", default=argparse.SUPPRESS, metavar="model",
        help="further models; see docs/serving-models.md",
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="FILE", help="options from a YAML, TOML or JSON file; see docs/server.md"
    )
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=argparse.SUPPRESS, metavar="F",
        help="--memory as a share of the available memory",
    )  # fmt: skip
    parser.add_argument(
        "--from-command", default=argparse.SUPPRESS, metavar="COMMAND",
        help="print the command that does what this one of vllm, sglang, llama-server, text-generation-launcher or "
        "ollama does, and start nothing; see docs/migrating.md",
    )  # fmt: skip
    add_parallel_option(parser)
    add_node_options(parser)
    add_config_options(parser, ServingConfig, explicit_only=True)
    add_config_options(parser, EngineConfig, explicit_only=True)
    take_foreign_options(parser)


def simulated() -> Sequence[object]:
    """What the lesson has from rooms above it, imported when it is asked for: simulations, listings, measurements."""
    from quire.bench.lesson.listings import LISTINGS
    from quire.bench.lesson.measured_levels import LEVELS
    from quire.bench.lesson.simulated_lessons import SIMULATIONS

    return (*SIMULATIONS, *LISTINGS, LEVELS)


def run(args: argparse.Namespace) -> int:
    environment = args.__dict__.pop("environment", {})
    file = args.__dict__.pop("config")
    environment.pop("config", None)
    given = {name: value for name, value in vars(args).items() if name not in environment}
    if "from_command" in given:
        return _print_equivalent(given["from_command"])
    further = given.pop("more_models", [])
    options = {} if file is None else read_config(Path(file))
    sources = {*options, *environment, *given}
    several = bool(further) or not sources.isdisjoint(("models", "models_dir", "pull_limit"))
    if not sources.isdisjoint(("models", "models_dir")) and "model" not in sources:
        options["model"] = ""
    hosts = use_node_options([given, environment])
    asked = [source.pop("parallel") for source in (given, environment, options) if "parallel" in source]
    model, engine_config, serving = settings(given, options, environment, several=several)
    if asked:
        if asked[0] != "auto":
            raise ValueError(f"parallel: {asked[0]!r} is not auto")
        if several:
            raise ValueError("parallel: auto is for a server of one model")
        engine_config = with_parallel(engine_config, model, quiet=serving.quiet, hosts=hosts)
    if hosts > 1 and engine_config.parallel.data_parallel_size > 1:
        raise ValueError(_REPLICAS_OF_HOSTS)
    if hosts > 1 and (several or engine_config.parallel.ranks == 1):
        raise ValueError(
            "nnodes: hosts share the ranks of one model: set tensor_parallel_size or pipeline_parallel_size"
        )
    if several:
        plain = ADAPTER_OPTIONS.isdisjoint(sources)
        return _serve_several([*([model] if model else []), *further], engine_config, serving, plain=plain)
    return _serve(model, engine_config, serving)


def _serve_several(names: list[str], config: EngineConfig, serving: ServingConfig, *, plain: bool) -> int:
    """`plain`: no option is about adapters."""
    import uvloop

    from quire.cli.several_models import served_models
    from quire.learn.offered import offer
    from quire.server.admin import check_all_keys
    from quire.server.dialects.response_store import prepare_file
    from quire.server.fleet.fleet import Fleet
    from quire.server.fleet.fleet_service import FleetService
    from quire.server.fleet.shares import divided
    from quire.server.logs import ServerLog
    from quire.server.run import address, bind, serve

    check_all_keys(serving)
    if parse_kv_events(serving.kv_events_config).on:
        raise ValueError("kv_events_config: events are of one model: serve each with a server of its own")
    if serving.response_store is not None:
        prepare_file(serving.response_store)
    models = served_models(names, config, serving, shipped=plain)
    for each in models:
        check_kv_quality(each.model, each.config, quiet=serving.quiet)
    sock = bind(serving)
    try:
        with ServerLog(serving) as log:
            fleet = Fleet(models, divided(config.limits.memory, models, serving), serving, config)

            def announce() -> None:
                if serving.quiet:
                    return
                for line in fleet.memory_lines:
                    log.say(f"  {line}")
                served = ", ".join(name for name, _ in fleet.names())
                log.say(f"quire: serving {served} at {address(serving, sock)}")

            offer(simulated)
            return uvloop.run(serve(fleet, FleetService(fleet), serving, sock, announce))
    finally:
        sock.close()
        if serving.uds is not None:
            Path(serving.uds).unlink(missing_ok=True)


def _print_equivalent(command: str) -> int:
    """Print the command of Quire that does what another one does; 1 if something essential cannot be had."""
    from quire.cli.from_command import equivalent

    parser = Parser(prog="quire serve")
    add_arguments(parser)
    made = equivalent(command, parser, os.environ)
    print(made)
    for text in made.notes:
        print(f"note: {text}", file=sys.stderr)
    for text in made.dropped:
        print(f"left out: {text}", file=sys.stderr)
    for text in made.lost:
        print(f"cannot be had: {text}", file=sys.stderr)
    if (
        not made.lost
    ):  # a contradiction between its options, or a value out of range, is an error here already
        given = vars(parser.parse_args([*made.words()[2:], "--quiet"] if made.options else []))
        file = given.pop("config")
        settings(given, {} if file is None else read_config(Path(file)))
    return 1 if made.lost else 0


def settings(
    given: dict[str, Any],
    file: dict[str, Any],
    environment: dict[str, Any] | None = None,
    *,
    several: bool = False,
) -> tuple[str, EngineConfig, ServingConfig]:
    """Return the model and its configs. The command line overrides the environment, which overrides a config file.

    Raises ValueError naming the option that contradicts another, or is out of range.
    """
    options: dict[str, Any] = {}
    sources = {"config file": file, "environment": environment or {}, "command line": given}
    for source, found in sources.items():
        for sides in _EXCLUSIVE:
            one, other = (side & found.keys() for side in sides)
            if one and other:
                names = " and ".join(sorted(one | other))
                raise ValueError(f"{names}: the {source} sets more than one of them; set only one")
            if one or other:
                beaten = sides[1] if one else sides[0]
                options = {name: value for name, value in options.items() if name not in beaten}
        options |= found
    share = options.pop("gpu_memory_utilization", None)
    if share is not None:
        options["memory"] = memory_share(share)
    model = named_model(options.pop("model", None), quiet=options.get("quiet", False))
    _with_adapters("" if several else model, options)  # of several each has its own
    chosen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    return (
        model,
        EngineConfig(**{name: value for name, value in chosen.items() if name in OPTIONS}),
        ServingConfig(**{name: value for name, value in chosen.items() if name not in OPTIONS}),
    )


def _with_adapters(model: str, options: dict[str, Any]) -> None:
    """Turn adapters on where they are named, and those of a shipped model, unless the options say otherwise."""
    if not ADAPTER_OPTIONS & options.keys():
        options["lora_modules"] = [name for name in shipped_adapters() if name.startswith(f"{model}:")]
    if options.get("lora_modules") or options.get("lora_dir"):
        options.setdefault("enable_lora", True)


def _follow(model: str, config: EngineConfig, *, quiet: bool) -> None:
    """In a process that a launcher has started as a rank that does not lead, or on a host whose ranks do not: be that
    rank until the model ends, or that host until this process does."""
    from quire.engine.build.rendezvous import join

    found = launched(os.environ, config.parallel.ranks)
    if found is None or found.leads:
        return
    if found.nodes:
        from quire.engine.build.following_node import follow_node

        follow_node(found, model, config, quiet=quiet)
    from quire.engine.build.rank_process import serve

    serve(join(found))


def _serve(model: str, config: EngineConfig, serving: ServingConfig) -> int:
    if config.parallel.ranks > 1:
        if config.parallel.data_parallel_size > 1 and launched(os.environ, config.parallel.ranks):
            raise ValueError(_REPLICAS_OF_HOSTS)
        _follow(model, config, quiet=serving.quiet)
    check_kv_quality(model, config, quiet=serving.quiet)
    from quire.engine.host.spawn import Spawned

    with closing(Spawned()) as spawned:  # its imports take as long as ours, so both run at once
        return _serve_with(spawned, model, config, serving)


def _serve_with(spawned: Spawned, model: str, config: EngineConfig, serving: ServingConfig) -> int:
    gc.disable()  # imports leave no garbage, and collecting takes a tenth of the time
    import uvloop

    from quire.engine.front.adapter_names import shown
    from quire.engine.front.serving_engine import serving_engine
    from quire.learn.offered import offer
    from quire.objectives import parse_degrade
    from quire.server.admin import check_all_keys
    from quire.server.dialects.response_store import prepare_file
    from quire.server.logs import ServerLog
    from quire.server.run import address, bind, serve
    from quire.server.service import Service
    from quire.text.regions.detect import facts_text
    from quire.util.progress import ByteProgress

    gc.freeze()  # the collector skips modules from now on
    gc.enable()
    check_all_keys(serving)  # the start fails here if a key file cannot be read
    for step in parse_degrade(config.scheduler.degrade):
        if step.kind == "model":
            raise ValueError(f"degrade: {step}: this server has no other model")
    if serving.response_store is not None:
        prepare_file(serving.response_store)
    sock = bind(serving)
    try:
        bar = ByteProgress("loading weights", "saving packed weights", enabled=not serving.quiet)
        with ServerLog(serving) as log, bar:
            engine = serving_engine(model, config, serving, progress=bar, spawned=spawned)

            def announce() -> None:
                gc.freeze()  # and the vocabulary
                if serving.quiet:
                    return
                if engine.card.answers:
                    log.say(f"  answers: {facts_text(engine.card.answers)}")
                if engine.adapters:
                    log.say(f"  adapters: {shown(engine.adapters)}")
                for line in (*engine.memory_lines, *(f"note: {text}" for text in engine.card.notices)):
                    log.say(f"  {line}")
                log.say(f"quire: serving {engine.card.name} at {address(serving, sock)}")

            offer(simulated)
            tiers = config.cache.tiers
            role = "" if tiers is None else tiers.role
            return uvloop.run(serve(engine, Service(engine, serving), serving, sock, announce, role))
    finally:
        sock.close()
        if serving.uds is not None:
            Path(serving.uds).unlink(missing_ok=True)
