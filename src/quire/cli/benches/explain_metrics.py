"""Define every figure, and show worked examples with their source, computed by the benchmark's own code."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", help="one figure or example (default: all definitions and examples)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from quire.bench.goodput import PRESETS
    from quire.bench.listings import LISTINGS
    from quire.bench.request_metrics import DEFINITIONS
    from quire.cli.parser import nearest
    from quire.objectives import OBJECTIVES

    listings = [one for one in LISTINGS if args.name in {None, one.name}]
    definitions = {name: text for name, text in DEFINITIONS.items() if args.name in {None, name}}
    if not listings and not definitions:
        known = [*DEFINITIONS, *(one.name for one in LISTINGS)]
        raise ValueError(f"name: no figure or example {args.name!r}{nearest(args.name, known)}")
    if args.json:
        examples = [{"name": one.name, "about": one.about, "source": one.source(), "output": one.output(),
                     "note": one.note} for one in listings]  # fmt: skip
        print(json.dumps({"definitions": definitions, "examples": examples}, ensure_ascii=False))
        return 0
    for name, text in definitions.items():
        print(f"{name:<20}{text}")
    if args.name is None:
        print("\nobjectives for --goodput (milliseconds):")
        for name, text in OBJECTIVES.items():
            print(f"  {name:<18}{text}")
        print("\npresets:")
        for name, (slo, text) in PRESETS.items():
            print(f"  {name:<18}{slo!s:<32}{text}")
    for one in listings:
        print(f"\n== {one.name}: {one.about}")
        print("".join(f"    {line}\n" for line in one.source().splitlines()))
        print(one.output(), end="")
        if one.note:
            print(f"note: {one.note}")
    return 0
