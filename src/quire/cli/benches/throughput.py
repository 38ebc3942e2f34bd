"""Measure the throughput of many requests over the whole run, and its share of the machine's limits.

The engine runs in this process. All requests are submitted at once, or --concurrency limits how many are in the engine.
The bound is computed from the actual steps: each takes at least the longer of moving its weights, keys and values at
the measured bandwidth and computing at the measured peaks.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire.cli.benches.common import count
from quire.cli.benches.engine_options import add_workload_options, engine_config, run_in_engine

if TYPE_CHECKING:
    from quire.bench.results import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=count, default=32, metavar="N", help="requests (default: 32)")
    parser.add_argument("--concurrency", "--max-concurrency", type=count, metavar="N",
                        help="requests in the engine at once (default: all)")  # fmt: skip
    parser.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R",
                        help="uniform variation of lengths relative to their mean, in [0, 1) (default: 0)")  # fmt: skip
    add_workload_options(parser, iterations=3, warmup=1)


def run(args: argparse.Namespace) -> int:
    from quire.bench import throughput

    ratio = args.random_range_ratio
    if not 0 <= ratio < 1:
        raise ValueError(f"random_range_ratio: {ratio:g} is not in [0, 1)")
    asked = throughput.ThroughputAsked(
        args.num_prompts, args.input_len, args.output_len, ratio, args.concurrency, args.num_iters,
        args.num_iters_warmup, args.seed or 0,
    )  # fmt: skip
    config = engine_config(args, round((args.input_len + args.output_len) * (1 + ratio)) + 2)
    return run_in_engine(args, throughput, config, asked, _text)


def _text(result: Result) -> list[str]:
    settings, tables = result.settings, result.tables
    at_once = settings["concurrency"] or min(settings["num_prompts"], settings["max_num_seqs"])
    lines = [
        f"{settings['architecture']}, {settings['weights']} weights, {settings['kv']} KV: {settings['num_prompts']} "
        f"requests of {settings['input_len']} tokens in, {settings['output_len']} out, {at_once} at once",
        f"{'iteration':>9} {'output tok/s':>12} {'total tok/s':>11} {'requests/s':>10} {'share of bound':>14} "
        f"{'engine ms':>9} {'at most rows':>12}",
    ]
    rows = [(str(row["iteration"] + 1), row) for row in tables["iterations"]]
    rows.append(("median", {name: found.value for name, found in result.metrics.items()}))
    for name, row in rows:
        lines.append(
            f"{name:>9} {row['output']:>12.2f} {row['total']:>11.2f} {row['requests']:>10.3f} {row['share']:>14.1%} "
            f"{row['engine'] * 1e3:>9.3f} {row['engine_of_full'] * 1e3:>12.3f}"
        )
    lines += ["", "steps of the last iteration"]
    lines.append(
        f"{'kind':>9} {'steps':>6} {'rows':>6} {'tokens':>7} {'seconds':>8} {'bound by':>8} {'share':>6} "
        f"{'engine ms':>9}"
    )
    last = tables["iterations"][-1]["iteration"]
    for row in tables["composition"]:
        if row["iteration"] == last:
            lines.append(
                f"{row['kind']:>9} {row['steps']:>6} {row['rows']:>6.1f} {row['tokens']:>7} {row['seconds']:>8.3f} "
                f"{row['bound']:>8} {row['share']:>6.1%} {row['engine_seconds'] / row['steps'] * 1e3:>9.3f}"
            )
    return lines
