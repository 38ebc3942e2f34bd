"""Simulate a server: the real scheduler, blocks, prefix cache, policies and admission on a virtual clock.

A step takes what the cost model of a log has learned, or what the roofline of a device allows a model at best."""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import add_trace_options

if TYPE_CHECKING:
    from quire.bench.request_metrics import Summary
    from quire.bench.scenario import Scenario
    from quire.bench.simulated_server import SimulatedRun

_SETTINGS = ("scheduling_policy", "replicas", "router", "prefill_replicas")
_LIMITS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("experiment", "factors"), help="of the lesson: experiment N "
                        "(1 to 7), or what each technique brings")  # fmt: skip
    parser.add_argument("number", nargs="?", type=int, help="of the experiment")
    add_trace_options(parser.add_argument)
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
        help="relative deviation of step times (default: that of the log; a bound has none)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the spread, and of ServeGen")
    for name in _LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="as of quire serve")
    parser.add_argument("--scheduling-policy", metavar="P", help="as of quire serve")
    parser.add_argument("--replicas", type=int, metavar="N", help="servers behind a router (default: 1)")
    parser.add_argument(
        "--router", metavar="P", help="policy of the router, as of quire router (default: prefix)"
    )
    parser.add_argument(
        "--prefill-replicas", type=int, metavar="N", help="of the replicas, those for prompts alone"
    )
    parser.add_argument("--link-gb-s", type=float, default=50.0, metavar="R",
                        help="link over which caches move from there (default: 50, InfiniBand NDR)")  # fmt: skip
    parser.add_argument("--no-prefix-caching", action="store_true", help="without a prefix cache")
    parser.add_argument(
        "--slo", nargs="+", metavar="CLASS", default=(), help="as of quire serve; admission predicts"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.bench.request_metrics import summarize
    from quire.objectives import parse_classes

    if args.what is not None:
        return _lesson(args)
    for name, least in (("limit", 1), ("rate", 1e-6), ("overhead_ms", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}: {getattr(args, name):g} is below the minimum of {least:g}")
    if (args.trace is None) + (args.log is None) == 2:
        raise ValueError("trace: --trace FILE or --log FILE is needed")
    scenario, source = _scenario(args)
    gc.set_threshold(100_000, 20, 100)  # a simulation makes many objects and hardly a cycle
    served, left_out = scenario.run(args.seed)
    classes = parse_classes(tuple(args.slo))
    summary = summarize(served.records, classes[0].slo if classes else None)
    facts = {
        "requests": len(served.records), "left_out": left_out, "steps": served.steps, "step_times": source,
        "preemptions": served.preemptions, "hit_share": served.hit_share, "refused": len(served.refused),
    }  # fmt: skip
    if args.json:
        metrics = {name: metric.value for name, metric in summary.metrics().items()}
        print(json.dumps(facts | {"metrics": metrics}))
    else:
        print("\n".join(_lines(summary, served, facts)))
    return 0


def _lesson(args: argparse.Namespace) -> int:
    from quire.bench.lesson.production_experiments import experiment, factors
    from quire.cli.calc import lines

    if args.what == "factors":
        print(lines([*factors()]))
        return 0
    if args.number is None:
        raise ValueError("number: experiment needs one from 1 to 7")
    found = experiment(args.number)
    print(f"{found.number}. {found.title}\n\n{lines(found.figures)}\n")
    for sentence, holds in found.holds:
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {sentence}")
    return 0 if all(holds for _, holds in found.holds) else 1


def _scenario(args: argparse.Namespace) -> tuple[Scenario, str]:
    """What is to be simulated, and where step times are from."""
    from quire.bench.scenario import Scenario, scenario_of_log
    from quire.bench.simulated_arrivals import arrivals_of_trace, load_of_log
    from quire.bench.traces import read_trace
    from quire.cli.calc import named_size
    from quire.core.scheduler_config import SchedulerConfig
    from quire.objectives import parse_classes
    from quire.planner.devices import counted
    from quire.routing.transfer import transfer_seconds
    from quire.steplog.log_files import read_log

    made = Scenario(
        arrivals=[], config=SchedulerConfig(num_blocks=4096, max_model_len=32768), costs=lambda _: 0.0
    )
    source, model = "", None if args.model is None else named_size(args.model)
    if args.log is not None:
        load = load_of_log(read_log(Path(args.log)))
        made = replace(scenario_of_log(load), classes=())
        source = f"fitted to {load.fit.steps} steps of the log"
    if args.device is not None:
        from quire.planner.step_bound import RankLayout, StepBound

        if model is None:
            raise ValueError("model: --device needs --model, whose weights and arithmetic it runs")
        device, count = counted(args.device)
        bound = StepBound(
            model=model,
            device=device,
            layout=RankLayout(count),
            per_host=count,
            overhead=args.overhead_ms / 1e3,
        )
        made = replace(made, costs=bound.seconds, noise=0.0)
        source = f"bound only: the roofline of {count} × {device.title}"
    if not source:
        raise ValueError("log: step times are those of --log FILE, or of --device NAME with --model MODEL")
    settings = {
        name: str(value) for name in (*_LIMITS, *_SETTINGS) if (value := getattr(args, name)) is not None
    }
    settings |= {"enable_prefix_caching": "off"} if args.no_prefix_caching else {}
    made = replace(made.changed(settings), classes=parse_classes(tuple(args.slo)))
    if args.prefill_replicas:
        if model is None:
            raise ValueError("model: --prefill-replicas needs --model, whose KV cache is moved")
        size, rate = 2.0 * model.kv_values, args.link_gb_s
        made = replace(made, transfer=lambda tokens: transfer_seconds(size * tokens, rate))
    if args.spread is not None:
        made = replace(made, noise=args.spread)
    if args.trace is not None:
        rows = read_trace(args.trace, limit=args.limit, seed=args.seed, form=args.trace_format)
        made = replace(made, arrivals=arrivals_of_trace(rows))
    return replace(made, arrivals=made.arrivals[: args.limit]).faster(args.rate), source


def _lines(summary: Summary, served: SimulatedRun, facts: dict[str, Any]) -> list[str]:
    from quire.bench.perception import perceived
    from quire.bench.serve_result import latency_table

    rates = summary.metrics()
    lines = [
        f"{facts['requests']} requests in {summary.seconds:.1f} simulated seconds, {facts['steps']} steps "
        f"(step times: {facts['step_times']})",
        f"  {summary.completed / summary.seconds:.2f} requests/s, "
        f"{rates['output_token_rate'].value:.1f} output tokens/s, concurrency {summary.concurrency:.1f}, "
        f"{served.preemptions} preemptions, {served.hit_share:.0%} of prompt tokens from the cache",
    ]
    if summary.goodput is not None:
        lines.append(f"  goodput {summary.goodput.rate:.2f} requests/s ({summary.goodput.share:.0%}), "
                     f"{facts['refused']} refused")  # fmt: skip
    if facts["left_out"]:
        lines.append(f"  left out: {facts['left_out']} requests that exceed max_model_len or the cache")
    rows = [one.row() for one in summary.distributions.values()]
    return [*lines, "", *latency_table(rows), "", *perceived(rows)]
