"""Second and third turns that mean nothing without the turns before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from . import arithmetic, faq, glossary, scope, smalltalk, stories, tables, world
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .faq import capitalised
from .lists import categories, in_order
from .tables import Fact
from .wording import ask, typed, word

_AGAIN = (
    "(Again|Again please|Once more|One more time|Repeat|Repeat that|Please repeat that|Say it again|Say that again|Can you repeat that?|Could you say that again?|Come again?|Sorry, what?|Repeat your answer|What did you say?|I didn't get that. Again?|What was your answer?|tell me again)",
)  # fmt: skip
_ONE_WORD = (
    "(In one word|In a word|One word please|Just the answer|Only the answer, please|Just the answer please|Give me only the answer|In one word, please|Shorter|Shorter please|Make it shorter|Even shorter|Too long. Just the answer|as short as possible|short version|without the sentence|Just one word)",
)  # fmt: skip
_SHORTER = (
    "(Shorter|Shorter please|Make it shorter|In one sentence|In one sentence, please|Too long|That's too long|Briefly|Sum it up|Summarize that|Say it in one sentence|tl;dr|Can you make that shorter?|Give me the short version|only the first sentence)",
)  # fmt: skip
_CAPITALS = (
    "(Say that in capitals|In capitals|In capital letters|In upper case|Say it in capital letters|ALL CAPS PLEASE|all caps|Write that in capitals|uppercase please|Louder|Shout it|Say that in upper case, please)",
)  # fmt: skip
_LOWER = (
    "(in lower case|Say that in lower case|Without capitals|lowercase please|Write it in small letters|all lower case please|no capitals please)",
)
_SURE = (
    "(Are you sure|Are you really sure|Sure|Really|Is that right|Is that true|Is that correct|Are you certain|You sure|Do you know that for sure|Can I trust that|100% sure|I don't believe that)?",
    "(Hm, are you sure about that?|Are you sure about this answer?|that sounds wrong|is that really true|Honestly?)",
)
_CERTAIN = ("Yes, I'm sure. {said}", "Yes. {said}", "I'm quite sure. {said}", "I think so. {said}")
_WRONG = (
    "(No|No,|Wrong,|I think|Isn't it|You are wrong,|That's wrong,|Nope,|But I read) it's {wrong}",
    "(I thought|My friend says|My teacher said|I'm sure) it's {wrong}",
    "(Not|Is it not|Shouldn't it be|Why not) {wrong}?",
)
_FIRM = (
    "I'm quite sure about this one. {said}",
    "No, I don't think so. {said}",
    "I'm fairly sure. {said}",
)
_AND = (
    "(And|And for|What about|How about|and what about|And what about|now|Now|Next:|Same for|The same for|Okay, and|ok and|Thanks, and|Good. And|and how about) {value}?",
)
_MEANT = (
    "(No, I meant|I meant|Sorry, I meant|No, I mean|Oops, I meant|Not that: I meant|I wanted to ask about|I wanted|Sorry, wrong word. I meant) {value}",
)
_WHY = ("(Why|Why is that|Why so|How come|Why is it so|But why|Why that|Explain why|For what reason)?",)
_NO_REASON = (
    "I only know the fact, not the reason. {said}",
    "I can't say why. I only learned it so. {said}",
    "I don't know the reason. I'm small and only know the fact.",
)
_TOO_SMALL = (
    "Because I'm a very small model with only some millions of parameters.",
    "I'm very small, so I know little. I was trained for short stories, small sums and definitions.",
    "Because I was made to be tiny: my whole file has at most 16 MB.",
)
_WHAT_DID_I_ASK = (
    "(What did I just ask|What was my question|What did I ask|What did I ask you|Repeat my question|What was the question|Do you remember my question|What did I just say|What did I write|What was my last message|What did I ask before)?",
)
_YOU_ASKED = ('You asked: "{asked}"', 'Your question was: "{asked}"', 'You wrote: "{asked}"')
_THANKS_AND = (
    "(Thanks|Thank you|Thx|Great, thanks|Cool|Ok|Nice|Perfect|Good|Okay thanks)(.|!|,) (Next question|Another question|One more|And now|Now|And): {question}",
    "(Thanks|Thank you|Great|Good|Nice|Ok)(.|!) {question}",
)
_ANOTHER = (
    "(Another|Another one|Another one please|One more|One more please|More|Next|Again|Tell me another|Tell me another one|Give me another one|a different one|Haha, another one|Next one|One more!|I know that one. Another|Encore|Do you know another one?|Got more?)",
)
_THREE = (
    "(Name|Give me|Tell me|List|I need|Say) (three|3) {things}",
    "(three|3) {things}( please|)",
)
_THREE_MORE = (
    "(Three more|3 more|What about 3 more|And three more|More|Some more|Give me three more|Name three more|And others|Another three|three others|and 3 more please|Other ones|different ones|more please)[?]",
)
_FIRST = (
    "(The first|The first one|Which one was first|First one|What was the first one|Only the first|Take the first|Give me the first one|number one|the first please)[?]",
)
_LAST = (
    "(The last|The last one|Which one was last|Last one|What was the last one|Only the last|the third one|number three|the last please)[?]",
)
_COUNT = (
    "(How many was that|How many are that|How many did you name|Count them|How many|How many words)[?]",
)
_CHOICE = {
    "joke": "(A joke|joke|The joke|a joke please|Joke please|tell me a joke then|joke it is|let's hear a joke)",
    "riddle": "(A riddle|riddle|The riddle|a riddle please|Riddle please|ask me a riddle then|riddle it is)",
    "fun fact": "(A fun fact|fun fact|The fact|The fun fact|a fact please|fact|tell me a fact then)",
}
_TABLES = {"joke": "jokes", "riddle": "riddles", "fun fact": "curious"}
_NTH = (
    ("The first|The first one|first|1|Number one|the first please", 0),
    ("The last|The last one|last|the last please", -1),
)
_BORED = ("(I'm bored|Entertain me|Tell me something|Talk to me|Do something|Surprise me|I have some time)",)
_SHALL_I = (
    "Shall I tell you a {noun}?",
    "Would you like a {noun}?",
    "How about a {noun}?",
    "Would a {noun} help?",
)
_SAD = (
    "(I'm sad|I'm tired|I had a bad day|I feel lonely|I'm stressed|I'm a bit down|I lost my job|I'm angry)[ today]",
)
_YES = (
    "(Yes|Yes please|Sure|Ok|Okay|Yeah|Go on|Please|Of course|Why not|Yep|Gladly|I'd like that|y|go ahead|do it|yes tell me|let's hear it)[!|.]",
)
_NO = ("(No|No thanks|Nope|Not now|No, thank you|Nah|Maybe later|Rather not|I don't want that)[!|.]",)
_ALL_RIGHT = (
    "All right. What would you like instead?",
    "No problem. Just ask when you need something.",
    "OK! Tell me what you need.",
)
_FIRST_QUESTION = (
    "(What was my first question|What did I ask first|What did I ask you at the beginning|What was the first thing I asked|My first question)?",
)
_THANK_YOU = "(Thanks|Thank you|Thx|Great|Ok thanks|Cool, thanks|Got it|Perfect, thank you|Thanks a lot)[!|.]"
_WELCOME = ("You're welcome!", "Happy to help!", "My pleasure. Anything else?", "Glad I could help!")


def _check(must: tuple[str, ...] | list[str], task: str) -> Check:
    return Check("contains", {"all": list(must), "task": f"follow-up: {task}"})


def _exact(text: str, task: str) -> Check:
    return Check("exact", {"text": text, "task": f"follow-up: {task}"})


def _says(draw: Draw, patterns: tuple[str, ...]) -> Turn:
    """A short remark; never a greeting before it."""
    return user(typed(draw, [word(draw, patterns)], courtesy=False))


def _fact(draw: Draw) -> tuple[Fact, list[Turn]]:
    fact = world.any_fact(draw)
    return fact, fact.turns(draw, "before a follow-up")


def _refused(draw: Draw) -> list[Turn]:
    return scope.refusal(draw, grave=False)


def _repeated(draw: Draw) -> list[Turn]:
    """The answer again, shorter, louder or in one word."""
    fact, turns = _fact(draw)
    said, core = fact.said, capitalised(fact.core)
    short = len(core.split()) < 3 and core not in ("Yes", "No")
    kind = draw.weighted((("again", 0.3), ("core", 0.35 if short else 0.0), ("upper", 0.25), ("lower", 0.1)))
    patterns, text = {
        "again": (_AGAIN, said),
        "core": (_ONE_WORD, f"{core}."),
        "upper": (_CAPITALS, said.upper()),
        "lower": (_LOWER, said.lower()),
    }[kind]
    task = {"again": "again", "core": "in one word", "upper": "in capitals", "lower": "in lower case"}[kind]
    return [*turns, _says(draw, patterns), assistant(text, _exact(text, task))]


def _shorter(draw: Draw) -> list[Turn]:
    """The first sentence of a longer answer."""
    turns = (_refused if draw.chance(0.4) else lambda d: glossary.make(d).turns[:2])(draw)
    said = turns[-1].content
    first = said.split(". ")[0].rstrip(".") + "."
    if first == said or "\n" in said:
        return _repeated(draw)
    return [*turns, _says(draw, _SHORTER), assistant(first, _exact(first, "shorter"))]


def _doubted(draw: Draw) -> list[Turn]:
    """The user doubts, disagrees or asks why."""
    fact, turns = _fact(draw)
    others = [r for r in fact.relation.rows if r is not fact.row]
    column = next((c for c, v in fact.row.items() if v == fact.core), "")
    kind = draw.weighted((("sure", 0.4), ("why", 0.3), ("wrong", 0.3 if column and others else 0.0)))
    plain = capitalised(fact.said.removeprefix("Yes, ").removeprefix("No, "))
    must = tuple(m for m in fact.must if m not in ("Yes", "No", f"No|{fact.core}"))
    if kind == "why":
        return [*turns, _says(draw, _WHY), assistant(word(draw, _NO_REASON, said=plain))]
    if kind == "sure":
        said = word(draw, _CERTAIN, said=plain)
        check = faq.contains(must, "follow-up: are you sure")
        return [*turns, _says(draw, _SURE), assistant(said, check)]
    wrong = draw.pick([r[column] for r in others if r[column] not in (fact.core, "-")] or ["wrong"])
    check = faq.contains(must, "follow-up: wrong objection")
    return [*turns, user(ask(draw, _WRONG, wrong=wrong)), assistant(word(draw, _FIRM, said=plain), check)]


def _why_not(draw: Draw) -> list[Turn]:
    """Why the model can't do something."""
    turns = _refused(draw)
    why = ("(Why|Why not|Why can't you|How come|But why|Why don't you know|That's a pity. Why|Really, why)?",)
    return [*turns, _says(draw, why), assistant(word(draw, _TOO_SMALL))]


def _transferred(draw: Draw) -> list[Turn]:
    """The same question about something else: "And Germany?"."""

    def make() -> tuple[Fact, Fact, str]:
        fact = world.any_fact(draw)
        slots = {m for pattern in fact.relation.entry.asks for m in tables.slots_of(pattern)}
        column = next(iter(slots)) if len(slots) == 1 else ""
        if not column or fact.relation.differing:
            return fact, fact, ""
        other = tables.fact(draw, fact.relation, draw.pick(fact.relation.rows))
        return fact, other, column

    fact, other, column = draw.held(make, lambda p: f"and|{p[2]}|{p[0].asked}|{p[1].said}")
    if not column or fact.row is other.row:
        return _repeated(draw)
    turns = fact.turns(draw, "before a follow-up")
    form = draw.weighted(((_AND, 0.75), (_MEANT, 0.25)))
    check = faq.contains(other.must, "follow-up: and …?")
    return [*turns, user(ask(draw, form, value=other.row[column])), assistant(other.said, check)]


def _quoted(draw: Draw) -> list[Turn]:
    """What the user asked before."""
    turns = (_refused if draw.chance(0.3) else world.question)(draw)
    asked = turns[0].content
    said = word(draw, _YOU_ASKED, asked=asked)
    return [*turns, _says(draw, _WHAT_DID_I_ASK), assistant(said, _check([asked], "what did I ask"))]


def _thanked(draw: Draw) -> list[Turn]:
    """Thanks and another question in one message."""
    turns = world.question(draw)
    sources: tuple[Callable[[Draw], list[Turn]], ...] = (
        lambda d: glossary.make(d).turns[:2], lambda d: arithmetic.make(d).turns[:2], world.question, _refused,
    )  # fmt: skip
    asked, answered = draw.pick(sources)(draw)
    said = word(draw, _THANKS_AND, question="\0").replace("\0", asked.content)
    return [*turns, user(said), answered]


def _another(draw: Draw) -> list[Turn]:
    """One more joke, fun fact or example."""
    name = draw.pick(("jokes", "curious"))
    relation = tables.relations(name)[0]
    first, second, third = draw.held(
        lambda: draw.sample(relation.rows, 3), lambda r: "another|" + "|".join(map(str, r))
    )
    fact = tables.fact(draw, relation, first)
    turns = [user(typed(draw, [fact.asked], courtesy=False)), assistant(fact.said)]
    for row in (second, third)[: draw.between(1, 2)]:
        turns += [_says(draw, _ANOTHER), assistant(next(iter(row.values())))]
    return turns


def _three(draw: Draw) -> list[Turn]:
    """Three of a kind, then three more, the first or the last."""
    kind = draw.pick([c for c in categories() if len(c.members) >= 6])
    six = draw.held(lambda: in_order(draw, kind.members, 6), lambda s: "three|" + "|".join(s))
    first, rest = six[:3], six[3:]
    said = f"Here are three {kind.plurals[0]}: {', '.join(first)}."
    turns = [user(ask(draw, _THREE, things=draw.pick(kind.plurals))), assistant(said)]
    form = draw.weighted(
        (("more", 0.35), ("first", 0.15), ("last", 0.15), ("count", 0.1), ("upper", 0.15), ("lower", 0.1))
    )
    if form == "more":
        return [*turns, _says(draw, _THREE_MORE), assistant(f"Three more: {', '.join(rest)}.")]
    if form in {"upper", "lower"}:
        text = said.upper() if form == "upper" else said.lower()
        patterns = _CAPITALS if form == "upper" else _LOWER
        return [*turns, _says(draw, patterns), assistant(text, _exact(text, f"in {form} case"))]
    if form == "count":
        return [*turns, _says(draw, _COUNT), assistant("I named three.", _check(["three"], "how many"))]
    text = first[0 if form == "first" else -1]
    pattern = _FIRST if form == "first" else _LAST
    return [*turns, _says(draw, pattern), assistant(text, _exact(text, f"the {form} one"))]


def _chosen(draw: Draw) -> list[Turn]:
    """The model offers, the user chooses by name or by place."""
    names = draw.shuffled(tuple(_CHOICE))
    offer = word(draw, ("Would you like {a}, {b} or {c}?", "Shall it be {a}, {b} or {c}?", "I have {a}, {b} and {c}. Which one?"),
                 **{k: f"a {n}" for k, n in zip("abc", names, strict=True)})  # fmt: skip
    forms, at = draw.pick(_NTH) if draw.chance(0.4) else ("", draw.below(3))
    choice = f"({forms})" if forms else _CHOICE[names[at]]
    said = draw.held(lambda: _offered(draw, names[at]), lambda s: f"chosen|{offer}|{s}")
    start = _says(draw, _BORED)
    options = [next(iter(row.values())) for row in tables.rows(_TABLES[names[at]])]
    kind = Check("one_of", {"options": options, "task": "follow-up: a choice"})
    return [start, assistant(offer), _says(draw, (choice,)), assistant(said, kind)]


def _accepted(draw: Draw) -> list[Turn]:
    """Yes or no to an offer."""
    noun = draw.weighted((("joke", 0.35), ("riddle", 0.2), ("fun fact", 0.2), ("short story", 0.25)))
    offer = word(draw, _SHALL_I, noun=noun)
    start, before = draw.pick(
        ((_BORED, ""), (_SAD, "I'm sorry to hear that. "), (("(Hi|Hello|Hey)[!]",), "Hello! "))
    )
    turns = [_says(draw, start), assistant(before + offer)]
    told = draw.held(lambda: _offered(draw, noun), lambda s: f"accepted|{offer}|{s}")
    if draw.chance(0.7):
        return [*turns, _says(draw, _YES), assistant(told)]
    return [*turns, _says(draw, _NO), assistant(draw.pick(_ALL_RIGHT))]


def _offered(draw: Draw, noun: str) -> str:
    """What was offered."""
    if noun == "short story":
        return stories.document(draw)
    return next(iter(draw.pick(tables.rows(_TABLES[noun])).values()))


def _first_question(draw: Draw) -> list[Turn]:
    """What was asked or answered first, after another question."""
    turns = [*world.question(draw), *world.question(draw)]
    asked = turns[0].content
    said = word(draw, ('Your first question was: "{asked}"', 'First you asked: "{asked}"'), asked=asked)
    return [*turns, _says(draw, _FIRST_QUESTION), assistant(said, _check([asked], "the first question"))]


def _closed(draw: Draw) -> list[Turn]:
    """A question, its answer, thanks."""
    turns = (world.question if draw.chance(0.7) else smalltalk.joke)(draw)
    return [*turns, _says(draw, (_THANK_YOU,)), assistant(draw.pick(_WELCOME))]


_KINDS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_repeated, 0.2), (_shorter, 0.08), (_doubted, 0.13), (_why_not, 0.06), (_transferred, 0.18), (_quoted, 0.06), (_thanked, 0.08),
    (_another, 0.06), (_three, 0.1), (_chosen, 0.05), (_accepted, 0.07), (_closed, 0.04), (_first_question, 0.02),
)  # fmt: skip


def make(draw: Draw) -> Conversation:
    """One exchange and what follows from it, sometimes with thanks at the end."""
    turns = draw.weighted(_KINDS)(draw)
    turns = [
        replace(t, check=None) if t.check and t.check.data["task"] == "before a follow-up" else t
        for t in turns
    ]
    if draw.chance(0.1):
        turns += [_says(draw, (_THANK_YOU,)), assistant(draw.pick(_WELCOME))]
    return Conversation("followups", turns)
