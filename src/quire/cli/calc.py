"""Compute a bound, a size or a time of inference, from numbers, a model and a device."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cli.parser import Parser
    from quire.planner.calculators import Calculator
    from quire.planner.figure import Figure
    from quire.planner.model_size import ModelSize

_LISTS = ("devices", "worked")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "`quire calc` lists the calculators, `quire calc devices` the hardware with its sources, and `quire calc\n"
        "worked` published figures beside the right ones. `quire calc NAME --help` explains a calculator."
    )
    parser.add_argument("name", nargs="?", help="a calculator")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def calc_parser(one: Calculator) -> Parser:
    """The parser of a calculator: an option for each of its numbers."""
    from quire.cli.parser import Parser
    from quire.planner.calculators import PARAMETERS

    parser = Parser(
        prog=f"quire calc {one.name}",
        description=one.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for name, parameter in one.parameters.items():
        if name == "kv_values":
            continue
        given = parameter.default is not parameter.empty
        default = f" (default: {parameter.default:g})" if given and parameter.annotation is not str else ""
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=parameter.annotation,
            metavar="N",
            help=PARAMETERS[name] + default,
        )
    parser.add_argument(
        "--model", help="a released shape or a checkpoint: gives parameters, layers, heads", metavar="MODEL"
    )
    parser.add_argument(
        "--device", help="a device, or several: h100, h100:8; gives memory, rates", metavar="NAME[:N]"
    )
    parser.add_argument("--json", action="store_true", default=False, help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    from quire.cli.parser import nearest
    from quire.planner.calculators import CALCULATORS

    if args.name is None:
        print("\n".join(f"{name:<20}{one.about.splitlines()[0]}" for name, one in CALCULATORS.items()))
        return 0
    if args.name in _LISTS:
        return _list(args.name, args.rest)
    if args.name not in CALCULATORS:
        raise ValueError(f"name: no calculator {args.name!r}{nearest(args.name, [*CALCULATORS, *_LISTS])}")
    one = CALCULATORS[args.name]
    options = vars(calc_parser(one).parse_args(args.rest))
    as_json, figures = options.pop("json"), calculate(one, options)
    print(json.dumps([figure._asdict() for figure in figures]) if as_json else lines(figures))
    return 0


def calculate(one: Calculator, options: dict[str, object]) -> list[Figure]:
    """The results for the options of a command; `model` and `device` are names."""
    from quire.planner.devices import counted

    given = dict(options)
    model, device = given.pop("model", None), given.pop("device", None)
    chosen = counted(str(device)) if device else (None, 1)
    return one.figures(given, named_size(str(model)) if model else None, *chosen)


def named_size(name: str) -> ModelSize:
    """The numbers of a released shape, or of a checkpoint. Raises ValueError or CheckpointError."""
    from quire.planner.model_size import model_size, size_of_config
    from quire.planner.shapes import SHAPES

    if name in SHAPES:
        return size_of_config(SHAPES[name])
    from quire.engine.build.opening import open_model
    from quire.program.formats import NumberFormats
    from quire.program.lower import lower

    spec = open_model(name, tokenizer=False).facts.spec
    return model_size(spec, lower(spec, NumberFormats("bf16", "bf16")))


def lines(figures: list[Figure]) -> str:
    """The results as text, a line each."""
    width = max(len(figure.label) for figure in figures) + 2
    return "\n".join(
        f"{figure.label:<{width}}{figure.shown()}" + (f"  ({figure.remark})" if figure.remark else "")
        for figure in figures
    )


def _list(name: str, rest: list[str]) -> int:
    from dataclasses import asdict

    from quire.planner.devices import devices, links
    from quire.planner.worked import worked_figures

    as_json = rest == ["--json"]
    if rest and not as_json:
        raise ValueError(f"{name}: takes no option but --json")
    if name == "worked":
        cases = worked_figures()
        if as_json:
            print(json.dumps([asdict(case) for case in cases]))
        for case in () if as_json else cases:
            print(f"{case.place}: {case.printed} -> {case.right}")
            if case.command:
                print(f"    quire calc {case.command}")
            if case.note:
                print(textwrap.indent(textwrap.fill(case.note, 110), "    "))
        return 0
    if as_json:
        print(json.dumps({"devices": [asdict(one) for one in devices().values()], "links_gb_s": links()}))
        return 0
    print(f"{'':<16}{'GB':>8}{'GB/s':>12}{'bf16 TFLOPS':>13}{'FLOP/byte':>11}")
    for one in devices().values():
        ridge = one.ridge()
        peak = f"{one.tflops['bf16']:g}" if "bf16" in one.tflops else "-"
        print(
            f"{one.name:<16}{one.memory_gb:>8g}{one.bandwidth_gb_s:>12,g}{peak:>13}"
            f"{'-' if ridge is None else f'{ridge:.0f}':>11}  {one.title} [{one.source}]"
        )
    print("\nlinks, GB/s: " + ", ".join(f"{link} {rate:g}" for link, rate in links().items()))
    return 0
