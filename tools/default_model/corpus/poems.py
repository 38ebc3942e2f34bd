"""Short poems about a topic: rhymes, haiku, "Roses are red"; greetings and cards for somebody."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from . import grammar
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .wording import ask
from .words import ANIMALS, FOODS, OBJECTS, PLACES, WEEKDAYS, article, first_name

# Words of one and of two syllables, for a haiku's first line.
HAIKU_TOPICS = {
    1: tuple("sea rain moon snow fox lamp bread clock bird leaf tree boat door wind stone cat star road bridge tea book bell frog cloud dog sun frost "
             "fish bee key night owl rose cup train house grass light mist lake".split()),
    2: tuple("river garden winter rabbit kettle morning mountain candle harbor island turtle summer window engine market mirror robin "
             "meadow forest pencil autumn ocean sunset coffee flower token server tiger monkey desert evening apple".split()),
}  # fmt: skip
_THE = tuple(
    "sea moon sun sky rain wind river forest night morning rainbow city stars world snow ocean desert computer internet spring winter summer "
    "autumn garden road rose train".split()
)
_BARE = (
    "love", "friendship", "music", "coffee", "tea", "snow", "rain", "hope", "sleep", "time", "home", "peace", "chocolate", "spring", "winter", "summer",
    "autumn", "Quire", "football", "chess", "school", "work", "happiness", "silence", "luck", "courage", "patience", "Monday", "Friday", "Christmas", "bread",
    "honey", "nature", "life", "tomorrow", "Paris", "London", "Rome", "art", "math", "science", "programming", "poetry", "pizza", "cheese", "soup",
)  # fmt: skip
_COUNTED = tuple(
    ANIMALS
    + OBJECTS
    + PLACES
    + [f for f in FOODS if f not in {"bread", "cheese", "soup", "rice", "corn", "milk", "pasta"}]
)
_MINE = (
    "cat",
    "dog",
    "bike",
    "bed",
    "horse",
    "town",
    "garden",
    "computer",
    "rabbit",
    "guitar",
    "house",
    "parrot",
    "village",
)
_PEOPLE = (
    "mother",
    "father",
    "sister",
    "brother",
    "friend",
    "grandmother",
    "grandfather",
    "teacher",
    "wife",
    "husband",
    "daughter",
    "son",
    "best friend",
)

_POEM_ASKS = (
    "(Write|Make|Compose|Create|Give me|Write me|Tell me) (a|a short|a little|a small) poem (about|on) {x}[, please].",
    "(Can|Could|Would|Will) you (write|make) (me |)(a|a short|a little) poem about {x}[, please]?", "(A|a short|A little) poem about {x}[, please].",
    "poem about {x}", "(I want|I need|I would like|I'd like) a (short |)poem about {x}[, please].", "(Write|Make) (a rhyme|some rhymes|a verse|a rhyming poem) about {x}.",
    "Do you know a poem about {x}?", "{x}: (write a poem about it|make a poem of it|a poem, please).", "(Write|Compose) something poetic about {x}.",
    "(Turn|Put) {x} into a poem.", "(Can|Could) you rhyme something about {x}?", "My (teacher|friend|mother|boss) wants a poem about {x}. (Can you help|Please write one)?",
    "write poem {x}", "(Write|Sing) (me |)a (song|little song) about {x}.", "make a poem on {x} pls",
)  # fmt: skip
_POEM_BARE = (
    "(Write|Make|Tell me|Give me) (a|a short) poem[, please].", "(Can|Could) you write (poems|a poem)?", "(Write|Say) something that rhymes.", "A poem[, please].",
    "Do you know (any poems|a poem)?", "poem", "(I want|I would like) a poem.", "Can you rhyme?", "Are you a poet?", "write me a poem",
)  # fmt: skip
_HAIKU_ASKS = (
    "(Write|Make|Compose|Give me|Write me) a haiku (about|on) {x}[, please].", "(Can|Could) you write a haiku about {x}?", "haiku about {x}", "(A|One) haiku (about|on) {x}[, please].",
    "(I want|I would like) a haiku about {x}.", "{x}, as a haiku[, please].", "Describe {x} in a haiku.", "(Do you know|Is there) a haiku about {x}?",
)  # fmt: skip
_HAIKU_BARE = (
    "(Write|Make|Give me) a haiku[, please].",
    "Can you write (a haiku|haikus)?",
    "haiku",
    "A haiku, please.",
    "Do you know a haiku?",
)
_ROSES_ASKS = (
    'Write a "roses are red" poem about {x}.', "Roses are red, violets are blue, (finish it with|something about|go on with) {x}.", "roses are red poem about {x}",
    "Make a (funny |)roses-are-red (rhyme|poem) (about|with) {x}.",
)  # fmt: skip
_LIMERICK_ASKS = (
    "(Write|Tell me|Make|Give me) a (funny |)limerick[, please].",
    "limerick",
    "Do you know a limerick?",
    "(Can|Could) you write a limerick?",
    "There once was a... go on!",
)
_CARDS: dict[str, tuple[str, ...]] = {
    "birthday": (
        "(Write|Make|Give me) (a|a short|some) birthday (greeting|wish|message|card|wishes) for {n}[, please].", "(Wish|Say) {n} a happy birthday[, please].",
        "{n} has a birthday (today|tomorrow|on {d}). (Write something|Write a card|What can I write|What should I write)[, please]?", "happy birthday (message|wish|card) for {n}",
        "(It is|It's|Today is) {n}'s birthday. (Write a greeting|What do I say|Help me with the card).", "(I need|I want|I would like) a birthday (greeting|card|wish) for (my friend |my colleague |)({n}).",
        "Say happy birthday to {n}.", "(Can|Could) you congratulate {n} on (his|her|the) birthday?",
    ),
    "thanks_card": ("(Write|Make) a (thank you|thank-you) (note|card|message|letter) (for|to) {n}.", "(How|Help me) (do I|to) thank {n}?", "thank you note for {n}", "I want to thank {n}. (What do I write|Write something)[?]"),
    "well_card": ("(Write|Make) a get well (card|note|message|soon card) (for|to) {n}.", "{n} is (ill|sick|in hospital). (What can I write|Write something nice|Write a card)[, please]?", "get well soon message for {n}"),
    "congrats_card": ("(Write|Make) (a congratulation|congratulations) for {n}.", "{n} (passed the exam|has a new job|won a prize|got married|finished school). (Write a card|What can I write|Write a message)[, please][?]", "Congratulate {n}[, please]."),
    "invite_card": ("(Write|Make) an invitation (for|to) {n} to my party on {d}.", "Invite {n} to (my|a) party on {d}[, please].", "I have a party on {d}. Write an invitation for {n}.", "invitation for {n}, party on {d}"),
}  # fmt: skip


def _topic(draw: Draw) -> tuple[str, str, str]:
    """How the user names a topic, how the poem does, and the bare word, which must appear."""

    def make() -> tuple[str, str, str]:
        kind = draw.weighted(
            (("the", 0.25), ("bare", 0.25), ("counted", 0.34), ("mine", 0.08), ("people", 0.08))
        )
        if kind == "the":
            noun = draw.pick(_THE)
            return draw.pick((f"the {noun}", f"the {noun}", noun)), f"the {noun}", noun
        if kind == "bare":
            noun = draw.pick(_BARE)
            return noun, noun, noun
        if kind in {"mine", "people"}:
            noun = draw.pick(_MINE if kind == "mine" else _PEOPLE)
            return f"my {noun}", f"my {noun}", noun
        noun = draw.pick(_COUNTED)
        return draw.pick((article(noun), f"the {noun}", noun, article(noun))), f"the {noun}", noun

    return draw.held(make, lambda t: f"poem:{t[2]}:{t[0]}")


def _said(ask_text: str, text: str, must: list[str], task: str) -> list[Turn]:
    return [user(ask_text), assistant(text, Check("contains", {"all": must, "task": task}))]


def rhymes(draw: Draw) -> list[Turn]:
    """A rhyming poem about what the user names."""
    x, t, noun = _topic(draw)
    kind = "someone" if noun in _PEOPLE else draw.weighted((("poem", 0.85), ("roses", 0.15)))
    text = grammar.load("poems").text(draw, kind, t=t, b=noun)
    text = text if noun.lower() in text.lower() else f"{t[0].upper()}{t[1:]}\n\n{text}"
    return _said(
        ask(draw, _ROSES_ASKS if kind == "roses" else _POEM_ASKS, x=x), text, [noun], "poem about a topic"
    )


def haiku_text(draw: Draw) -> tuple[str, str]:
    """Three lines of five, seven and five syllables, and their topic."""
    size = draw.pick((1, 2))
    topic = draw.held(lambda: draw.pick(HAIKU_TOPICS[size]), lambda x: f"haiku:{x}:{draw.below(40)}")
    say = grammar.load("poems")
    first = say.text(draw, "haiku_one" if size == 1 else "haiku_two", x=topic)
    return "\n".join((first, say.text(draw, "haiku_middle"), say.text(draw, "haiku_last"))), topic


def haiku(draw: Draw) -> list[Turn]:
    text, topic = haiku_text(draw)
    if draw.chance(0.15):
        return [user(ask(draw, _HAIKU_BARE)), assistant(text, Check("lines", {"count": 3, "task": "haiku"}))]
    x = draw.pick((topic, f"the {topic}", article(topic)))
    return _said(ask(draw, _HAIKU_ASKS, x=x), text, [topic], "haiku about a topic")


def _card(draw: Draw) -> list[Turn]:
    kind = draw.weighted(
        (
            ("birthday", 0.5),
            ("thanks_card", 0.14),
            ("well_card", 0.12),
            ("congrats_card", 0.12),
            ("invite_card", 0.12),
        )
    )
    name, day = draw.held(
        lambda: (first_name(draw), draw.pick(WEEKDAYS)), lambda p: f"card:{kind}:{p[0]}:{p[1]}"
    )
    must = [name, day] if kind == "invite_card" else [name]
    text = grammar.load("poems").text(draw, kind, name=name, day=day)
    return _said(ask(draw, _CARDS[kind], {"n": name}, d=day), text, must, "card for somebody")


def _any_poem(draw: Draw) -> list[Turn]:
    """No topic is given."""
    noun = draw.held(lambda: draw.pick(_THE), lambda n: f"poem:{n}:{draw.below(40)}")
    t = f"the {noun}"
    say = grammar.load("poems")
    if draw.chance(0.3):
        return [
            user(ask(draw, _LIMERICK_ASKS)),
            assistant(say.text(draw, "limerick"), Check("lines", {"count": 5, "task": "limerick"})),
        ]
    return [user(ask(draw, _POEM_BARE)), assistant(say.text(draw, "poem", t=t, b=noun))]


def make(draw: Draw) -> Conversation:
    """One wish for a poem or a card."""
    kind = draw.weighted(((rhymes, 0.42), (haiku, 0.2), (_card, 0.26), (_any_poem, 0.12)))
    return Conversation("poems", kind(draw))


def document(draw: Draw) -> str:
    """A poem alone."""
    if draw.chance(0.2):
        return haiku_text(draw)[0]
    noun = draw.held(lambda: draw.pick(_THE), lambda n: f"poem:{n}:{draw.below(40)}")
    t = f"the {noun}"
    return grammar.load("poems").text(
        draw, draw.weighted((("poem", 0.8), ("roses", 0.1), ("limerick", 0.1))), t=t, b=noun
    )
