"""Counting and spelling: letters of a word, words of a sentence, items of a list, numbers and letters in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from .columns import answer
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .lists import categories, things_of_a_kind
from .sentences import clause, sentence
from .tasks import about, answered, listing, loud, request, sections, words
from .words import (
    ANIMALS,
    FOODS,
    MONTHS,
    NAMES,
    NUMBERS,
    OBJECTS,
    ORDINALS,
    PLAIN_WORDS,
    WEEKDAYS,
    invented,
    listed,
    plural,
)

_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}
# The longest word there may be, and how often.
_LENGTHS = ((4, 0.35), (6, 0.5), (99, 0.15))
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def common_word(draw: Draw) -> str:
    """A word that the model learns to spell, mostly a short one, now and then one that no list holds."""
    if draw.chance(0.06):
        return invented(draw).lower()
    return draw.pick(_common(draw.weighted(_LENGTHS)))


@cache
def _common(longest: int) -> tuple[str, ...]:
    listed_words = [m for c in categories() for m in c.members if m.isascii() and m.isalpha() and m.islower()]
    known = dict.fromkeys((*words("spelling", "words"), *PLAIN_WORDS, *listed_words))
    return tuple(name for name in known if len(name) <= longest)


def _cased(draw: Draw, name: str) -> str:
    """A word as the user may write it."""
    return draw.weighted(((name, 0.8), (name.capitalize(), 0.12), (name.upper(), 0.08)))


def _asks(topic: str) -> tuple[str, ...]:
    return sections("counting")[topic]


def _spelling(topic: str) -> tuple[str, ...]:
    return sections("spelling")[topic]


def ordinal(draw: Draw, number: int) -> str:
    """ "third" or "3rd"."""
    if draw.chance(0.75) and number <= len(ORDINALS):
        return ORDINALS[number - 1]
    return f"{number}{'th' if 10 < number < 20 else _SUFFIXES.get(number % 10, 'th')}"


def _how_many(draw: Draw, count: int) -> str:
    return NUMBERS[count] if count <= 10 and draw.chance(0.5) else str(count)


def _letter(draw: Draw) -> list[Turn]:
    """Spell the word, then say how often."""
    name = common_word(draw)
    letter = draw.pick(name) if draw.chance(0.85) else draw.pick("abcdefghilmnoprstu")
    if draw.chance(0.4):
        name = draw.pick([w for w in words("spelling", "words") if len(w) - len(set(w)) >= 2])
        letter = draw.pick([c for c in name if name.count(c) > 1])
    asked = request(draw, "letters", _spelling("letters"), {"l": letter, "w": _cased(draw, name)})
    spelled, count = _tallied(name, letter)
    said = f"{spelled}: the letter {letter} appears {count} {'time' if count == 1 else 'times'}."
    return answered(asked, said, "letters of a kind")


def _tallied(name: str, counted: str) -> tuple[str, int]:
    """The letters of a word with a running count behind those that are counted, "b-a(1)-n-a(2)", and the count."""
    count = 0
    parts: list[str] = []
    for letter in name:
        count += letter in counted
        parts.append(f"{letter}({count})" if letter in counted else letter)
    return "-".join(parts), count


def _numbered(parts: Sequence[str]) -> str:
    """ "1 c, 2 a, 3 t": each part with its place, so that the last number is the count."""
    return ", ".join(f"{n} {part}" for n, part in enumerate(parts, 1))


def _length(draw: Draw) -> list[Turn]:
    name = common_word(draw)
    asked = request(draw, "length", _spelling("length"), {"w": _cased(draw, name)})
    return answered(asked, f"{_numbered(name)}. That makes {len(name)} letters.", "letters of a word")


def _spell(draw: Draw) -> list[Turn]:
    name = common_word(draw)
    if draw.chance(0.08):
        name = draw.pick(NAMES)
        asked = request(draw, "spell", _spelling("spell"), {"w": name})
        return answered(asked, "-".join(name), "spell a name")
    asked = request(draw, "spell", _spelling("spell"), {"w": _cased(draw, name)})
    turns = answered(asked, "-".join(name), "spell")
    while draw.chance(0.35):
        name = common_word(draw)
        asked = request(
            draw, "spell", ("(And|Now|Next|And how about|What about) {w}[?]", "{w}[?]"), {"w": name}
        )
        turns += answered(asked, "-".join(name), "spell")
    return turns


def _unspell(draw: Draw) -> list[Turn]:
    name = common_word(draw)
    shown = draw.pick(("-", "-", " ", ", ")).join(name)
    asked = request(draw, "unspell", _spelling("unspell"), {"s": shown})
    return answered(asked, f"{'-'.join(name)} spells {name}.", "join letters")


def _backwards(draw: Draw) -> list[Turn]:
    name = common_word(draw)
    while len(name) > 7:
        name = common_word(draw)
    asked = request(draw, "backwards", _spelling("backwards"), {"w": _cased(draw, name)})
    back = "".join(reversed(name))
    return answered(asked, f"{'-'.join(name)} backwards is {'-'.join(back)}, {back}.", "backwards")


def _nth_letter(draw: Draw) -> list[Turn]:
    name = common_word(draw)
    kind = draw.pick(("start", "end", "nth", "nth"))
    if kind == "nth":
        at = draw.weighted(((1, 0.3), (2, 0.2), (3, 0.2), (4, 0.1), (len(name), 0.2)))
        at = min(at, len(name))
        which = "last" if at == len(name) and draw.chance(0.9) else ordinal(draw, at)
        asked = request(draw, "nth letter", _spelling("nth letter"), {"w": name}, n=which)
    else:
        at, which = (1, "first") if kind == "start" else (len(name), "last")
        asked = request(draw, kind, _spelling(f"{kind} letter"), {"w": name})
    if at > 1 and which != "last":
        return answered(
            asked, f"{_numbered(name[:at])}: the {ORDINALS[at - 1]} letter is {name[at - 1]}.", "nth letter"
        )
    which = "last" if which == "last" else "first"
    return answered(asked, f"The {which} letter of {name} is {name[at - 1]}.", f"{which} letter")


def _has_letter(draw: Draw) -> list[Turn]:
    name = common_word(draw)
    letter = draw.pick(name) if draw.chance(0.5) else draw.pick("abcdefghilmnoprstuz")
    asked = request(draw, "has letter", _spelling("has letter"), {"w": name, "l": letter})
    said = f"{'-'.join(name)}: {f'yes, there is {_an(letter)}' if letter in name else f'no, there is no {letter}'}."
    return answered(asked, said, "has a letter")


def _vowels(draw: Draw) -> list[Turn]:
    if draw.chance(0.3):
        letter = draw.pick(_ALPHABET)
        asked = request(draw, "vowel", _spelling("vowel or consonant"), {"l": letter})
        said = f"The letter {letter} is a {'vowel' if letter in 'aeiou' else 'consonant'}."
        return answered(asked, said, "vowel or consonant")
    name = common_word(draw)
    asked = request(draw, "vowels", _spelling("vowels"), {"w": name})
    spelled, count = _tallied(name, "aeiou")
    return answered(asked, f"{spelled}: {count} vowel{'' if count == 1 else 's'}.", "vowels")


def _an(letter: str) -> str:
    """The letter with "a" or "an", as it is spoken."""
    return f"{'an' if letter in 'aefhilmnorsx' else 'a'} {letter}"


def _starting(draw: Draw) -> list[Turn]:
    """Words that begin or end with a letter."""
    ending = draw.chance(0.25)
    letter = draw.pick("dehknprstyl" if ending else "abcdefghijklmnoprstuvwyz")
    pool = [w for w in words("spelling", "words") if (w.endswith if ending else w.startswith)(letter)]
    count = 1 if ending else draw.weighted(((1, 0.5), (2, 0.1), (3, 0.25), (4, 0.05), (5, 0.1)))
    shown = letter if draw.chance(0.5) else letter.upper()
    topic = "ending" if ending else "starting" if count == 1 else "starting many"
    asked = request(draw, topic, _spelling(topic), {"l": shown}, n=_how_many(draw, count))
    said = ", ".join(draw.sample(pool, count))
    pattern = f"[a-z]*{letter}" if ending else f"{letter}[a-z]*"
    check = Check(
        "match", {"pattern": ", ".join([pattern] * count), "task": f"word {topic.split(maxsplit=1)[0]} with"}
    )
    return [user(asked), assistant(said, check)]


def some_items(draw: Draw, low: int, high: int) -> tuple[str, list[str]]:
    """Things of a kind, at times with an invented one."""
    name, pool = things_of_a_kind(draw)
    items = draw.sample(pool, draw.between(low, high))
    if draw.chance(0.15):
        items[draw.below(len(items))] = invented(draw).lower()
    return name, items


def _items(draw: Draw) -> list[Turn]:
    kind, items = some_items(draw, 2, 7)
    asked = about(draw, "items", _asks("items"), listing(draw, items), k=kind)
    return answered(asked, f"{_numbered(items)}. That makes {len(items)}.", "items")


def _words(draw: Draw) -> list[Turn]:
    text = sentence(draw) if draw.chance(0.4) else clause(draw).present()
    text = text.lower() if draw.chance(0.3) else text
    asked = about(draw, "words", _asks("words"), text + draw.pick((".", ".", "")))
    parts = text.split()
    return answered(asked, f"{_numbered(parts)}. That makes {len(parts)} words.", "words")


def _sentences(draw: Draw) -> list[Turn]:
    """How many sentences a text has: the first word of each, numbered."""
    said = [clause(draw).present() for _ in range(draw.between(1, 4))]
    asked = about(draw, "sentences", _asks("sentences"), ". ".join(said) + ".")
    firsts = _numbered([text.split()[0] for text in said])
    total = f"{len(said)} sentence{'' if len(said) == 1 else 's'}"
    return answered(asked, f"{firsts}. That makes {total}.", "sentences")


def _repeated(draw: Draw) -> list[Turn]:
    _, items = some_items(draw, 2, 3)
    asked_for, count = items[0], draw.between(1, 4)
    all_items = draw.shuffled(items[1:] + [asked_for] * count)
    shown = draw.pick((", ", " ")).join(all_items)
    asked = about(draw, "repeated", _asks("repeated"), shown, {"x": asked_for})
    times = "once" if count == 1 else f"{count} times"
    return answered(asked, f"{asked_for} appears {times}.", "repeated")


def _nth(draw: Draw) -> list[Turn]:
    _, items = some_items(draw, 3, 6)
    at = draw.below(len(items) + 1)
    number = min(at, len(items) - 1)
    which = "last" if at == len(items) else ordinal(draw, at + 1)
    asked = about(draw, "nth", _asks("nth"), listing(draw, items), n=which)
    said = "last" if which == "last" else ORDINALS[number]
    return answered(asked, f"The {said} one is {items[number]}.", "nth item")


def _numbers(draw: Draw) -> list[Turn]:
    """Count up, down or in steps."""
    form = draw.weighted((("to", 0.35), ("from", 0.2), ("down", 0.2), ("by", 0.1), ("even", 0.15)))
    b = draw.pick((3, 5, 10, 10, 10, 12, 15, 20, 20, 25, 30, draw.between(2, 40)))
    if form == "to":
        asked = request(draw, "count to", _asks("count to"), {"b": str(b)})
        numbers = list(range(1, b + 1))
    elif form == "from":
        a = draw.between(2, 60)
        numbers = list(range(a, a + draw.between(3, 12)))
        asked = request(draw, "count from", _asks("count from"), {"a": str(a), "b": str(numbers[-1])})
    elif form == "down":
        to = 1 if draw.chance(0.7) else draw.between(0, b - 2)
        asks = [p if to == 1 else p.replace("[ to {b}]", " to {b}") for p in _asks("count down")]
        asks = [p for p in asks if to == 1 or "{b}" in p]
        asked = request(draw, "count down", tuple(asks), {"a": str(b), "b": str(to)})
        numbers = list(range(b, to - 1, -1))
    elif form == "by":
        step = draw.pick((2, 3, 5, 10, 10, 20, 100))
        start, count = step, draw.between(4, 10)
        numbers = [start + i * step for i in range(count)]
        slots = {"a": str(start), "b": str(numbers[-1]), "d": str(step)}
        asked = request(draw, "count by", _asks("count by"), slots, s=f"{step}s")
    else:
        return _even(draw)
    return answered(asked, ", ".join(map(str, numbers)), "count")


def _even(draw: Draw) -> list[Turn]:
    """Even or odd numbers, multiples."""
    form = draw.below(3)
    word = draw.pick(("even", "odd"))
    first = 2 if word == "even" else 1
    if form == 0:
        b = draw.between(5, 24)
        asked = request(draw, "even", _asks("even"), {"b": str(b)}, e=word)
        numbers = list(range(first, b + 1, 2))
    elif form == 1:
        count = draw.between(3, 10)
        asked = request(draw, "first even", _asks("first even"), {"c": _how_many(draw, count)}, e=word)
        numbers = [first + 2 * i for i in range(count)]
    else:
        d, count = draw.between(2, 12), draw.between(3, 8)
        asked = request(draw, "multiples", _asks("multiples"), {"c": _how_many(draw, count), "d": str(d)})
        count = 10 if "table" in asked.lower() else count
        numbers = [d * i for i in range(1, count + 1)]
    return answered(asked, ", ".join(map(str, numbers)), "even, odd, multiples")


def _groups(draw: Draw) -> list[Turn]:
    """Count one kind of thing among others in a sentence, or all."""
    things = [
        (item, draw.between(2, 20))
        for item in draw.sample(draw.pick((ANIMALS, FOODS, OBJECTS)), draw.between(2, 3))
    ]
    scene = listed([f"{n} {plural(item)}" for item, n in things])
    if draw.chance(0.3):
        (_, a), (_, b) = things[:2]
        scene = listed([f"{n} {plural(item)}" for item, n in things[:2]])
        asked = request(draw, "total", _asks("total"), {"s": scene})
        return answered(asked, f"{a} + {b} = {a + b}.", "total")
    item, count = draw.pick(things)
    asked = request(draw, "groups", _asks("groups"), {"s": scene}, w=plural(item))
    return answered(asked, f"There are {count} {plural(item)}.", "groups")


def _alphabet(draw: Draw) -> list[Turn]:
    form = draw.pick(
        ("alphabet", "first letters", "place letter", "after letter", "after letter", "before letter")
    )
    at = draw.between(1, 24)
    shown = {"l": _ALPHABET[at] if draw.chance(0.5) else _ALPHABET[at].upper()}
    if form == "alphabet":
        return answered(request(draw, form, _asks(form)), " ".join(_ALPHABET), "alphabet")
    if form == "first letters":
        count = draw.between(2, 10)
        asked = request(draw, form, _asks(form), c=_how_many(draw, count))
        return answered(asked, " ".join(_ALPHABET[:count]), "alphabet")
    if form == "place letter":
        at = draw.between(1, 26) if draw.chance(0.5) else draw.between(1, 6)
        last = at == 26 and draw.chance(0.7)
        asked = request(draw, form, _asks(form), n="last" if last else ordinal(draw, at))
        which = "last" if last else _place(at)
        return answered(asked, f"The {which} letter of the alphabet is {_ALPHABET[at - 1]}.", "alphabet")
    near = _ALPHABET[at + (1 if form == "after letter" else -1)]
    asked = request(draw, form, _asks(form), shown)
    return answered(asked, f"{near} comes {form.split()[0]} {_ALPHABET[at]}.", "alphabet")


def _place(number: int) -> str:
    if number <= len(ORDINALS):
        return ORDINALS[number - 1]
    return f"{number}{'th' if number < 20 else _SUFFIXES.get(number % 10, 'th')}"


def _calendar(draw: Draw) -> list[Turn]:
    """Days and months in their order."""
    form = draw.pick(("days", "months", "month number"))
    if form in {"days", "months"}:
        return answered(
            request(draw, form, _asks(form)), ", ".join(WEEKDAYS if form == "days" else MONTHS), "calendar"
        )
    at = draw.below(12)
    asked = request(draw, form, _asks(form), l=MONTHS[at], n=ordinal(draw, at + 1))
    return answered(asked, f"{MONTHS[at]} is the {ORDINALS[at]} month of the year.", "calendar")


def _later(draw: Draw) -> list[Turn]:
    """Days of a month, days and hours later, years between."""
    form = draw.pick(("month length", "later", "later", "clock", "clock", "born"))
    if form == "month length":
        month = draw.pick(MONTHS)
        days = (
            "28 or 29"
            if month == "February"
            else "30"
            if month in {"April", "June", "September", "November"}
            else "31"
        )
        return answered(
            request(draw, form, _asks(form), l=month), f"{month} has {days} days.", "days of a month"
        )
    count = draw.between(2, 6)
    if form == "later":
        at = draw.below(7)
        asked = request(draw, form, _asks(form), l=WEEKDAYS[at], n=_how_many(draw, count))
        said = f"{NUMBERS[count].capitalize()} days after {WEEKDAYS[at]} is {WEEKDAYS[(at + count) % 7]}."
        return answered(asked, said, "days later")
    if form == "clock":
        at = draw.between(1, 12)
        half = draw.pick(("am", "pm"))
        late = draw.between(1, 11)
        hour = (at % 12 + late) % 12 or 12
        turned = at % 12 + late >= 12
        after = {"am": "pm", "pm": "am"}[half] if turned else half
        asked = request(draw, form, _asks(form), {"h": f"{at} {half}"}, n=str(late))
        asked = asked.replace("1 hours", "1 hour") if late == 1 else asked
        return answered(
            asked,
            f"{late} {'hour' if late == 1 else 'hours'} after {at} {half} is {hour} {after}.",
            "hours later",
        )
    year = draw.between(1930, 2015)
    now = draw.between(max(year + 2, 1990), 2030)
    asked = request(draw, form, _asks(form), {"a": str(year), "b": str(now), "m": draw.pick(NAMES)})
    return answered(asked, answer("subtract", now, year), "years between")


def _digits(draw: Draw) -> list[Turn]:
    """The digits of a number: how many, their sum, backwards."""
    number = str(draw.between(10, draw.pick((99, 999, 9999, 99999))))
    form = draw.pick(("digits", "digit sum", "reverse number"))
    asked = request(draw, form, _asks(form), {"x": number})
    spelled = "-".join(number)
    said = {
        "digits": f"{spelled} has {len(number)} digits.",
        "digit sum": f"{' + '.join(number)} = {sum(map(int, number))}.",
        "reverse number": f"{number} backwards is {number[::-1]}.",
    }
    return answered(asked, said[form], form)


_KINDS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_spell, 0.2), (_letter, 0.13), (_length, 0.11), (_unspell, 0.05), (_backwards, 0.08), (_nth_letter, 0.08),
    (_has_letter, 0.03), (_vowels, 0.03), (_starting, 0.03), (_items, 0.08), (_words, 0.08), (_sentences, 0.03), (_repeated, 0.02),
    (_nth, 0.06), (_numbers, 0.12), (_groups, 0.03), (_alphabet, 0.04), (_calendar, 0.03), (_later, 0.02), (_digits, 0.015),
)  # fmt: skip


# Whose answers repeat words in the user's case.
_CASED = (_words, _sentences)


def make(draw: Draw) -> Conversation:
    """One counting or spelling question."""
    kind = draw.weighted(_KINDS)
    made = kind(draw)
    return Conversation("counting", made if kind in _CASED else loud(draw, made))
