"""Short stories from a grammar: one hero, one friend, one trouble, and an end."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .story_plots import ENDINGS, FRIENDS, OPENINGS, PLOTS, SETTINGS, SKILLS, Plot
from .words import ANIMALS, BOYS, COLORS, FOODS, GIRLS, OBJECTS, PLACES, article, casual, first_name

_TRAITS = (
    "small brave shy kind proud clever curious lonely happy quiet young funny gentle lazy busy careful "
    "cheerful stubborn"
).split()
_CARRIED = [
    o for o in OBJECTS if o not in {"table", "chair", "door", "window", "shelf", "drawer", "wagon", "ladder"}
]
# Heroes of fairy tales, by the pronoun that goes with them.
_SHE = ("princess", "queen", "witch", "mermaid", "fairy", "grandmother")
_HE = ("king", "knight", "wizard", "prince", "giant", "grandfather")
_EITHER = ("dragon", "robot", "ghost", "elf", "unicorn", "dinosaur", "monster", "snowman", "kitten", "puppy")
_TIMES = ("morning", "evening", "afternoon", "day")
_MASS = [
    f
    for f in FOODS
    if f
    in {"bread", "cheese", "soup", "rice", "cake", "honey", "pasta", "salad", "pie", "milk", "corn", "fish"}
]
_MANY = ("apples pears carrots cherries plums nuts berries grapes mushrooms peaches").split()
_BARE = (
    "Tell me a story.", "Write a short story.", "Tell me a bedtime story.", "Can you tell me a story?", "I would like to hear a story.",
    "Make up a story.", "Please tell me a short story.", "Story time!", "Read me a story.", "Write a story for children.",
)  # fmt: skip
_ABOUT = ("Tell me a story about {x}.", "Write a short story about {x}.", "I want a story about {x}.", "Make up a story about {x}.",
          "Can you write a story about {x}?", "A story about {x}, please.", "Tell a short story about {x}.")  # fmt: skip
_WITH_WORDS = ("Write a story with the words {a}, {p} and {o}.", "Use the words {a}, {p} and {o} in a story.")


def _people(draw: Draw) -> dict[str, str]:
    """Hero and friend: names, kinds, pronouns."""
    form = draw.weighted((("child", 0.4), ("animal", 0.4), ("tale", 0.2)))
    if form == "child":
        kind = draw.pick(("girl", "boy"))
    else:
        kind = draw.pick(ANIMALS if form == "animal" else _SHE + _HE + _EITHER)
    if kind in {"girl", *_SHE}:
        name = draw.pick(GIRLS)
    elif kind in {"boy", *_HE}:
        name = draw.pick(BOYS)
    else:
        name = first_name(draw)
    he, him, his = ("she", "her", "her") if name in GIRLS else ("he", "him", "his")
    friend = draw.pick([n for n in GIRLS + BOYS if n != name])
    friend_kind = draw.pick([a for a in (*ANIMALS, *_EITHER) if a != kind])
    return {"h": name, "a": kind, "he": he, "him": him, "his": his, "f": friend, "fa": friend_kind}


def _slots(draw: Draw) -> dict[str, str]:
    """Everything a story mentions, chosen once so that it stays the same throughout."""

    def make() -> dict[str, str]:
        place, other = draw.sample(PLACES, 2)
        return {
            **_people(draw), "adj": draw.pick(_TRAITS), "p": place, "q": other, "o": draw.pick(_CARRIED),
            "c": draw.pick(COLORS), "e": draw.pick(_MASS + _MANY), "w": draw.pick(_TIMES), "s": draw.pick(SKILLS),
        }  # fmt: skip

    slots = draw.held(make, lambda s: f"story:{s['h']}:{s['a']}:{s['f']}:{s['p']}:{s['o']}")
    slots |= {"He": slots["he"].capitalize(), "His": slots["his"].capitalize()}
    return slots | {"adj_a": article(slots["adj"]), "fa_a": article(slots["fa"])}


def _fill(text: str, slots: dict[str, str]) -> str:
    for noun in ("{c} {o}", "{o}", "{c}"):
        text = text.replace("a " + noun, article(noun.format(**slots)))
        text = text.replace("A " + noun, article(noun.format(**slots)).capitalize())
    return text.format(**slots)


def tell(draw: Draw, plot: Plot, slots: dict[str, str], *, ending: str | None = None) -> str:
    """The story in two or three paragraphs."""
    opening = [draw.pick(OPENINGS), *draw.sample(SETTINGS, draw.between(0, 2))]
    if plot.friends:
        opening.append(draw.pick(FRIENDS))
    beats = [draw.pick(beat) for beat in plot.beats]
    cut = draw.between(2, len(beats) - 2)
    last = [*beats[cut:], ending if ending is not None else draw.pick(ENDINGS)]
    paragraphs = [opening, beats[:cut], last] if draw.chance(0.6) else [opening + beats[:cut], last]
    return "\n\n".join(" ".join(_fill(line, slots) for line in part) for part in paragraphs)


def _request(draw: Draw, plot: Plot, slots: dict[str, str]) -> tuple[str, list[str]]:
    """A wish for a story, and what the story must then mention."""
    hero, friend = article(slots["a"]), article(slots["fa"])
    wishes = {
        "bare": ("", []),
        "hero": (hero, ["a"]),
        "trait": (article(f"{slots['adj']} {slots['a']}"), ["a"]),
        "name": (f"{hero} named {slots['h']}", ["h", "a"]),
        "pair": (f"{hero} and {friend}", ["a", "fa"]),
        "theme": (draw.pick(plot.themes), []),
        "place": (f"{hero} near the {slots['p']}", ["a", "p"]),
        "words": ("", ["a", "p", "o"]),
    }
    shares = (0.13, 0.22, 0.1, 0.15, 0.1, 0.18, 0.06, 0.06)
    kind = draw.weighted(list(zip(wishes, shares, strict=True)))
    what, words = wishes[kind]
    asks = {"bare": _BARE, "words": _WITH_WORDS}.get(kind, _ABOUT)
    return draw.pick(asks).format(x=what, **slots), [slots[w] for w in words]


def _must_mention(text: str, words: list[str], slots: dict[str, str]) -> str:
    """Add a last line for what was asked for and did not come up."""
    missing = [w for w in words if w not in text]
    if not missing:
        return text
    lines = {
        slots["p"]: "All of this happened near the {p}.",
        slots["o"]: "And {h} still has {his} {o} today.",
    }
    return text + " " + " ".join(_fill(lines[w], slots) for w in missing if w in lines)


def make(draw: Draw) -> Conversation:
    """A wish and a story, sometimes with a question about it after."""
    slots = _slots(draw)
    plot = draw.pick(PLOTS)
    ask, words = _request(draw, plot, slots)
    text = _must_mention(tell(draw, plot, slots), words, slots)
    check = Check("contains", {"all": words, "task": "mentions what was asked"}) if words else None
    turns = [user(casual(draw, ask)), assistant(text, check)]
    if draw.chance(0.15):
        turns += _question(draw, slots)
    return Conversation("stories", turns)


def _question(draw: Draw, slots: dict[str, str]) -> list[Turn]:
    options = [
        (
            ("Who is the story about?", "What was the name of the hero?"),
            "The story is about {h}.",
            slots["h"],
        ),
        (
            ("What kind of creature was the hero?", "Was the hero an animal or a child?"),
            "{h} was {kind}.",
            slots["a"],
        ),
    ]
    asks, said, must = draw.pick(options)
    text = said.format(h=slots["h"], kind=article(slots["a"]))
    return [
        user(draw.pick(asks)),
        assistant(text, Check("contains", {"all": [must], "task": "about the story"})),
    ]


def document(draw: Draw) -> str:
    """A story alone."""
    return tell(draw, draw.pick(PLOTS), _slots(draw))
