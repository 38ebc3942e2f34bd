"""Simulate a server: the real scheduler, blocks, prefix cache, policies and admission on a virtual clock.

A step takes what the cost model of a log has learned, or what the roofline of a device allows a model at best."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.bench.request_metrics import Summary
    from quire.bench.simulated_server import Arrival, SimulatedRun, StepTime
    from quire.core.scheduler_config import SchedulerConfig
    from quire.steplog.log_files import Log

_LIMITS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", help="requests of a trace: Mooncake, Azure, ServeGen, lengths"
    )
    parser.add_argument("--log", metavar="FILE", help="a log: its requests, limits and step times")
    parser.add_argument("--model", metavar="MODEL", help="a released shape or a checkpoint, for --device")
    parser.add_argument(
        "--device", metavar="NAME[:N]", help="step times are the roofline of a device: a bound"
    )
    parser.add_argument(
        "--overhead-ms", type=float, default=0.0, metavar="MS", help="of each step, with --device"
    )
    parser.add_argument("--limit", type=int, default=1000, metavar="N", help="most requests (default: 1000)")
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)"
    )
    parser.add_argument(
        "--spread",
        type=float,
        metavar="S",
        help="relative deviation of step times (default: 0.03, a bound has none)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the spread, and of ServeGen")
    for name in _LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="as of quire serve")
    parser.add_argument("--scheduling-policy", metavar="P", help="as of quire serve")
    parser.add_argument("--no-prefix-caching", action="store_true", help="without a prefix cache")
    parser.add_argument(
        "--slo", nargs="+", metavar="CLASS", default=(), help="as of quire serve; admission predicts"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.bench.request_metrics import summarize
    from quire.bench.simulated_arrivals import SimulationError
    from quire.bench.simulated_server import SimulatedServer
    from quire.objectives import parse_classes
    from quire.steplog.log_files import read_log

    for name, least in (("limit", 1), ("rate", 1e-6), ("overhead_ms", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}: {getattr(args, name):g} is below the minimum of {least:g}")
    if (args.trace is None) + (args.log is None) == 2:
        raise ValueError("trace: --trace FILE or --log FILE is needed")
    log = None if args.log is None else read_log(Path(args.log))
    arrivals, config, left_out = _load(args, log)
    if not arrivals:
        raise SimulationError("no request fits max_model_len")
    costs, spread, source = _costs(args, log)
    classes = parse_classes(tuple(args.slo))
    noise = spread if args.spread is None else args.spread
    server = SimulatedServer(
        config, costs, classes, admits=bool(classes), controls=bool(classes), noise=noise, seed=args.seed
    )
    served = server.run(arrivals)
    summary = summarize(served.records, classes[0].slo if classes else None)
    facts = {
        "requests": len(arrivals), "left_out": left_out, "steps": served.steps, "step_times": source, "spread": noise,
        "preemptions": served.preemptions, "hit_share": served.hit_share, "refused": len(served.refused),
    }  # fmt: skip
    if args.json:
        metrics = {name: metric.value for name, metric in summary.metrics().items()}
        print(json.dumps(facts | {"metrics": metrics}))
    else:
        print("\n".join(_lines(summary, served, facts)))
    return 0


def _load(args: argparse.Namespace, log: Log | None) -> tuple[list[Arrival], SchedulerConfig, int]:
    """The requests, the limits of the scheduler, and how many requests are too long for it."""
    from quire.bench.simulated_arrivals import arrivals_of_trace, load_of_log
    from quire.bench.traces import read_trace
    from quire.core.scheduler_config import SchedulerConfig

    recorded = None if log is None else load_of_log(log, args.rate)
    config = SchedulerConfig(num_blocks=4096, max_model_len=32768) if recorded is None else recorded.config
    given = {name: getattr(args, name) for name in _LIMITS}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.scheduling_policy is not None:
        changes["policy"] = args.scheduling_policy
    if args.no_prefix_caching:
        changes["enable_prefix_caching"] = False
    config = replace(config, **changes, max_draft_tokens=0, steps_in_flight=1)
    longest = min(config.max_model_len, config.num_blocks * config.block_size // len(config.groups) - 1)
    if args.trace is None:
        assert recorded is not None
        found = [one for one in recorded.arrivals if len(one.prompt) + one.output <= longest]
        return found[: args.limit], config, len(recorded.arrivals) - len(found)
    rows = read_trace(Path(args.trace), limit=args.limit, seed=args.seed)
    arrivals, longer = arrivals_of_trace(rows, longest, args.rate)
    return arrivals, config, longer


def _costs(args: argparse.Namespace, log: Log | None) -> tuple[StepTime, float, str]:
    """What steps take, their spread, and where that is from."""
    if args.device is not None:
        from quire.bench.roofline_time import roofline_time
        from quire.cli.calc import named_size
        from quire.planner.devices import counted

        if args.model is None:
            raise ValueError("model: --device needs --model, whose weights and arithmetic it runs")
        device, count = counted(args.device)
        made = roofline_time(named_size(args.model), device, count, overhead=args.overhead_ms / 1e3)
        return made, 0.0, f"bound only: the roofline of {count} × {device.title}"
    if log is None:
        raise ValueError("log: step times are those of --log FILE, or of --device NAME with --model MODEL")
    from quire.bench.simulated_arrivals import load_of_log

    model = load_of_log(log).costs
    return model.seconds, 0.03, "the cost model of the log"


def _lines(summary: Summary, served: SimulatedRun, facts: dict[str, Any]) -> list[str]:
    from quire.bench.serve_result import latency_table

    rates = summary.metrics()
    lines = [
        f"{facts['requests']} requests in {summary.seconds:.1f} simulated seconds, {facts['steps']} steps "
        f"(step times: {facts['step_times']}; spread {facts['spread']:g})",
        f"  {summary.completed / summary.seconds:.2f} requests/s, "
        f"{rates['output_token_rate'].value:.1f} output tokens/s, concurrency {summary.concurrency:.1f}, "
        f"{served.preemptions} preemptions, {served.hit_share:.0%} of prompt tokens from the cache",
    ]
    if summary.goodput is not None:
        lines.append(f"  goodput {summary.goodput.rate:.2f} requests/s ({summary.goodput.share:.0%}), "
                     f"{facts['refused']} refused")  # fmt: skip
    if facts["left_out"]:
        lines.append(f"  left out: {facts['left_out']} requests that exceed max_model_len or the cache")
    return [*lines, "", *latency_table([one.row() for one in summary.distributions.values()])]
