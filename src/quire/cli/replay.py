"""Run a log of `quire serve --record` again: the same arrivals through the same decisions, and compare every step.

Without a model the schedule is compared; with the server's model and options, and recorded prompts, the tokens too."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options import add_engine_options, engine_config
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.core.scheduler_config import SchedulerConfig
    from quire.engine.build.assemble import Built
    from quire.engine.core import EngineCore
    from quire.offline.replay_log import Replayed
    from quire.steplog.log_files import Log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help="the log; what a crash has left is in FILE.crash")
    parser.add_argument(
        "--model", metavar="MODEL", help="compute again, with this model: needs recorded prompts"
    )
    parser.add_argument(
        "--speed", type=float, default=0.0, metavar="X",
        help="1: steps begin as far apart as they did; 10: ten times as fast; 0: nothing waits (default)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when something differs."""
    from quire.offline.replay_log import replay
    from quire.steplog.log_files import Log, read_log

    if not 0 <= args.speed <= 1e6:
        raise ValueError(f"speed: {args.speed:g} must be from 0 to 1e6")
    path = Path(args.log)
    log, before = read_log(path), path.with_name(path.name + ".1")
    if before.exists() and getattr(log.rows[0] if log.rows else None, "part", 0) == 1:
        log = Log([*read_log(before).rows, *log.rows[1:]], log.damage)
    if args.model is None:
        found = replay(log, speed=args.speed)
    else:
        with _Engine(args, log) as core:
            found = replay(log, core=core, speed=args.speed)
    cut = _cut(log, found)
    if args.json:
        print(json.dumps(asdict(found) | {"damage": log.damage, "cut": cut}))
    else:
        compared = f", {found.compared_tokens} tokens" if args.model is not None else ""
        print(
            f"{found.steps} steps of {found.requests} requests{compared} in {found.seconds:.2f} s: {found.digest}"
        )
        print(f"first difference: {found.difference}" if found.difference else "the same")
        for note in filter(None, (log.damage, cut)):
            print(f"note: {note}")
    return int(bool(found.difference))


def _cut(log: Log, found: Replayed) -> str:
    """Where a log ends that its engine did not end, and what was left there; empty if it did, or is not reached."""
    if log.closed or found.difference:
        return ""
    return (
        f"the engine did not end in order (it was killed, or still runs): the log ends after {found.steps} steps, "
        f"sequences that had not ended: {found.unfinished}"
    )


class _Engine:
    """An engine with the log's limits and the options that were given. A context: it frees the engine."""

    def __init__(self, args: argparse.Namespace, log: Log) -> None:
        from quire.offline.replay_log import ReplayError, config_of
        from quire.steplog.log_rows import Opened

        opened = log.rows[0] if log.rows else None
        if not isinstance(opened, Opened):
            raise ReplayError("the log does not begin with its options")
        self._built = built_like(args, args.model, config_of(opened))

    def __enter__(self) -> EngineCore:
        return self._built.core

    def __exit__(self, *_: object) -> None:
        self._built.core.recorder = None
        self._built.close()


def built_like(args: argparse.Namespace, model: str, limits: SchedulerConfig) -> Built:
    """A model with the engine options of a command and the limits of a log. Raises QuireError if both do not fit."""
    from quire.engine.build.assemble import build
    from quire.engine.build.budget import options_of
    from quire.engine.build.opening import find_model, open_model

    given = engine_config(args).replace(**options_of(limits))
    built = build(open_model(find_model(model), tokenizer=False), given)
    own = built.core.scheduler.config
    if own != limits:
        built.close()
        names = ", ".join(
            one.name for one in fields(own) if getattr(own, one.name) != getattr(limits, one.name)
        )
        raise QuireError(
            f"model: with these options its scheduler has other limits than that of the log: {names}"
        )
    return built
