"""Measure every op of a model at many row counts, and compare with the limits of the machine at that moment.

Each op runs in the native executor on weights and KV caches that exceed the processor caches. Its bound is the longer
of moving its weights, keys and values at the measured bandwidth and computing at the measured peak of its number
format; "cache" means that moving activations in a cache is the longest part, and there is no share. Scaling is the time
relative to one row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import add_result_options, count, finish

if TYPE_CHECKING:
    from quire.bench.kernels import Asked
    from quire.bench.results import Metric
    from quire.engine.build.opening import Model

ROWS = "1,2,4,8,16,32,64,128,256,512"
CONTEXTS = "128,512,2048,8192,32768"
SHAPES = "qwen3-0.6b,llama-3.2-1b"
ALIASES = {"attention": "attend", "sampler": "sample", "rope": "rope_write", "activation": "gated_act"}
KINDS = (
    "embed",
    "norm",
    "linear",
    "quantize",
    "rope_write",
    "attend",
    "head_linear",
    "latent_write",
    "latent_attend",
    "gated_act",
    "gather_rows",
    "route",
    "dispatch",
    "experts",
    "combine",
    "layer",
    "sample",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("measurements").add_argument
    add("--shapes", type=words, default=words(SHAPES), metavar="NAME,…",
                       help=f"released shapes (default: {SHAPES})")  # fmt: skip
    add("--model", metavar="MODEL", help="use the shape of this checkpoint instead of --shapes")
    add("--ops", type=words, default=[], metavar="OP,…",
                       help="kinds of ops: linear, attention, norm, sampler, layer … (default: all)")  # fmt: skip
    add("--formats", type=words, default=[], metavar="FORMAT,…",
                       help="weight formats (default: all but f32)")  # fmt: skip
    add("--kv-formats", type=words, default=[], metavar="FORMAT,…",
                       help="formats of the KV cache (default: all but f32)")  # fmt: skip
    add("--rows", type=counts, default=counts(ROWS), metavar="N,…", help=f"(default: {ROWS})")
    add("--contexts", type=counts, default=counts(CONTEXTS), metavar="N,…",
                       help=f"keys per row of attention in decode (default: {CONTEXTS})")  # fmt: skip
    add = parser.add_argument_group("how").add_argument
    add("--threads", type=count, metavar="N", help="threads (default: all usable cores)")
    add("--isa", default="", metavar="NAME", help="instruction set (default: the best)")
    add("--rounds", type=count, default=5, metavar="N",
                     help="rounds of limits, ops, limits; figures are medians (default: 5)")  # fmt: skip
    add("--seconds", type=float, default=0.05, metavar="S",
                     help="time per figure in each round (default: 0.05)")  # fmt: skip
    add_result_options(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the roofline plot")


def words(text: str) -> list[str]:
    """Argument type: names separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def counts(text: str) -> list[int]:
    """Argument type: integers separated by commas, sorted."""
    found = sorted({count(word) for word in words(text)})
    if not found:
        raise argparse.ArgumentTypeError("is empty")
    return found


def run(args: argparse.Namespace) -> int:
    from quire.bench.bounds import beaten
    from quire.bench.kernels import Runner
    from quire.bench.recording import Recording
    from quire.bench.roofline_plot import roofline
    from quire.config import env

    asked = _asked(args)
    recording = Recording("kernels", args.words)
    runner = Runner(asked, isa=args.isa or env.isa(), threads=args.threads or 0)
    rows: list[dict[str, Any]] = []
    for shape, model in _models(args):
        for found in runner.model(model):
            rows += [{"shape": shape, **row} for row in found]
            _progress(rows)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    result = recording.result(
        limits=runner.probe.limits(),
        metrics=_metrics(rows),
        definitions=DEFINITIONS,
        settings={"rounds": asked.rounds, "seconds": asked.seconds, "copies_bytes": runner.spill},
        tables={"ops": rows},
        notes=beaten(row["share"] for row in rows),
    )
    finish(args, result, _table(rows) + [f"note: {note}" for note in result.notes])
    if args.plot is not None:
        args.plot.write_text(roofline(result))
    return 0


def _progress(rows: list[dict[str, Any]]) -> None:
    """Show the last measured op on one line of a terminal."""
    if sys.stderr.isatty() and rows:
        row = rows[-1]
        text = f"{len(rows)} figures; {row['shape']} {row['format']} {row['op']} {row['name']}"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


DEFINITIONS = {
    "seconds": "median over rounds of the median time of one op, from calls of about 10 ms that run copies of it; "
    "weights and KV of the copies take four times the largest cache",
    "bytes": "weights, keys and values once, and activations read and written once",
    "share": "bound_seconds / seconds, in each round with the limits measured just before and after it",
    "scaling": "seconds / seconds at 1 row",
}


def _asked(args: argparse.Namespace) -> Asked:
    from quire.bench.kernels import Asked, chosen

    ops = [ALIASES.get(name, name) for name in args.ops]
    chosen(ops, (*KINDS, *ALIASES), "ops")
    if args.seconds <= 0:
        raise ValueError(f"seconds: {args.seconds:g} is not above 0")
    return Asked(
        rows=tuple(args.rows),
        contexts=tuple(args.contexts),
        formats=tuple(args.formats),
        kv_formats=tuple(args.kv_formats),
        ops=tuple(ops),
        rounds=args.rounds,
        seconds=args.seconds,
    )


def _models(args: argparse.Namespace) -> Iterator[tuple[str, Model]]:
    import tempfile

    from quire.engine.build.opening import open_model
    from quire.planner import shapes

    if args.model is not None:
        yield Path(args.model).name, open_model(args.model, tokenizer=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        opened = [(s, open_model(shapes.write(s, Path(folder) / s), tokenizer=False)) for s in args.shapes]
    yield from opened


def _metrics(rows: list[dict[str, Any]]) -> dict[str, Metric]:
    """The figures for comparing two runs: the time of every op."""
    from quire.bench.kernels import ATTENTION
    from quire.bench.results import metric

    found = {}
    for row in rows:
        step = f"{row['rows']} rows" if row["op"] not in ATTENTION else (
            f"{row['sequences']} x {row['rows'] // row['sequences']} of {row['context']}"
        )  # fmt: skip
        name = f"{row['shape']} {row['format']} {row['kv']} {row['op']} {row['name']} {step}"
        found[name] = metric(row["samples"], "s", "lower")
    return found


def _table(rows: list[dict[str, Any]]) -> list[str]:
    from quire.bench.kernels import CACHED

    lines: list[str] = []
    group: tuple[str, ...] = ()
    for row in rows:
        shown = (row["shape"], row["format"], row["kv"], row["op"], row["name"])
        if shown != group:
            group = shown
            kv = f", {row['kv']} KV" if row["op"] in {*CACHED, "layer"} else ""
            op = row["name"] if row["name"].startswith(row["op"]) else f"{row['op']} {row['name']}"
            lines += ["", f"{row['shape']} {row['format']}{kv}: {op}"]
            lines.append(
                f"  {'rows':>14} {'µs':>11} {'GB/s':>7} {'GFLOP/s':>8} {'bound':>8} {'share':>6} {'scaling':>8}"
            )
        share = "" if row["share"] is None else f"{row['share']:.0%}"
        scaling = "" if row["scaling"] is None else f"{row['scaling']:.2f}"
        lines.append(
            f"  {_step(row):>14} {row['seconds'] * 1e6:>11.1f} {row['bytes_per_second'] / 1e9:>7.1f} "
            f"{row['flops_per_second'] / 1e9:>8.1f} {row['bound']:>8} {share:>6} {scaling:>8}"
        )
    return lines


def _step(row: dict[str, Any]) -> str:
    from quire.bench.kernels import ATTENTION

    if row["op"] not in ATTENTION:
        return str(row["rows"])
    return f"{row['sequences']}x{row['rows'] // row['sequences']} of {row['context']}"
