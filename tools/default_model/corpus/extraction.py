"""Facts from a paragraph into JSON that fits a schema given in the prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .conversation import Check, Conversation, assistant, system, user
from .draw import Draw
from .records import GROUP_KEYS, RECORDS, Field, Record
from .words import FOODS, OBJECTS, first_name, listed, plural

_ASK = (
    "Extract the facts as JSON that fits this schema:\n{schema}\n\nText: {text}",
    "Text: {text}\n\nReturn JSON that matches this schema:\n{schema}",
    "Read the text and fill in this JSON schema.\nSchema: {schema}\nText: {text}",
    "{text}\n\nGive me the facts from this text as JSON with this schema: {schema}",
    "Convert this text to JSON.\nText: {text}\nSchema: {schema}",
    "Schema: {schema}\n\nParagraph: {text}\n\nAnswer with JSON only.",
)
_SYSTEM = (
    "Extract the facts from the user's text. Reply only with JSON that fits this schema:\n{schema}",
    "You turn text into JSON. The JSON must match this schema:\n{schema}",
    "Answer with one JSON object that fits this schema and nothing else.\n{schema}",
)


@dataclass(slots=True)
class _Entry:
    """One key of the object asked for. `value` None means that the text does not say."""

    key: str
    schema: dict[str, Any]
    value: Any


def make(draw: Draw) -> Conversation:
    """One paragraph, one schema, one object."""
    schema, value, text, task = _items(draw) if draw.chance(0.08) else _record(draw)
    shown = json.dumps(schema)
    said = json.dumps(value, ensure_ascii=False)
    check = Check("json", {"schema": schema, "value": value, "task": task})
    if draw.chance(0.2):
        turns = [system(draw.pick(_SYSTEM).format(schema=shown)), user(text), assistant(said, check)]
    else:
        turns = [user(draw.pick(_ASK).format(schema=shown, text=text)), assistant(said, check)]
    return Conversation("extraction", turns)


def _record(draw: Draw) -> tuple[dict[str, Any], dict[str, Any], str, str]:
    record = draw.pick(RECORDS)
    fields, keys = draw.held(
        lambda: _choose(draw, record), lambda c: f"schema:{record.kind}:{','.join(c[1])}"
    )
    values = draw.held(
        lambda: {id(f): f.value(draw) for f in (record.name, *record.fields)},
        lambda v: (
            f"record:{record.kind}:" + json.dumps([v[id(f)] for f in (record.name, *record.fields[:2])])
        ),
    )
    absent = draw.pick(fields) if draw.chance(0.15) else None
    absent = None if absent is record.name else absent
    entries = []
    for f, key in zip(fields, keys, strict=True):
        kind = (
            {**f.schema, "type": [f.schema["type"], "null"]}
            if f is absent and "enum" not in f.schema
            else f.schema
        )
        entries.append(_Entry(key, kind, None if kind is not f.schema else values[id(f)]))
    missing = {id(f) for f, e in zip(fields, entries, strict=True) if e.value is None}
    text = _paragraph(draw, record, values, {id(f) for f in fields}, missing)
    schema, value, nested = _object(draw, entries)
    return schema, value, text, "nested" if nested else "flat"


def _choose(draw: Draw, record: Record) -> tuple[list[Field], list[str]]:
    """Fields in the order of the schema, and the key that names each."""
    fields = draw.sample(record.fields, draw.between(1, 5))
    if draw.chance(0.85):
        fields.insert(0 if draw.chance(0.6) else draw.between(0, len(fields)), record.name)
    return fields, [draw.pick(f.keys) for f in fields]


def _paragraph(
    draw: Draw, record: Record, values: dict[int, Any], wanted: set[int], missing: set[int]
) -> str:
    """The opening sentence, every wanted fact that is not missing, and a few more, in random order."""
    subject = draw.pick(record.subjects)
    said = [f for f in record.fields if id(f) not in missing and (id(f) in wanted or draw.chance(0.35))]
    lines = [record.name.state(draw, subject, values[id(record.name)])]
    lines += [f.state(draw, subject, values[id(f)]) for f in draw.shuffled(said)]
    return " ".join(line[0].upper() + line[1:] for line in lines)


def _object(draw: Draw, entries: list[_Entry]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Schema and value; now and then the last entries move into an object of their own."""
    nested = len(entries) >= 3 and draw.chance(0.25)
    cut = draw.between(1, len(entries) - 2) if nested else len(entries)
    properties = {e.key: e.schema for e in entries[:cut]}
    value: dict[str, Any] = {e.key: e.value for e in entries[:cut]}
    if nested:
        inner = entries[cut:]
        group = draw.pick(GROUP_KEYS)
        properties[group] = object_schema({e.key: e.schema for e in inner})
        value[group] = {e.key: e.value for e in inner}
    return object_schema(properties), value, nested


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """An object whose keys are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _items(draw: Draw) -> tuple[dict[str, Any], dict[str, Any], str, str]:
    """An order: an array of objects."""

    def make() -> list[tuple[str, int]]:
        return [(thing, draw.between(2, 40)) for thing in draw.sample(FOODS + OBJECTS, draw.between(1, 4))]

    things = draw.held(make, lambda t: f"order:{t}")
    item = draw.pick(("item", "name", "product"))
    count = draw.pick(("quantity", "count", "amount"))
    whole = draw.pick(("items", "order", "lines", "products"))
    line = object_schema({item: {"type": "string"}, count: {"type": "integer"}})
    properties: dict[str, Any] = {whole: {"type": "array", "items": line}}
    value: dict[str, Any] = {whole: [{item: plural(thing), count: n} for thing, n in things]}
    buyer = first_name(draw)
    if draw.chance(0.5):
        properties = {"customer": {"type": "string"}, **properties}
        value = {"customer": buyer, **value}
    said = listed([f"{n} {plural(thing)}" for thing, n in things])
    text = draw.pick(("{b} ordered {s}.", "Please send {s} to {b}.", "{b} would like to buy {s}.")).format(
        b=buyer, s=said
    )
    return object_schema(properties), value, text, "array of objects"
