"""Measure the limits of this machine: bytes read from memory and caches, and dot products by number format, per second.

All threads run the loops of the chosen instruction set. The limits are kept for servers, whose metrics then have the
shares of them that steps reach. Every other benchmark measures the same limits between its own figures.
"""

from __future__ import annotations

import argparse

from quire.cli.benches.common import add_result_options, count, finish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=count, metavar="N", help="threads (default: all usable cores)")
    parser.add_argument("--isa", default="", metavar="NAME", help="instruction set (default: the best)")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="samples of each (default: 5)")
    parser.add_argument(
        "--disk", metavar="FOLDER", help="also read a new file of 256 MiB there, past the page cache"
    )
    add_result_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.bench.environment import environment
    from quire.bench.limits import LimitsProbe
    from quire.bench.memory_tiers import cache_rates, disk_rate
    from quire.bench.recording import Recording
    from quire.bench.results import metric
    from quire.config import env
    from quire.engine.build.kept_peaks import keep_peaks
    from quire.program.step_work import MachinePeaks

    recording = Recording("limits", args.words)
    probe = LimitsProbe(args.isa or env.isa(), args.threads or 0)
    for _ in range(args.rounds):
        probe.sample()
    metrics = {"bandwidth": metric([s.bandwidth for s in probe.samples], "B/s", "higher")}
    for name in probe.formats:
        metrics[f"{name}_compute"] = metric([s.compute[name] for s in probe.samples], "FLOP/s", "higher")
    for name, (rate, _) in cache_rates(probe.isa, probe.threads, environment().caches).items():
        metrics[f"{name}_bandwidth"] = metric([rate], "B/s", "higher")
    if args.disk is not None:
        try:
            metrics["disk_bandwidth"] = metric([disk_rate(args.disk)], "B/s", "higher")
        except OSError as error:
            raise ValueError(f"disk: {args.disk}: {error.strerror}") from None
    result = recording.result(limits=probe.limits(), metrics=metrics, settings={"arena_bytes": probe.arena})
    spreads = probe.limits()
    peaks = MachinePeaks(
        spreads.bandwidth.median, {name: each.median for name, each in spreads.compute.items()}
    )
    keep_peaks(peaks, probe.isa, probe.threads)
    finish(args, result, [])
    return 0
