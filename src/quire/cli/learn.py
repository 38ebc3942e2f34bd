"""Run the simulations of a lesson about inference, with numbers from the engine's own parts and calculators."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.learn.scene import Scene, Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "`quire learn` lists the simulations, `quire learn NAME --help` the controls of one. `quire serve` shows all\n"
        "of them at /learn."
    )
    parser.add_argument("name", nargs="?", help="a simulation, by name or number")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from quire.learn.simulations import SIMULATIONS, simulation

    if args.name is None:
        for one in SIMULATIONS.values():
            print(f"{one.number:>3}  {one.name:<20}{one.title}")
        return 0
    one = simulation(args.name)
    options = vars(_parser(one).parse_args(args.rest))
    as_json, scene = options.pop("json"), None
    scene = one.scene(options)
    print(json.dumps(scene.to_json()) if as_json else f"{textwrap.fill(one.about, 100)}\n\n{_text(scene)}")
    return 0


def _parser(one: Simulation) -> argparse.ArgumentParser:
    from quire.cli.parser import Parser

    parser = Parser(prog=f"quire learn {one.name}", description=one.about, argument_default=argparse.SUPPRESS)
    for control in one.controls:
        kind = "|".join(control.choices) or (
            "true|false" if isinstance(control.default, bool) else f"{control.least:g} to {control.most:g}"
        )
        said = f"{control.label}{f', {control.unit}' if control.unit else ''}: {kind} (default: {control.default})"
        parser.add_argument(
            f"--{control.name.replace('_', '-')}", metavar="VALUE", help=said.replace("%", "%%")
        )
    parser.add_argument("--json", action="store_true", default=False, help="print JSON, as the page gets it")
    return parser


def _text(scene: Scene) -> str:
    from quire.cli.calc import lines

    parts = [lines([*scene.figures])]
    for table in scene.tables:
        rows = [table.columns, *table.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        parts.append("\n".join([table.title, *shown]))
    if scene.remark:
        parts.append(textwrap.fill(scene.remark, 100))
    return "\n\n".join(parts)
