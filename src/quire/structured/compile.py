"""Compiles what a user asks of an answer's form into a grammar. It runs in a process of its own: see pool."""

from __future__ import annotations

import hashlib
import json
import re
import time
from functools import cache
from typing import TYPE_CHECKING

from quire.structured.ask import CompiledGrammar, GrammarError, StructuredOutput
from quire.structured.character_rules import Node, texts
from quire.structured.gbnf import START, looks_like_gbnf, parse_gbnf
from quire.structured.grammar_limits import MAX_SOURCE_BYTES, parser_limits
from quire.structured.lark import check_lark, no_duplicates
from quire.structured.lark_text import write_lark
from quire.structured.regex import parse_regex
from quire.structured.structural_tag import TOP, parse_structural_tag
from quire.types import Grammar
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SHOWN = 400  # characters of a message of llguidance
_SOURCE = re.compile(r"\n *\d+ \|.*", re.S)  # the lines of a grammar in such a message


def compile_grammar(ask: StructuredOutput) -> CompiledGrammar:
    """The grammar of an ask. Raises GrammarError naming the field and what cannot be enforced.

    Sizes and nesting are bounded, time and memory are not: call it where both are.
    """
    began = time.process_time()
    maker = _Maker(ask)
    try:
        source = maker.source()
    except RecursionError:
        raise GrammarError(ask.kind, "nested too deeply") from None
    if (size := len(source.encode())) > MAX_SOURCE_BYTES:
        limit = format_size(MAX_SOURCE_BYTES)
        raise GrammarError(
            ask.kind, f"the grammar made of it has {format_size(size)}, over the limit of {limit}"
        )
    _validate(source, ask)
    grammar = Grammar(source, hashlib.sha256(source.encode()).digest())
    return CompiledGrammar(grammar, tuple(maker.dropped), time.process_time() - began)


def _validate(source: str, ask: StructuredOutput) -> None:
    """Refuse what llguidance would refuse in the engine process, what no text fits, and what is not kept apart."""
    from llguidance import LLMatcher

    # LLMatcher.validate_grammar leaves out the lexer, which costs the most.
    matcher = LLMatcher(_bytes(), source, log_level=0, limits=parser_limits())
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        shown = " ".join(_SOURCE.sub("", matcher.get_error()).split())
        if shown.startswith("panic"):
            shown = "llguidance fails to compile it"
        raise GrammarError(ask.kind, shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "...")
    if not any(mask):
        raise GrammarError(ask.kind, "no text fits it")
    for text in ask.apart:
        if matcher.validate_tokens([*text.encode()]) == len(text.encode()):
            raise GrammarError(
                ask.kind,
                f"an answer that fits it may begin with {text[:_SHOWN]!r}, as a call of tools does; set tool_choice, "
                "or leave one of the two out",
            )


@cache
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Bytes(), slices=[])  # type: ignore[arg-type]


class _Bytes:
    """A vocabulary of bytes: whether a grammar compiles does not depend on it."""

    is_tokenizer_wrapper = True
    eos_token_id = None
    bos_token_id = None
    special_token_ids = ()
    tokens = tuple(bytes([byte]) for byte in range(256))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


class _Maker:
    """Makes the source of one ask; schemas inside of other grammars become grammars beside them."""

    def __init__(self, ask: StructuredOutput) -> None:
        self.dropped: list[str] = []
        self._ask = ask
        self._beside: dict[str, str] = {}

    def source(self) -> str:
        ask = self._ask
        if ask.kind == "json":
            return self._schema(_parse(ask.json, "json"))
        if ask.kind == "json_object":
            return self._schema({"type": "object"})
        lark = self._lark()
        if not self._beside:
            return lark
        grammars = {"answer": lark, **self._beside}
        return json.dumps(
            {"grammars": [{"name": name, "lark_grammar": text} for name, text in grammars.items()]}
        )

    def _lark(self) -> str:
        ask = self._ask
        if ask.kind == "grammar":
            text = str(ask.grammar)
            if ask.syntax == "lark" or (ask.syntax == "auto" and not looks_like_gbnf(text)):
                return check_lark(text, self._add_schema)
            return write_lark(parse_gbnf(text), START)
        if ask.kind == "structural_tag":
            return write_lark(
                parse_structural_tag(_parse(ask.structural_tag, ask.kind), self._add_schema), TOP
            )
        node: Node = parse_regex(str(ask.regex)) if ask.kind == "regex" else texts(ask.choice or ())
        return write_lark({"start": node}, "start")

    def _schema(self, schema: object) -> str:
        from quire.structured.json_schema import SchemaError, compile_json_schema

        ask = self._ask
        try:
            spaced = not ask.disable_any_whitespace and ask.whitespace_pattern is None
            made = compile_json_schema(schema, strict=ask.strict, whitespace=spaced)
        except SchemaError as error:
            if ask.kind != "json":
                raise GrammarError(ask.kind, str(error)) from None
            raise GrammarError("json" + dotted(f"{error.path}/{error.keyword}"), error.message) from None
        self.dropped += made.dropped
        return made.source

    def _add_schema(self, schema: object) -> str:
        """The name of the grammar of a schema."""
        if isinstance(schema, str):
            schema = _parse(schema, self._ask.kind)
        name = f"json{len(self._beside)}"
        self._beside[name] = self._schema(schema)
        return name


def dotted(pointer: str) -> str:
    """A JSON pointer as the rest of the name of a field: "/properties/a" becomes ".properties.a"."""
    return "".join(f".{part.replace('~1', '/').replace('~0', '~')}" for part in pointer.split("/") if part)


def _parse(text: str, field: str) -> object:
    """A JSON value. Raises GrammarError for anything else, for duplicate keys and for numbers that are none."""
    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except ValueError as error:
        raise GrammarError(field, f"not valid JSON: {error}") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
