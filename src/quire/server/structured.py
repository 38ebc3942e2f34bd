"""Structured output over HTTP: the fields in which several APIs say what an answer must look like, as one
StructuredOutput, and its grammar, compiled before the request is admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.engine.api import CompiledStructure, DeadlineError, GenerateAsk
from quire.engine.request_forms import constrained
from quire.records import dataclass
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Exchange
from quire.server.requests import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
    TextFormat,
)
from quire.structured.ask import KINDS, StructuredOutput
from quire.types import RequestError


@dataclass(frozen=True, slots=True)
class AskedField:
    """What one field of a request asks for. `field` is its name as the client wrote it, with the path to the value."""

    field: str
    kind: str
    value: Any
    options: dict[str, Any]


def find_structure(body: GenerationRequest) -> tuple[str, StructuredOutput] | None:
    """What the answer must look like, and the field that says so; None for any text.

    Raises ApiError 400 when two fields ask for it, and RequestError naming the field for a value that cannot be right.
    """
    asked = list(_asked(body))
    if len(asked) > 1:
        first, second = asked[0].field, asked[1].field
        raise bad_request(
            second, f"{first} and {second} both say what the answer must look like; set one of them"
        )
    if not asked:
        if body.guided_whitespace_pattern is not None:
            raise bad_request("guided_whitespace_pattern", "guided_whitespace_pattern: needs guided_json")
        return None
    (one,) = asked
    try:
        return one.field, StructuredOutput(**{one.kind: one.value}, **one.options)
    except RequestError as error:
        raise _named(error, one.field, one.kind) from None


def _asked(body: GenerationRequest) -> Iterator[AskedField]:
    """Every field that asks for a structure."""
    yield from _response_format(body)
    if body.structured_outputs is not None:
        yield from _structured_outputs(body.structured_outputs)
    pattern = body.guided_whitespace_pattern
    spaces = {} if pattern is None else {"whitespace_pattern": pattern}
    if schema := _given(body.guided_json):
        yield AskedField("guided_json", "json", _schema("guided_json", schema), spaces)
    for kind in ("regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            yield AskedField(f"guided_{kind}", kind, value, {})
    if body.guided_json_object:
        yield AskedField("guided_json_object", "json_object", True, spaces)
    if body.grammar:
        yield AskedField("grammar", "grammar", body.grammar, {"syntax": "gbnf"})
    if schema := _given(body.json_schema):
        yield AskedField("json_schema", "json", _schema("json_schema", schema), {})
    if (given := _given(body.format)) not in {"", '""'}:
        if given == '"json"':
            yield AskedField("format", "json_object", True, {})
        elif given.startswith('"'):
            raise bad_request("format", 'format: must be "json" or a JSON schema')
        else:
            yield AskedField("format", "json", _schema("format", given), {})


def _response_format(body: GenerationRequest) -> Iterator[AskedField]:
    match body.response_format:
        case None | TextFormat():
            return
        case JsonObjectFormat(schema):
            if given := _given(schema):
                field = "response_format.schema"
                yield AskedField(field, "json", _schema(field, given), {})
            else:
                yield AskedField("response_format", "json_object", True, {})
        case JsonSchemaFormat(named):
            field = "response_format.json_schema.schema"
            yield AskedField(
                field, "json", _schema(field, _given(named.schema)), {"strict": named.strict is not False}
            )
        case StructuralTagFormat() as tag:
            parts = {
                name: given for name in ("format", "structures") if (given := _given(getattr(tag, name)))
            }
            if tag.triggers is not None:
                parts["triggers"] = msgspec.json.encode(tag.triggers).decode()
            text = ",".join(
                ['"type":"structural_tag"', *(f'"{name}":{given}' for name, given in parts.items())]
            )
            yield AskedField("response_format", "structural_tag", f"{{{text}}}", {})


def _structured_outputs(given: StructuredOutputs) -> Iterator[AskedField]:
    """The fields of `structured_outputs`; two of them are an error as two fields of the request are."""
    if given.disable_additional_properties:
        name = "structured_outputs.disable_additional_properties"
        message = f"{name}: not supported; write additionalProperties: false into the schema"
        raise bad_request(name, message, "unsupported_parameter")
    names = ("disable_any_whitespace", "whitespace_pattern")
    options = {name: value for name in names if (value := getattr(given, name)) not in {None, False}}
    found = 0
    for kind in KINDS:
        field, value = f"structured_outputs.{kind}", getattr(given, kind)
        if isinstance(value, Raw | UnsetType):
            value = _schema(field, text) if (text := _given(value)) else None
        if value is None or value is False:
            continue
        found += 1
        yield AskedField(field, kind, value, options)
    if options and not found:
        name = next(iter(options))
        raise bad_request(
            f"structured_outputs.{name}", f"structured_outputs.{name}: needs json or json_object"
        )


def _given(raw: Raw | UnsetType) -> str:
    """The JSON text of a value; "" where it was left out or is null."""
    text = "" if raw is UNSET else bytes(raw).strip().decode()
    return "" if text == "null" else text


def _schema(field: str, text: str) -> str:
    """A schema as JSON text, given as JSON or as a string of it. Raises ApiError 400 for another type."""
    if text.startswith('"'):
        return msgspec.json.decode(text, type=str)
    if text[:1] not in {"{", "t", "f"}:
        raise bad_request(field, f"{field}: must be a JSON schema, an object", "invalid_type")
    return text


async def with_grammar(
    context: ServerContext,
    exchange: Exchange,
    asks: Sequence[GenerateAsk],
    found: tuple[str, StructuredOutput],
) -> tuple[list[GenerateAsk], tuple[str, ...]]:
    """The same requests with the grammar of their answers, and the keywords of a schema that it does not enforce.

    Raises what `compiled_for` raises.
    """
    made = await compiled_for(context, exchange, asks, found)
    return [replace(ask, request=constrained(ask.request, made.grammar)) for ask in asks], made.dropped


async def compiled_for(
    context: ServerContext,
    exchange: Exchange,
    asks: Sequence[GenerateAsk],
    found: tuple[str, StructuredOutput],
) -> CompiledStructure:
    """The grammar of a structure, and the field that asked for it.

    It is compiled off the event loop, before the requests are queued; this ends early when the client hangs up.
    Raises ApiError 400 for what cannot be enforced, DeadlineError, and what Engine.compile raises.
    """
    (field, asked), grammars = found, context.metrics.grammars
    exchange.held.give(context.memory.work)  # the prompts are token ids, and the wait may be long
    ends = [end for ask in asks for end in (ask.deadline, ask.queue_deadline) if end is not None]
    try:
        async with exchange.watch(), asyncio.timeout(min(ends) - time.monotonic() if ends else None):
            made = await context.engine.compile(asked, exchange.tenant)
    except TimeoutError:
        raise DeadlineError("the deadline of the request passed while its grammar was compiled") from None
    except RequestError as error:
        grammars.refused[asked.kind] += 1
        raise _named(error, field, asked.kind) from None
    grammars.count(asked.kind, made.seconds)
    return made


def _named(error: RequestError, field: str, kind: str) -> ApiError:
    """An error of a StructuredOutput, with the field as the client calls it and the path within its value."""
    if error.field.startswith(kind):
        name = field + error.field.removeprefix(kind)
    else:  # an option beside the value
        name = field.removesuffix(kind) + error.field
    return bad_request(name, f"{name}: {error.message}")
