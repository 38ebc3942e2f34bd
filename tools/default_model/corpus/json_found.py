"""More that becomes JSON: values in a row, what people say of themselves, all words of a kind, and schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from . import records
from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .json_tasks import KEYS, dumps, key_list, object_schema, right, schema_of, shown
from .told import FACTS
from .wording import ask, expand
from .words import ANIMALS, CITIES, COLORS, FOODS, NAMES, OBJECTS, WEEKDAYS, articled, invented

_IN_A_ROW = (
    "(Put|Write|Turn|Make) (this|these values) (into|in|as) JSON with [the keys ]{keys}: {data}", "{data} (as|in|to|into) JSON with [the keys ]{keys}", "{data} -> JSON {keys}",
    "(Convert|Parse|Turn) '{data}' (to|into) JSON with [the keys ]{keys}[, please].", "(The values are|Values:) {data}. (The keys are|Keys:) {keys}. (Make|Write|Return) JSON.", "(Make|Create|Give me) [a ]JSON[ object] with [the keys ]{keys} (from|and the values) {data}",
    "Keys: {keys}\nValues: {data}\n(JSON:|As JSON, please.|Give me the JSON.)", "(Extract|Get) {keys} as JSON: {data}", "(Extract|Get) {keys} as JSON from {data}",
)  # fmt: skip
_OF_MYSELF = (
    "(Turn|Convert|Put|Write) (this|what I say|my data) (into|to|as|in) JSON[, please]: {text}", "{text} (Write|Give me|Make|Put) that (as|in) JSON.", "{text} (As JSON, please|JSON please|in JSON).", "(Make|Create|Write) [a ]JSON[ object] (about|of) me: {text}", "JSON: {text}",
)  # fmt: skip
_OF_MYSELF_BY_KEYS = (
    "(Extract|Get|Find) {keys} as JSON: {text}", "{text} (Write|Give me|Make|Return) [a ]JSON[ object] (about me |)with {keys}.", "JSON with {keys}: {text}", "(Make|Create) a JSON object with [the keys ]{keys}: {text}", "{text}\n\n(Extract|Return) {keys} as JSON.",
)  # fmt: skip
_ALL = (
    "(Extract|Find|Get|Collect|List|Give me) all [the ]{kind} (from|in) (this|this text|the text) as a JSON (list|array): {text}", "{text}\n\n(List|Extract|Give me|Return) (all |the |all the ){kind} as a JSON (list|array).", "(Which|What) {kind} are in this text? (Answer|Reply) (with|as) a JSON (list|array).\n{text}", "JSON (list|array) of [all ][the ]{kind}: {text}",
    "(Extract|Find|Get) (all |the |){kind} as JSON: {text}", "(Return|Give me) the {kind} as a JSON array[, nothing else]. Text: {text}",
)  # fmt: skip
_TO_CSV = (
    "(Convert|Turn|Change) this JSON (to|into) CSV[, please]:\n{data}", "{data}\n\n(As CSV|To CSV|Convert to CSV|Make a CSV of this)[, please].", "JSON to CSV: {data}", "(Write|Give me|I need) this (as|in) CSV: {data}", "(Make|Give me) a (table|CSV table|CSV) (from|of) this JSON:\n{data}",
)  # fmt: skip
_TO_LINES = (
    "(Convert|Turn|Change) this JSON (to|into) (YAML|lines|plain lines|key: value lines)[, please]:\n{data}", "{data}\n\n(As YAML|To YAML|Convert to YAML|One line for each key)[, please].", "JSON to YAML: {data}", "(Write|Give me|I need) this (as|in) YAML: {data}", "(Write|Show) each key of this JSON on its own line: {data}",
)  # fmt: skip
_MERGE = (
    "(Merge|Combine|Join) {data} and {other}", "(Merge|Combine|Join) (these|these two|both)[ JSON objects| objects|]:\n{data}\n{other}", "(Put|Bring) these two JSON objects (into one|together):\n{data}\n{other}", "{data} + {other} as one JSON object", "(Make|Create) one JSON object (of|from|out of) {data} and {other}",
)  # fmt: skip
_ONE_LINE = (
    "(Minify|Compress|Shorten) this JSON:\n{data}", "(Put|Write|Format) this JSON on one line:\n{data}", "{data}\n\n(On one line|In one line|Without line breaks)[, please].", "(Clean up|Tidy|Format) this JSON:\n{data}",
)  # fmt: skip
_PRETTY = (
    "Pretty[ |-]print this JSON: {data}", "(Indent|Format with indentation) this JSON: {data}", "{data}\n\n(Pretty print it|Indent it|With line breaks|One key on each line, as JSON)[, please].", "(Make|Write) this JSON (pretty|with indentation|readable): {data}",
)  # fmt: skip
_SCHEMA = (
    "(Write|Make|Give me|Create|Show me) a JSON schema (for|with) {keys}[, please].", "JSON schema (for|with|of) {keys}", "(What is|How does) a JSON schema (for|with) {keys}[ look like|]?", "(Write|Give me|Create) [the |a ](schema|JSON schema) of an object with {keys}.", "(I need|Give me) a JSON schema with [the ](keys|fields|properties) {keys}.",
    "(Write|Give me|What is) the JSON schema (of|for) {example}[?|]", "{example}\n(Write|Give me|Show) the JSON schema[ of this| for it|].",
)  # fmt: skip

# Topics that people tell of themselves, and the key each becomes.
_TOPICS = {
    "name": "name", "age": "age", "city": "city", "job": "job", "hobby": "hobby", "color": "favorite_color", "food": "favorite_food", "email": "email",
    "pet": "pet", "drink": "favorite_drink", "birthday": "birthday", "company": "company", "boss": "boss", "sister": "sister", "brother": "brother",
}  # fmt: skip
_KINDS: tuple[tuple[str, Callable[[Draw], Any], tuple[str, ...]], ...] = (
    ("emails", records.email, ("(Write|Send it|Please write) to {v}.", "The address of {n} is {v}.", "Contact {v} for help.", "{n} uses {v}.")),
    ("names", lambda d: d.pick(NAMES), ("{v} (came late|was happy|bought a lamp|went home).", "I (met|saw|called) {v}[ yesterday| in the park|].", "The letter is for {v}.")),
    ("numbers", lambda d: d.between(2, 999), ("{v} people came.", "The box holds {v} pens.", "There are {v} trees in the garden.", "It costs {v} dollars.", "We (sold|need) {v} tickets.")),
    ("cities", lambda d: d.pick(CITIES), ("{n} (lives in|flew to|moved to|likes) {v}.", "The train stops in {v}.", "{v} is nice[ in summer|].")),
    ("colors", lambda d: d.pick(COLORS), ("The (door|car|hat|boat) is {v}.", "{n} painted it {v}.", "I have a {v} bag.")),
    ("animals", lambda d: d.pick(ANIMALS), ("{n} saw a {v}.", "The {v} (slept|ran away|was hungry).", "There was a {v} in the garden.")),
    ("foods", lambda d: d.pick(FOODS), ("{n} ate {v}.", "I (like|bought|cooked) {v}[ today|].", "We need {v}.")),
    ("days", lambda d: d.pick(WEEKDAYS), ("We meet on {v}.", "{n} comes on {v}.", "The shop is closed on {v}.")),
    ("phone numbers", records.phone, ("Call {v}.", "The number of {n} is {v}.", "You can reach me at {v}.")),
    ("words in quotes", lambda d: invented(d).lower(), ('She said "{v}".', 'The sign says "{v}".', 'I read "{v}" on the wall.')),
    ("dates", records.date, ("The (party|exam|meeting) is on {v}.", "{n} was born on {v}.", "We leave on {v}.")),
    ("objects", lambda d: d.pick(OBJECTS), ("{n} lost a {v}.", "The {v} is broken.", "I bought a {v}[ yesterday|].")),
)  # fmt: skip


def make(draw: Draw) -> list[Turn]:
    return draw.weighted(
        ((_in_a_row, 0.26), (_of_myself, 0.27), (_all_of_a_kind, 0.2), (_schema, 0.07), (_reshaped, 0.2))
    )(draw)


def _in_a_row(draw: Draw) -> list[Turn]:
    """Values in the order of the keys."""

    def make() -> list[tuple[str, Any]]:
        chosen = [k for k in draw.sample(KEYS, draw.between(2, 4)) if k[1] != {"type": "boolean"}]
        if draw.chance(0.6):
            head = [k for k in KEYS if k[0] in {"name", "age", "city"}]
            chosen = [
                *head[: draw.between(1, 3)],
                *[k for k in chosen if k not in head][: draw.between(1, 2)],
            ]
        return [(key, value(draw)) for key, _, value in chosen] or [("name", invented(draw))]

    pairs = draw.held(make, lambda p: "row:" + dumps(p))
    spaces = any(" " in shown(v) for _, v in pairs)
    between = draw.pick((", ", ", ", ",", ", " if spaces else " ", " / ", "; ", " | "))
    slots = {"keys": key_list(draw, [k for k, _ in pairs]), "data": between.join(shown(v) for _, v in pairs)}
    return [user(ask(draw, _IN_A_ROW, slots)), right(dict(pairs), "values in a row")]


def _of_myself(draw: Draw) -> list[Turn]:
    """First person, with keys that are named or the plainest ones."""
    by_topic = {f.topic: f for f in FACTS if f.topic in _TOPICS}

    def make() -> dict[str, str]:
        topics = ["name", *draw.sample([t for t in by_topic if t != "name"], draw.between(1, 3))]
        return {t: by_topic[t].value(draw) for t in topics}

    told = draw.held(make, lambda t: "myself:" + dumps(t))
    text = articled(
        " ".join(expand(draw, draw.pick(by_topic[t].tell)).replace("{v}", v) for t, v in told.items())
    )
    value = {_TOPICS[t]: int(v) if t == "age" else v for t, v in told.items()}
    if draw.chance(0.5):
        return [user(ask(draw, _OF_MYSELF, {"text": text})), right(value, "no schema")]
    keys = draw.sample(list(value), draw.between(1, len(value)))
    asked = {k: value[k] for k in keys}
    return [
        user(ask(draw, _OF_MYSELF_BY_KEYS, {"text": text, "keys": key_list(draw, keys)})),
        right(asked, "named keys"),
    ]


def _all_of_a_kind(draw: Draw) -> list[Turn]:
    """Every email, name, number, … of a text into an array."""
    kind, value, sentences = draw.pick(_KINDS)
    count = draw.weighted(((1, 0.2), (2, 0.4), (3, 0.3), (4, 0.1)))
    found = draw.held(
        lambda: list(dict.fromkeys(value(draw) for _ in range(count))), lambda v: f"found:{kind}:{v}"
    )
    others = [n for n in NAMES if n not in found]
    lines = [expand(draw, draw.pick(sentences)).format(v=v, n=draw.pick(others)) for v in found]
    request = ask(draw, _ALL, {"text": articled(" ".join(lines))}, kind=kind)
    return [user(request), right(found, "all of a kind")]


def _schema(draw: Draw) -> list[Turn]:
    """The schema of an object: from its keys or from an example."""
    chosen = draw.held(
        lambda: draw.sample(KEYS, draw.between(1, 3)), lambda c: "schema of:" + ",".join(k for k, _, _ in c)
    )
    schema = object_schema({key: kind for key, kind, _ in chosen})
    example = {key: value(draw) for key, _, value in chosen}
    slots = {"keys": key_list(draw, list(example)), "example": dumps(example)}
    check = Check("json", {"schema": schema_of(schema), "value": schema, "task": "a schema made"})
    return [user(ask(draw, _SCHEMA, slots)), assistant(dumps(schema), check)]


def _reshaped(draw: Draw) -> list[Turn]:
    """JSON into CSV or lines, two objects into one, an object on one line or on many."""
    form = draw.pick(("csv", "lines", "merge", "one line", "pretty"))
    rows = draw.weighted(((1, 0.2), (2, 0.6), (3, 0.2))) if form == "csv" else 2 if form == "merge" else 1

    def make() -> list[dict[str, Any]]:
        keys = draw.sample([k for k in KEYS if k[0] != "date"], 4)
        if form == "merge":
            return [{k: value(draw) for k, _, value in half} for half in (keys[:2], keys[2:])]
        chosen = keys[: draw.between(2, 3)]
        return [{k: value(draw) for k, _, value in chosen} for _ in range(rows)]

    made = draw.held(make, lambda v: f"reshaped:{form}:{dumps(v)}")
    first = made[0]
    if form == "merge":
        slots = {"data": dumps(first), "other": dumps(made[1])}
        return [user(ask(draw, _MERGE, slots)), right({**first, **made[1]}, "merged")]
    if form == "one line":
        return [
            user(ask(draw, _ONE_LINE, {"data": json.dumps(first, indent=2)})),
            right(first, "on one line"),
        ]
    if form == "csv":
        said = "\n".join(
            ",".join(row) for row in (first, *([shown(v) for v in row.values()] for row in made))
        )
    elif form == "lines":
        said = "\n".join(f"{k}: {shown(v)}" for k, v in first.items())
    else:
        said = json.dumps(first, indent=2, ensure_ascii=False)
    patterns = {"csv": _TO_CSV, "lines": _TO_LINES, "pretty": _PRETTY}[form]
    data = dumps(made if form == "csv" else first)
    return [
        user(ask(draw, patterns, {"data": data})),
        assistant(said, Check("exact", {"text": said, "task": f"JSON to {form}"})),
    ]
