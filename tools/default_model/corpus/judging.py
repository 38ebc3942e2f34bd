"""Judging texts and things: sentiment, topic, kind, odd one out, comparing, choosing, chance."""

from __future__ import annotations

from collections.abc import Callable

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .faq import capitalised
from .lists import Category, categories
from .tasks import about, answered, pairs, request, sections, words
from .wording import word
from .words import NAMES, OBJECTS, WEEKDAYS, article, city, first_name, listed

# Kinds that no thing shares with another one, and those whose things take no article.
_APART = (
    "animals", "fruits", "vegetables", "drinks", "countries", "jobs", "sports", "musical instruments", "tools", "pieces of clothing",
    "vehicles", "pieces of furniture", "planets", "languages", "family members", "metals", "shapes", "colors",
)  # fmt: skip
_BARE = {"drinks", "countries", "sports", "planets", "languages", "metals", "colors"}


def _judged(topic: str) -> tuple[str, ...]:
    return sections("judging")[topic]


def _filled(draw: Draw, pattern: str) -> str:
    return word(
        draw, pattern, food=draw.pick(("soup", "pizza", "cake", "fish", "coffee", "meal", "bread", "salad")), thing=draw.pick(OBJECTS),
        city=city(draw), name=first_name(draw), day=draw.pick(WEEKDAYS), n=str(draw.between(2, 90)),
    )  # fmt: skip


def _sentiment(draw: Draw) -> list[Turn]:
    kind = draw.weighted((("positive", 0.47), ("negative", 0.47), ("neutral", 0.06)))
    text = " ".join(_filled(draw, p) for p in draw.sample(_judged(kind), draw.weighted(((1, 0.6), (2, 0.4)))))
    asks = tuple(p for p in _judged("sentiment asks") if kind != "neutral" or "positive" not in p)
    asked = about(draw, "sentiment", asks, text)
    low = asked.lower()
    if any(m in low for m in ("happy", "satisf")) and ("customer" in low or "writer" in low):
        said = {"positive": "Yes, the writer is happy.", "negative": "No, the writer is not happy."}.get(
            kind, "That is not clear."
        )
        return answered(asked, said, "happy or not")
    return answered(asked, f"{kind.capitalize()}.", "sentiment")


def _topic(draw: Draw) -> list[Turn]:
    (kind, texts), (other, _) = draw.sample(pairs("judging", "topics"), 2)
    text = _filled(draw, draw.pick(texts.split(" | ")))
    x, y = draw.shuffled([kind, other])
    asked = about(draw, "topic", _judged("topic asks"), text, {"x": x, "y": y})
    return answered(asked, f"It is about {kind}.", "topic")


def _pick(draw: Draw) -> list[Turn]:
    """A question of taste: any of the two is right."""
    first, others = draw.pick(pairs("judging", "pick table"))
    a, b = draw.shuffled([first, draw.pick(others.split(" | "))])
    asked = request(draw, "pick", _judged("pick asks"), {"a": a, "b": b})
    x = draw.pick((a, b))
    said = draw.pick(_judged("pick said")).format(x=x, X=x[0].upper() + x[1:])
    return [user(asked), assistant(said, Check("contains", {"all": [f"{a}|{b}"], "task": "choose one"}))]


def _random(draw: Draw) -> list[Turn]:
    """A number between two, or one of a list, by chance."""
    ask, kind = draw.pick(pairs("judging", "random"))
    low = draw.pick((0, 1, 1, 1, 1, 10))
    high = low - low % 10 + draw.pick((5, 20, 50, 100))
    names = draw.sample(
        NAMES if "Who" in ask or "name" in ask or draw.chance(0.4) else OBJECTS, draw.between(2, 5)
    )
    options = {
        "number": [str(n) for n in range(low, high + 1)], "list": names,
        "password": ["-".join(draw.sample(words("spelling", "words"), 4))],
    }[kind]  # fmt: skip
    slots = {"a": str(low), "b": str(high), "l": draw.pick((", ".join(names), listed(names)))}
    asked = request(draw, "random", (ask,), slots)
    x = draw.pick(options)
    said = x if kind == "password" else f"I pick {x}." if draw.chance(0.5) else f"{capitalised(x)}."
    return [
        user(asked),
        assistant(said, Check("contains", {"all": ["|".join(options)], "task": f"random {kind}"})),
    ]


def _apart(draw: Draw, count: int) -> list[Category]:
    return draw.sample([c for c in categories() if c.plurals[0] in _APART], count)


def _member(draw: Draw, kind: Category, *others: Category) -> str:
    taken = {m for other in others for m in other.members}
    return draw.pick([m for m in kind.members if m not in taken])


def _with_article(kind: Category, thing: str) -> str:
    return thing if kind.plurals[0] in _BARE else article(thing)


def _odd(draw: Draw) -> list[Turn]:
    kind, other = _apart(draw, 2)
    items = draw.sample(kind.members, draw.between(2, 4))
    odd = _member(draw, other, kind)
    items.insert(draw.below(len(items) + 1), odd)
    asked = about(draw, "odd one out", _judged("odd asks"), ", ".join(items))
    return answered(asked, f"{odd[0].upper()}{odd[1:]}: the others are {kind.plurals[0]}.", "odd one out")


def _choose(draw: Draw) -> list[Turn]:
    kinds = _apart(draw, draw.between(3, 4))
    items = [_member(draw, k, *(o for o in kinds if o is not k)) for k in kinds]
    wanted = draw.below(len(items))
    asked = about(
        draw, "choose", _judged("choose asks"), ", ".join(draw.shuffled(items)), k=article(kinds[wanted].one)
    )
    return answered(asked, items[wanted], "choose by kind")


def _all_of(draw: Draw) -> list[Turn]:
    """Every thing of a kind in a mixed list, in the order of the list."""
    kind, other = _apart(draw, 2)
    wanted = [m for m in draw.sample(kind.members, draw.between(1, 3)) if m not in other.members]
    items = draw.shuffled(
        wanted + draw.sample([m for m in other.members if m not in kind.members], draw.between(1, 3))
    )
    asked = about(draw, "filter", _judged("all asks"), ", ".join(items), k=kind.plurals[0])
    return answered(asked, ", ".join(i for i in items if i in wanted), "filter a list")


def _instructed(draw: Draw, asks: str, tail: str) -> tuple[str, ...]:
    pattern, told = draw.pick(_judged(asks)), draw.pick(_judged(tail))
    return (f"{told} {pattern}" if draw.chance(0.3) else f"{pattern} {told}",)


def _kind(draw: Draw) -> list[Turn]:
    """What a thing is, in one word or with yes and no."""
    kind, other = _apart(draw, 2)
    thing = _member(draw, kind, other)
    shown, one, wrong = _with_article(kind, thing), article(kind.one), article(other.one)
    if draw.chance(0.45):
        a, b = draw.shuffled([one, wrong])
        asks = _instructed(draw, "either asks", "one word")
        asked = request(draw, "one word", asks, x=shown, a=a, b=b)
        return answered(asked, kind.one.capitalize(), "one word")
    right = draw.chance(0.5)
    asks = _instructed(draw, "is it asks", "yes or no")
    asked = request(draw, "yes or no", asks, x=shown, a=one if right else wrong)
    return answered(asked, "Yes" if right else "No", "yes or no")


_KINDS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_sentiment, 0.16), (_topic, 0.1), (_pick, 0.08), (_random, 0.05), (_odd, 0.08), (_choose, 0.07),
    (_all_of, 0.05), (_kind, 0.16),
)  # fmt: skip


def turns(draw: Draw) -> list[Turn]:
    """One judgement."""
    return draw.weighted(_KINDS)(draw)
