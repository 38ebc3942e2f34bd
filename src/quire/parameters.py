"""Everything about a parameter of a request, written once: where its field is declared.

`types.SamplingParams` declares its fields with `number`, `integer`, `switch`, `several` and `structure`. The checks of
values, the fields, bounds and descriptions of the HTTP API, the options of the command line, the values in checkpoints
and the table in docs/sampling.md all come from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

from quire.records import dataclass

MAX_INTEGER = 2**31 - 1
MAX_NAME_CHARS = 64
# Files and APIs with other names for parameters. Those of a GGUF file follow "general.sampling.".
NameSource = Literal["generation_config", "GGUF", "llama-server", "Ollama", "SGLang", "TGI"]
Names = Mapping[NameSource, str]
_NONE: Names = {}
_APIS: tuple[NameSource, ...] = ("llama-server", "Ollama", "SGLang")


def called(name: str, *files: NameSource) -> dict[NameSource, str]:
    """One name in the APIs of several servers, and in files."""
    return dict.fromkeys((*_APIS, *files), name)


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of the texts in a request's parameters.

    `bad_words` are sequences of which none is completed, `breakers` tokens that end a repetition (DRY), and `biases`
    the tokens of texts in logit_bias: a token may occur several times, and its biases add up.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    breakers: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()


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


def ids_refusal(ids: Sequence[int]) -> str | None:
    """What is wrong with the first invalid token id; there may be very many valid ones, so these are not walked."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31):
        return None
    wrong = (token for token in ids if not is_integer(token) or not 0 <= token < 2**31)
    return next((f"{token!r} is not a token id" for token in wrong), None)


def texts_refusal(texts: Sequence[str], most: int, chars: int, what: str) -> str | None:
    """What is wrong with a list of up to `most` texts of up to `chars` characters; `what` is the name of one."""
    if isinstance(texts, str):
        return f"{texts[:50]!r} is not a list of strings"
    if len(texts) > most:
        return f"{len(texts)} strings exceed the limit of {most}"
    for text in texts:
        if not isinstance(text, str) or not text:
            return f"every {what} must be a non-empty string"
        if len(text) > chars:
            return f"a {what} of {len(text)} characters is over {chars}"
    return None


def choices_refusal(names: Sequence[str], known: Sequence[str], what: str) -> str | None:
    """What is wrong with a list of some of the `known` names, none of them twice; `what` is the name of one."""
    if (refusal := texts_refusal(names, len(known), MAX_NAME_CHARS, what)) is not None:
        return refusal
    for i, name in enumerate(names):
        if name not in known:
            return f"{name!r} is not one of {', '.join(known)}"
        if name in names[:i]:
            return f"{name} occurs twice"
    return None


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
