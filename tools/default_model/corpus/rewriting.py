"""Rewriting text: case, order, duplicates, replacing, lists, marks, summaries, templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from . import tables
from .conversation import Conversation, Turn
from .counting import common_word, some_items
from .draw import Draw
from .lists import written
from .sentences import clause, sentence
from .tasks import about, answered, listing, loud, pairs, request, sections, words
from .wording import word
from .words import (
    ADJECTIVES,
    FOODS,
    NAMES,
    OBJECTS,
    ORDINALS,
    PLACES,
    SURNAMES,
    WEEKDAYS,
    article,
    city,
    first_name,
    invented,
)

Turns = list[Turn]
# What a sentence can end with and do without.
_SPARE = (
    "today",
    "again",
    "now",
    "too",
    "there",
    "really",
    "often",
    "sometimes",
    "alone",
    "together",
    "here",
    "quickly",
)


def _asked(draw: Draw, topic: str, text: str, kept: Mapping[str, str] | None = None, **slots: str) -> str:
    return about(draw, topic, sections("rewriting")[topic], text, kept, **slots)


def _text(draw: Draw) -> str:
    """A word, a phrase, a name or a sentence, as people try things with."""
    at = draw.below(20)
    if at < 6:
        return common_word(draw)
    if at < 13:
        return " ".join(common_word(draw) for _ in range(draw.between(2, 4)))
    if at < 16:
        return draw.pick(sections("language")["phrases"])
    if at == 16:
        return f"{draw.pick(NAMES)} {draw.pick(SURNAMES)}"
    if at == 17:
        return f"{invented(draw)} {invented(draw)}"
    return sentence(draw) + draw.pick(("", "."))


def _upper(draw: Draw) -> Turns:
    text = _text(draw)
    return answered(_asked(draw, "upper", text), text.upper(), "upper case")


def _lower(draw: Draw) -> Turns:
    text = _text(draw)
    shown = text.upper() if draw.chance(0.75) else text
    return answered(_asked(draw, "lower", shown), text.lower(), "lower case")


def _title(draw: Draw) -> Turns:
    text = _text(draw).lower().rstrip(".")
    said = " ".join(part.capitalize() for part in text.split())
    return answered(_asked(draw, "title", text), said, "title case")


def _copy(draw: Draw) -> Turns:
    text = _text(draw)
    if draw.chance(0.25):
        text = common_word(draw)
        ask, times = draw.pick(pairs("rewriting", "copy often"))
        return answered(about(draw, "copy often", (ask,), text), " ".join([text] * int(times)), "copy often")
    return answered(_asked(draw, "copy", text), text, "copy")


def _list(draw: Draw, low: int = 3, high: int = 6) -> list[str]:
    """Words in a list: mostly of one kind, some of any, some invented, some names."""
    at = draw.below(10)
    count = draw.between(low, high)
    if at < 5:
        return some_items(draw, low, high)[1]
    if at < 8:
        return draw.sample(words("spelling", "words"), count)
    if at == 8:
        return draw.sample(NAMES, count)
    return list(dict.fromkeys(invented(draw).lower() for _ in range(count + 2)))[:count]


def _reverse(draw: Draw) -> Turns:
    items = _list(draw)
    asked = _asked(draw, "reverse", listing(draw, items))
    return answered(asked, f"Reversed: {', '.join(items[::-1])}.", "reverse a list")


def _sort(draw: Draw) -> Turns:
    """Mostly words with different first letters: the first letter decides. "Sorted:" has every word behind a space."""
    for _ in range(20):
        items = _list(draw, 2, draw.pick((3, 4, 5)))
        if draw.chance(0.06):
            items = draw.sample("abcdefghijklmnopqrstuvwxyz", draw.between(3, 6))
        if len({item[0] for item in items}) == len(items) or draw.chance(0.1):
            break
    said = f"Sorted: {', '.join(sorted(items, key=str.lower))}."
    return answered(_asked(draw, "sort", listing(draw, items)), said, "sort words")


def _some_numbers(draw: Draw) -> list[int]:
    top = draw.pick((9, 9, 20, 20, 99, 99, 500))
    return draw.sample(range(1, top + 1), draw.between(2, 5 if top < 500 else 3))


def _sort_numbers(draw: Draw) -> Turns:
    numbers = _some_numbers(draw)
    down = draw.chance(0.3)
    asked = _asked(draw, "sort down" if down else "sort numbers", listing(draw, list(map(str, numbers))))
    said = f"Sorted: {', '.join(map(str, sorted(numbers, reverse=down)))}."
    return answered(asked, said, "sort numbers")


def _largest(draw: Draw) -> Turns:
    numbers = _some_numbers(draw)
    large = draw.chance(0.5)
    name = draw.pick(("largest", "biggest", "highest", "greatest") if large else ("smallest", "lowest"))
    asked = _asked(draw, "largest", listing(draw, list(map(str, numbers))), s=name)
    value = max(numbers) if large else min(numbers)
    return answered(asked, f"The {'largest' if large else 'smallest'} number is {value}.", "largest number")


def _dedupe(draw: Draw) -> Turns:
    items = _list(draw, 2, 4)
    doubled = draw.shuffled(items + draw.sample(items, draw.between(1, 2)))
    asked = _asked(draw, "dedupe", listing(draw, doubled))
    return answered(asked, f"Without duplicates: {', '.join(dict.fromkeys(doubled))}.", "remove duplicates")


def _replace(draw: Draw) -> Turns:
    text = _short(draw)
    parts = text.split()
    old = draw.pick([p for p in parts[1:] if len(p) > 3] or parts[1:])
    new = common_word(draw)
    said = " ".join(new if p == old else p for p in parts)
    end = draw.pick(("", "."))
    quote = draw.pick(("", "", '"'))
    kept = {"o": f"{quote}{old}{quote}", "n": f"{quote}{new}{quote}"}
    return answered(_asked(draw, "replace", text + end, kept), said + end, "replace a word")


def _edit(draw: Draw) -> Turns:
    """Take one item off a list or put one on it."""
    items = _list(draw, 3, 5)
    if draw.chance(0.5):
        gone = draw.pick(items)
        asked = _asked(draw, "remove", listing(draw, items), {"g": gone})
        return answered(asked, f"The list: {', '.join(i for i in items if i != gone)}.", "remove an item")
    new = common_word(draw)
    asked = _asked(draw, "add", listing(draw, items), {"g": new})
    return answered(asked, f"The list: {', '.join([*items, new])}.", "add an item")


def _first_last(draw: Draw) -> Turns:
    text = _short(draw)
    which, form = draw.pick(("first", "last")), draw.chance(0.3)
    asks = sections("rewriting")["first last"]
    if form:
        row = draw.pick([p for p in asks if " = " in p])
        ask, which = row.split(" = ")
        asked = about(draw, "first last", (ask,), text)
    else:
        asked = about(draw, "first last", tuple(p for p in asks if " = " not in p), text, f=which)
    found = text.split()[0 if which == "first" else -1]
    return answered(asked, f"The {which} word is {found}.", "first or last word")


def _longest(draw: Draw) -> Turns:
    while True:
        items = draw.sample(words("spelling", "words"), draw.pick((2, 2, 3)))
        sizes = sorted(map(len, items))
        if sizes[-1] > sizes[-2] + 1 and sizes[0] + 1 < sizes[1]:
            break
    long = draw.chance(0.6)
    found = (max if long else min)(items, key=len)
    if len(items) == 2:
        asks = sections("rewriting")["longer"]
        asked = request(
            draw, "longer", asks, dict(zip("ab", items, strict=True)), s="longer" if long else "shorter"
        )
        return answered(asked, f"The {'longer' if long else 'shorter'} word is {found}.", "longest word")
    asked = _asked(draw, "longest", ", ".join(items), s="longest" if long else "shortest")
    return answered(asked, f"The {'longest' if long else 'shortest'} word is {found}.", "longest word")


def _cut(draw: Draw) -> Turns:
    """A sentence without a word that it does not need: an adjective, or one at its end."""
    parts = sentence(draw).split()
    spare = [p for p in parts if p in ADJECTIVES]
    if not spare:
        parts.append(draw.pick(_SPARE))
    gone = draw.pick(spare or parts[-1:])
    parts = [p.lower() for p in parts] if draw.chance(0.35) else parts
    end = draw.pick(("", "."))
    asked = _asked(draw, "cut", " ".join(parts) + end, {"o": draw.pick((gone, f'"{gone}"'))})
    return answered(asked, " ".join(p for p in parts if p != gone) + end, "leave out a word")


def _mark(draw: Draw) -> Turns:
    """A mark put behind a text, or off it."""
    text = draw.pick((common_word(draw), _short(draw), draw.pick(sections("language")["phrases"]))).rstrip(
        ".?!"
    )
    mark, names = draw.pick(pairs("rewriting", "marks"))
    off = draw.chance(0.3)
    kept = {"m": draw.pick((*names.split("|"), mark))}
    asked = _asked(draw, "mark off" if off else "mark on", text + mark * off, kept)
    return answered(asked, text + mark * (not off), "a mark put on or off")


def _short(draw: Draw) -> str:
    """A sentence of few words, in the user's case."""
    text = clause(draw).present() if draw.chance(0.7) else sentence(draw)
    return text.lower() if draw.chance(0.35) else text


def _form(draw: Draw) -> Turns:
    """A list in another form."""
    items = _list(draw, 2, 5)
    form = draw.pick(("join", "dashes", "bullets", "bullets", "numbered", "numbered", "json array"))
    shown = " ".join(items) if form in {"join", "dashes"} else listing(draw, items)
    lines = {
        "join": ", ".join(items),
        "dashes": "-".join(items),
        "bullets": "\n".join(f"- {item}" for item in items),
        "numbered": "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1)),
        "json array": "[" + ", ".join(f'"{item}"' for item in items) + "]",
    }
    return answered(_asked(draw, form, shown), lines[form], f"list as {form}")


def _initials(draw: Draw) -> Turns:
    at = draw.below(3)
    if at == 0:
        items = draw.sample(words("spelling", "words"), draw.between(3, 4))
        said = "".join(item[0].upper() for item in items)
        return answered(_asked(draw, "initials", " ".join(items)), said, "first letters")
    first, last = first_name(draw), draw.pick(SURNAMES)
    if at == 1:
        return answered(
            _asked(draw, "name initials", f"{first} {last}"), f"{first[0]}. {last[0]}.", "initials"
        )
    return answered(_asked(draw, "last name first", f"{first} {last}"), f"{last}, {first}", "last name first")


def _fix(draw: Draw) -> Turns:
    """Capital letters and marks that are missing, or a wrong form of the verb."""
    made = clause(draw)
    said = draw.pick((made.present() + ".", made.past() + ".", made.question(), made.future() + "."))
    wrong = said.rstrip(".?")
    if draw.chance(0.75):
        wrong = wrong.lower()
    if draw.chance(0.12) and not made.plural and made.forms[0] != "be":
        said = made.present() + "."
        wrong = f"{made.subject} {made.forms[0]} {made.rest}"
    if draw.chance(0.1):
        wrong = wrong.upper()
    if wrong == said:
        wrong = wrong.lower()
    return answered(_asked(draw, "fix", wrong), said, "capitals and marks")


def _spelling(draw: Draw) -> Turns:
    """A word or a sentence with a typo."""
    if draw.chance(0.3):
        wrong, right = draw.pick(pairs("language", "misspellings"))
        return answered(_asked(draw, "misspelled", wrong), f"The right spelling is {right}.", "spelling")
    text = _short(draw)
    parts = text.split()
    at = draw.pick([i for i, p in enumerate(parts) if len(p) > 3] or [0])
    name = parts[at]
    i = draw.between(1, max(len(name) - 2, 1))
    parts[at] = draw.pick(
        (
            name[:i] + name[i + 1 :],
            name[:i] + name[i : i + 2][::-1] + name[i + 2 :],
            name[:i] + name[i - 1] + name[i:],
        )
    )
    return answered(_asked(draw, "spelling", f"{' '.join(parts)}."), f"{text}.", "spelling")


def _tense(draw: Draw) -> Turns:
    made = clause(draw)
    form = draw.pick(("past", "past", "future", "negative", "question", "question"))
    said = {"past": made.past, "future": made.future, "negative": made.negative, "question": made.question}[
        form
    ]()
    end = "" if form == "question" else "."
    return answered(
        _asked(draw, form, made.present() + draw.pick((".", ".", ""))), said + end, f"make it {form}"
    )


def _two_sentences(draw: Draw) -> Turns:
    """Two sentences made one, or a sentence about somebody else."""
    first, second = clause(draw), clause(draw)
    if draw.chance(0.5):
        asked = _asked(draw, "combine", f"{first.present()}. {second.present()}.")
        return answered(asked, f"{first.present()} and {second.inner()}.", "combine sentences")
    person = draw.pick(("he", "she", "we", "they", "you", first_name(draw)))
    plural = person in {"we", "they", "you"}
    mine = replace(first, subject="I", plural=True)
    if first.forms[0] == "be":
        return _two_sentences(draw)
    said = replace(first, subject=person[0].upper() + person[1:], plural=plural).present()
    return answered(
        _asked(draw, "person", f"{mine.present()}.", {"x": person}), f"{said}.", "change the person"
    )


def _polite(draw: Draw) -> Turns:
    at = draw.below(10)
    base, _, _, things = draw.pick(pairs("language", "verbs")[:32])
    thing = article(draw.pick(OBJECTS))
    if at < 4:
        order = f"{base} {draw.pick(things.split('|'))}"
        rude, kind = f"{order.capitalize()}.", f"Could you please {order}?"
    elif at == 4:
        rude, kind = f"I want {thing}.", f"I would like {thing}, please."
    elif at == 5:
        rude, kind = f"Give me {thing}.", f"Could you please give me {thing}?"
    else:
        rude, kind = draw.pick(pairs("language", "polite"))
    shown = rude if draw.chance(0.6) else rude.rstrip(".").lower()
    return answered(_asked(draw, "polite", shown), kind, "polite")


def _news(draw: Draw) -> Turns:
    """A text whose first or second sentence says what matters."""
    main, title = draw.pick(pairs("language", "news"))
    name, other = draw.sample(NAMES, 2)
    slots = {
        "name": first_name(draw) if draw.chance(0.3) else name, "other": other, "city": city(draw), "day": draw.pick(WEEKDAYS),
        "n": str(draw.between(3, 60)),
    }  # fmt: skip
    main, title = word(draw, main, **slots), word(draw, title, **slots)
    if draw.chance(0.25):
        return answered(_asked(draw, "title for", main), title, "title")
    rest = [word(draw, d, **slots) for d in draw.sample(sections("language")["details"], draw.between(1, 3))]
    rest.insert(1 if draw.chance(0.15) else 0, main)
    return answered(_asked(draw, "summary", " ".join(rest)), main, "summary")


def _fill(draw: Draw) -> Turns:
    """Gaps in a template filled with facts."""
    template = draw.pick(sections("language")["templates"])
    values = {
        "name": first_name(draw), "city": city(draw), "day": draw.pick(WEEKDAYS), "thing": article(draw.pick(FOODS + OBJECTS)),
    }  # fmt: skip
    if "the {thing}" in template:
        values["thing"] = draw.pick(OBJECTS)
    used = [k for k in values if f"{{{k}}}" in template]
    facts = ", ".join(f"{k}{draw.pick((' = ', ': '))}{values[k]}" for k in draw.shuffled(used))
    shown = template
    left, right = draw.pick((("[", "]"), ("<", ">"), ("{", "}"), ("[", "]")))
    for k in used:
        shown = shown.replace(f"{{{k}}}", f"{left}{k}{right}")
    return answered(_asked(draw, "fill", shown, {"f": facts}), template.format_map(values), "fill a template")


def _article(draw: Draw) -> Turns:
    """Whether "a" or "an" stands before a noun."""
    name = draw.pick(tables.rows("plurals"))["word"]
    asked = request(draw, "article", sections("rewriting")["article"], {"t": name})
    return answered(asked, f"It is {article(name)}.", "a or an")


def _found(draw: Draw) -> Turns:
    """The number, the name or the city in a sentence."""
    values = {
        "number": str(draw.between(8, 90)), "name": first_name(draw), "city": city(draw), "day": draw.pick(WEEKDAYS),
        "thing": article(draw.pick(OBJECTS)), "place": draw.pick(PLACES),
    }  # fmt: skip
    fact, found = draw.pick(pairs("rewriting", "found"))
    asked = _asked(draw, f"found {found}", fact.format_map(values))
    return answered(asked, values[found], "find in a text")


def _changed(items: list[str], form: str, action: str, at: int, new: str) -> tuple[list[str], str]:
    """The list after an action, and the form in which it stands."""
    if action == "sort":
        return sorted(items, key=str.lower), form
    if action == "reverse":
        return items[::-1], form
    if action in {"upper", "lower"}:
        return [i.upper() if action == "upper" else i.lower() for i in items], form
    if action == "add":
        return [*items, new], form
    if action.startswith("remove"):
        return items[:at] + items[at + 1 :], form
    return items, action if action in {"commas", "bullets", "numbers"} else form


def _kept(form: str, items: list[str]) -> str:
    """The list as it is now."""
    return f"Your list: {', '.join(items)}." if form == "commas" else written(form, items)


def _then(draw: Draw) -> Turns:
    """A list that stays in the talk and is changed step by step."""
    items = _list(draw, 3, 5)
    form = draw.weighted((("commas", 0.6), ("bullets", 0.2), ("numbers", 0.2)))
    topic = {"commas": "start list", "bullets": "bullets", "numbers": "numbered"}[form]
    turns = answered(_asked(draw, topic, listing(draw, items)), _kept(form, items), "keep a list")
    for _ in range(draw.weighted(((1, 0.5), (2, 0.35), (3, 0.15)))):
        ask, action = draw.pick(pairs("rewriting", "then"))
        at, new = draw.below(len(items)), common_word(draw)
        slots = {"x": items[at] if action == "remove" else new}
        asked = request(
            draw,
            "then",
            (ask,),
            slots,
            n=draw.pick((ORDINALS[at], "last" if at + 1 == len(items) else ORDINALS[at])),
        )
        if action == "nth":
            said = "last" if " last " in f" {asked.lower()} " else ORDINALS[at]
            turns += answered(asked, f"The {said} one is {items[at]}.", "then the nth")
        elif action == "count":
            turns += answered(asked, f"That makes {len(items)}.", "then count")
        else:
            items, form = _changed(items, form, action, at, new)
            turns += answered(asked, _kept(form, items), "then change the list")
        if len(items) < 3:
            break
    return turns


_KINDS: tuple[tuple[Callable[[Draw], Turns], float], ...] = (
    (_upper, 2.2), (_lower, 1.8), (_title, 1.0), (_copy, 1.2), (_reverse, 1.5), (_sort, 2.4), (_sort_numbers, 2.0), (_largest, 0.6),
    (_dedupe, 0.5), (_replace, 1.6), (_cut, 1.0), (_mark, 0.7), (_edit, 0.8), (_first_last, 0.7), (_longest, 0.6), (_form, 1.3), (_initials, 0.3),
    (_fix, 0.8), (_spelling, 1.0), (_tense, 0.9), (_polite, 0.5), (_two_sentences, 0.3), (_found, 0.5), (_news, 1.0), (_fill, 0.4), (_article, 0.15), (_then, 1.6),
)  # fmt: skip


# Whose answers stay as they are when the request is typed in capitals.
_LOUD = (_upper, _reverse, _sort, _sort_numbers, _largest, _dedupe, _longest)


def make(draw: Draw) -> Conversation:
    """One rewriting task."""
    kind = draw.weighted(_KINDS)
    made = kind(draw)
    return Conversation("rewriting", loud(draw, made) if kind in _LOUD else made)
