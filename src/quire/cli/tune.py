"""Find the settings that serve a recorded load best: a search over the simulator, from the settings that were.

What counts is goodput under --goodput, then the mean time of a request. Settings for which most steps would be beyond
what the log has seen are left out. Check the answer on the real engine: quire whatif says what to expect of it."""

from __future__ import annotations

import argparse
import json

from quire.cli.whatif import add_log_options, recorded_load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_options(parser)
    parser.add_argument(
        "--simulations", type=int, default=40, metavar="N", help="at most so many (default: 40)"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.bench.tuning import tune
    from quire.objectives import parse_slo

    if not args.goodput:
        raise ValueError("goodput: --goodput ttft:500 tpot:50 says what good is")
    if not 2 <= args.simulations <= 10_000:
        raise ValueError(f"simulations: {args.simulations} must be from 2 to 10000")
    if not 0 < args.rate <= 1e6:
        raise ValueError(f"rate: {args.rate:g} must be above 0")
    load, slo = recorded_load(args), parse_slo(args.goodput)
    tried = tune(load, slo, args.simulations, args.rate)
    first, best = tried[0], max(tried, key=lambda one: one.score)
    changes = {name: value for name, value in best.settings.items() if first.settings[name] != value}
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
    if args.json:
        report = {"first": first.report(), "best": best.report(), "changes": changes, "tried": len(tried)}
        print(json.dumps(report))
        return 0
    print(f"{len(load.arrivals)} requests, {len(tried)} simulations, objectives {slo}")
    width = max(len(one.said()) for one in tried)
    for one in sorted(tried, key=lambda one: one.score, reverse=True)[:8]:
        marks = " best" * (one is best) + " as it was" * (one is first) + " beyond what was seen" * one.beyond
        print(f"  {one.said():<{width}}  {one.goodput:>7.1%}  {one.seconds * 1e3:>9.1f} ms a request {marks}")
    if not changes:
        print("nothing is better than the settings that were")
        return 0
    print(f"try        quire serve … {words}")
    if first.error is not None:
        print(
            f"the simulator is {first.error:.0%} from what was measured on this load: check with quire bench serve"
        )
    return 0
