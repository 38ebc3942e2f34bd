"""Measure Quire's server, any server with OpenAI's API, or the native APIs of llama-server, SGLang, TGI and Ollama.

Closed loop with --concurrency, open loop with --rate or the times of a trace. The clock of a request starts when it is
due. Warm-up requests are not counted; failures count in every rate.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import count, finish, write_page
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
    from quire.bench.server_bench import Pace
    from quire.bench.timeline import RequestRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add_pace_options(parser)
    add_measuring_options(parser)


def add_pace_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", type=count, metavar="N", help="closed loop: clients (default: 1)")
    add("--rate", type=float, metavar="R", help="open loop: requests per second; inf sends all at once")
    add(
        "--arrival", choices=("poisson", "constant", "gamma", "trace"),
        help="open loop: spacing (default: poisson, or that of the trace)",
    )  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="F", help="shape of gamma gaps; below 1: bursts")
    add("--num-requests", type=count, metavar="N", help="default: 100, or the whole trace")
    add("--duration", type=seconds, metavar="S", help="start no more requests after S seconds")
    add(
        "--max-in-flight",
        type=count,
        metavar="N",
        help="open loop: further requests wait while their clock runs",
    )
    add("--warmup", type=int, default=4, metavar="N", help="warm-up requests (default: 4)")


def run(args: argparse.Namespace) -> int:
    import uvloop

    from quire.bench import serve_result

    result = uvloop.run(_measure(args))
    write_page(args, result)
    finish(args, result, serve_result.lines(result))
    return 1 if result.metrics["failure_rate"].value == 1.0 else 0


async def _measure(args: argparse.Namespace) -> Result:
    from quire.bench.recording import Recording
    from quire.bench.serve_result import serve_result
    from quire.bench.server_bench import ServerBench

    work = workload(args, _requests(args))
    chosen, slo = pace(args, timed=work.times() is not None), objectives(args)
    chosen.times(work)  # raises before anything is sent
    bench = ServerBench(server_options(args))
    recording = Recording("serve", public_words(args.words))
    try:
        await bench.open()
        counts = await bench.calibrate()
        await bench.warm_up(args.warmup, chosen, work)
        with RequestProgress(work.num_requests, enabled=not args.quiet) as progress:
            outcome = await bench.measure(work, chosen, slo, progress)
    finally:
        await bench.close()
    settings: dict[str, Any] = {"warm_up": args.warmup, "counting": counts, "seed": args.seed}
    return serve_result(recording, bench, work, chosen, outcome, settings)


def pace(args: argparse.Namespace, *, timed: bool) -> Pace:
    """Return the pace of the load. `timed`: the workload has arrival times, whose pattern a rate keeps unless --arrival
    is set. Raises ValueError naming the option."""
    from quire.bench.server_bench import Pace

    if args.rate is not None and args.concurrency is not None:
        raise ValueError("concurrency: cannot be combined with --rate; --max-in-flight bounds an open loop")
    if args.rate is not None and not args.rate > 0:
        raise ValueError(f"rate: {args.rate} is not above 0")
    if args.rate is None and args.arrival not in {None, "trace"}:
        raise ValueError(f"rate: --arrival {args.arrival} needs a rate")
    if args.warmup < 0:
        raise ValueError(f"warmup: {args.warmup} is below 0")
    common: dict[str, Any] = {
        "duration": args.duration,
        "max_in_flight": args.max_in_flight,
        "seed": args.seed,
    }
    own_times = args.arrival == "trace" or (args.trace is not None and args.arrival is None and timed)
    if args.trace is not None and not timed and args.rate is None and args.concurrency is None:
        raise ValueError("rate: this trace has no times; set --rate or --concurrency")
    if args.concurrency is not None or (args.rate is None and not own_times):
        return Pace(clients=args.concurrency or 1, **common)
    if own_times:
        return Pace(rate=args.rate, trace=args.rate is None, keep_pattern=args.rate is not None, **common)
    return Pace(rate=args.rate, process=args.arrival or "poisson", burstiness=args.burstiness, **common)


def _requests(args: argparse.Namespace) -> int | None:
    if args.num_requests is not None or args.duration is None:
        return args.num_requests  # type: ignore[no-any-return]
    if args.rate is not None and args.rate != float("inf"):
        return max(1, int(args.rate * args.duration) + 1)
    return None if args.trace is not None or args.prompts is not None else 20_000


class RequestProgress:
    """A progress bar over requests on a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        self._failed = 0
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="requests", unit="req", file=sys.stderr, leave=False)

    def __call__(self, record: RequestRecord) -> None:
        if self._bar is None:
            return
        if record.failed:
            self._failed += 1
            self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update()

    def __enter__(self) -> RequestProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
