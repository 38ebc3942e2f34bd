"""Numbers in the text of a chapter: each names the sum that gives it, and is computed when the chapter is shown.

`{{throughput --params-b 70 --device h100 | tokens}}` is a result of `quire calc`, by its label. `sim NAME …` in place
of a calculator is a figure of a simulation, `device NAME` and `model NAME` are facts of the tables. A third part,
`number` or `remark`, gives the value without its unit, or what is said beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from quire.learn.simulations import simulation
from quire.planner.commands import figures_of
from quire.planner.devices import device
from quire.planner.figure import Figure
from quire.planner.model_size import ModelSize, size_of_config
from quire.planner.shapes import SHAPES
from quire.util.likeness import did_you_mean

_PARTS = ("shown", "number", "remark")


class Number(NamedTuple):
    """A number as it is shown, and what gives it: a command, or a file."""

    text: str
    source: str


def number(reference: str) -> Number:
    """What a reference stands for. Raises ValueError, quoting it, for one that leads nowhere."""
    command, *rest = (part.strip() for part in reference.split("|"))
    label, part = (*rest, "shown")[:2] if rest else ("", "")
    if not label or len(rest) > 2 or part not in _PARTS:
        raise ValueError(
            f"{{{{{reference}}}}}: must be COMMAND | LABEL, or COMMAND | LABEL | number or remark"
        )
    kind, _, words = command.partition(" ")
    figures, said = (
        _SOURCES[kind](words) if kind in _SOURCES else (figures_of(command), f"quire calc {command}")
    )
    known = {one.label: one for one in figures}
    if label not in known:
        raise ValueError(f"{{{{{reference}}}}}: no figure {label!r}{did_you_mean(label, known)}")
    return Number(_text(known[label], part), said)


def _text(figure: Figure, part: str) -> str:
    if part == "remark":
        return figure.remark
    return (figure._replace(unit="") if part == "number" else figure).shown()


def _simulated(words: str) -> tuple[Iterable[Figure], str]:
    name, *given = shlex.split(words)
    values = dict(one.split("=", 1) for one in given)
    options = "".join(f" --{key.replace('_', '-')} {shlex.quote(value)}" for key, value in values.items())
    return simulation(name).scene(values).figures, f"quire learn {name}{options}"


def _device(words: str) -> tuple[Iterable[Figure], str]:
    one = device(words)
    figures = [
        Figure("memory", one.memory_gb, "GB"),
        Figure("bandwidth", one.bandwidth_gb_s, "GB/s"),
        Figure("link", one.link_gb_s, "GB/s"),
        Figure("power", one.watts, "W"),
    ]
    if "bf16" in one.tflops:
        figures.append(Figure("arithmetic", one.tflops["bf16"], "TFLOPS"))
    return figures, "quire calc devices"


@lru_cache
def _size(name: str) -> ModelSize:
    return size_of_config(SHAPES[name])


def _model(words: str) -> tuple[Iterable[Figure], str]:
    if words not in SHAPES:
        raise ValueError(f"no model {words!r}{did_you_mean(words, SHAPES)}")
    one = _size(words)
    facts = ("layers", "heads", "kv_heads", "head_dim", "hidden", "width", "experts")
    figures = [Figure(fact.replace("_", " ").replace("kv", "KV"), getattr(one, fact)) for fact in facts]
    figures += [
        Figure("parameters", one.params_b, "billion"), Figure("active parameters", one.active_b, "billion"),
        Figure("vocabulary", SHAPES[words]["vocab_size"]),
    ]  # fmt: skip
    return figures, f"config.json of {words}"


_SOURCES = {"sim": _simulated, "device": _device, "model": _model}
