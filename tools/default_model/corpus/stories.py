"""Short stories from a grammar: one hero, one friend, one trouble, and an end."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .story_plots import ENDINGS, FRIENDS, OPENINGS, PAIRS, PLOTS, SETTINGS, SKILLS, Plot
from .wording import ask, word
from .words import ANIMALS, BOYS, COLORS, FOODS, GIRLS, OBJECTS, PLACES, article, first_name

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
    "(Tell|Write|Read|Give) (me |)(a|a short|another) story[, please].",
    "(Tell me|Make up) a (bedtime|funny|nice|sad|happy) story[, please].",
    "(Can|Could|Will|Would) you (please |)tell me a (short |bedtime |)story?",
    "I (would like|want) to hear a (short |)story[, please].",
    "Story time!",
    "Write a story for (children|kids|my daughter|my son).",
    "story[ please]",
    "(I am bored|I can't sleep). (Tell|Can you tell) me a story[, please][?]",
    "Do you know (a story|any stories)?",
    "Tell me something (nice|exciting|to read to my kids|before I sleep).",
    "Once upon a time",
    "once upon a time...",
    "Entertain me.",
    "(A|One) (short |)story, please.",
    "tell a tale",
    "Surprise me with a story.",
    "Make something up for me.",
    "Write a (short|very short|little|tiny) story[ of a few sentences].",
)
_ABOUT = (
    "(Tell me|Write|Make up|Give me|Tell|Write me|Invent) (a|a short|a little|a bedtime|a funny) story about {x}[, please].",
    "I (want|would like|need) a (short |)story about {x}[, please].",
    "(Can|Could|Will|Would) you (write|tell me|tell|make up) a (short |)story about {x}[, please]?",
    "(A|One) (short |bedtime |)story about {x}[, please].",
    "story about {x}",
    "(Do you know|Is there) a story about {x}?",
    "(Please write|Please tell) a story about {x}.",
    "(My daughter|My son|My friend|My class) (wants|would like) a story about {x}.",
    "What about a story about {x}?",
    "tell me about {x}, as a story",
    "{x}: (tell me a story about it|make a story of that|write a story).",
    "Let me hear (a story|something) about {x}, as a story.",
    "make me a story with {x} in it",
    "write a fairy tale about {x}",
)
_WITH_WORDS = (
    "(Write|Tell me|Make up) a (short |)story with the words {a}, {p} and {o}.",
    "Use the words {a}, {p} and {o} in a (short |)story.",
    "A story with {a}, {p} and {o}[, please].",
    "(Can|Could) you make a story (out of|from|with) these words: {a}, {p}, {o}?",
    "Words: {a}, {p}, {o}. (Write|Make) a (short |)story.",
)
_GO_ON = (
    "(Continue|Go on with|Finish|Complete) (this|the|my) story: {s}", "{s} (Go on|Continue|What happened then|What happens next|Now you|Finish the story)[.]", "(How does this story|How would this story|How does it) (go on|end|continue)? {s}",
    "(I begin|I start) a story and you (finish|continue|end) it: {s}", "(A|My) story begins like this: {s} (Please go on|Continue|Go on).", '"{s}" (Continue this story|Go on from here|Write the rest)[, please].',
    "Write a story that (begins|starts) with: {s}", "{s}", "Story beginning: {s} (Write|Tell me) the rest.", "{s}..", "Use this as the first sentence of a story: {s}",
)  # fmt: skip
# What a story is also asked to be: with its long form or without.
_LONGER = ("(Tell me|Write) a (long|longer) story about {x}[, please].", "I want a long story about {x}.", "Write a story of two or three paragraphs about {x}.")  # fmt: skip


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


def tell(draw: Draw, plot: Plot, slots: dict[str, str], *, long: bool | None = None) -> str:
    """The story: short in one paragraph, or longer in two or three."""
    long = draw.chance(0.25) if long is None else long
    if plot.friends and draw.chance(0.4):
        opening = [draw.pick(PAIRS)]
    else:
        opening = [draw.pick(OPENINGS)]
        opening += [draw.pick(FRIENDS)] if plot.friends else []
    opening[1:1] = draw.sample(SETTINGS, draw.between(1, 2) if long else draw.weighted(((0, 0.8), (1, 0.2))))
    beats = [draw.pick(beat) for beat in plot.beats]
    known = [e for e in ENDINGS if "{o}" not in e or any("{o}" in line for line in opening + beats)]
    ending = [draw.pick(known)] if long or draw.chance(0.15) else []
    cut = draw.between(2, len(beats) - 2)
    paragraphs = (
        [opening, beats[:cut], beats[cut:] + ending]
        if draw.chance(0.6)
        else [opening + beats[:cut], beats[cut:] + ending]
    )
    if not long and draw.chance(0.7):
        paragraphs = [opening + beats + ending]
    return "\n\n".join(" ".join(_fill(line, slots) for line in part) for part in paragraphs)


def _continued(draw: Draw, plot: Plot, slots: dict[str, str]) -> list[Turn]:
    """The user gives the first sentence; the answer is the rest of the story."""
    first = _fill(draw.pick(PAIRS if plot.friends and draw.chance(0.3) else OPENINGS), slots)
    rest = [draw.pick(FRIENDS)] if plot.friends and slots["f"] not in first else []
    rest += [draw.pick(beat) for beat in plot.beats]
    text = " ".join(_fill(line, slots) for line in rest)
    name = slots["h"] if slots["h"] in text else slots["f"]
    check = Check("contains", {"all": [name], "task": "goes on with a story"})
    return [user(ask(draw, _GO_ON, kept={"s": first})), assistant(text, check)]


def _request(draw: Draw, plot: Plot, slots: dict[str, str]) -> tuple[str, list[str]]:
    """A wish for a story, and what the story must then mention."""
    hero, friend = article(slots["a"]), article(slots["fa"])
    wishes = {
        "bare": ("", []),
        "hero": (hero, ["a"]),
        "trait": (article(f"{slots['adj']} {slots['a']}"), ["a"]),
        "name": (f"{hero} (named|called) {{h}}", ["h", "a"]),
        "pair": (f"{hero} and {friend}", ["a", "fa"]),
        "theme": (draw.pick(plot.themes), []),
        "place": (f"{hero} near the {slots['p']}", ["a", "p"]),
        "words": ("", ["a", "p", "o"]),
    }
    shares = (0.13, 0.22, 0.1, 0.15, 0.1, 0.18, 0.06, 0.06)
    kind = draw.weighted(list(zip(wishes, shares, strict=True)))
    what, words = wishes[kind]
    asks = {"bare": _BARE, "words": _WITH_WORDS}.get(kind, _ABOUT)
    kept = {"h": slots["h"]} if kind == "name" else {}
    return ask(draw, draw.pick(asks).replace("{x}", what), kept=kept, **slots), [slots[w] for w in words]


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
    form = draw.weighted((("wish", 0.72), ("go on", 0.2), ("longer", 0.08)))
    if form == "go on":
        turns = _continued(draw, plot, slots)
    else:
        asked, words = _request(draw, plot, slots)
        if form == "longer":
            asked, words = ask(draw, _LONGER, x=article(slots["a"])), [slots["a"]]
        text = _must_mention(tell(draw, plot, slots, long=form == "longer" or None), words, slots)
        check = Check("contains", {"all": words, "task": "mentions what was asked"}) if words else None
        turns = [user(asked), assistant(text, check)]
    if draw.chance(0.15):
        turns += _question(draw, slots, turns[-1].content)
    return Conversation("stories", turns)


_QUESTIONS = (
    (("(Who is|Who was) (the story about|the hero)?", "What (is|was) the (name of the hero|hero's name)?", "How was the hero called?", "who was it about"), ("The story is about {h}.", "It is about {h}."), "h"),
    (("Who (is|was) {h}'s friend?", "What (is|was) the friend's name?", "Who was with {h}?"), ("{f} is {h}'s friend.", "The friend is {f}."), "f"),
    (("(Is that true|Did that really happen|Is this a true story)?",), ("I made it up, so {h} lives only in this story.", "It is only a story. I made {h} up."), "h"),
)  # fmt: skip


def _question(draw: Draw, slots: dict[str, str], story: str) -> list[Turn]:
    asks, said, must = draw.pick([q for q in _QUESTIONS if slots[q[2]] in story])
    check = Check("contains", {"all": [slots[must]], "task": "about the story"})
    return [
        user(ask(draw, asks, kept={"h": slots["h"]})),
        assistant(word(draw, said, h=slots["h"], f=slots["f"]), check),
    ]


def document(draw: Draw) -> str:
    """A story alone."""
    return tell(draw, draw.pick(PLOTS), _slots(draw))
