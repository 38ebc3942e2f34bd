"""Measure start-up in new processes: import, first token of `quire generate`, first token of `quire serve`.

The files are in the page cache, except for cold starts. shape:NAME first writes a checkpoint of that shape with random
weights, which then loads like a released model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import add_result_options, count, finish, shown
from quire.cli.options import add_engine_options, engine_config
from quire.config.shipped import DEFAULT_MODEL

if TYPE_CHECKING:
    from quire.bench.results import Metric

KINDS = ("import", "generate", "cold", "serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL,
        help="checkpoint folder, hub name, or shape:NAME for a checkpoint of random weights (default: bundled model)",
    )  # fmt: skip
    parser.add_argument(
        "--input-len", type=count, default=16, metavar="N", help="tokens of the prompt (default: 16)"
    )
    parser.add_argument("--num-iters", type=count, default=5, metavar="N",
                        help="starts of each kind, after an uncounted one (default: 5)")  # fmt: skip
    parser.add_argument("--only", choices=KINDS, action="append", help="what to start; may be repeated")
    parser.add_argument(
        "--at-most", nargs=2, action="append", default=[], metavar=("KIND", "SECONDS"),
        help="exit with status 1 if the median of a kind of start exceeds this; may be repeated",
    )  # fmt: skip
    add_result_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.bench.recording import Recording
    from quire.bench.startup import DEFINITIONS, Starts, engine_flags, measure_startup
    from quire.engine.build.opening import kept_files

    recording = Recording("startup", args.words)
    config = engine_config(args)
    kinds = args.only or KINDS
    bounds = [_bound(kind, seconds, kinds) for kind, seconds in args.at_most]
    kept = kept_files(config)
    prompt = [(7919 * i) % 251 + 3 for i in range(args.input_len)]
    with _folder(args.model) as model:
        starts = Starts(model, engine_flags(config), prompt, kept=kept.folder if kept else None)
        metrics, tables = measure_startup(starts, kinds, args.num_iters)
    result = recording.result(
        settings={"model": shown(args.model), "input_len": args.input_len, "num_iters": args.num_iters},
        metrics=metrics,
        definitions=DEFINITIONS,
        tables=tables,
    )
    finish(args, result, _text(metrics, tables["phases"]))
    late = [f"{kind}: {value:.3f} s exceed the limit of {most:g} s" for kind, most in bounds
            if (value := metrics[kind].value) is not None and value > most]  # fmt: skip
    for line in late:
        print(line, file=sys.stderr)
    return 1 if late else 0


def _bound(kind: str, seconds: str, kinds: Sequence[str]) -> tuple[str, float]:
    try:
        if kind in kinds:
            return kind, float(seconds)
    except ValueError:
        pass
    raise ValueError(f"at-most: {kind} {seconds}: must be one of {', '.join(kinds)} and a number of seconds")


@contextmanager
def _folder(model: str) -> Iterator[str]:
    """Yield the model to start; for a shape, a checkpoint that is removed afterwards."""
    import tempfile
    from pathlib import Path

    from quire.bench.random_checkpoint import write_checkpoint
    from quire.planner import shapes

    if not model.startswith(shapes.PREFIX):
        yield model
        return
    config = shapes.config(model.removeprefix(shapes.PREFIX))
    with tempfile.TemporaryDirectory() as folder:
        yield str(write_checkpoint(Path(folder), config))


def _text(metrics: dict[str, Metric], phases: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'':>18} {'median s':>9} {'least':>8} {'most':>8}"]
    for name, found in metrics.items():
        if found.value is not None:
            lines.append(
                f"{name:>18} {found.value:>9.3f} {min(found.samples):>8.3f} {max(found.samples):>8.3f}"
            )
    kind = ""
    for row in phases:
        if row["kind"] != kind:
            kind = row["kind"]
            lines += ["", f"{kind}: {'process':>10} {'phase':>16} {'begin s':>9} {'end s':>9} {'takes s':>9}"]
        lines.append(
            f"{'':>{len(kind) + 1}} {row['process']:>10} {row['phase']:>16} {row['begin']:>9.3f} {row['end']:>9.3f} "
            f"{row['seconds']:>9.3f}"
        )
    return lines
