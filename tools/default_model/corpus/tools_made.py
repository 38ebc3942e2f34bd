"""Tools that nobody has seen before: what they do stands in their description alone."""

# ruff: noqa: ARG005, SIM905 -- one signature for all results; word lists read better as text
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .draw import Draw
from .records import brand, clock, date, phone
from .tool_specs import Param, Tool, price, text
from .words import CITIES, COLORS, FOODS, GIRLS, OBJECTS, article, city, code, first_name, full_name, invented

ENTITIES = (
    "product customer machine room order invoice book car team project parcel robot ship server door lamp device account ticket camera "
    "printer engine bus train garden plant student teacher company shop recipe song game planet tower bridge"
).split()
_FACTS: tuple[tuple[str, Callable[[Draw], str]], ...] = (
    ("price", lambda d: str(price(d))), ("weight", lambda d: f"{d.between(1, 900)} kg"), ("owner", full_name), ("age", lambda d: f"{d.between(1, 90)} years"),
    ("status", lambda d: d.pick(("open", "closed", "ready", "broken", "new", "waiting"))), ("size", lambda d: d.pick(("small", "medium", "large", "huge"))),
    ("color", lambda d: d.pick(COLORS)), ("address", lambda d: f"{d.between(1, 240)} {invented(d)} Street"), ("phone number", phone),
    ("rating", lambda d: str(d.between(1, 10))), ("balance", lambda d: f"{d.between(1, 9000)} dollars"), ("birthday", date), ("length", lambda d: f"{d.between(2, 900)} cm"),
    ("height", lambda d: f"{d.between(2, 900)} m"), ("manager", full_name), ("deadline", date), ("location", city), ("version", lambda d: f"{d.between(1, 9)}.{d.between(0, 9)}"),
    ("speed", lambda d: f"{d.between(2, 300)} km/h"), ("code", code), ("closing time", clock), ("maker", brand), ("stock", lambda d: str(d.between(0, 900))), ("name", first_name),
    ("best friend", first_name), ("favorite food", lambda d: d.pick(FOODS)), ("boss", full_name), ("temperature", lambda d: f"{d.between(-20, 90)} degrees"),
)  # fmt: skip
_VERBS = (
    "open opened|close closed|start started|stop stopped|restart restarted|lock locked|unlock unlocked|clean cleaned|paint painted|repair repaired|"
    "sell sold|buy bought|delete deleted|archive archived|print printed|inspect inspected|scan scanned|copy copied|wash washed|polish polished|"
    "pause paused|update updated|test tested|publish published|cancel canceled|block blocked|hide hidden|charge charged|rent rented|park parked|"
    "feed fed|wake woken|call called|find found|weigh weighed|measure measured|wrap wrapped|sort sorted|burn burned|fold folded"
)
_LOOKUP_ASKS = (
    "(What is|What's) the {fact} of {v}?", "(What is|What's) the {fact} of (the |){entity} {v}?", "(Tell me|Get|Look up|Show me|Find|Give me|Check) the {fact} of [{entity} |]{v}.", "{fact} of {v}", "{v} {fact}?", "I need the {fact} of [the {entity} |]{v}.",
    "(Do you know|Can you tell me|Can you find) the {fact} of {v}?", "(What is|What's) {v}'s {fact}?",
)  # fmt: skip
_ACTION_ASKS = (
    "[Please |Now |]{verb} [the |]{entity} {v}.", "(Can|Could|Would) you {verb} {v}[ for me| please|]?", "{verb} {v}", "[Please |]{verb} {v}[ now|, please|].", "I want you to {verb} [the {entity} |]{v}.", "{v} has to be {past}.",
    "I would like {v} to be {past}.", "The {entity} {v} must be {past}[ today| now|].",
)  # fmt: skip


def made_tool(draw: Draw, entity: str) -> Tool:
    """A tool that looks up one fact of an entity, or does one thing to it."""
    return _lookup(draw, entity) if draw.chance(0.5) else _action(draw, entity)


def _numbered(draw: Draw) -> str:
    return f"{invented(draw)} {draw.between(2, 99)}"


def _what(draw: Draw, entity: str) -> Param:
    values: tuple[Callable[[Draw], str], ...] = (code, invented, invented, _numbered)
    value = draw.pick(values)
    names = (entity, f"{entity}_name", "name", "id", f"{entity}_id", "target", "which", "key", "x")
    return text(entity, " ".join(names), f"Name of the {entity}.", value, f"Which {entity}?")


def _lookup(draw: Draw, entity: str) -> Tool:
    fact, value = draw.pick(_FACTS)
    base = fact.replace(" ", "_")
    odd = invented(draw).lower()
    names = (
        f"get_{base}",
        f"{entity}_{base}",
        f"lookup_{base}",
        f"find_{base}",
        f"fetch_{entity}_{base}",
        odd,
        f"{odd}_{base}",
        f"{odd}_{draw.between(1, 9)}",
    )
    notes = tuple(f"{verb} the {fact} of {article(entity)}." for verb in ("Get", "Look up", "Find"))
    asks = tuple(
        a.replace("{fact}", fact).replace("{entity}", entity).replace("{v}", "{" + entity + "}")
        for a in _LOOKUP_ASKS
    )
    answer = f"The {fact} of {{{entity}}} is {{value}}."
    vague = (
        f"What is the {fact}[ of the {entity}|]?",
        f"(Get|Tell me|Look up) the {fact}[ of {article(entity)}|].",
    )
    key = draw.pick(("value", base, "result"))
    answers = (answer.replace("{value}", "{" + key + "}"),)
    return Tool(
        names,
        notes,
        (_what(draw, entity),),
        asks,
        lambda d, v: {key: value(d)},
        answers,
        vague,
        f"{fact} {entity}",
    )


def _action(draw: Draw, entity: str) -> Tool:
    verb, past = draw.pick(_VERBS.split("|")).split()
    if draw.chance(0.15):
        verb = invented(draw).lower()
        past = verb + "ed"
    odd = invented(draw).lower()
    names = (
        f"{verb}_{entity}",
        f"{verb}_{entity}",
        f"{entity}_{verb}",
        f"do_{verb}",
        odd,
        f"{odd}_{entity}",
        f"{odd}_{draw.between(1, 9)}",
    )
    params: tuple[Param, ...] = (_what(draw, entity),)
    slot = "{" + entity + "}"
    asks = tuple(
        a.replace("{verb}", verb).replace("{past}", past).replace("{entity}", entity).replace("{v}", slot)
        for a in _ACTION_ASKS
    )
    note = f"{verb.capitalize()} {article(entity)}."
    vague: tuple[str, ...] = (f"[Please |]{verb} {article(entity)}.", f"{verb} the {entity}")
    answers = (f"Done: {slot} is {past}.", f"{slot} is {past} now.")
    if draw.chance(0.3):
        name, extra, join = draw.pick(_EXTRAS)
        params = (*params, extra)
        asks = (
            f"[Please |]{verb} [the {entity} |]{slot} {join} {{{name}}}.",
            f"(Can|Could) you {verb} {slot} {join} {{{name}}}?",
            f"{verb} {slot} {join} {{{name}}}",
        )
        vague = (f"[Please |]{verb} [the {entity} |]{slot}.",)
        note = f"{verb.capitalize()} {article(entity)} {join} {_OF[name]}."
    results: tuple[dict[str, Any], ...] = ({"ok": True}, {"status": "done"}, {"result": "ok"})
    result = draw.pick(results)
    return Tool(names, (note,), params, asks, lambda d, v: dict(result), answers, vague, f"{verb} {entity}")


_EXTRAS = (
    ("person", text("person", "person who user", "A person.", lambda d: d.pick(GIRLS), "For whom?"), "for"),
    ("city", text("city", "city place where", "A city.", lambda d: d.pick(CITIES), "In which city?"), "in"),
    (
        "object",
        text(
            "object", "object thing tool", "A thing to use.", lambda d: article(d.pick(OBJECTS)), "With what?"
        ),
        "with",
    ),
    ("clock", text("clock", "time at when", "Time as HH:MM.", clock, "At what time?"), "at"),
    ("day", text("day", "day date on", "A date.", date, "On which day?"), "on"),
)
_OF = {"person": "a person", "city": "a city", "object": "an object", "clock": "a time", "day": "a day"}
