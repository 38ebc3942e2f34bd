"""Small requests of everyday life: lists, descriptions, how-tos, recipes, ideas, advice, slogans, letters, judgements."""

from __future__ import annotations

from collections.abc import Callable

from . import faq, judging, letters
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .lists import Category, categories, in_order, written
from .tasks import answered, pairs, request, sections
from .words import ADJECTIVES, ANIMALS, FOODS, JOBS, NUMBERS, OBJECTS, PLACES, article, plural

# The first words of ideas that are things to do.
_DOING = {"visit", "bake", "cook", "turn", "take"}
_WHOLE = {"planets", "seasons", "days", "months", "continents", "oceans"}
# What people ask for first.
_COMMON = frozenset((
    "animals", "birds", "fruits", "vegetables", "foods", "drinks", "colors", "countries", "cities", "jobs", "sports", "hobbies", "tools", "clothes",
    "flowers", "vehicles", "musical instruments", "things in a kitchen", "breakfast foods", "pets", "languages", "programming languages",
))  # fmt: skip
_NUMBERED = 4  # things and more are numbered unless another form is asked for: a small model counts only what it numbers
_POOLS = {"animal": ANIMALS, "food": FOODS, "object": OBJECTS, "place": PLACES}


def _asks(topic: str) -> tuple[str, ...]:
    return sections("instructions")[topic]


def _number(draw: Draw, count: int) -> str:
    return NUMBERS[count] if draw.chance(0.5) else str(count)


def _list_check(form: str, items: list[str], options: tuple[str, ...], task: str) -> Check:
    return Check("list", {"count": len(items), "form": form, "options": list(options), "task": task})


def _category(draw: Draw) -> Category:
    """A kind of things that has no last one; half of the time one of those that people try first."""
    kinds = [c for c in categories() if c.plurals[0] not in _WHOLE]
    return draw.pick([c for c in kinds if c.plurals[0] in _COMMON] if draw.chance(0.5) else kinds)


def _list_of(draw: Draw) -> list[Turn]:
    """So many things of a kind, in the form that is asked for; then perhaps more of them."""
    kind = _category(draw)
    form = draw.weighted((("commas", 0.64), ("bullets", 0.18), ("numbers", 0.18)))
    count = draw.weighted(
        ((2, 0.12), (3, 0.36), (4, 0.12), (5, 0.24), (6, 0.05), (7, 0.04), (8, 0.03), (10, 0.04))
    )
    is_open = draw.chance(0.2)
    count = min(5 if is_open else count, len(kind.members))
    pattern = draw.pick(_asks("list open" if is_open else "list"))
    asked_form = form != "commas" or draw.chance(0.2)
    if asked_form:
        tails = next(rest for name, rest in pairs("instructions", "list tails") if name == form)
        tail = draw.pick(tails.split("|")).rstrip()
        tail = tail if tail.startswith((",", " ")) else f" {tail}"
        end = pattern[len(pattern.rstrip("[].|?, plesa")) :]
        pattern = pattern.removesuffix(end) + tail + ("?" if end == "?" else "[.]")
    name = draw.pick(kind.plurals)
    asked = request(draw, "list", (pattern,), n=_number(draw, count), k=name)
    items = in_order(draw, kind.members, count)
    if not asked_form and count >= _NUMBERED:
        form = "numbers"
    said = written(form, items)
    if form == "commas":
        said = f"Here are {'some' if is_open else NUMBERS[count]} {kind.plurals[0]}: {said}."
    turns = [user(asked), assistant(said, _list_check(form, items, kind.members, "list of N"))]
    return turns + _more(draw, kind, items, form)


def _whole_list(draw: Draw) -> list[Turn]:
    """All things of a small kind in their order: the planets, the seasons."""
    kind = draw.pick([c for c in categories() if c.plurals[0] in _WHOLE])
    form = draw.weighted((("commas", 0.8), ("bullets", 0.1), ("numbers", 0.1)))
    tail = {"commas": "", "bullets": " as a bullet list", "numbers": " as a numbered list"}[form]
    patterns = tuple(p.replace("{k}", "{k}" + tail) for p in _asks("whole list"))
    asked = request(
        draw,
        "whole list",
        patterns,
        k=draw.pick(kind.plurals),
        n=_number(draw, len(kind.members)) if len(kind.members) < 11 else "12",
    )
    items = list(kind.members)
    return [
        user(asked),
        assistant(written(form, items), _list_check(form, items, kind.members, "whole list")),
    ]


def _more(draw: Draw, kind: Category, items: list[str], form: str) -> list[Turn]:
    rest = kind.members[kind.members.index(items[-1]) + 1 :]
    if len(rest) < 3 or not draw.chance(0.2):
        return []
    many = draw.chance(0.4)
    count = min(draw.between(2, 3), len(rest)) if many else 1
    asked = request(
        draw,
        "more of them",
        _asks("more of them")[1 if many else 0 :][:2] if many else _asks("another"),
        n=_number(draw, count),
    )
    more = in_order(draw, rest, count)
    form = form if many else "commas"
    said = f"How about: {', '.join(more)}." if form == "commas" else written(form, more)
    return [user(asked), assistant(said, _list_check(form, more, rest, "more of them"))]


def _one_of(draw: Draw) -> list[Turn]:
    kind = _category(draw)
    pattern = draw.pick(_asks("one of"))
    if kind.one[0].lower() in "aeiou":
        pattern = (
            pattern.replace("(a|an|one)", "(an|one)")
            .replace("(A|An|One)", "(An|One)")
            .replace(" a {k}", " an {k}")
        )
    pattern = pattern.replace("(a|an|one)", "(a|one)").replace("(A|An|One)", "(A|One)")
    items = in_order(draw, kind.members, 1)
    asked = request(draw, "one of", (pattern,), k=kind.one)
    said = f"For example: {items[0]}."
    turns = [user(asked), assistant(said, _list_check("commas", items, kind.members, "one of a kind"))]
    return turns + _more(draw, kind, items, "commas")


def _thing(draw: Draw) -> tuple[str, str, list[str]]:
    """A thing, its plural and what can be said of it: what it is first, the rest in any order."""
    if draw.chance(0.12):
        kind = draw.pick(list(_POOLS))
        known = {row[0] for row in pairs("things", "things")}
        name = draw.pick([n for n in _POOLS[kind] if n not in known])
        lines = sections("things")[f"{kind} lines"][0].split(" | ")
        return name, plural(name), [line.format(x=plural(name)) for line in draw.shuffled(lines)]
    name, many, told = draw.pick(pairs("things", "things"))
    first, *rest = told.split(" | ")
    return name, many, [first, *draw.shuffled(rest)]


def _sentences(draw: Draw) -> list[Turn]:
    name, many, lines = _thing(draw)
    count = draw.weighted(((1, 0.25), (2, 0.3), (3, 0.3), (4, 0.15)))
    shown = f"{draw.pick(('one', '1', 'a')) if count == 1 else _number(draw, count)} {'sentence' if count == 1 else 'sentences'}"
    if count == 1:
        shown = shown.replace(
            "a sentence", draw.pick(("a sentence", "a short sentence", "one short sentence"))
        )
    topic = draw.pick((many, f"the {name}", many)) if many != name else many
    asked = request(draw, "sentences", _asks("sentences"), n=shown, x=topic)
    about = name if lines[0].lower().startswith((f"a {name}", f"an {name}", name, f"the {name}")) else many
    check = Check("sentences", {"count": count, "about": about, "task": "number of sentences"})
    return [user(asked), assistant(" ".join(lines[:count]), check)]


def _about(draw: Draw) -> list[Turn]:
    name, many, told = draw.pick(pairs("things", "things"))
    first, *rest = told.split(" | ")
    start = first.split(" ", 2)
    shown = f"{start[0].lower()} {name}" if start[0] in {"A", "An", "The"} else name
    if draw.chance(0.5):
        asked = request(draw, "what is", _asks("what is"), a=shown)
    else:
        asked = request(draw, "about", _asks("about"), x=draw.pick((shown, many)))
    said = " ".join([first, *draw.sample(rest, draw.between(1, 2))])
    return [user(asked), assistant(said, Check("contains", {"all": [first], "task": "describe a thing"}))]


def _told(draw: Draw, heading: str) -> tuple[str, list[str]]:
    """One of the names of an entry of everyday help, and its parts."""
    names, told = draw.pick(pairs("everyday", heading))
    return draw.pick(names.split("|")), told.split(" | ")


def _how_to(draw: Draw) -> list[Turn]:
    what, steps = _told(draw, "howto")
    asked = request(draw, "how to", _asks("how to"), x=what)
    return answered(asked, written("numbers", steps), "how to")


def _recipe(draw: Draw) -> list[Turn]:
    what, steps = _told(draw, "recipes")
    asks = _asks("recipes")
    asks = tuple(p for p in asks if not p.startswith("{x}")) if what.startswith(("a ", "an ")) else asks
    return answered(request(draw, "recipe", asks, x=what), steps[0], "recipe")


def _ideas(draw: Draw) -> list[Turn]:
    what, options = _told(draw, "ideas")
    if draw.chance(0.25):
        asked = request(draw, "one idea", _asks("one idea"), x=what)
        said = draw.pick(options)
        check = Check("contains", {"all": ["|".join(options)], "task": "an idea"})
        done = options[0].split()[0] in _DOING
        return [user(asked), assistant(f"You could {said}." if done else f"How about {said}?", check)]
    count = draw.weighted(((3, 0.6), (2, 0.1), (4, 0.1), (5, 0.2)))
    pattern = draw.pick(_asks("ideas"))
    count = count if "{n}" in pattern and "|{n}" not in pattern else 3
    pattern = pattern.replace("|{n} ideas", "")
    asked = request(draw, "ideas", (pattern,), n=_number(draw, count), x=what)
    items = draw.sample(options, count)
    return [
        user(asked),
        assistant(written("numbers", items), _list_check("numbers", items, tuple(options), "ideas")),
    ]


def _slogan(draw: Draw) -> list[Turn]:
    what, options = _told(draw, "slogans")
    asked = request(draw, "slogan", _asks("slogans"), x=what)
    check = Check("contains", {"all": ["|".join(options)], "task": "slogan"})
    return [user(asked), assistant(draw.pick(options), check)]


def _difference(draw: Draw) -> list[Turn]:
    what, said = _told(draw, "differences")
    return answered(request(draw, "difference", _asks("differences"), x=what), said[0], "difference")


def _pros_and_cons(draw: Draw) -> list[Turn]:
    names, pros, cons = draw.pick(pairs("everyday", "pros and cons"))
    asked = request(draw, "pros and cons", _asks("pros and cons"), x=draw.pick(names.split("|")))
    return answered(asked, f"For it: {pros}. Against it: {cons}.", "pros and cons")


def _plan(draw: Draw) -> list[Turn]:
    what, items = _told(draw, "plans")
    form = "bullets" if "list" in what or "menu" in what else "numbers"
    return answered(request(draw, "plan", _asks("plans"), x=what), written(form, items), "plan")


def _use_word(draw: Draw) -> list[Turn]:
    """A sentence with one or two words that the user gives."""
    animal, thing, quality = draw.pick(ANIMALS), draw.pick(OBJECTS), draw.pick(ADJECTIVES)
    food, place, job = draw.pick(FOODS), draw.pick(PLACES), draw.pick(JOBS)
    if draw.chance(0.4):
        x, y, said = draw.pick((
            (animal, thing, f"The {animal} looks at the {thing}."), (thing, place, f"I found the {thing} near the {place}."),
            (animal, place, f"The {animal} lives near the {place}."), (job, thing, f"The {job} needs a new {thing}."),
            (job, animal, f"The {job} has a {quality} {animal}."),
        ))  # fmt: skip
        asked = request(draw, "use words", _asks("use words"), {"x": x, "y": y})
    else:
        x, said = draw.pick((
            (animal, f"The {animal} sleeps in the {place}."), (thing, f"My {thing} is old, but I like it."), (quality, f"The {animal} is {quality}."),
            (food, f"We had {plural(food)} for lunch."), (place, f"We walked to the {place} in the morning."), (job, f"My sister is {article(job)}."),
        ))  # fmt: skip
        y = ""
        if x == food:
            x = plural(food)
        asked = request(draw, "use word", _asks("use word"), {"x": x})
    return [
        user(asked),
        assistant(said, Check("contains", {"all": [w for w in (x, y) if w], "task": "use a word"})),
    ]


def _advice(draw: Draw) -> list[Turn]:
    return faq.question(draw, faq.load("advice"), "advice")


_KINDS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_list_of, 0.5), (_one_of, 0.14), (_whole_list, 0.06), (_difference, 0.035), (_pros_and_cons, 0.015), (_plan, 0.035), (_use_word, 0.035), (_sentences, 0.1), (_about, 0.1), (_how_to, 0.08), (_recipe, 0.03), (_ideas, 0.07),
    (_slogan, 0.03), (_advice, 0.07), (letters.turns, 0.06), (judging.turns, 0.25),
)  # fmt: skip


def make(draw: Draw) -> Conversation:
    """One small request."""
    return Conversation("instructions", draw.weighted(_KINDS)(draw))
