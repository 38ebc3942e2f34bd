"""Everything about a parameter of a request, written once: where its field is declared.

`types.SamplingParams` declares its fields with `number`, `integer`, `switch`, `several` and `structure`. The checks of
values, the fields, bounds and descriptions of the HTTP API, the options of the command line, the values in checkpoints
and the table in docs/sampling.md all come from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

from quire.records import dataclass

MAX_INTEGER = 2**31 - 1
# Files and APIs with other names for parameters. Those of a GGUF file follow "general.sampling.".
NameSource = Literal["generation_config", "GGUF", "llama-server", "Ollama", "TGI"]
Names = Mapping[NameSource, str]
_NONE: Names = {}


class Structure:
    """What an answer must look like. The room `structured` has the one kind of it, StructuredOutput."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a request.

    A float or an int has a range, a list or a dict holds up to `high` entries. `help` is the text of the command line,
    OpenAPI and the docs. `metavar` stands for the value in the help of the option; a parameter without one has no
    option generated from here.
    """

    kind: type
    default: Any
    help: str
    low: float = 0
    high: float = 0
    above: bool = False  # the low end itself is excluded
    metavar: str = ""
    names: Names = dataclasses.field(default_factory=dict)

    @property
    def range(self) -> str:
        """The range in brackets; a round bracket where the end is excluded."""
        low, high = (f"{end:g}" if self.kind is float else str(end) for end in (self.low, self.high))
        return f"{'(' if self.above else '['}{low}, {high}]"

    def refusal(self, value: Any) -> str | None:
        """What is wrong with the value of a float or an int, or None. The value None is valid if it is the default."""
        right = type(value) is self.kind or (is_number if self.kind is float else is_integer)(value)
        if right and self.low <= value <= self.high and not (self.above and value == self.low):
            return None
        if value is None and self.default is None:
            return None
        return f"{value!r} is not {'a number' if self.kind is float else 'an integer'} in {self.range}"


def number(
    default: float,
    text: str,
    low: float,
    high: float,
    metavar: str,
    *,
    above: bool = False,
    names: Names = _NONE,
) -> Any:
    """A dataclass field of a number in [low, high], or in (low, high] with `above`."""
    return _field(Parameter(float, default, text, low, high, above, metavar, names))


def integer(
    default: int | None, text: str, low: int, high: int, metavar: str = "", *, names: Names = _NONE
) -> Any:
    """A dataclass field of an integer in [low, high]; with the default None it is optional."""
    return _field(Parameter(int, default, text, low, high, False, metavar, names))


def switch(default: bool, text: str) -> Any:
    """A dataclass field that is on or off."""
    return _field(Parameter(bool, default, text))


def several(default: Any, text: str, most: int) -> Any:
    """A dataclass field of up to `most` entries."""
    return _field(Parameter(dict if default == {} else list, default, text, high=most))


def structure(text: str) -> Any:
    """A dataclass field of what an answer must look like."""
    return _field(Parameter(Structure, None, text))


def _field(parameter: Parameter) -> Any:
    metadata = {"parameter": parameter}
    if parameter.kind is dict:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=parameter.default, metadata=metadata)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
