"""Run the simulations of a lesson about inference, with numbers from the engine's own parts and calculators."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.learn.quiz import Question
    from quire.learn.scene import Scene, Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "`quire learn` lists the simulations, `quire learn NAME --help` the controls of one, `quire learn quiz` asks\n"
        "questions. `quire serve` shows all of it at /learn."
    )
    parser.add_argument("name", nargs="?", help="a simulation, by name or number")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from quire.cli.serve import simulated
    from quire.learn.offered import offer
    from quire.learn.simulations import simulation, simulations

    offer(simulated)
    if args.name == "quiz":
        return _quiz(args.rest)
    if args.name is None:
        for one in simulations().values():
            print(f"{one.number:>3}  {one.name:<20}{one.title}")
        return 0
    one = simulation(args.name)
    options = vars(_parser(one).parse_args(args.rest))
    as_json = options.pop("json")
    scene = one.scene(options)
    print(json.dumps(scene.to_json()) if as_json else f"{textwrap.fill(one.about, 100)}\n\n{_text(scene)}")
    return 0


def _quiz(rest: list[str]) -> int:
    from quire.cli.parser import Parser
    from quire.learn.quiz import questions

    parser = Parser(prog="quire learn quiz", description="Questions of the lesson, a chapter each.")
    parser.add_argument("chapter", nargs="?", type=int, help="one chapter (default: all)")
    parser.add_argument(
        "--answer", type=int, metavar="N", help="your choice; the command ends with 1 if it is wrong"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with the answers")
    options = parser.parse_args(rest)
    found = [one for one in questions() if options.chapter in {None, one.chapter}]
    if not found:
        raise ValueError(f"chapter: {options.chapter} must be from 0 to {questions()[-1].chapter}")
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    elif options.answer is not None:
        return _judge(found, options.answer)
    else:
        for one in found:
            print(f"{one.chapter}. {textwrap.fill(one.text, 100)}")
            print("\n".join(f"   {n}) {choice}" for n, choice in enumerate(one.choices, 1)) + "\n")
    return 0


def _judge(found: list[Question], answer: int) -> int:
    if len(found) > 1:
        raise ValueError("answer: needs a chapter before it")
    (one,) = found
    if not 1 <= answer <= len(one.choices):
        raise ValueError(f"answer: {answer} must be from 1 to {len(one.choices)}")
    right = one.choices[answer - 1] == one.right
    print(f"{'Right' if right else 'No'}: {one.right}.\n{textwrap.fill(one.why, 100)}")
    print(f"See it: quire learn {one.simulation}")
    return 0 if right else 1


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
