"""JSON made, read and changed: from lines, lists and tables, out of nothing, into sentences, by key, repaired."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from . import records
from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .lists import categories
from .wording import ask, word
from .words import (
    ANIMALS,
    CITIES,
    COLORS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    OBJECTS,
    PLAIN_WORDS,
    city,
    code,
    first_name,
    full_name,
    invented,
    listed,
)

Pairs = list[tuple[str, Any]]

_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_NUMBER = {"type": "number"}
_FLAG = {"type": "boolean"}
# What people keep in JSON: key, schema, a value.
KEYS: tuple[tuple[str, dict[str, Any], Callable[[Draw], Any]], ...] = (
    ("name", _TEXT, first_name), ("age", _WHOLE, lambda d: d.between(1, 95)), ("city", _TEXT, city), ("email", _TEXT, records.email),
    ("color", _TEXT, lambda d: d.pick(COLORS)), ("price", _NUMBER, lambda d: d.between(1, 200) + d.pick((0.25, 0.5, 0.75, 0.99))),
    ("id", _WHOLE, lambda d: d.between(1, 9999)), ("active", _FLAG, lambda d: d.chance(0.5)), ("title", _TEXT, records.title),
    ("job", _TEXT, lambda d: d.pick(JOBS)), ("size", _TEXT, lambda d: d.pick(("small", "medium", "large"))),
    ("weight", _WHOLE, lambda d: d.between(1, 90)), ("count", _WHOLE, lambda d: d.between(1, 60)), ("year", _WHOLE, lambda d: d.between(1950, 2026)),
    ("animal", _TEXT, lambda d: d.pick(ANIMALS)), ("food", _TEXT, lambda d: d.pick(FOODS)), ("hobby", _TEXT, lambda d: d.pick(HOBBIES)),
    ("phone", _TEXT, records.phone), ("code", _TEXT, code), ("owner", _TEXT, full_name), ("date", _TEXT, records.date),
    ("time", _TEXT, records.clock), ("score", _WHOLE, lambda d: d.between(0, 100)), ("level", _WHOLE, lambda d: d.between(1, 20)),
    ("author", _TEXT, full_name), ("pages", _WHOLE, lambda d: d.between(40, 900)), ("brand", _TEXT, records.brand),
    ("status", _TEXT, lambda d: d.pick(("open", "closed", "done", "new", "ready"))), ("item", _TEXT, lambda d: d.pick(OBJECTS)),
    ("admin", _FLAG, lambda d: d.chance(0.5)), ("team", _TEXT, records.team), ("room", _TEXT, lambda d: f"{d.pick('ABCD')}{d.between(1, 60)}"),
    ("height", _WHOLE, lambda d: d.between(50, 210)), ("stock", _WHOLE, lambda d: d.between(0, 500)), ("done", _FLAG, lambda d: d.chance(0.5)),
    ("pet", _TEXT, lambda d: d.pick(ANIMALS)), ("word", _TEXT, lambda d: invented(d).lower()), ("user", _TEXT, first_name),
    ("quantity", _WHOLE, lambda d: d.between(1, 60)), ("friend", _TEXT, first_name), ("available", _FLAG, lambda d: d.chance(0.5)),
    ("country", _TEXT, lambda d: d.pick(records.COUNTRIES)), ("people", _WHOLE, lambda d: d.between(2, 900)),
    ("points", _WHOLE, lambda d: d.between(0, 500)), ("material", _TEXT, lambda d: d.pick(("wood", "steel", "glass", "paper", "stone"))),
)  # fmt: skip
SCHEMAS = {key: schema for key, schema, _ in KEYS}
VALUES = {key: value for key, _, value in KEYS}

_INTO = (
    "(Convert|Turn|Change|Transform|Parse|Put) (this|the following|these lines|it) (to|into) JSON[, please]:{gap}{data}",
    "(Convert|Turn) to JSON:{gap}{data}", "{data}\n\n(Convert|Turn) (this|that|it) (to|into) JSON[, please].", "(As JSON|In JSON|JSON|To JSON):{gap}{data}",
    "{data}\n(as JSON|to JSON|in JSON please|JSON please|now as JSON)", "(Write|Give me|Show me|Format|I need|I want) this (as|in) JSON:{gap}{data}",
    "(Can you|Could you|Please) (turn|convert|make|put) this (to|into) [a ]JSON[ object|][?|]:{gap}{data}",
    "(Make|Create|Build|Write) [a ]JSON[ object] (from|out of|with) (this|these values|the following|these facts):{gap}{data}",
    "(What is|How do I write|How would you write) this (in|as) JSON?{gap}{data}", "(Put|Store|Save) this in a JSON object:{gap}{data}",
)  # fmt: skip
_TO_LIST = (
    "(As a|Make a|Give me a|Write a|Return a) JSON (list|array)[ of this|]: {data}", "(Turn|Convert|Change|Put|Make) (this|these|these words|them) (into|to) a JSON (list|array): {data}",
    "(Write|Put|Give me|I need|I want) (this|these) (as|in) a JSON (list|array): {data}", "{data} (as|to|into|in) a JSON (list|array)[, please]",
    "(Can you|Could you|Please) (make|write|give me) a JSON (list|array) (of|from|with) {data}", "JSON (list|array): {data}", "JSON (list|array) of {data}", "{data} -> JSON (array|list)",
)  # fmt: skip
_TO_KEYED = (
    'Put (these|this list|the items|them) under the key {key} (in|as) JSON: {data}', "JSON with one key {key} (that holds|holding|with) the list: {data}",
    "(Make|Create|Give me) a JSON object (where|in which) {key} is (this list|the list): {data}",
)  # fmt: skip
_TABLE = (
    "(Convert|Turn|Change|Parse) this (table|CSV|data) (to|into) JSON:\n{data}", "{data}\n\n(As JSON|To JSON|CSV to JSON|Turn it into JSON|Convert to JSON)[, please].",
    "CSV to JSON:\n{data}", "(Give me|Write|Show|I need) this (table|CSV) as (JSON|a JSON array|a JSON list|an array of objects):\n{data}", "(Make|Create) a JSON array from (these rows|this table):\n{data}",
    "(Here is|I have) a (CSV file|table). (Convert it to|Turn it into|Give me) JSON[, please].\n{data}", "(Can you|Please) (convert|turn) these rows (to|into) JSON[?|]\n{data}", "to JSON\n{data}",
)  # fmt: skip
_READ = (
    "What is the {key} in {data}[?|]", "What is the {key} (here|in this JSON|in this)?{gap}{data}", "What's the {key}? {data}", "{data}\n\n(What is|Tell me|Give me|Read) the {key}[?|]", "(Get|Read|Find|Give me|Tell me|Extract|Look up) the {key} (from|in|of|out of) (this JSON|this object|this):{gap}{data}", "{data} {key}?", "(Parse|Read|Load) (this|the) JSON and (tell me|give me|return|print) the {key}:{gap}{data}", "(Given|In|For) {data}, what is the {key}?",
    "(Look at|Read) this JSON: {data} What is the {key}?", "(Which|What) {key} (is in|does) this JSON[ have|]?{gap}{data}", "(Here is|I have|This is) a JSON object: {data} (What is|Tell me) its {key}[?|]", "(What does|What value does) {key} have in {data}[?|]", "(What is|What's) the value of {key} in {data}[?|]",
)  # fmt: skip
_READ_ONLY = (
    "What is the {key} in {data}? (Only the value|Just the value|Answer with the value only|One word|Value only).", "(Print|Return|Give me|Output) only the (value of {key}|{key}): {data}", "(Just|Only) the {key}, nothing else: {data}", "{data}\nvalue of {key} only",
)  # fmt: skip
_WHICH_KEYS = (
    "(Which|What) keys (does this JSON have|are in this JSON|are there|does this object have)?{gap}{data}", "(List|Name|Show|Give me) the keys (of|in) (this JSON|this object|this):{gap}{data}", "{data}\n(What are|List|Which are) (the keys|its keys)[?|]", "keys of {data}",
)  # fmt: skip
_HOW_MANY = (
    "How many keys (does this JSON have|are in this JSON|has this object|are there)?{gap}{data}", "Count the keys[ in this]:{gap}{data}", "{data}\nHow many keys are (there|in it)?",
)  # fmt: skip
_TELL = (
    "(Turn|Convert|Change|Rewrite|Put) (this JSON|this object|this|it) (into|to|as) (a sentence|text|plain text|plain English|English|words|prose):{gap}{data}", "(Describe|Explain|Say|Read|Tell me) (this JSON|this object|this|it) in (a sentence|words|plain words|plain English|one sentence):{gap}{data}",
    "{data}\n\n(Say this in words|As a sentence, please|Write a sentence from this|What does this say|What does this JSON say|Make a sentence of it|In plain English)[?|]", "JSON to text:{gap}{data}", "(Write|Make|Give me) a sentence (from|out of|for|about) (this|this JSON|the JSON):{gap}{data}", "(What does|What is in) this JSON[ say| mean|]?{gap}{data}",
)  # fmt: skip
_SET = (
    "(Set|Change|Update) [the ]{key} to {value} in {data}", "(Set|Change|Update) [the ]{key} to {value}:{gap}{data}", "(Change|Make|Update) (the|its) {key} (to |){value} in this JSON:{gap}{data}", "{data}\n\n(Set|Change|Update) [the ]{key} to {value}[, please].", "In {data} (set|change|replace) [the ]{key} (to|with|by) {value}", "(Replace|Overwrite) the {key} (with|by) {value}:{gap}{data}", "{data} now with {key} {value}",
    "(Can you|Please|Could you) (change|set|update) the {key} to {value}[?|]{gap}{data}", "The {key} (should be|must be|is now|is wrong, it is) {value}. (Fix|Correct|Update) (it|this|the JSON):{gap}{data}",
)  # fmt: skip
_ADD = (
    "Add {key}[:| =] {value} to {data}", "Add (the|a) (key|field) {key} with [the ][value ]{value}[ to this|]:{gap}{data}", "{data}\n\nAdd [the ][key ]{key} (with|=|:|with value) {value}[, please].", "(Add|Insert|Append|Put) {key} {value} (to|into|in) this JSON:{gap}{data}", "(Please|Can you|Could you) add {key} = {value} to this[?|]{gap}{data}", "{data} add {key} {value}",
    "(Extend|Expand) this JSON (with|by) {key} = {value}:{gap}{data}", "There is a key missing: {key}, it is {value}. {data}",
)  # fmt: skip
_DROP = (
    "(Remove|Delete|Drop|Take out) [the ][key |field ]{key} from {data}", "(Remove|Delete|Drop) [the ][key ]{key}:{gap}{data}", "{data}\n\n(Remove|Delete|Drop|Leave out) [the ][key ]{key}[, please].", "(Please|Can you) (remove|delete|drop) the {key}[?|]{gap}{data}", "{data} without [the ]{key}", "The same without {key}: {data}", "I don't need the {key}:{gap}{data}",
)  # fmt: skip
_RENAME = (
    "Rename [the key |]{key} to {value} in {data}", "(Rename|Change) the key {key} (to|into) {value}:{gap}{data}", "{data}\n\nRename [the key |]{key} to {value}[, please].", "(Call the key|The key) {key} (should be called|should be|now|must be named) {value}:{gap}{data}",
)  # fmt: skip
_REPAIR = (
    "(Fix|Repair|Correct|Mend) (this JSON|this|this broken JSON|the JSON|the error|the mistake):{gap}{data}", "(This JSON is|This is|My JSON is) (broken|invalid|wrong|not valid). (Fix|Correct|Repair) it[, please]:{gap}{data}", "{data}\n\n(Fix this|Fix the JSON|Make this valid JSON|Correct it|Repair it|make it valid)[, please].", "(Make|Turn) this (into |)valid JSON:{gap}{data}",
    "(Why is this not valid JSON|What is wrong here)? (Just fix|Fix) it:{gap}{data}", "(Can you|Could you|Please) (fix|repair|correct) this JSON[?|]{gap}{data}", "fix json {data}", "(My parser fails|I get a parse error|It does not parse)[ on this|]. (Fix|Correct) it[ please|]: {data}",
)  # fmt: skip
_VALID = (
    "Is this [valid |correct |good |right |]JSON [valid|correct|ok]?{gap}{data}", "Is this (valid|correct) JSON?{gap}{data}", "{data}\n\n(Is this|Is that|Is it) valid JSON?", "(Check|Validate) this JSON:{gap}{data}", "(Does|Will) this parse as JSON?{gap}{data}", "valid JSON? {data}", "(Can you|Please) (check|validate) this JSON[?|]{gap}{data}", "Is {data} valid JSON?", "(Is there an error|What is wrong) in this JSON?{gap}{data}",
)  # fmt: skip


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def pasted(draw: Draw, value: Any) -> str:
    """JSON as people paste it: on one line, indented, without spaces, in a code block."""
    form = draw.weighted((("line", 0.76), ("indented", 0.12), ("tight", 0.06), ("block", 0.06)))
    if form == "tight":
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if form == "line":
        return dumps(value)
    text = json.dumps(value, ensure_ascii=False, indent=draw.pick((2, 2, 4)))
    return text if form == "indented" else f"```json\n{text}\n```"


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """An object whose keys are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def key_list(draw: Draw, keys: list[str]) -> str:
    """Keys as people name them."""
    form = draw.weighted(
        (("and", 0.45), ("commas", 0.3), ("quoted", 0.15), ("single", 0.05), ("spaces", 0.05))
    )
    if form == "and":
        return listed(keys)
    if form == "spaces" and len(keys) > 1:
        return " ".join(keys)
    mark = {"quoted": '"', "single": "'"}.get(form, "")
    return ", ".join(f"{mark}{k}{mark}" for k in keys)


def schema_of(value: Any) -> dict[str, Any]:
    """The schema of a value, as its checks need it."""
    if isinstance(value, dict):
        return object_schema({k: schema_of(v) for k, v in value.items()})
    if isinstance(value, list):
        return {"type": "array", **({"items": schema_of(value[0])} if value else {})}
    kinds = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"))
    return {"type": next((name for kind, name in kinds if isinstance(value, kind)), "null")}


def make(draw: Draw) -> list[Turn]:
    """One task on JSON, sometimes with a change after it."""
    tasks: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
        (_lines, 0.16), (_list, 0.1), (_table, 0.08), (_read, 0.11), (_tell, 0.05),
        (_edit, 0.1), (_repair, 0.05), (_valid, 0.03),
    )  # fmt: skip
    return draw.weighted(tasks)(draw)


def right(value: Any, task: str) -> Turn:
    return assistant(dumps(value), Check("json", {"schema": schema_of(value), "value": value, "task": task}))


def shaped(value: Any, schema: dict[str, Any], task: str) -> Turn:
    return assistant(dumps(value), Check("json_shape", {"schema": schema, "task": task}))


def _gap(draw: Draw) -> str:
    return draw.pick((" ", " ", "\n"))


def pairs_of(draw: Draw, low: int, high: int) -> Pairs:
    """Keys with values; together they belong to one split."""

    def make() -> Pairs:
        keys = [k for k, _, _ in draw.sample(KEYS, draw.between(low, high))]
        if draw.chance(0.4):
            keys = ["name", *[k for k in keys if k != "name"][: high - 1]]
        if draw.chance(0.12):
            keys[-1] = invented(draw).lower()
        return [(k, VALUES[k](draw) if k in VALUES else _loose(draw)) for k in keys]

    return draw.held(make, lambda p: "pairs:" + dumps(p))


def _loose(draw: Draw) -> Any:
    return draw.pick((draw.between(0, 999), invented(draw).lower(), draw.pick(PLAIN_WORDS), draw.chance(0.5)))


def _object(draw: Draw, low: int = 2, high: int = 4) -> dict[str, Any]:
    """An object that the prompt shows, now and then with a list or an object in it."""
    value = dict(pairs_of(draw, low, high))
    if draw.chance(0.12):
        value[draw.pick(("tags", "likes", "items"))] = draw.sample(FOODS + HOBBIES, draw.between(1, 3))
    return value


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _lines(draw: Draw) -> list[Turn]:
    """Lines such as "name: Ada" into an object; the keys as they are written."""
    pairs = pairs_of(draw, 1, 4)
    if draw.chance(0.05):
        pairs[-1] = (pairs[-1][0], None)
    if draw.chance(0.2):
        pairs = [(k.capitalize(), v) for k, v in pairs]
    sign, between, start = draw.weighted((
        ((": ", "\n", ""), 0.3), ((": ", ", ", ""), 0.25), (("=", "\n", ""), 0.08), ((" = ", ", ", ""), 0.08), ((": ", "\n", "- "), 0.08),
        ((" is ", ", ", ""), 0.08), ((": ", "; ", ""), 0.06), ((" ", ", ", ""), 0.07), (("=", " ", ""), 0.06),
    ))  # fmt: skip
    if between == " " and any(" " in shown(v) for _, v in pairs):
        between = ", "
    data = between.join(f"{start}{k}{sign}{shown(v)}" for k, v in pairs)
    gap = "\n" if between == "\n" else _gap(draw)
    turns = [user(ask(draw, _INTO, {"data": data, "gap": gap})), right(dict(pairs), "key and value lines")]
    if draw.chance(0.12):
        turns += changed(draw, dict(pairs))
    return turns


def _list(draw: Draw) -> list[Turn]:
    """Words or numbers into an array, alone or under a key."""
    pool = draw.pick(categories()).members

    def make() -> list[Any]:
        if draw.chance(0.2):
            return [draw.between(0, 99) for _ in range(draw.between(2, 6))]
        pools = (pool, NAMES, CITIES) if draw.chance(0.5) else (pool,)
        words: list[Any] = draw.sample(draw.pick(pools), draw.between(2, 5))
        if draw.chance(0.3):
            words[draw.below(len(words))] = invented(draw).lower()
        return words

    items = draw.held(make, lambda w: f"array:{w}")
    texts = [str(i) for i in items]
    data = draw.pick(
        (
            ", ".join(texts),
            ", ".join(texts),
            listed(texts),
            " ".join(texts),
            "\n".join(texts),
            "\n".join(f"- {t}" for t in texts),
        )
    )
    if draw.chance(0.2):
        key = draw.pick(("items", "words", "names", "values", "list", "things", invented(draw).lower()))
        return [
            user(ask(draw, _TO_KEYED, {"data": data, "key": key})),
            right({key: items}, "list under a key"),
        ]
    return [user(ask(draw, _TO_LIST, {"data": data})), right(items, "list")]


def _table(draw: Draw) -> list[Turn]:
    """Rows of CSV or of a table into an array of objects."""
    keys = [k for k, _, _ in draw.sample(KEYS, draw.between(2, 3))]
    if draw.chance(0.5):
        keys = ["name", *[k for k in keys if k != "name"]][:3]
    count = draw.weighted(((1, 0.15), (2, 0.6), (3, 0.25)))
    rows = draw.held(
        lambda: [{k: VALUES[k](draw) for k in keys} for _ in range(count)], lambda r: "table:" + dumps(r)
    )
    form = draw.weighted((("csv", 0.5), ("spaced", 0.2), ("bars", 0.2), ("semicolons", 0.1)))
    cells = [keys, *[[shown(v) for v in row.values()] for row in rows]]
    if form == "bars":
        lines = ["| " + " | ".join(row) + " |" for row in cells]
        if draw.chance(0.5):
            lines.insert(1, "|" + "---|" * len(keys))
    else:
        lines = [{"csv": ",", "spaced": ", ", "semicolons": ";"}[form].join(row) for row in cells]
    return [user(ask(draw, _TABLE, {"data": "\n".join(lines)})), right(rows, "table")]


def _read(draw: Draw) -> list[Turn]:
    """What an object holds: a value by key, its keys, their number."""
    value = _object(draw, 2, 4)
    slots = {"data": pasted(draw, value), "gap": _gap(draw)}
    form = draw.weighted(
        (("value", 0.6), ("only", 0.11), ("missing", 0.1), ("keys", 0.1), ("count", 0.05), ("bare", 0.04))
    )
    if form == "bare":
        said = f"This is a JSON object with the keys {listed(list(value))}. What should I do with it?"
        return [user(ask(draw, "{data}", slots)), assistant(said, _exact(said, "JSON alone"))]
    if form == "keys":
        said = (
            f"The keys are {listed(list(value))}."
            if len(value) > 1
            else f"The only key is {next(iter(value))}."
        )
        return [user(ask(draw, _WHICH_KEYS, slots)), assistant(said, _exact(said, "names of keys"))]
    if form == "count":
        said = f"It has {len(value)} key{'s' if len(value) > 1 else ''}: {listed(list(value))}."
        return [user(ask(draw, _HOW_MANY, slots)), assistant(said, _exact(said, "number of keys"))]
    if form == "missing":
        key = draw.pick([k for k, _, _ in KEYS if k not in value])
        said = f"There is no {key} in this JSON."
        return [
            user(ask(draw, _READ, {**slots, "key": key})),
            assistant(said, _exact(said, "key that is not there")),
        ]
    key = draw.pick(list(value))
    plain = _spoken(value[key])
    if form == "only":
        return [
            user(ask(draw, _READ_ONLY, {**slots, "key": key})),
            assistant(plain, _exact(plain, "value only")),
        ]
    turns = [*_value_asked(draw, _READ, slots, key, value)]
    if draw.chance(0.2):
        other = draw.pick([k for k in value if k != key])
        turns += _value_asked(
            draw,
            ("(And|What is|What about|And what is) the {key}?", "and {key}?", "Now the {key}."),
            slots,
            other,
            value,
        )
    return turns


def _value_asked(
    draw: Draw, patterns: tuple[str, ...], slots: dict[str, str], key: str, value: dict[str, Any]
) -> list[Turn]:
    verb = "are" if isinstance(value[key], list) else "is"
    said = f"The {key} {verb} {_spoken(value[key])}."
    return [user(ask(draw, patterns, {**slots, "key": key})), assistant(said, _exact(said, "value by key"))]


def _exact(text: str, task: str) -> Check:
    return Check("exact", {"text": text, "task": task})


def _spoken(value: Any) -> str:
    return listed([str(v) for v in value]) if isinstance(value, list) else shown(value)


def _tell(draw: Draw) -> list[Turn]:
    """An object into a sentence."""
    value = {k: v for k, v in _object(draw).items() if not isinstance(v, bool)}
    parts = [f"the {k} {'are' if isinstance(v, list) else 'is'} {_spoken(v)}" for k, v in value.items()]
    said = listed(parts) if parts else "it is empty"
    said = f"{said[0].upper()}{said[1:]}."
    slots = {"data": pasted(draw, value), "gap": _gap(draw)}
    return [user(ask(draw, _TELL, slots)), assistant(said, _exact(said, "JSON to text"))]


def _change(draw: Draw, value: dict[str, Any]) -> tuple[tuple[str, ...], str, Any, dict[str, Any]]:
    """A change of an object: patterns of the request, the key, the new value or name, and the object after it."""
    form = draw.weighted((("set", 0.4), ("add", 0.3), ("drop", 0.2), ("rename", 0.1)))
    key = draw.pick(list(value))
    if form == "add" or (form == "drop" and len(value) < 2) or isinstance(value[key], list):
        key = draw.pick([k for k, _, _ in KEYS if k not in value])
        new = VALUES[key](draw)
        return _ADD, key, new, {**value, key: new}
    if form == "set":
        new = value[key]
        while new == value[key]:
            new = VALUES[key](draw) if key in VALUES else _loose(draw)
        return _SET, key, new, {**value, key: new}
    if form == "drop":
        return _DROP, key, "", {k: v for k, v in value.items() if k != key}
    new = draw.pick(
        [k for k in (f"new_{key}", f"{key}_2", f"my_{key}", invented(draw).lower()) if k not in value]
    )
    return _RENAME, key, new, {new if k == key else k: v for k, v in value.items()}


def _edit(draw: Draw) -> list[Turn]:
    value = _object(draw, 1, 3)
    patterns, key, new, after = _change(draw, value)
    slots = {"data": pasted(draw, value), "gap": _gap(draw), "key": key, "value": shown(new)}
    task = {_ADD: "key added", _SET: "value changed", _DROP: "key removed", _RENAME: "key renamed"}[patterns]
    turns = [user(ask(draw, patterns, slots)), right(after, task)]
    if draw.chance(0.2) and after:
        turns += changed(draw, after)
    return turns


def changed(draw: Draw, value: dict[str, Any]) -> list[Turn]:
    """A change of the object in the answer before."""
    patterns, key, new, after = _change(draw, value)
    forms = {
        _ADD: (
            "(Now add|Add|Also add|Please add) {key}[:| =] {value}.",
            "(Add|Now add) (the key|a field) {key} with {value}",
        ),
        _SET: (
            "(Now set|Set|Change|Now change|Please change) the {key} to {value}.",
            "(No, |Actually, |)the {key} (is|should be) {value}.",
        ),
        _DROP: (
            "(Now remove|Remove|Delete|Drop) the {key}.",
            "(Now |)without [the ]{key}[, please].",
            "Leave out the {key}.",
        ),
        _RENAME: (
            "(Rename|Now rename) {key} to {value}.",
            "(Call|Name) the key {value} (instead of|not) {key}.",
        ),
    }[patterns]
    return [
        user(ask(draw, forms, {"key": key, "value": shown(new)})),
        right(after, "change of the last answer"),
    ]


def _break(draw: Draw, text: str) -> tuple[str, str]:
    """The text with an error, and the error in words."""
    form = draw.pick(("comma", "single", "open", "bare", "missing", "equals"))
    if form == "comma":
        return text[:-1] + ",}", "there is a comma before the last brace"
    if form == "single":
        return text.replace('"', "'"), "it uses single quotes"
    if form == "open":
        return text[:-1], "the last brace is missing"
    if form == "bare":
        at = text.index('"', 2)
        return "{" + text[2:at] + text[at + 1 :], "the first key has no quotes"
    if form == "missing" and '", "' in text:
        return text.replace('", "', '" "', 1), "a comma is missing"
    return text.replace('": ', '" = ', 1), "it has = in place of a colon"


def _repair(draw: Draw) -> list[Turn]:
    value = dict(pairs_of(draw, 1, 3))
    broken, _ = _break(draw, dumps(value))
    return [user(ask(draw, _REPAIR, {"data": broken, "gap": _gap(draw)})), right(value, "repair")]


def _valid(draw: Draw) -> list[Turn]:
    text = dumps(dict(pairs_of(draw, 1, 3)))
    said, must = "Yes, this is valid JSON.", "Yes"
    if draw.chance(0.6):
        text, error = _break(draw, text)
        said, must = word(draw, f"No, {error}."), "No,"
    check = Check("contains", {"all": [must], "task": "valid or not"})
    return [user(ask(draw, _VALID, {"data": text, "gap": _gap(draw)})), assistant(said, check)]
