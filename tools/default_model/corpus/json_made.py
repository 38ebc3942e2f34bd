"""JSON made out of nothing or out of a few words: objects with named keys, any objects, arrays, objects in objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import records
from .conversation import Turn, user
from .draw import Draw
from .json_tasks import (
    KEYS,
    SCHEMAS,
    VALUES,
    changed,
    dumps,
    key_list,
    object_schema,
    pairs_of,
    right,
    schema_of,
    shaped,
    shown,
)
from .lists import categories
from .records import RECORDS, Field
from .wording import ask
from .words import (
    ADJECTIVES,
    BOYS,
    GIRLS,
    NUMBERS,
    article,
    city,
    invented,
    listed,
)

_MAKE = (
    "(Make|Create|Write|Give me|Generate|Build|Show me|I need|I want) [me ]a JSON object (about|for|of|describing) {thing} with {keys}[, please].", "(Make|Create|Write|Give me|Generate) [a ]JSON (about|for|describing) {thing} with [the ](keys|fields|properties) {keys}.",
    "(Describe|Invent|Make up) {thing} (as|in) [a ]JSON[ object] with {keys}.", "JSON (for|about|of) {thing} with {keys}", "(Can you|Could you|Please) (make|write|create|give me) a JSON object (for|about) {thing} (with|that has|containing) {keys}[?|]",
    "(An example|Give me an example|Example) of {thing} (as|in) JSON with {keys}.", "(Give me|Return|Write|Answer with|Show me) [a ]JSON[ object] with [the ](keys|fields) {keys}[, please].", "JSON with [the keys |]{keys}",
    "(Return|Give me|I want) JSON only: {thing} with {keys}", "{thing} as JSON, (keys|fields|with) {keys}", "(Give me|Make|Create|Write|Generate|Return) [a ]JSON[ object] with [the ](keys|fields|properties) {keys} (for|about|of|describing) {thing}[, please].", "JSON with {keys} (for|about|of) {thing}", "(Make|Create|Write) (some|sample|dummy|fake|test) JSON (for|about) {thing} with {keys}.", "(Can you|Could you) (write|make|produce) JSON with {keys}?",
)  # fmt: skip
_MAKE_NESTED = (
    "(Make|Create|Write|Give me|Build) [a ]JSON[ object] (about|for|of) {thing} with {keys}, and (a nested|an inner|a sub-object|an object) {outer} with {inner}[, please].", "[Nested |]JSON (for|about) {thing}: {keys}, and {outer} (holding|with|containing) {inner}.", "(Make|Give me|Write) a nested JSON[ object] with {keys} and, (in|under|inside) {outer}, {inner}.",
)  # fmt: skip
_OUTER = (
    ("address", "city country room phone"), ("owner", "name age city email phone"), ("contact", "email phone city"),
    ("details", "color size weight material brand"), ("stats", "score level points height"),
)  # fmt: skip
_MAKE_OF = (
    "(Make|Create|Write|Give me|Build|I need) a JSON object (with|where|in which) {data}.", "JSON object with {data}", "(Make|Write|Give me|Create) JSON (with|where|in which) {data}[, please].", "A JSON object (with|where) {data}[, please].",
    "(Can you|Please|Could you) (make|write|create) a JSON object (with|where) {data}[?|]", "(Return|Answer with) a JSON object with {data}.",
)  # fmt: skip
_ANY = (
    "(Give me|Show me|Write|Make|Create|Generate|Return|I want|I need) (some|any|a bit of|sample|example|valid) JSON[, please|].", "(Give me|Show me|Write|Make|Create|Generate) (a|any|a small|a short|a simple|an example) JSON[ object|][, please|].", "JSON[ please| example]",
    "(Give me|Show me) an example of [a ]JSON[ object].", "(Can|Could) you (write|make|give me|produce|output|do) [valid |some |a ]JSON[ object|]?", "(Reply|Answer) (with|in) (a JSON object|JSON|any JSON|valid JSON).", "(What does|How does) [a ]JSON[ object|] look[ like]?",
    "(Write|Make|Give me) a JSON object (about|for|of) (anything|something|whatever you like|a thing of your choice).", "(Make|Create|Write|Give me|Generate) [a ]JSON[ object] (about|for|of|describing) {thing}[, please].", "{thing} as JSON", "JSON (about|for) {thing}", "(Describe|Show) {thing} (in|as) JSON.",
)  # fmt: skip
_SOME = (
    "(Give me|Write|Make|Create|Return|Show me|Generate) a JSON (list|array) (of|with) {n} {kind}[, please].", "JSON (list|array) (of|with) {n} {kind}", "(List|Name|Give me) {n} {kind} (as|in) [a ]JSON[ list| array].", "{n} {kind} (as|in) [a ]JSON (list|array)", "(Can you|Please) (give me|list|name) {n} {kind} as a JSON (array|list)[?|]",
)  # fmt: skip
_SOME_OBJECTS = (
    "(Give me|Write|Make|Create|Return|Generate) a JSON (list|array) of {n} {thing} with {keys}[, please].", "JSON (list|array) of {n} {thing} with {keys}", "{n} {thing} as JSON[ objects| array| list] with {keys}", "(Make|Generate|Create) {n} (sample|fake|test|example) {thing} (as|in) JSON with {keys}.",
)  # fmt: skip
# What things are called, and the keys that suit them.
_KINDS = tuple((nouns.split(), keys.split()) for nouns, keys in (
    ("user person customer student teacher player hero friend patient employee guest man woman child girl boy singer", "name age city job email hobby phone color"),
    ("cat dog pet rabbit horse bird animal fox dragon monster parrot", "name age color food weight owner size"),
    ("book story poem", "title author year pages price"), ("movie film song", "title year price"),
    ("product car bike phone computer lamp house ship robot toy hat bag pizza cake tree flower chair", "name color price size weight brand year material stock"),
    ("city country company shop team event planet castle", "name country city year people id"),
    ("order ticket task bill message", "id item price quantity status date user done"),
))  # fmt: skip
_PLURALS = {"person": "people", "man": "men", "woman": "women", "child": "children", "story": "stories", "city": "cities", "country": "countries", "company": "companies", "fox": "foxes"}  # fmt: skip
_FEIGNED = (
    *ADJECTIVES[:12],
    "fictional",
    "fictional",
    "random",
    "random",
    "made-up",
    "imaginary",
    "typical",
    "fake",
    "sample",
)
_POOLS = (
    *((c.plurals[0], list(c.members)) for c in categories()), ("names", GIRLS + BOYS), ("girls' names", GIRLS), ("boys' names", BOYS),
)  # fmt: skip
_NAMED: dict[str, Callable[[Draw], str]] = {
    "city": city, "country": lambda d: d.pick(records.COUNTRIES), "company": records.brand, "shop": records.brand, "team": records.team,
    "event": lambda d: f"{invented(d)} {d.pick(('Festival', 'Concert', 'Party', 'Fair'))}", "planet": invented, "castle": invented,
}  # fmt: skip
_CITIES_OF = {
    "France": "Paris Lyon Marseille Nice", "Germany": "Berlin Munich Hamburg Cologne", "Spain": "Madrid Barcelona Valencia", "Italy": "Rome Milan Naples Venice",
    "Japan": "Tokyo Osaka Kyoto", "India": "Delhi Mumbai", "Canada": "Toronto Montreal Vancouver Ottawa", "Norway": "Oslo Bergen", "Sweden": "Stockholm Malmo",
    "Poland": "Warsaw Krakow", "Greece": "Athens", "Ireland": "Dublin", "Portugal": "Lisbon Porto", "Egypt": "Cairo", "Kenya": "Nairobi", "Austria": "Vienna",
}  # fmt: skip


def make(draw: Draw) -> list[Turn]:
    return draw.weighted(((_made, 0.44), (_made_of, 0.17), (_any, 0.17), (_nested, 0.08), (_some, 0.14)))(
        draw
    )


def _made(draw: Draw) -> list[Turn]:
    """An object with the keys that are named, its values invented."""
    pattern = draw.pick(_MAKE)
    record = draw.pick(RECORDS) if draw.chance(0.25) else None
    noun, suited = _thing(draw, pattern)
    noun = record.kind if record else noun

    def make() -> list[tuple[str, Field | None]]:
        if record:
            return [
                (draw.pick(f.keys), f) for f in (record.name, *draw.sample(record.fields, draw.between(1, 3)))
            ]
        if draw.chance(0.65):
            return [(k, None) for k in suited]
        return [(k, None) for k, _, _ in draw.sample(KEYS, draw.between(1, 4))]

    pairs = draw.held(make, lambda p: f"made:{noun}:{','.join(k for k, _ in p)}")
    value = {k: f.value(draw) if f else VALUES[k](draw) for k, f in pairs}
    value = value if record else _consistent(draw, value, noun)
    schema = object_schema({k: f.schema if f else SCHEMAS[k] for k, f in pairs})
    thing = article(f"{draw.pick(_FEIGNED)} {noun}" if draw.chance(0.2) else noun)
    turns = [
        user(ask(draw, pattern, {"keys": key_list(draw, list(value))}, thing=thing)),
        shaped(value, schema, "made with keys"),
    ]
    if draw.chance(0.15):
        turns += changed(draw, value)
    return turns


def _made_of(draw: Draw) -> list[Turn]:
    """An object whose values the request names in its sentence."""
    pairs = pairs_of(draw, 1, 3)
    sign = draw.pick((" ", " ", " set to ", " = ", " is ", ": "))
    quote = draw.pick(("", "", '"'))
    said = [f"{k}{sign}" + (f"{quote}{v}{quote}" if isinstance(v, str) else shown(v)) for k, v in pairs]
    turns = [user(ask(draw, _MAKE_OF, {"data": listed(said)})), right(dict(pairs), "made with values")]
    if draw.chance(0.15):
        turns += changed(draw, dict(pairs))
    return turns


def _any(draw: Draw) -> list[Turn]:
    """Any object at all, or one about a thing."""
    pattern = draw.pick(_ANY)
    noun, keys = _thing(draw, pattern)
    value = draw.held(
        lambda: _consistent(draw, {k: VALUES[k](draw) for k in keys}, noun), lambda v: "any:" + dumps(v)
    )
    text = ask(draw, pattern, thing=article(noun))
    return [user(text), shaped(value, {"type": "object"}, "any object")]


def _consistent(draw: Draw, value: dict[str, Any], noun: str = "") -> dict[str, Any]:
    """The object with a name that suits the thing, a city in its country and an email address of the name."""
    if {"city", "country"} <= set(value):
        country = draw.pick(list(_CITIES_OF))
        value |= {"country": country, "city": draw.pick(_CITIES_OF[country].split())}
    if "name" in value and noun in _NAMED:
        value["name"] = _NAMED[noun](draw)
    elif "name" in value and any(noun in nouns for nouns, _ in _KINDS[3:]):
        value["name"] = f"{invented(draw)} {noun}"
    if {"name", "email"} <= set(value) and " " not in value["name"]:
        value["email"] = f"{value['name'].lower()}@{value['email'].split('@')[1]}"
    return value


def _thing(draw: Draw, pattern: str = "{thing}") -> tuple[str, list[str]]:
    """A noun and two or three keys that suit it, the name first; a person where the pattern names no thing."""
    nouns, keys = draw.pick(_KINDS) if "{thing}" in pattern else _KINDS[0]
    return draw.pick(nouns), [keys[0], *draw.sample(keys[1:], draw.between(1, 2))]


def _nested(draw: Draw) -> list[Turn]:
    """An object with an object in it, its values invented."""
    noun, keys = _thing(draw)
    outer, inner = draw.pick(_OUTER)
    names = draw.held(lambda: draw.sample(inner.split(), 2), lambda k: f"nested:{noun}:{outer}:{k}")
    value = {k: VALUES[k](draw) for k in keys if k not in names and k != outer}
    keys = list(value) or ["id"]
    value = _consistent(draw, {k: VALUES[k](draw) for k in keys}, noun)
    value[outer] = _consistent(draw, {k: VALUES[k](draw) for k in names})
    slots = {"keys": listed(keys), "outer": outer, "inner": listed(names)}
    said = shaped(value, schema_of(value), "made, nested")
    return [user(ask(draw, _MAKE_NESTED, slots, thing=article(noun))), said]


def _some(draw: Draw) -> list[Turn]:
    """An array of so many words, numbers or objects."""
    n = draw.between(2, 5)
    count = NUMBERS[n] if draw.chance(0.5) else str(n)
    if draw.chance(0.3):
        noun, keys = _thing(draw)
        things = _PLURALS.get(noun, noun + "s")
        n = min(n, 3)
        made = draw.held(
            lambda: [_consistent(draw, {k: VALUES[k](draw) for k in keys}, noun) for _ in range(n)],
            lambda v: "some:" + dumps(v),
        )
        slots = {"keys": key_list(draw, keys)}
        schema = {"type": "array", "items": object_schema({k: SCHEMAS[k] for k in keys})}
        return [
            user(ask(draw, _SOME_OBJECTS, slots, n=draw.pick((NUMBERS[n], str(n))), thing=things)),
            shaped(made, schema, "array made"),
        ]
    if draw.chance(0.15):
        low = draw.between(0, 30)
        last = low + draw.between(2, 8)
        numbers = draw.held(lambda: list(range(low, last + 1)), lambda v: f"numbers:{v[0]}:{len(v)}")
        kind = f"the numbers (from |){low} to {last}".replace("(from |)", draw.pick(("from ", "")))
        return [user(ask(draw, _SOME, {"kind": kind}, n="").replace("  ", " ")), right(numbers, "numbers")]
    name, pool = draw.pick(_POOLS)
    words = draw.held(lambda: draw.sample(pool, n), lambda v: f"some:{v}")
    schema = {"type": "array", "items": {"enum": list(pool)}}
    return [user(ask(draw, _SOME, n=count, kind=name)), shaped(words, schema, "array made")]
