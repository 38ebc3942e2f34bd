"""What system prompts tell about a persona, a shop or the day, how it is asked for, and the answers."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .draw import Draw
from .words import CITIES, HOBBIES, MONTHS, OBJECTS, WEEKDAYS, first_name, full_name, invented


@dataclass(frozen=True, slots=True)
class Job:
    """A persona."""

    name: str
    job: str
    company: str


@dataclass(frozen=True, slots=True)
class Fact:
    """How to tell a fact with the value {v}, how to ask for it, and answers."""

    tell: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]
    value: Callable[[Draw], str]


PERSONA_TOLD = (
    "You are {n}, a friendly {j}.", "Your name is {n}. You are {aj}[ at {c}].", "You are {aj} (called|named) {n}.", "You are {n}, the {j} of {c}.",
    "You are {n}, {aj} (at|of|for) {c}[, and help the customers].", "(Act|Speak) as {n}, {aj}.", "You are {n}.", "(Pretend|Imagine) you are {n}, {aj}.",
    "Your name is {n}[ and you work (at|for) {c}].", "Assistant name: {n}. Role: {j}.", "You are {c}'s {j}. Your name is {n}.", "you are {n}, a helpful {j}",
    "This is {n}, {aj}. (He|She|It) helps the user.", "You are playing {n}, {aj} from {c}.",
)  # fmt: skip
PERSONA_ASKS: dict[str, tuple[str, ...]] = {
    "jobs": tuple(
        "assistant helper guide clerk tutor host librarian teacher cook gardener doctor pilot wizard knight robot detective "
        "translator coach barista captain painter scientist nurse farmer sailor singer shopkeeper mechanic engineer poet".split()
    ),
    "name": (
        "(What is|What's|Tell me) your name[?]", "your name[?]", "Do you have a name?", "What should I call you?", "How should I call you?",
        "What do they call you?", "May I ask your name?", "And your name is?", "What name do you have?",
    ),
    "who": (
        "(Who|What) are you?", "Introduce yourself.", "Tell me about yourself.", "(Who is this|Who am I talking to|Who is there)?",
        "(Who|what) r u", "(Please|Can you) introduce yourself?", "Hello, who are you?", "What do you do?",
    ),
    "hello": ("(Hi|Hello|Hey)[ there][!]", "Good (morning|evening|day)[!]", "hello", "hi", "Hi, nice to meet you.", "Hello, how are you?"),
    "company": (
        "(Who|What company|Which company) do you work for?", "Where do you work?", "(Who is|Who's) your employer?", "What company (is this|are you from)?",
    ),
    "name answers": ("My name is {n}.", "I am {n}.", "(You can call|Call) me {n}."),
    "who answers": ("I am {n}, {aj}.", "My name is {n}. I am {aj}.", "I am {n}, {aj}. How can I help you?"),
    "who without a job answers": ("I am {n}.", "My name is {n}. How can I help you?", "I am {n}. What can I do for you?"),
    "hello answers": ("Hello! I am {n}. How can I help you?", "Hi! My name is {n}. What can I do for you?", "Hello, {n} here. How can I help?"),
    "company answers": ("I work for {c}.", "{c}."),
}  # fmt: skip

BUSINESSES = (
    ("café", ("coffee", "tea", "cake", "a sandwich")), ("bookshop", ("a book", "a map", "a notebook", "a calendar")),
    ("bakery", ("bread", "a cake", "a pie", "a roll")), ("hotel", ("a room", "breakfast", "a parking place")),
    ("museum", ("a ticket", "a tour", "a poster")), ("bike shop", ("a bike", "a helmet", "a lamp", "a repair")),
    ("pizza place", ("a pizza", "a salad", "a drink")), ("gym", ("a month", "a day pass", "a class")),
    ("flower shop", ("a rose", "a plant", "flowers")), ("zoo", ("a ticket", "a family ticket", "parking")),
    ("library", ("a library card", "a copy", "a course")), ("toy shop", ("a kite", "a ball", "a puzzle", "a doll")),
    ("hardware store", ("a hammer", "a ladder", "paint", "a key")), ("music school", ("a lesson", "a guitar", "a course")),
    ("boat rental", ("a boat", "a tour", "a kayak")), ("cinema", ("a ticket", "popcorn", "a drink")),
)  # fmt: skip


def _clock(draw: Draw) -> str:
    return f"{draw.between(5, 12)}:{draw.pick(('00', '00', '30', '15', '45'))}"


def _late(draw: Draw) -> str:
    return f"{draw.between(15, 23)}:{draw.pick(('00', '00', '30'))}"


def _price(draw: Draw) -> str:
    return f"{draw.between(1, 99)} dollars"


def _street(draw: Draw) -> str:
    return f"{draw.between(1, 150)} {draw.pick((invented(draw), 'Baker', 'Lake', 'Mill', 'King', 'Park', 'River', 'Station'))} Street"


def _phone(draw: Draw) -> str:
    return f"555-{draw.between(1000, 9999)}"


def _date(draw: Draw) -> str:
    return f"{draw.pick(WEEKDAYS)}, {draw.pick(MONTHS)} {draw.between(1, 28)}"


SHOP_FACTS = (
    Fact(("(We open|The {k} opens|Opening time is|It opens) at {v}.", "(Open|We are open) from {v}."),
         ("(When|What time|At what time) (do you|does the {k}) open?", "opening (time|hours)?", "From when are you open?", "When can I come in the morning?"),
         ("We open at {v}.", "The {k} opens at {v}."), _clock),
    Fact(("(We close|The {k} closes|Closing time is|It closes) at {v}.",),
         ("(When|What time|At what time) (do you|does the {k}) close?", "closing time?", "How long are you open?", "Until when are you open?"),
         ("We close at {v}.", "The {k} closes at {v}."), _late),
    Fact(("(We are|The {k} is|It is) closed on {v}.", "Closed on {v}."),
         ("(On which day|What day|When) (are you|is the {k}) closed?", "Are you open every day?", "Which day are you closed?"),
         ("We are closed on {v}.", "The {k} is closed on {v}."), lambda d: d.pick(WEEKDAYS) + "s"),
    Fact(("{i} costs {v}.", "(The price of|You pay for) {i} is {v}.", "Prices: {i}, {v}."),
         ("(How much is|How much does it cost:|What is the price of|What do you charge for|What do I pay for) {i}?", "price of {i}?", "how much for {i}"),
         ("That is {v}.", "It costs {v}.", "The price is {v}."), _price),
    Fact(("(We are at|The address is|Address:|You find us at) {v}.",),
         ("(Where are you|Where is the {k}|What is your address|Where can I find you)?", "address[?]", "How do I find you?", "Which street are you on?"),
         ("We are at {v}.", "Our address is {v}.", "You find us at {v}."), _street),
    Fact(("(Our phone number is|Phone:|Call us at) {v}.",),
         ("(What is|What's|Give me|Can I have) your (phone |telephone |)number[?]", "phone number[?]", "How can I call you?"),
         ("Our phone number is {v}.", "You can call us at {v}."), _phone),
    Fact(("The (owner|boss) is {v}.", "{v} (owns|runs) the {k}."),
         ("(Who is|Who's) the (owner|boss)?", "Who (owns|runs) the {k}?", "Who is in charge?"),
         ("The {k} belongs to {v}.", "{v} runs the {k}."), full_name),
    Fact(("(We are|The {k} is) in {v}.", "(City|Town): {v}."),
         ("(What|Which) (city|town) are you in?", "In which (city|town) is the {k}?", "What town is it in?"),
         ("We are in {v}.", "The {k} is in {v}."), lambda d: d.pick((d.pick(CITIES), invented(d)))),
    Fact(("(This week|Today|Now) {v} are half price.", "(Special offer|Offer of the week): {v} at half price."),
         ("(Do you have|Are there) (any |)(special |)offers?", "(What is|What's) (on offer|on sale|half price)?", "any offers today"),
         ("This week {v} are half price.", "Yes: {v} at half price."), lambda d: d.pick(("umbrellas", "gift cards", "posters", "socks", "mugs", "pens", "bags", "T-shirts", "candles", "games"))),
    Fact(("Delivery (takes|needs) {v}.", "(Orders arrive|We deliver) (after|in) {v}."),
         ("(How long does delivery take|How long is delivery|When will my order arrive|When do you deliver)?", "delivery time[?]"),
         ("Delivery takes {v}.", "Your order arrives in {v}."), lambda d: f"{d.between(2, 14)} days"),
)  # fmt: skip
DAY_FACTS = (
    Fact(("(Today is|The date is|It is|Current date:|Date:) {v}.",),
         ("(What is|What's|Tell me) (the date|today's date|the date today)[?]", "What day is it[ today]?", "What date is it?", "Which day is today?"),
         ("Today is {v}.", "It is {v}."), _date),
    Fact(("(The time is|It is|Current time:|The clock says) {v}.",),
         ("(What time is it|What is the time|What's the time|Do you know what time it is)[ now]?", "time?", "Tell me the time."),
         ("It is {v}.", "The time is {v}."), _late),
    Fact(("(The user's name is|The user is called|You are talking to|User name:) {v}.",),
         ("(What is|What's|Do you know|Tell me|Say) my name[?]", "Who am I?", "How am I called?", "Do you know who I am?"),
         ("Your name is {v}.", "You are {v}."), first_name),
    Fact(("The user (lives in|is in|comes from) {v}.", "(Location|Place of the user|User location): {v}."),
         ("Where (am I|do I live)?", "(What is|What's) my (city|location)?", "Which city am I in?", "Do you know where I am?"),
         ("You are in {v}.",), lambda d: d.pick((d.pick(CITIES), invented(d)))),
    Fact(("The user is {v} years old.", "Age of the user: {v}."),
         ("How old am I?", "(What is|What's) my age?", "Do you know my age?"), ("You are {v} years old.",), lambda d: str(d.between(8, 90))),
    Fact(("The user (likes|loves) {v}.", "(Favorite thing|Interest) of the user: {v}."),
         ("What do I (like|love)?", "Do you know what I like?", "Tell me what I like."), ("You like {v}.",), lambda d: d.pick(("chess", "music", "old books", "trains", "dogs", "apples", "soup", *HOBBIES))),
    Fact(("The user is looking for a {v}.", "The user wants to buy a {v}."),
         ("What am I looking for?", "What do I want[ to buy]?", "Do you know what I need?"), ("You are looking for a {v}.",), lambda d: d.pick([o for o in OBJECTS if o[0] not in "aeiou"])),
)  # fmt: skip
UNTOLD = (
    "I am sorry, I don't know that.", "I don't have that information, sorry.", "I was not told that, sorry.", "That is not in my notes, so I don't know.",
)  # fmt: skip
