"""A little knowledge of the world: facts from tables, asked in many ways, and as plain text."""

from __future__ import annotations

from . import faq, tables
from .conversation import Conversation, Turn, assistant, user
from .draw import Draw
from .tables import Fact
from .wording import ask, plain, word
from .words import HOBBIES, JOBS, MEALS, WEEKDAYS, article, city, first_name

# Tables and their shares of the questions.
TABLES = (
    ("capitals", 0.26), ("definitions", 0.2), ("computing", 0.1), ("animals", 0.1), ("opposites", 0.08), ("order", 0.04),
    ("synonyms", 0.05), ("plurals", 0.05), ("past", 0.045), ("rhymes", 0.04), ("colours", 0.02), ("units", 0.03),
    ("shapes", 0.01), ("categories", 0.03), ("uses", 0.03), ("jobs", 0.03), ("works", 0.03), ("hello", 0.015),
    ("parts", 0.01), ("acronyms", 0.02), ("planets", 0.012), ("people", 0.03), ("landmarks", 0.035), ("most", 0.05),
    ("currency", 0.02),
)  # fmt: skip
_SINGLE = 0.16  # of the questions are of faq/world.txt
_COMPARED = 0.05
_WHICH = (
    "(What|Which|Which one) is {how}, {first} or {second}?", "(What|Which) is {how}: {first} or {second}?",
    "{first} or {second}, (what|which) is {how}?", "{how}: {first} or {second}?", "{first} or {second}: {how}?", "Which one is {how}: {first} or {second}?", "(Tell me|Do you know) (what|which) is {how}, {first} or {second}",
)  # fmt: skip
_IS_IT = (
    "(Would you say|Is it true) that {first} is {how} than {second}?",
    "Is {first} {how} than {second}?",
    "{first} is {how} than {second}, (right|isn't it|true or false|yes or no)?",
)
_DIALOGUES = (
    "(Hi|Hello|hi|Hey), {name}! (How are you?|How are you today?|Nice to see you.)\n(Hi|Hello), {other}! I'm (fine|very well|a bit tired|happy), (thanks|thank you). And you?\n(I'm fine too.|Very well.) (Do you want some {food}?|Shall we go to {place} on {day}?)\n(Yes, please!|Oh, I would like that.|That sounds good.) (See you later!|Thank you, {name}.|Let's go.)",
    '"(Good morning|Hello|Hi there)," said {name}.\n"(Good morning|Hello)," said {other}. "(What are you doing?|Where are you going?)"\n"(I am on my way to {place}|I am looking for some {food}|I have time for {hobby} today)," said {name}.\n"(I will come with you|Have fun|Tell me about it tomorrow)," said {other}, and (they both laughed|they went on together|the day began well).',
    "hi\n(hello|hi), who is this?\n(this is|it's) {name}, do you have time on {day}?\n(yes|sure), (what for|why)?\n(I want to go to {place}|I'm cooking {food}|we are going to try {hobby}). (Come too!|Are you in?)\n(Great, I'll be there.|Sounds good, see you then!)",
)  # fmt: skip
_SELVES = (
    "(Hello|Hi|hello), my name is {name}. I am {age} years old and I live in {place}. I work as {job}. In my free time I like {hobby}, and my favourite food is {food}. (Nice to meet you!|My best friend is called {other}.|I have a sister, {other}.)",
    "My name is {name} and I come from {place}. I am {job}. Every {day} I have time for {hobby} with my friend {other}. Afterwards we eat {food} together.",
    "I am {name}. (Today|This morning) I got up early, had some {food} and went to work. I am {job} in {place}. (In the evening I like {hobby}.|On {day} I will visit {other}.) (Life is good.|That is my day.)",
    "Dear {name},\n\n(thank you for your letter.|how are you?) I am (well|fine), and the weather in {place} is (good|cold|warm). (On {day} I will try {hobby}.|Last {day} we had {food} for dinner.) (Please write soon.|Come and see us soon.)\n\n(Best wishes|Yours|Love),\n{other}",
    "{name} is {job} and lives in {place}. {name} likes {hobby} and {food}. On {day} {name} meets {other}, who is {age} years old. They (talk|laugh|walk) for a long time and are good friends.",
)  # fmt: skip


def any_fact(draw: Draw) -> Fact:
    """A question about a row of one of the tables."""
    name = draw.weighted(TABLES)
    return tables.any_fact(draw, name, f"facts: {name}")


def question(draw: Draw) -> list[Turn]:
    """One question and its answer."""
    if draw.chance(_COMPARED):
        return _compared(draw)
    if draw.chance(_SINGLE):
        return faq.question(draw, faq.load("world"), "facts: world")
    name = draw.weighted(TABLES)
    topic = f"facts: {name}"
    return tables.any_fact(draw, name, topic).turns(draw, topic)


def _compared(draw: Draw) -> list[Turn]:
    """Which of two things is larger, faster or older."""

    def make() -> tuple[str, str, str]:
        scale = draw.pick(tables.rows("scales"))
        more, less, items = scale["more"], scale["less"], [i.strip() for i in scale["items"].split(",")]
        low, high = sorted(draw.sample(range(len(items)), 2))
        return (items[high], items[low], more) if draw.chance(0.6) else (items[low], items[high], less)

    wins, loses, how = draw.held(make, lambda p: "compared|" + "|".join(sorted(p[:2])))
    first, second = (wins, loses) if draw.chance(0.5) else (loses, wins)
    slots = {"first": first, "second": second, "how": how}
    said = f"{faq.capitalised(wins)} is {how} than {loses}."
    if draw.chance(0.5):
        yes = "Yes" if first == wins else "No"
        said = f"{yes}, {wins} is {how} than {loses}."
        return [
            user(ask(draw, _IS_IT, None, **slots)),
            assistant(said, faq.contains((yes, f"{wins} is"), "facts: comparisons")),
        ]
    return [
        user(ask(draw, _WHICH, None, **slots)),
        assistant(said, faq.contains((f"{wins} is",), "facts: comparisons")),
    ]


def make(draw: Draw) -> Conversation:
    """One to four questions."""
    count = draw.weighted(((1, 0.6), (2, 0.22), (3, 0.12), (4, 0.06)))
    return Conversation("world", [turn for _ in range(count) for turn in question(draw)])


def document(draw: Draw) -> str:
    """A plain text: facts, questions with answers, a dialogue, or somebody who tells about themselves."""
    kind = draw.weighted(((_facts, 0.35), (_row, 0.2), (_exchanges, 0.1), (_dialogue, 0.17), (_self, 0.18)))
    return draw.held(lambda: kind(draw), lambda text: f"document|{plain(text)}")


def _statement(draw: Draw, relation: tables.Relation, row: tables.Row) -> str:
    """The relation of the row as a sentence; empty where it isn't one."""
    said = tables.fact(draw, relation, row).said
    return said if said.endswith(".") and not said.startswith(("Yes", "No", "That ")) and " " in said else ""


def _stated(draw: Draw) -> list[tables.Relation]:
    """The relations of a table that need no second row."""
    return [r for r in tables.relations(draw.weighted(TABLES)) if not r.differing]


def _facts(draw: Draw) -> str:
    """The same relation of several rows, or different ones of a table."""
    table = _stated(draw)
    same = draw.pick(table)
    count = draw.between(2, 6)
    picked = [same if draw.chance(0.6) else draw.pick(table) for _ in range(count)]
    said = [_statement(draw, relation, draw.pick(relation.rows)) for relation in picked]
    return " ".join(dict.fromkeys(s for s in said if s)) or _self(draw)


def _row(draw: Draw) -> str:
    """All there is to say of a row."""
    table = _stated(draw)
    row = draw.pick(draw.pick(table).rows)
    said = [_statement(draw, relation, row) for relation in draw.shuffled(table)[:4] if row in relation.rows]
    return " ".join(dict.fromkeys(s for s in said if s)) or _self(draw)


def _exchanges(draw: Draw) -> str:
    """Questions with their answers."""
    facts = [any_fact(draw) for _ in range(draw.between(1, 4))]
    ask, reply = draw.pick((("Q: ", "A: "), ("Question: ", "Answer: "), ("", ""), ("- ", "- ")))
    asked = [f.asked if f.asked[-1] in "?." else f.asked + "?" for f in facts]
    return "\n".join(f"{ask}{a}\n{reply}{f.said}" for a, f in zip(asked, facts, strict=True))


def _self(draw: Draw) -> str:
    return _filled(draw, _SELVES)


def _dialogue(draw: Draw) -> str:
    return _filled(draw, _DIALOGUES)


def _filled(draw: Draw, patterns: tuple[str, ...]) -> str:
    return word(
        draw, patterns, name=first_name(draw), other=first_name(draw), age=str(draw.between(8, 80)), place=city(draw),
        job=article(draw.pick(JOBS)), hobby=draw.pick(HOBBIES), food=draw.pick(MEALS), day=draw.pick(WEEKDAYS),
    )  # fmt: skip
