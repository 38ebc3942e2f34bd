"""Find the capacity of a server: its throughput–latency curve, and the knee (highest goodput) by bisection.

Every load is a separate open loop, with texts that the server has not seen. The objectives are those of --goodput, else
of --preset, else of chat.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import count, finish, write_page
from quire.cli.benches.serve import RequestProgress
from quire.cli.benches.serving import (
    add_measuring_options,
    add_server_options,
    objectives,
    public_words,
    seconds,
    server_options,
    workload,
)

if TYPE_CHECKING:
    from quire.bench.results import Result
    from quire.bench.server_bench import Pace, ServerBench
    from quire.bench.sweep import Knee, Point
    from quire.objectives import SLO

CURVE = ("request_rate", "output_token_rate", "total_token_rate", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99",
         "itl_p50", "itl_p99", "e2el_p50", "e2el_p99", "stream_rate_p50", "concurrency", "failure_rate")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add = parser.add_argument_group("search").add_argument
    add("--start-rate", type=float, metavar="R", help="first load (default: the rate of one client)")
    add("--rates", type=rates, metavar="R,R,…", help="measure these loads instead of searching")
    add("--tolerance", type=float, default=0.1, metavar="F", help="width of the bracket (default: 0.1)")
    add("--max-points", type=count, default=12, metavar="N", help="maximum number of loads (default: 12)")
    add("--duration", type=seconds, default=30.0, metavar="S", help="duration of each load (default: 30)")
    add("--min-requests", type=count, default=20, metavar="N", help="minimum per load (default: 20)")
    add(
        "--arrival", choices=("poisson", "constant", "gamma", "trace"), default="poisson",
        help="spacing; trace: the pattern of the trace at each rate (default: poisson)",
    )  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="F", help="shape of gamma gaps")
    add("--warmup", type=int, default=4, metavar="N", help="warm-up requests (default: 4)")
    add_measuring_options(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    result = uvloop.run(_sweep(args))
    write_page(args, result)
    finish(args, result, lines(result))
    return 0


async def _sweep(args: argparse.Namespace) -> Result:
    from quire.bench.recording import Recording
    from quire.bench.server_bench import Pace, ServerBench
    from quire.bench.sweep import curve, find_knee

    slo = objectives(args, default="chat")
    assert slo is not None
    recording = Recording("sweep", public_words(args.words))
    bench = ServerBench(server_options(args))
    try:
        await bench.open()
        await bench.calibrate()
        await bench.warm_up(args.warmup, Pace(clients=1), workload(args, max(1, args.warmup)))
        probe = _Probe(args, bench, slo)
        if args.rates is not None:
            knee = await curve(probe.measure, args.rates)
        else:
            start = args.start_rate or await probe.alone()
            knee = await find_knee(probe.measure, start, tolerance=args.tolerance, most=args.max_points)
    finally:
        await bench.close()
    return _result(recording, bench, slo, knee, probe)


class _Probe:
    """Measures one load after another."""

    def __init__(self, args: argparse.Namespace, bench: ServerBench, slo: SLO) -> None:
        self.args, self.bench, self.slo = args, bench, slo
        self.text, self.measured = "", 0
        self.notes: list[str] = []
        self.definitions: dict[str, str] = {}

    async def alone(self) -> float:
        """Measure the requests per second of a single client."""
        from quire.bench.server_bench import Pace

        work = workload(self.args, 4, " alone")
        outcome = await self.bench.measure(work, Pace(clients=1), self.slo, lambda _record: None)
        return min(1e3, max(1e-2, outcome.summary.completed / outcome.summary.seconds))

    async def measure(self, rate: float) -> Point:
        from quire.bench.serve_result import definitions_used
        from quire.bench.sweep import Point

        requests = max(self.args.min_requests, round(rate * self.args.duration))
        # New texts for every load; otherwise the second load would hit the cached prefixes of the first.
        work = workload(self.args, requests, f" load {self.measured}")
        self.text, self.measured = work.text, self.measured + 1
        with RequestProgress(work.num_requests, enabled=not self.args.quiet) as progress:
            outcome = await self.bench.measure(work, self._pace(rate), self.slo, progress)
        summary = outcome.summary
        assert summary.goodput is not None
        figures = {name: metric.value for name, metric in summary.metrics().items() if name in CURVE}
        share = summary.goodput.share
        self.definitions = definitions_used(summary)
        said = {_words_of(note) for note in self.notes}
        self.notes += [f"at {rate:.3g} requests/s: {n}" for n in outcome.notes if _words_of(n) not in said]
        if not self.args.quiet:
            met = f"{100 * share:5.1f} % met the objectives"
            print(f"{rate:8.3f} requests/s: {met}, goodput {share * rate:.3f}/s", file=sys.stderr)
        # Goodput is a share of the offered rate, so the drain after the last arrival is in none of the rates.
        return Point(rate, share * rate, share, share >= self.slo.share, figures)

    def _pace(self, rate: float) -> Pace:
        from quire.bench.server_bench import Pace

        args = self.args
        if args.arrival == "trace":
            return Pace(rate=rate, keep_pattern=True, seed=args.seed)
        return Pace(rate=rate, process=args.arrival, burstiness=args.burstiness, seed=args.seed)


def _words_of(note: str) -> str:
    """Return a note without figures and load, so that equal notes of several loads are shown once."""
    return re.sub(r"[\d.,]+", "#", note.rpartition("requests/s: ")[2])


def _result(recording: Any, bench: ServerBench, slo: SLO, knee: Knee, probe: _Probe) -> Result:
    from quire.bench.results import Metric, plain_word

    found: Result = recording.result(
        settings={
            "url": bench.options.target.url, "backend": bench.backend, "api": bench.options.api,
            "model": plain_word(bench.model),
            "workload": probe.text, "goodput": str(slo), "slo": dataclasses.asdict(slo), "arrival": probe.args.arrival,
            "duration": probe.args.duration,
        },
        metrics={
            "knee_rate": Metric(knee.best.rate, "requests/s", "higher"),
            "knee_goodput": Metric(knee.best.goodput, "requests/s", "higher"),
            "highest_served": Metric(knee.highest_served, "requests/s", "higher"),
            "lowest_unserved": Metric(knee.lowest_unserved, "requests/s", "higher"),
        },
        definitions={
            "goodput": "offered rate × share of requests that met every objective; a failure meets none",
            "knee": "the measured load with the highest goodput",
            "served": f"at least {slo.share:.0%} of requests met every objective",
            **{name: text for name, text in probe.definitions.items() if name != "goodput"},
        },
        tables={"loads": [point.row() for point in knee.points]},
        notes=[*knee.notes(), *probe.notes],
    )  # fmt: skip
    return found


def lines(result: Result) -> list[str]:
    """Format a result of `sweep` as text."""
    from quire.bench.text import aligned, figure

    settings, value = result.settings, {name: metric.value for name, metric in result.metrics.items()}
    columns = {
        "rate": "offered/s", "request_rate": "done/s", "output_token_rate": "tokens/s", "ttft_p50": "TTFT p50",
        "ttft_p99": "p99", "tpot_p50": "TPOT p50", "tpot_p99": "p99", "share": "met", "goodput": "goodput/s",
    }  # fmt: skip
    loads = result.tables["loads"]
    head, *rows = aligned(
        [list(columns.values()), *([figure(row.get(name)) for name in columns] for row in loads)]
    )
    best = next(row for row in loads if row["rate"] == value["knee_rate"])
    text = [
        f"{settings['model'] or 'the model'} at {settings['url']} ({settings['backend']}), {settings['goodput']} (ms)",
        f"  {settings['workload']}",
        "",
        f"  {head}",
        *(f"  {line}{'  ← knee' if row is best else ''}" for line, row in zip(rows, loads, strict=True)),
    ]
    text += [
        "",
        f"  knee: {figure(value['knee_goodput'])} requests/s of goodput at {figure(value['knee_rate'])} offered; "
        f"served up to {figure(value['highest_served'])}, not at {figure(value['lowest_unserved'])}",
    ]
    text += ["", *(f"note: {note}" for note in result.notes)] if result.notes else []
    return [
        *text,
        "",
        "definitions:",
        *(f"  {name:<18}{words}" for name, words in result.definitions.items()),
    ]


def rates(text: str) -> list[float]:
    """Argument type: a list of rates."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 0 < rate < 1e6 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates like 1,2,4")
    return found
