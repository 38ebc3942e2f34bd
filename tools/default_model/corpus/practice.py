"""Many small tasks of one kind in one request, an answer a line: much practice for few words.

What a small model learns only by many examples stands here: sums, times tables, the letters of words, their forms in
capitals and in quotes, order, and facts of two words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import arithmetic, tables
from .columns import SIGNS, equation
from .conversation import Conversation
from .counting import common_word
from .draw import Draw
from .sentences import sentence
from .tasks import answered, request, sections
from .words import invented

Item = tuple[str, str]  # as it is asked, and the line that answers it


def _sum(draw: Draw, kind: str) -> Item:
    """Two numbers whose result is said at once."""
    a, b = arithmetic.small_pair(draw, kind)
    sign = draw.pick((SIGNS[kind], "x", "*")) if kind == "multiply" else SIGNS[kind]
    gap = draw.pick(("", " "))
    return f"{a}{gap}{sign}{gap}{b}", equation(kind, a, b)


def _added(draw: Draw) -> Item:
    return _sum(draw, draw.pick(("add", "subtract")))


def _multiplied(draw: Draw) -> Item:
    return _sum(draw, draw.pick(("multiply", "multiply", "divide")))


def _spelled(draw: Draw) -> Item:
    name = common_word(draw)
    return name, f"{name}: {'-'.join(name)}"


def _phrase(draw: Draw) -> str:
    return " ".join(common_word(draw) for _ in range(draw.between(2, 4)))


def _raised(words: Callable[[Draw], str], draw: Draw) -> Item:
    name = words(draw)
    return name, name.upper()


def _lowered(words: Callable[[Draw], str], draw: Draw) -> Item:
    name = words(draw)
    return name.upper(), name


def _backwards(draw: Draw) -> Item:
    name = common_word(draw)
    return name, f"{'-'.join(name)}: {'-'.join(reversed(name))}"


def _shouted(draw: Draw) -> Item:
    """A word in capitals, spelled in small letters."""
    name = common_word(draw)
    return name.upper(), f"{name}: {'-'.join(name)}"


def _measured(draw: Draw) -> Item:
    name = common_word(draw)
    return name, f"{', '.join(f'{n} {letter}' for n, letter in enumerate(name, 1))}: {len(name)}"


def _titled(draw: Draw) -> Item:
    name = common_word(draw)
    return name, name.capitalize()


def _quoted(draw: Draw) -> Item:
    name = common_word(draw)
    return name, f'"{name}"'


def _begun(draw: Draw) -> Item:
    name = common_word(draw)
    return name, f"{name}: {name[0]}"


def _sorted(draw: Draw) -> Item:
    names = draw.sample([common_word(draw) for _ in range(6)], draw.weighted(((2, 0.4), (3, 0.4), (4, 0.2))))
    names = list(dict.fromkeys(names))
    return ", ".join(names), f"- {', '.join(sorted(names))}"


def _ordered(draw: Draw, *, down: bool = False) -> Item:
    numbers = draw.sample(range(1, draw.pick((10, 20, 100))), draw.between(2, 4))
    return ", ".join(map(str, numbers)), f"- {', '.join(map(str, sorted(numbers, reverse=down)))}"


def _reversed(draw: Draw) -> Item:
    names = [common_word(draw) for _ in range(draw.between(2, 4))]
    return ", ".join(names), f"- {', '.join(names[::-1])}"


def _two(draw: Draw) -> list[int]:
    return draw.sample(range(1, draw.pick((10, 100, 100))), 2)


def _comparison(a: int, b: int, *, larger: bool) -> str:
    low, high = sorted((a, b))
    return f"{high} is larger than {low}" if larger else f"{low} is smaller than {high}"


def _compared(draw: Draw, *, larger: bool) -> Item:
    a, b = _two(draw)
    return f"{a} or {b}", _comparison(a, b, larger=larger)


def _asked(draw: Draw) -> Item:
    """A yes or no is only right by the numbers, and half of them are right."""
    a, b = _two(draw)
    w = draw.pick(("larger", "smaller"))
    right = (a > b) == (w == "larger")
    return f"is {a} {w} than {b}", f"{'Yes' if right else 'No'}, {_comparison(a, b, larger=w == 'larger')}"


def _claimed(draw: Draw) -> Item:
    kind = draw.pick(("add", "subtract"))
    a, b = arithmetic.small_pair(draw, kind)
    right = equation(kind, a, b)
    value = int(right.rpartition(" ")[2])
    said = value if draw.chance(0.5) else value + draw.pick((-10, -1, 1, 10))
    return f"{a} {SIGNS[kind]} {b} = {said}", arithmetic.judged(right, str(said))


def _swapped(draw: Draw) -> Item:
    """One word of a sentence for another."""
    parts = sentence(draw).split()
    at, new = draw.between(1, len(parts) - 1), common_word(draw)
    changed = [*parts[:at], new, *parts[at + 1 :]]
    return f"{' '.join(parts)} ({parts[at]} -> {new})", " ".join(changed)


def _cut(draw: Draw) -> Item:
    """A sentence without one of its words."""
    parts = sentence(draw).split()
    at = draw.between(1, len(parts) - 1)
    return f"{' '.join(parts)} ({parts[at]})", " ".join(parts[:at] + parts[at + 1 :])


def _copied(draw: Draw) -> Item:
    """Words as they are, invented ones among them."""
    names = " ".join(
        invented(draw) if draw.chance(0.3) else common_word(draw) for _ in range(draw.between(1, 4))
    )
    return names, names


def _after(draw: Draw) -> Item:
    a = draw.between(0, 99)
    return str(a), f"{a + 1} comes after {a}"


def _column(table: str, asked: str, said: str) -> Callable[[Draw], Item]:
    """Two columns of a table of facts."""

    def make(draw: Draw) -> Item:
        row = draw.pick([r for r in tables.rows(table) if "-" not in (r[asked], r[said])])
        return row[asked], f"{row[asked]}: {row[said]}"

    return make


# Headings of tasks/practice.txt, what makes an item, and its share.
_KINDS: tuple[tuple[tuple[str, Callable[[Draw], Item]], float], ...] = (
    (("sums", _added), 0.22),
    (("tables", _multiplied), 0.04),
    (("spelling", _spelled), 0.1),
    (("spelling", _shouted), 0.04),
    (("measured", _measured), 0.05),
    (("upper", partial(_raised, common_word)), 0.06),
    (("upper", partial(_raised, _phrase)), 0.06),
    (("lower", partial(_lowered, common_word)), 0.06),
    (("lower", partial(_lowered, _phrase)), 0.06),
    (("titled", _titled), 0.02),
    (("quoted", _quoted), 0.05),
    (("copied", _copied), 0.08),
    (("backwards", _backwards), 0.03),
    (("begun", _begun), 0.03),
    (("sorted", _sorted), 0.1),
    (("ordered", _ordered), 0.05),
    (("descending", partial(_ordered, down=True)), 0.03),
    (("reversed", _reversed), 0.06),
    (("larger", partial(_compared, larger=True)), 0.03),
    (("smaller", partial(_compared, larger=False)), 0.02),
    (("compared", _asked), 0.03),
    (("claimed", _claimed), 0.02),
    (("swapped", _swapped), 0.08),
    (("cut", _cut), 0.05),
    (("after", _after), 0.02),
    (("capitals", _column("capitals", "country", "capital")), 0.04),
    (("opposites", _column("opposites", "word", "opposite")), 0.04),
    (("past", _column("past", "verb", "past")), 0.02),
)


# Their answers are divided as the requests are.
_AS_ASKED = {"upper", "lower", "titled", "quoted", "copied"}


def make(draw: Draw) -> Conversation:
    """Two to ten items of one kind."""
    heading, item = draw.weighted(_KINDS)
    made = dict(item(draw) for _ in range(draw.between(2, 10)))
    ends = draw.pick(("\n", "; ") if any("," in asked for asked in made) else (", ", "\n", "; ", "\n", " "))
    if ends == " " and any(" " in asked for asked in made):
        ends = ", "
    # Behind a comma a word begins with a space, which the tokenizer makes a part of it: both forms are learned.
    between = ends if heading in _AS_ASKED else "\n"
    asked = request(draw, f"practice: {heading}", sections("practice")[heading], {"l": ends.join(made)})
    return Conversation("practice", answered(asked, between.join(made.values()), heading))
