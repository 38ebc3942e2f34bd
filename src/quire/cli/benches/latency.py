"""Measure the latency of one batch: time to first token, decode rate, and their share of the machine's limits.

The engine runs in this process. Memory bandwidth and compute peaks are measured before and after each iteration.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire.cli.benches.common import count
from quire.cli.benches.engine_options import add_workload_options, engine_config, run_in_engine

if TYPE_CHECKING:
    from quire.bench.results import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=count, default=1, metavar="N", help="requests in the batch (default: 1)"
    )
    add_workload_options(parser, iterations=5, warmup=1)


def run(args: argparse.Namespace) -> int:
    from quire.bench import latency

    config = engine_config(args, args.input_len + args.output_len)
    most = config.limits.max_num_seqs
    if most < args.batch_size:
        raise ValueError(f"batch_size: {args.batch_size} is more than max_num_seqs, {most}")
    asked = latency.LatencyAsked(
        args.batch_size, args.input_len, args.output_len, args.num_iters, args.num_iters_warmup,
        config.execution.seed,
    )  # fmt: skip
    return run_in_engine(args, latency, config, asked, _text)


def _text(result: Result) -> list[str]:
    settings = result.settings
    lines = [
        f"{settings['architecture']}, {settings['weights']} weights, {settings['kv']} KV: "
        f"{settings['batch_size']} x {settings['input_len']} tokens in, {settings['output_len']} out",
        f"{'iteration':>9} {'latency s':>10} {'ttft ms':>8} {'tpot ms':>8} {'decode tok/s':>12} {'GB/s':>6} "
        f"{'share':>6} {'prefill tok/s':>13} {'share':>6} {'engine ms':>9}",
    ]
    named = [(str(row["iteration"] + 1), row) for row in result.tables["iterations"]]
    named.append(("median", {name: found.value for name, found in result.metrics.items()}))
    for name, row in named:
        lines.append(
            f"{name:>9} {_number(row['latency'], 1, 3):>10} {_number(row['ttft'], 1e3, 1):>8} "
            f"{_number(row['tpot'], 1e3, 2):>8} {_number(row['decode'], 1, 2):>12} "
            f"{_number(row['decode_bandwidth'], 1e-9, 1):>6} {_percent(row['decode_share']):>6} "
            f"{_number(row['prefill'], 1, 1):>13} {_percent(row['prefill_share']):>6} "
            f"{_number(row['engine'], 1e3, 3):>9}"
        )
    return lines


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
