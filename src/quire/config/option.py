"""A field of the configuration that is an option of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    aliases: Mapping[str, str] = {},
    count: bool = False,
    most: int | None = None,
    size: bool = False,
) -> Any:
    """A config field with the metadata of its command-line option.

    `aliases` are names of values in vLLM, PyTorch and llama.cpp; `count` is an integer from 1 to `most`; `size` is in
    bytes, written like 6GiB.
    """
    return field(default=default, metadata={
        "help": text, "choices": choices, "metavar": metavar, "aliases": aliases, "count": count, "most": most,
        "size": size,
    })  # fmt: skip


def check_options(group: Any) -> None:
    """Resolve the aliases of a group's values and check their ranges. Raises ValueError naming the field."""
    for f in fields(group):
        value, meta = getattr(group, f.name), f.metadata
        if meta["aliases"] and value in meta["aliases"]:
            value = meta["aliases"][value]
            object.__setattr__(group, f.name, value)
        if meta["choices"] and value not in meta["choices"]:
            raise ValueError(f"{f.name}: {value!r} is not one of {', '.join(meta['choices'])}")
        if not meta["count"] or value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{f.name}: {value!r} is not a positive integer")
        # Larger values gain nothing and overflow the arrays of a step.
        if meta["most"] is not None and value > meta["most"]:
            raise ValueError(f"{f.name}: {value} exceeds the limit of {meta['most']}")
