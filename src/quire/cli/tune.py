"""Find the settings that serve a recorded load best: a search over the simulator, from the settings that were.

What counts is goodput under --goodput, then the mean time of a request. A log tells of steps up to what it has seen, or
twice that, where its smaller steps say what its larger ones took. Settings beyond that are shown, not chosen. With
--check the requests then come again to a real engine, as the settings were, as they would be, and with those that could
be better but are beyond the log, with prompts of random tokens: quire serve's model and options have to be given."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cli.options import add_engine_options
from quire.cli.replay import built_like
from quire.cli.whatif import add_log_options, recorded_load

if TYPE_CHECKING:
    from quire.bench.simulated_arrivals import RecordedLoad
    from quire.bench.tuning import TunedSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_options(parser)
    parser.add_argument(
        "--simulations", type=int, default=40, metavar="N", help="at most so many (default: 40)"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)"
    )
    parser.add_argument(
        "--check",
        metavar="MODEL",
        help="measure the settings that were and the best on this model, here, without drafts, one step at a time",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.bench.tuning import tune, unjudged
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
    far = unjudged(tried)
    wanted = [first, *([best] if changes else []), *([] if far is None else [far])]
    measured = _checked(args, load, wanted) if args.check is not None and len(wanted) > 1 else []
    if args.json:
        report = {"first": first.report(), "best": best.report(), "changes": changes, "tried": len(tried)}
        report["beyond"] = None if far is None else far.report()
        print(json.dumps(report | {"measured": [one.report() for one in measured]}))
        return 0
    print(f"{len(load.arrivals)} requests, {len(tried)} simulations, objectives {slo}")
    width = max(len(one.said()) for one in tried)
    for one in sorted(tried, key=lambda one: one.score, reverse=True)[:8]:
        marks = " best" * (one is best) + " as it was" * (one is first) + " beyond the log" * bool(one.beyond)
        print(f"  {one.said():<{width}}  {one.goodput:>7.1%}  {one.seconds * 1e3:>9.1f} ms a request {marks}")
    if changes:
        print(f"try        quire serve … {words}")
    else:
        print("nothing that the log can tell of is better than the settings that were")
    if far is not None:
        print(f"perhaps    {far.said()}: {far.beyond}")
        if not measured:
            print("           a log of a busier hour would tell, and so does --check")
    if measured:
        print("measured on this engine:")
        for one in measured:
            print(
                f"  {one.said():<{width}}  {one.goodput:>7.1%}  {one.seconds * 1e3:>9.1f} ms a request,"
                f" simulated {one.error:.0%} from it"
            )
        winner = max(measured, key=lambda one: one.score)
        print(
            "not better on this engine: keep what was"
            if winner is measured[0]
            else f"best here  {winner.said()}"
        )
    elif first.error is not None:
        print(
            f"the simulator is {first.error:.0%} from what was measured on this load: check with quire bench serve"
        )
    return 0


def _checked(
    args: argparse.Namespace, load: RecordedLoad, tried: Sequence[TunedSettings]
) -> list[TunedSettings]:
    """Measured on the model of --check. Raises QuireError."""
    from quire.bench.tuning import checked, limits_for
    from quire.objectives import parse_slo

    built = built_like(args, args.check, limits_for(load.config, tried))
    try:
        return checked(
            load, tried, parse_slo(args.goodput), built.core.worker, built.program.vocab, args.rate
        )
    finally:
        built.close()
