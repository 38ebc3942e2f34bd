"""Facts from a text into JSON: by a schema, by named keys, by an empty template, or with keys of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import json_found, json_made, json_short, json_tasks
from .conversation import Check, Conversation, Turn, assistant, system, user
from .draw import Draw
from .json_tasks import dumps, key_list, object_schema, pasted
from .records import GROUP_KEYS, RECORDS, Field, Record
from .wording import ask, word
from .words import FOODS, OBJECTS, first_name, listed, plural

_BY_SCHEMA = (
    "(Extract|Get|Pull|Take) the (facts|data|information|values|fields) (as|into) JSON that (fits|matches|follows) this schema:\n{schema}\n\n(Text|Input|Paragraph|Sentence): {text}",
    "(Text|Input|Paragraph): {text}\n\n(Return|Give me|Write|Output) JSON that (matches|fits|follows) this schema:\n{schema}",
    "Read the text and fill in this JSON schema.\nSchema: {schema}\nText: {text}",
    "{text}\n\n(Give me|Return|I need|I want) the facts from this text as JSON with this schema: {schema}",
    "(Convert|Turn|Change|Parse) this text (to|into) JSON.\nText: {text}\nSchema: {schema}",
    "Schema: {schema}\n\n(Paragraph|Text): {text}\n\n(Answer with JSON only.|JSON only, please.|Only JSON.)",
    "[Please ](use|follow) this [JSON ]schema: {schema}\n{text}",
    "(Can|Could) you (parse|extract) this (with|by|using) the schema {schema}: {text}",
    "json schema {schema}\ntext {text}",
)
_SCHEMA_SYSTEM = (
    "Extract the facts from the user's text. (Reply|Answer) only with JSON that fits this schema:\n{schema}",
    "You (turn|convert) text into JSON. The JSON must (match|fit|follow) this schema:\n{schema}",
    "Answer with one JSON object that fits this schema and nothing else.\n{schema}",
    "You are (an extraction|a data entry|a parsing) (service|tool|assistant). Output JSON only. Schema: {schema}",
    "Output schema: {schema}",
)
_BY_KEYS = (
    "(Extract|Get|Pull|Pull out|Take|Find|Give me|Return|Read) [the ]{keys} (from this[ text]|from the text|out of this|from the sentence below|from this sentence) (as|in|into) [a ](JSON|JSON object)[, please]: {text}",
    "(Extract|Get|Find|Give me|Return) {keys} as JSON[ from this|from the text|]: {text}",
    "(Extract|Get|Find) {keys} as JSON\n{text}",
    "(Give me|Return|Write|Make|Create|Build|Output|I want|I need) [a ](JSON|JSON object) with [the ](keys|fields|properties) {keys} (from|for|out of|about) this[ text]: {text}",
    "JSON with [the ](keys|fields) {keys}: {text}",
    "JSON with {keys} for: {text}",
    "{text}\n\n(Extract|Get|Give me|Return|Pull out) [the ]{keys} as JSON[, please].",
    "{text}\n\nJSON with [the ][keys ]{keys}[, please]",
    "{text} (->|=>) JSON with {keys}",
    "{text} (Give me|Return|Make) JSON with [the keys ]{keys}[ from that].",
    "(Turn|Convert|Change|Parse|Transform|Put) this (into|to) [a ]JSON[ object] with [the ](keys|fields) {keys}: {text}",
    "(Turn|Convert) this (into|to) JSON[. Keys|, keys|. Use the keys|. Fields|. The keys are]: {keys}\n{text}",
    "(Can|Could|Will) you [please ](extract|get|find|pull) [the ]{keys} from this (as|in) JSON[?|]: {text}",
    "(What are|What is|Tell me|Show me) the {keys} in this text? (Answer|Reply) (in|as|with) JSON[ only].\n{text}",
    "Text: {text}\nKeys: {keys}\n(Answer in JSON.|JSON:|Return JSON.|Output: JSON)",
    "Keys: {keys}\nText: {text}\nJSON:",
    "(Fill|Put) the (keys|fields) {keys} (with|from) this text, as JSON: {text}",
    "I (need|want|would like) {keys} (as JSON|in JSON|in a JSON object) from this: {text}",
    "(Only JSON|JSON only|No explanation, just JSON|Reply with JSON only)[, please]. Keys: {keys}. {text}",
    "(Parse|Read|Analyze) the following (text|sentence) and return a JSON object (with|containing) {keys}.\n\n{text}",
    "(Extract|Find) these (facts|fields|values) as JSON: {keys}. Text: {text}",
)
_BY_TEMPLATE = (
    "(Return|Give me|Answer with|Reply with|Output|Write) {template} for: {text}",
    "(Return|Give me|Answer in|Reply in) (this form|this format|the form|the format|this shape): {template}\n{text}",
    "(Fill in|Fill|Complete) (this|the) [JSON ][template|object|form][ from the text]: {template}\n(Text: |){text}",
    "{text}\n\n(Fill in|Use this format|Format|Answer like this|As JSON like this): {template}",
    "{text} (as|in the form) {template}",
    "(Extract|Get|Parse) as {template}: {text}",
    "{template}\n\n(Fill this in from the text|Fill it in|Put the facts of this text in): {text}",
    "(Turn|Convert|Parse) this into {template}: {text}",
)
_FREE = (
    "(Turn|Convert|Change|Transform|Parse|Put|Rewrite|Write|Format) (this|the following|this text|this sentence|it) (into|to|as|in) JSON[, please]: {text}",
    "(Turn|Convert|Change) (this|the text) (into|to) [a ]JSON[ object|]\n{text}",
    "{text}\n\n(Turn this into JSON|Convert this to JSON|As JSON, please|as JSON|in JSON|Make that JSON|JSON please|Write this as JSON).",
    "(Extract|Get|Give me|Pull out) (the facts|the data|all facts|everything|the information) (from this|from this text|in this) as JSON: {text}",
    "(Make|Create|Give me|Write|Build|I need|I want) [a ]JSON[ object] (from|out of|for) (this|this text|the following)[ text|]: {text}",
    "(Can you|Could you|Please) (turn|convert|parse) this (into|to) JSON[?|]: {text}",
    "JSON: {text}",
    "to JSON: {text}",
    "(What would|How would|How does) this look (as|in) JSON? {text}",
    "(I have|Here is) this text: {text} (Give me|Write|Return) (the|its) JSON[ version|].",
)
_KEYS_SYSTEM = (
    "Extract {keys} from the user's text[ and answer with JSON only|. Reply as JSON| as JSON].",
    "You (extract|find) {keys} in what the user writes. (Reply|Answer) only with [a ]JSON[ object with these keys].",
    "Return [a ]JSON[ object] with the keys {keys}[ for every message|. Nothing else].",
    "(Answer|Reply|Respond) only with JSON. Keys: {keys}.",
    "Turn each message into JSON with the fields {keys}.[ Use null if a fact is missing.]",
)
_TEMPLATE_SYSTEM = (
    "(Answer|Reply|Respond) only (in|with) this form: {template}",
    "Extract the facts. (Output|Return|Format): {template}",
    "For each message return {template} and nothing else.",
)
_FREE_SYSTEM = (
    "(Turn|Convert) (what the user writes|every message|the user's text) into JSON.",
    "(Answer|Reply|Respond) only with JSON[ that holds the facts of the text].",
    "You (extract|turn) (facts|text) into JSON.[ JSON only.]",
)
_AGAIN = (
    "(Now |And |)(the same|do the same) (for|with)[ this]: {text}", "(And|Now|Next) this[ one]: {text}", "Next: {text}", "And: {text}",
    "Same (for|with|again, for): {text}", "{text}",
)  # fmt: skip
_SAID = (
    "(Text|Sentence): {text}\n(Answer as a JSON array|JSON list|Return a JSON array of objects) with {keys}.",
    "(Extract|Get|List|Give me) [the ]{keys} of (everyone|each one|all|each) (as|in) a JSON (array|list): {text}",
    "(Turn|Convert) this into a JSON (list|array)[ of objects] with {keys}: {text}",
    "(Make|Return|Give me) a JSON (array|list) (with|of) {keys} (from|for): {text}",
    "{text}\n\n(As a|Give me a|Return a) JSON (array|list)[ of objects] with [the keys ]{keys}[, please].",
)  # fmt: skip
_ORDER = (
    "{b} (ordered|bought|wants|needs|asked for|got|took) {s}.", "Please send {s} to {b}.", "{b} would like to (buy|order|have) {s}.",
    "(Order|New order) (from|by) {b}: {s}.",
)  # fmt: skip


@dataclass(slots=True)
class _Entry:
    """One key of the object asked for. `value` None means that the text does not say."""

    key: str
    schema: dict[str, Any]
    value: Any


@dataclass(slots=True)
class _Asked:
    """A text, what is to be taken from it, and the object."""

    entries: list[_Entry]
    text: str

    @property
    def value(self) -> dict[str, Any]:
        return {e.key: e.value for e in self.entries}

    @property
    def schema(self) -> dict[str, Any]:
        return object_schema({e.key: e.schema for e in self.entries})


def make(draw: Draw) -> Conversation:
    """One text or value and the JSON made of it, sometimes with a second text."""
    kinds = (
        (_by_schema, 0.14), (_by_keys, 0.16), (_by_template, 0.04), (_free, 0.07), (_items, 0.02), (_several, 0.02),
        (json_short.turns, 0.45), (json_tasks.make, 0.16), (json_made.make, 0.12), (json_found.make, 0.12),
    )  # fmt: skip
    return Conversation("extraction", draw.weighted(kinds)(draw))


def _said(value: Any, schema: dict[str, Any], task: str) -> Turn:
    return assistant(dumps(value), Check("json", {"schema": schema, "value": value, "task": task}))


def _pick(draw: Draw) -> Record:
    return RECORDS[0] if draw.chance(0.3) else draw.pick(RECORDS)


def _asked(draw: Draw, most: int, own_keys: bool = False) -> _Asked:
    """A record in prose and some of its keys; now and then a fact that was asked for is missing."""
    record = _pick(draw)
    fields, keys = draw.held(
        lambda: _choose(draw, record, most, own_keys),
        lambda c: f"schema:{record.kind}:{','.join(c[1])}",
    )
    return _described(draw, record, fields, keys, 0.0 if own_keys else 0.16)


def _described(draw: Draw, record: Record, fields: list[Field], keys: list[str], absence: float) -> _Asked:
    values = draw.held(
        lambda: {id(f): f.value(draw) for f in (record.name, *record.fields)},
        lambda v: (
            f"record:{record.kind}:" + json.dumps([v[id(f)] for f in (record.name, *record.fields[:2])])
        ),
    )
    absent = draw.pick(fields) if draw.chance(absence) else None
    if absent is record.name or (absent and "enum" in absent.schema):
        absent = None
    entries = []
    for f, key in zip(fields, keys, strict=True):
        if f is absent:
            entries.append(_Entry(key, {**f.schema, "type": [f.schema["type"], "null"]}, None))
        else:
            entries.append(_Entry(key, f.schema, values[id(f)]))
    more = absence and draw.chance(0.5)
    said = [f for f in record.fields if f is not absent and (f in fields or (more and draw.chance(0.25)))]
    return _Asked(entries, record.paragraph(draw, values, said))


def _choose(draw: Draw, record: Record, most: int, own_keys: bool) -> tuple[list[Field], list[str]]:
    """Fields in the order of the answer, and the key that names each."""
    fields = draw.sample(record.fields, draw.between(1, min(most, len(record.fields))))
    if own_keys or draw.chance(0.85):
        fields.insert(0 if own_keys or draw.chance(0.7) else draw.between(0, len(fields)), record.name)
    if own_keys:
        fields = [f for f in (record.name, *record.fields) if f in fields]
    return fields, [f.keys[0] if own_keys or draw.chance(0.45) else draw.pick(f.keys) for f in fields]


def _lowered(draw: Draw, asked: _Asked) -> None:
    """Now and then the text is typed in lower case, and its names are copied as they stand there."""
    if not draw.chance(0.1):
        return
    asked.text = asked.text.lower().rstrip(".")
    for entry in asked.entries:
        if isinstance(entry.value, str) and "enum" not in entry.schema:
            entry.value = entry.value.lower()
        elif isinstance(entry.value, list):
            entry.value = [v.lower() for v in entry.value]


def _turns(
    draw: Draw, asked: _Asked, patterns: Sequence[str], systems: Sequence[str], task: str, **slots: str
) -> list[Turn]:
    """The request in one message, or the order in the system prompt and the text alone from the user."""
    if draw.chance(0.2):
        told = system(word(draw, tuple(systems), **slots))
        return [told, user(ask(draw, "{text}", {"text": asked.text})), _said(asked.value, asked.schema, task)]
    text = ask(draw, tuple(patterns), {**slots, "text": asked.text})
    return [user(text), _said(asked.value, asked.schema, task)]


def _again(draw: Draw, asked: _Asked, task: str) -> list[Turn]:
    return [user(ask(draw, _AGAIN, {"text": asked.text})), _said(asked.value, asked.schema, task)]


def _by_keys(draw: Draw) -> list[Turn]:
    record = _pick(draw)
    fields, keys = draw.held(
        lambda: _choose(draw, record, 3, False), lambda c: f"schema:{record.kind}:{','.join(c[1])}"
    )
    asked = _described(draw, record, fields, keys, 0.14)
    if draw.chance(0.06):
        key = draw.pick(
            [k for k in ("email", "phone", "country", "address", "website") if k not in asked.value]
        )
        asked.entries.append(_Entry(key, {"type": ["string", "null"]}, None))
    _lowered(draw, asked)
    shown = key_list(draw, list(asked.value))
    turns = _turns(draw, asked, _BY_KEYS, _KEYS_SYSTEM, "named keys", keys=shown)
    if draw.chance(0.12) and asked.entries[-1].value is not None:
        turns += _again(draw, _described(draw, record, fields, keys, 0.1), "named keys, next text")
    return turns


def _by_schema(draw: Draw) -> list[Turn]:
    """By JSON Schema; now and then the last entries move into an object of their own."""
    asked = _asked(draw, 3)
    schema, value = asked.schema, asked.value
    nested = len(asked.entries) >= 3 and draw.chance(0.25)
    if nested:
        cut = draw.between(1, len(asked.entries) - 2)
        group = draw.pick(GROUP_KEYS)
        head, inner = _Asked(asked.entries[:cut], ""), _Asked(asked.entries[cut:], "")
        schema = object_schema({**head.schema["properties"], group: inner.schema})
        value = {**head.value, group: inner.value}
    task = "schema, nested" if nested else "schema"
    shown = pasted(draw, schema) if draw.chance(0.15) else json.dumps(schema)
    if draw.chance(0.25):
        turns = [
            system(word(draw, _SCHEMA_SYSTEM, schema=shown)),
            user(ask(draw, "{text}", {"text": asked.text})),
        ]
    else:
        turns = [user(ask(draw, _BY_SCHEMA, {"schema": shown, "text": asked.text}))]
    return [*turns, _said(value, schema, task)]


def _by_template(draw: Draw) -> list[Turn]:
    """By an object to fill in: dots, empty values or the names of types."""
    asked = _asked(draw, 3)
    _lowered(draw, asked)
    form = draw.pick(("dots", "empty", "types", "quoted types", "same"))

    def slot(entry: _Entry) -> str:
        kinds = entry.schema["type"]
        kind = kinds if isinstance(kinds, str) else kinds[0]
        empty = {"string": '""', "integer": "0", "number": "0", "boolean": "false", "array": "[]"}[kind]
        same = '["..."]' if kind == "array" else '"..."'
        return {"dots": "...", "empty": empty, "types": kind, "quoted types": f'"{kind}"', "same": same}[form]

    template = "{" + ", ".join(f'"{e.key}": {slot(e)}' for e in asked.entries) + "}"
    return _turns(draw, asked, _BY_TEMPLATE, _TEMPLATE_SYSTEM, "template", template=template)


def _free(draw: Draw) -> list[Turn]:
    """No keys given: the plainest name of each fact that the text states, in one order."""
    asked = _asked(draw, 3, own_keys=True)
    return _turns(draw, asked, _FREE, _FREE_SYSTEM, "no schema")


def _several(draw: Draw) -> list[Turn]:
    """Two or three records of a kind into an array."""
    record = draw.pick([RECORDS[0], RECORDS[0], RECORDS[1], RECORDS[2], RECORDS[3]])
    fields = [record.name, *draw.sample(record.fields, draw.between(1, 2))]
    keys = [f.keys[0] for f in fields]
    made = [_described(draw, record, fields, keys, 0.0) for _ in range(draw.weighted(((2, 0.75), (3, 0.25))))]
    schema = {"type": "array", "items": made[0].schema}
    text = " ".join(a.text for a in made)
    said = _said([a.value for a in made], schema, "array of objects")
    return [user(ask(draw, _SAID, {"text": text, "keys": key_list(draw, keys)})), said]


def _items(draw: Draw) -> list[Turn]:
    """An order: an array of objects, by a schema or by named keys."""

    def make() -> list[tuple[str, int]]:
        return [(thing, draw.between(2, 40)) for thing in draw.sample(FOODS + OBJECTS, draw.between(1, 3))]

    things = draw.held(make, lambda t: f"order:{t}")
    item = draw.pick(("item", "name", "product"))
    count = draw.pick(("quantity", "count", "amount"))
    whole = draw.pick(("items", "order", "lines", "products"))
    line = object_schema({item: {"type": "string"}, count: {"type": "integer"}})
    lines = [{item: plural(thing), count: n} for thing, n in things]
    buyer = first_name(draw)
    said = listed([f"{n} {plural(thing)}" for thing, n in things])
    text = word(draw, _ORDER, b=buyer, s=said)
    if draw.chance(0.5):
        request = ask(draw, _SAID, {"text": text, "keys": key_list(draw, [item, count])})
        return [user(request), _said(lines, {"type": "array", "items": line}, "array of objects")]
    properties: dict[str, Any] = {whole: {"type": "array", "items": line}}
    value: dict[str, Any] = {whole: lines}
    if draw.chance(0.5):
        properties = {"customer": {"type": "string"}, **properties}
        value = {"customer": buyer, **value}
    schema = object_schema(properties)
    request = ask(draw, _BY_SCHEMA, {"schema": json.dumps(schema), "text": text})
    return [user(request), _said(value, schema, "array of objects")]
