"""Calculations as texts: the words behind `quire calc`."""

from __future__ import annotations

import shlex

from quire.planner.calculators import CALCULATORS
from quire.planner.devices import counted
from quire.planner.figure import Figure
from quire.planner.model_size import size_of_config
from quire.planner.shapes import SHAPES
from quire.util.likeness import did_you_mean


def figures_of(command: str) -> list[Figure]:
    """The results of `quire calc COMMAND`; a model is one of the released shapes.

    Raises ValueError for an unknown calculator, option or model, or for a value that it does not take.
    """
    name, *words = shlex.split(command)
    if name not in CALCULATORS:
        raise ValueError(f"{command}: no calculator {name!r}{did_you_mean(name, CALCULATORS)}")
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        raise ValueError(f"{command}: must be options that begin with --, each with a value")
    options = {word[2:].replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    model, device = options.pop("model", ""), options.pop("device", "")
    if model and model not in SHAPES:
        raise ValueError(f"{command}: no model {model!r}{did_you_mean(model, SHAPES)}")
    known = CALCULATORS[name].parameters
    for option in options:
        if option not in known:
            raise ValueError(
                f"{command}: {name} has no --{option.replace('_', '-')}{did_you_mean(option, known)}"
            )
    values = {option: known[option].annotation(value) for option, value in options.items()}
    chosen = counted(device) if device else (None, 1)
    return CALCULATORS[name].figures(values, size_of_config(SHAPES[model]) if model else None, *chosen)
