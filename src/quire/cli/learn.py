"""Read and run a lesson about inference: chapters, simulations, listings, with numbers from the engine's own parts."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.learn.quiz import Question
    from quire.learn.scene import Scene, Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "quire learn list          chapters, simulations and listings\n"
        "quire learn chapter N     a chapter; its name alone does as well\n"
        "quire learn NAME --help   the controls of a simulation\n"
        "quire learn run NAME      a listing\n"
        "quire learn check         all listings, against what they must print\n"
        "quire learn quiz          questions\n\n`quire serve` shows all of it at /learn."
    )
    parser.add_argument("name", nargs="?", help="a simulation, by name or number, or a chapter, by name")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from quire.cli.serve import simulated
    from quire.learn.chapters import chapters
    from quire.learn.offered import offer
    from quire.learn.simulations import simulation

    offer(simulated)
    if args.name in _VERBS:
        return _VERBS[args.name](args.rest)
    if args.name is None:
        _print_simulations()
        return 0
    if args.name in chapters():
        return _chapter([args.name, *args.rest])
    one = simulation(args.name)
    options = vars(_parser(one).parse_args(args.rest))
    as_json = options.pop("json")
    scene = one.scene(options)
    print(json.dumps(scene.to_json()) if as_json else f"{textwrap.fill(one.about, 100)}\n\n{_text(scene)}")
    return 0


def _print_simulations() -> None:
    from quire.learn.simulations import simulations

    for one in simulations().values():
        print(f"{one.number:>3}  {one.name:<20}{one.title}")


def _list(rest: list[str]) -> int:
    from quire.cli.parser import Parser
    from quire.learn.chapters import chapters
    from quire.learn.lesson_listings import listings

    Parser(prog="quire learn list", description="All parts of the lesson.").parse_args(rest)
    print("Chapters: quire learn chapter N")
    wide = max(map(len, chapters()))
    for each in chapters().values():
        print(f"{'' if each.number is None else each.number:>3}  {each.name:<{wide}}  {each.title}")
    print("\nSimulations: quire learn NAME")
    _print_simulations()
    print("\nListings: quire learn run NAME")
    wide = max(map(len, listings()), default=0)
    for name, one in listings().items():
        print(f"     {name:<{wide}}  {one.about}")
    return 0


def _chapter(rest: list[str]) -> int:
    from quire.cli.chapter_text import chapter_text
    from quire.cli.markdown_text import MarkdownText
    from quire.cli.parser import Parser
    from quire.learn.chapters import chapter

    parser = Parser(
        prog="quire learn chapter", description="A chapter of the lesson, its numbers computed now."
    )
    parser.add_argument("chapter", help="its number or name: see `quire learn list`")
    parser.add_argument("--json", action="store_true", help="print JSON: its blocks, as the page gets them")
    options = parser.parse_args(rest)
    one = chapter(options.chapter)
    print(
        json.dumps(one.page())
        if options.json
        else chapter_text(one, MarkdownText(styled=sys.stdout.isatty()))
    )
    return 0


def _run(rest: list[str]) -> int:
    from quire.cli.parser import Parser
    from quire.learn.lesson_listings import listing

    parser = Parser(prog="quire learn run", description="Run a listing, or print its source.")
    parser.add_argument("listing", help="its name: see `quire learn list`")
    parser.add_argument("--source", action="store_true", help="print the program in place of running it")
    options = parser.parse_args(rest)
    one = listing(options.listing)
    print(one.source if options.source else one.run(), end="")
    return 0


def _check(rest: list[str]) -> int:
    from quire.cli.parser import Parser
    from quire.learn.lesson_listings import listing, listings

    parser = Parser(
        prog="quire learn check",
        description="Run listings and compare what they print with what they must print; the command ends with 1 if"
        " one differs.",
    )
    parser.add_argument("listing", nargs="*", help="their names (default: all)")
    wrong = 0
    chosen = [listing(name) for name in parser.parse_args(rest).listing] or [*listings().values()]
    wide = max(len(one.name) for one in chosen)
    for one in chosen:
        problem = one.differs()
        print(f"{one.name:<{wide}}  {problem or 'as it must'}")
        wrong += bool(problem)
    return 1 if wrong else 0


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
    from quire.util.columns import in_columns

    parts = [lines([*scene.figures])]
    parts += ["\n".join([table.title, *in_columns([table.columns, *table.rows])]) for table in scene.tables]
    for flow in scene.flows:
        arrows = [f"{flow.places[a]} → {flow.places[b]}: {what}" for a, b, what in flow.arrows]
        parts.append("\n".join([flow.title, *(arrows or ["nothing"])]))
    if scene.remark:
        parts.append(textwrap.fill(scene.remark, 100))
    return "\n\n".join(parts)


_VERBS = {"list": _list, "chapter": _chapter, "run": _run, "check": _check, "quiz": _quiz}
