"""A short sentence with one to three facts and the keys to take from it: the first step to longer extraction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conversation import Check, Turn, assistant, system, user
from .counting import common_word
from .draw import Draw
from .json_tasks import VALUES, dumps, key_list, object_schema, schema_of
from .lists import categories
from .records import COUNTRIES
from .wording import ask, expand, word
from .words import FOODS, OBJECTS, article, city, first_name, plural

# Sentences and their slots: what the facts are, in the order in which they are said.
_SENTENCES = (
    "{name} (is {age} years old|turned {age}|is now {age}).", "{name}, {age}", "{name} ({age})", "{name} (lives in|moved to|comes from|is in) {city}.",
    "{name} (is|became|used to be|wants to be) {a_job}.", "{name}, {job}, {city}", "{name}, {age}, (lives in|from) {city}.", "(Meet|This is) {name} from {city}, {a_job}.",
    "(The price of the {item} is|We sell the {item} for|The {item} now is) {price}.", "{price} (dollars|euros|pounds) for {a_item}.", "One {item} is {price} (dollars|euros).", "{quantity} {items}[, please]", "(We need|Send me|I want|Pack|There are) {quantity} {items}.",
    "{name} (has|sold|found|packed|ate|needs) {count} {items}.", "{quantity} x {item}, {price} each", "{a_color} {item}", "(I have|Look at|They bought) {a_color} {animal}.", "(My|The|Our) {animal} is called {pet}.", "{pet} is {a_animal}[ of {age} years].",
    "{pet} the {animal} is {color}.", '"{title}" (came out in|is from|was written in) {year}.', '{name} wrote "{title}".', '"{title}", {year}, {pages} pages', "{city} (is in|is a city in|lies in) {country}.", "{name} (left|came home from) {country} in {year}.",
    "(Leaving|Going from) {city} (for|to) {to}.", "(A ticket|The bus|A flight) from {city} to {to}[, {price} dollars].", "{name} (meets|knows|calls|invites) {friend}.", "{name} and {friend} (meet|talk) (at {time}|in {city}).", "(Dinner|Lunch|The lesson|The call) is at {time} in room {room}.", "(The meeting|The lesson) (with {name}|) is on {date}.",
    "{name} (likes|enjoys|loves) {hobby}.", "{name} (eats|likes|had) {food}.", "(Write to|The address of {name} is|mail) {email}.", "{name}: {phone}", "(Call|Ring) {name} at {phone}.", "Ticket {id} is {status}.", "{name} (scored|got|has) {score} points.",
)  # fmt: skip
# Names that a key may have: the first is the slot's own.
_KEYS = {
    "name": "name name name person first_name who", "age": "age age years", "city": "city city town place", "job": "job job profession work", "item": "item item product thing object", "items": "item item product thing object",
    "price": "price price cost amount", "quantity": "quantity quantity count number amount", "count": "count count number quantity", "color": "color color colour", "animal": "animal animal kind pet", "pet": "name name pet called",
    "title": "title title book", "year": "year year", "pages": "pages pages", "country": "country country", "to": "to to destination", "friend": "friend friend other", "time": "time time hour", "room": "room room", "date": "date date day", "hobby": "hobby hobby likes",
    "food": "food food", "email": "email email address", "phone": "phone phone number", "id": "id id ticket", "status": "status status", "score": "score score points",
}  # fmt: skip
_ASKS = (
    "{keys} as JSON: {text}", "{text}\n\n{keys} as JSON[, please]", "(Give me|Write|Return|I want) [a ]JSON[ object] (with|holding|of) {keys}: {text}", "(As|In) JSON with {keys}[, please]: {text}", "{text} (Write|Give) {keys} (as|in) JSON.",
    "(Take|Get|Read|Pull) {keys} (out of|from) this (and write|as) JSON: {text}", "JSON, keys {keys}\n{text}", "Text: {text} Keys: {keys} JSON:", "(Make|Build) JSON (from|of) this: {text} (Keys|Fields): {keys}", "(Which|What) (are|is) {keys} here? JSON[ only|, please]: {text}",
    '{text} -> JSON ({keys})', "json {keys}: {text}",
)  # fmt: skip
_SYSTEMS = ("(Reply|Answer|Respond) (only |)(with|in) JSON[ only|]: {keys}.", "(Write|Return) {keys} of every message as JSON.", "JSON only. (Keys|Fields): {keys}.")  # fmt: skip
_BARE = (
    "(JSON|A JSON object|Some JSON|An example JSON) with (the keys |the fields |keys |){keys}[, please][.]",
    "(Write|Make|Show me|I need|Could I have) (JSON|a JSON object|an object in JSON) (that has|having|with) [the ](keys |fields |){keys}[.]",
    "{keys}[:|,] (make|write) JSON with these keys[.]",
)
_SHARE_BARE = 0.15


def turns(draw: Draw) -> list[Turn]:
    """One sentence, or keys alone, and the object."""
    if draw.chance(_SHARE_BARE):
        return _bare(draw)
    form, values = draw.held(lambda: _drawn(draw), lambda p: "short:" + p[0] + dumps(p[1]))
    keys = {slot: _key(draw, slot) for slot in values}
    if len({*keys.values()}) < len(keys):
        keys = {slot: slot.removesuffix("s") for slot in values}
    chosen = list(values)
    if len(chosen) > 1 and draw.chance(0.2):
        chosen = draw.shuffled(chosen)[: draw.between(1, len(chosen))]
    value = {keys[slot]: values[slot] for slot in chosen}
    text = form if draw.chance(0.85) else form.rstrip(".")
    if draw.chance(0.08):
        text = text.lower()
        value = {k: v.lower() if isinstance(v, str) else v for k, v in value.items()}
    elif draw.chance(0.06):
        text = text.upper()
        value = {k: v.upper() if isinstance(v, str) else v for k, v in value.items()}
    return _exchange(draw, text, value)


def _exchange(draw: Draw, text: str, value: dict[str, Any]) -> list[Turn]:
    shown = key_list(draw, list(value))
    schema = schema_of(value)
    said = assistant(dumps(value), Check("json", {"schema": schema, "value": value, "task": "short text"}))
    if draw.chance(0.12):
        return [system(word(draw, _SYSTEMS, keys=shown)), user(text), said]
    return [user(ask(draw, _ASKS, {"text": text, "keys": shown})), said]


def _bare(draw: Draw) -> list[Turn]:
    """Keys without a text: any object that has them."""
    names = draw.held(
        lambda: list(dict.fromkeys(_any_key(draw) for _ in range(draw.between(1, 3)))),
        lambda k: "bare:" + ",".join(k),
    )
    value = {name: VALUES[name](draw) if name in VALUES else common_word(draw) for name in names}
    schema = object_schema(
        {name: schema_of(v) if name in VALUES else {"type": "string"} for name, v in value.items()}
    )
    asked = ask(draw, _BARE, {"keys": key_list(draw, names)})
    return [
        user(asked),
        assistant(dumps(value), Check("json_shape", {"schema": schema, "task": "keys alone"})),
    ]


def _any_key(draw: Draw) -> str:
    return draw.weighted(
        ((draw.pick(tuple(VALUES)), 0.5), (common_word(draw), 0.25), (draw.pick("abcdefgxyz"), 0.25))
    )


def _key(draw: Draw, slot: str) -> str:
    return draw.pick(_KEYS[slot].split())


def _drawn(draw: Draw) -> tuple[str, dict[str, Any]]:
    """A sentence and its facts by slot."""
    form = expand(draw, draw.pick(_SENTENCES))
    values: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for slot in (part.split("}")[0] for part in form.split("{")[1:]):
        name = slot.removeprefix("a_")
        if name not in values:
            values[name] = _MAKERS[name](draw) if name in _MAKERS else VALUES[name](draw)
        shown[slot] = article(str(values[name])) if slot.startswith("a_") else str(values[name])
    return form.format_map(shown), values


def _thing(draw: Draw) -> str:
    """A thing of one word."""
    if draw.chance(0.3):
        return draw.pick(OBJECTS + FOODS)
    kinds = [c for c in categories() if c.plurals[0] in _OF_THINGS]
    return draw.pick([m for m in draw.pick(kinds).members if " " not in m and not m.endswith("s")])


_OF_THINGS = {"fruits", "vegetables", "clothes", "things in a kitchen", "toys", "tools", "school things"}
_MAKERS: dict[str, Callable[[Draw], Any]] = {
    "item": _thing, "items": lambda d: plural(_thing(d)), "price": lambda d: d.between(1, 99), "pet": first_name, "to": city,
    "country": lambda d: d.pick(COUNTRIES),
}  # fmt: skip
