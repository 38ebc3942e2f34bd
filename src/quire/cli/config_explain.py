"""Explain options of `quire serve`: the effect, the default, live or start-up, and the metrics that they move."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "verb", choices=("explain",), help="explain: print what options do", metavar="explain"
    )
    parser.add_argument(
        "option", nargs="*", metavar="OPTION", help="an option like max-num-seqs (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def explained() -> dict[str, dict[str, Any]]:
    """Every option of the engine and the server by its name, from the one description of each."""
    from quire.cli.options import default_text, fields_of, option_name, subjects_of
    from quire.config.effects import LIVE, MOVES
    from quire.config.schema import EngineConfig
    from quire.config.serving import ServingConfig

    found = {}
    for config in (EngineConfig, ServingConfig):
        subjects = subjects_of(config)
        for field in fields_of(config):
            meta = field.metadata
            found[field.name] = {
                "option": option_name(field),
                "variable": f"QUIRE_{field.name.upper()}",
                "group": subjects[field.name],
                "effect": meta["help"].replace("%%", "%"),
                "default": default_text(field.default, size=meta["size"]) or None,
                "choices": list(meta["choices"]),
                "change": "live" if field.name in LIVE else "start-up",
                "metrics": list(MOVES[field.name]),
            }
    return found


def run(args: argparse.Namespace) -> int:
    from quire.cli.parser import nearest

    known = explained()
    asked = [name.lstrip("-").replace("-", "_").lower().removeprefix("quire_") for name in args.option]
    for name, given in zip(asked, args.option, strict=True):
        if name not in known:
            raise ValueError(f"option: {given!r} is unknown{nearest(name, known)}")
    chosen = {name: known[name] for name in asked or known}
    if args.json:
        print(json.dumps(chosen))
        return 0
    print("\n\n".join(_text(each) for each in chosen.values()))
    return 0


def _text(each: dict[str, Any]) -> str:
    effect, marker, default = each["effect"].partition(" (default: ")
    lines = [
        ("effect", effect),
        ("default", default.rpartition(")")[0] if marker else each["default"] or "none"),
    ]
    if each["choices"]:
        lines.append(("choices", ", ".join(each["choices"])))
    lines += [("change", each["change"]), ("variable", each["variable"])]
    lines.append(("metrics", ", ".join(each["metrics"]) or "none"))
    return "\n".join([
        f"{each['option']}  [{each['group']}]",
        *(
            textwrap.fill(text, 100, initial_indent=f"  {name + ':':<10}", subsequent_indent=" " * 12)
            for name, text in lines
        ),
    ])  # fmt: skip
