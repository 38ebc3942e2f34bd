"""What a user asks of the form of an answer: one kind of structure, and how strictly it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal

from quire import records
from quire.parameters import Structure
from quire.types import Grammar, RequestError
from quire.util.sizes import format_size

MAX_BYTES = 2**20  # of a schema, a regular expression, a grammar, or all choices together
MAX_CHOICES = 2**14
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# Between two tokens of JSON: a space, or a line break and an indentation. A small model would go on with any other.
JSON_SPACE = "[ ]|\\r?\\n([ ]{0,64}|\\t{0,16})"
Syntax = Literal["auto", "lark", "gbnf"]
SYNTAXES = ("auto", "lark", "gbnf")


class GrammarError(RequestError):
    """A structure that cannot be enforced: it is malformed, not supported, or over a limit, which the message names."""


@records.dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is enforced completely, but for the keywords `dropped` of a schema that is not strict. `seconds`
    of processor time went into compiling it.
    """

    grammar: Grammar
    dropped: tuple[str, ...] = ()
    seconds: float = 0.0


@records.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput(Structure):
    """The form of an answer. Exactly one of these is given:

    json            a JSON Schema: an object, `True`, JSON text, or a class with `model_json_schema()` such as
                    pydantic's models
    json_object     True: any JSON object
    regex           a regular expression that the whole answer matches
    choice          the answer is one of these texts
    grammar         a grammar: Lark, or GBNF and the EBNF of vLLM. `syntax` says which; "auto" takes a grammar
                    in which a line begins with `name ::=` for GBNF
    structural_tag  text with tags whose contents have a form: an object or JSON text, see docs/structured.md

    `strict` False: keywords of a JSON schema that cannot be enforced are dropped, and listed in the answer.
    `disable_any_whitespace`: JSON without whitespace between tokens, as an empty `whitespace_pattern` says too.
    `apart`: a form of which an answer may begin with one of these texts is refused.

    Schemas and tags are kept as JSON text, choices as a tuple. Whether a text can be enforced is only known when it is
    compiled. Raises RequestError naming the field when a value has the wrong type or exceeds a limit.
    """

    json: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    syntax: Syntax = "auto"
    strict: bool = True
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    apart: Sequence[str] = ()
    kind: str = field(init=False, default="")

    def __post_init__(self) -> None:
        for name in ("json_object", "strict", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"must be true or false, not {getattr(self, name)!r:.80}")
        given = [
            name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if self.json is False:
            raise RequestError("json", "the schema false allows no value")
        if len(given) != 1:
            found = f", not {' and '.join(given)}" if given else ""
            raise RequestError(
                given[0] if given else "structured", f"give exactly one of {', '.join(KINDS)}{found}"
            )
        kind = given[0]
        object.__setattr__(self, "kind", kind)
        if kind in {"json", "structural_tag"}:
            object.__setattr__(self, kind, _json_text(kind, getattr(self, kind)))
        elif kind == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif kind in {"regex", "grammar"}:
            _check_text(kind, getattr(self, kind))
        self._check_options()

    def _check_options(self) -> None:
        if self.syntax not in SYNTAXES:
            raise RequestError("syntax", f"must be one of {', '.join(SYNTAXES)}, not {self.syntax!r:.80}")
        if self.syntax != "auto" and self.kind != "grammar":
            raise RequestError("syntax", f"applies only to grammar, not to {self.kind}")
        json_only = {
            "strict": not self.strict,
            "disable_any_whitespace": self.disable_any_whitespace,
            "whitespace_pattern": self.whitespace_pattern is not None,
        }
        for name, used in json_only.items():
            if used and self.kind not in {"json", "json_object", "structural_tag"}:
                raise RequestError(name, f"applies only to JSON, not to {self.kind}")
        if self.whitespace_pattern:
            raise RequestError("whitespace_pattern", 'only "" is supported: no whitespace')

    def values(self) -> dict[str, Any]:
        """The fields that are not at their defaults, as plain JSON values."""
        return {
            f.name: list(value) if isinstance(value, tuple) else value
            for f in fields(self)
            if f.init and (value := getattr(self, f.name)) != f.default
        }

    def digest(self) -> bytes:
        """Equal for equal asks. Fast: an event loop waits for it."""
        import msgspec  # which the process that compiles does without

        return hashlib.sha256(msgspec.msgpack.encode(self.values())).digest()


def _json_text(name: str, value: Any) -> str:
    """JSON text of a schema, given as text, as an object or as a class that makes one."""
    if isinstance(value, str):
        _check_text(name, value)
        return value
    if callable(make := getattr(value, "model_json_schema", None)):
        value = make()
    if not isinstance(value, Mapping) and value is not True:
        raise RequestError(
            name, f"must be a JSON object, JSON text or a pydantic model, not {type(value).__name__}"
        )
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    except RecursionError:
        raise RequestError(name, "nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(name, f"not valid JSON: {error}") from None
    _check_text(name, text)
    return text


def _choices(choice: Any) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise RequestError("choice", f"must be a list of strings, not {type(choice).__name__}")
    if not choice:
        raise RequestError("choice", "must not be empty")
    if len(choice) > MAX_CHOICES:
        raise RequestError("choice", f"{len(choice)} choices exceed the limit of {MAX_CHOICES}")
    size = 0
    for position, text in enumerate(choice):
        name = f"choice[{position}]"
        if not isinstance(text, str):
            raise RequestError(name, f"must be a string, not {type(text).__name__}")
        size += _check_text(name, text)
    if size > MAX_BYTES:
        raise RequestError("choice", f"{format_size(size)} exceed the limit of {format_size(MAX_BYTES)}")
    return tuple(choice)


def _check_text(name: str, text: Any) -> int:
    """The bytes of a text. Raises RequestError for another type, for one over the limit, and for lone surrogates, which
    no token stands for."""
    if not isinstance(text, str):
        raise RequestError(name, f"must be a string, not {type(text).__name__}")
    if len(text) <= MAX_BYTES:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(name, f"character {error.start} is a lone surrogate") from None
    else:
        size = len(text)
    if size > MAX_BYTES:
        raise RequestError(name, f"{format_size(size)} exceed the limit of {format_size(MAX_BYTES)}")
    return size
