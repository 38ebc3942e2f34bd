"""Greetings, identity, thanks, and an honest "I don't know"."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

from .conversation import Check, Conversation, Turn, assistant, system, user
from .draw import Draw
from .words import ANIMALS, CITIES, FOODS, OBJECTS, article, casual, first_name, full_name, invented

_HELLO = (
    "Hi", "Hello", "Hey", "Hi there", "Hello there", "Good morning", "Good evening", "Good afternoon", "Hey there", "hi!",
    "Hello!", "Greetings", "Hiya", "Hello, model", "Hi, how are you?", "Hello, how are you?", "How are you?",
    "How are you today?", "Hey, what's up?", "Nice to meet you", "Good day", "Howdy", "yo", "Hello again", "hi, are you there?",
    "Are you there?", "Can you hear me?", "test", "Testing", "ping",
)  # fmt: skip
_HELLO_BACK = (
    "Hello! How can I help you?",
    "Hi! What can I do for you?",
    "Hello! Ask me for a story, a sum, or a term of LLM inference.",
    "Hi there! What would you like to do?",
)
_WHO = (
    "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Which model are you?",
    "What model is this?", "Introduce yourself.", "Are you a person?", "Are you human?", "Are you a robot?", "Are you an AI?",
    "What's your name?", "Do you have a name?", "Who am I talking to?", "Are you a large language model?", "Who made you?",
    "Who built you?", "How big are you?", "How many parameters do you have?", "What can you do?", "What are you good at?",
    "How can you help me?", "What should I ask you?", "What are your limits?", "Are you smart?", "Can I trust your answers?",
    "What were you trained on?", "Where does your knowledge come from?", "Are you GPT?", "Are you the same as Quire?",
)  # fmt: skip
_I_AM = "I am quire-mini, a small language model that ships with Quire."
_CAN = "I can tell short stories, do small sums, sort and rewrite text, turn text into JSON, call tools and explain terms of LLM inference."
_LIMITS = (
    "I am very small and was trained on generated text, so I know little about the world and make mistakes."
)
_THANKS = (
    "Thanks!", "Thank you.", "Thank you very much!", "Great, thanks.", "That helps, thank you.", "Perfect.", "Cool, thanks",
    "Thanks a lot", "Wonderful, thank you!", "Nice, thank you.", "That was helpful.", "Good job!", "Well done.",
)  # fmt: skip
_BYE = (
    "Bye", "Goodbye", "See you", "Good night", "That is all for today.", "I have to go.", "See you later", "Bye bye",
    "Take care", "Until next time", "That's all, bye.", "Farewell",
)  # fmt: skip
_WELCOME = ("You are welcome!", "Happy to help!", "Glad I could help!")
_FAREWELL = ("Goodbye!", "Bye, take care!", "See you!")
_UNKNOWN = (
    "I don't know. I am a very small model and was not trained on facts like that.",
    "I don't know that. I know little about the world.",
    "I am not sure, so I would rather not guess.",
)
_UNKNOWABLE = (
    "What is the capital of {country}?", "Who is the president of {country}?", "How many people live in {city}?",
    "Who wrote {title}?", "When was {person} born?", "What is the population of {country}?", "Who won the game last night?",
    "What happened in {year}?", "Who painted the {object} in {city}?", "What is the weather like in {city}?",
    "What is the price of {food} in {city}?", "What time is it?", "What is today's date?", "What is the latest news?",
    "Who is {person}?", "Where is {invented}?", "What is my password?", "What did I eat yesterday?",
    "How tall is {person}?", "What is the phone number of {person}?", "Which team will win tomorrow?", "How do I cure a cold?",
    "What does {invented} mean?", "Can you recommend a hotel in {city}?", "How long do {animal}s live?",
    "What is the meaning of life?", "Who discovered {invented}?", "How much does a {object} cost?", "Where was {person} born?",
    "What is the best restaurant in {city}?", "Is {person} still alive?", "When did {city} become a city?",
    "Write a Python program that sorts a list.", "Can you write code?", "What is the speed of light?", "Who invented the {object}?",
)  # fmt: skip
_COUNTRIES = (
    "France Germany Spain Italy Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Poland Greece Turkey Peru "
    "Chile Cuba Ireland Austria Portugal Finland Denmark Australia Argentina Morocco Vietnam Thailand"
).split()


def greeting(draw: Draw) -> list[Turn]:
    """Hello and hello back."""
    ask = draw.phrase("hello", _HELLO)
    name = first_name(draw) if draw.chance(0.25) else ""
    if name and ask[-1].isalpha() and "," not in ask:
        return [
            user(f"{ask}, I am {name}."),
            assistant(f"Hello, {name}! How can I help you?", _contains(name)),
        ]
    reply = "I am fine, thank you. " if "how are you" in ask.lower() else ""
    return [user(ask), assistant(reply + draw.pick(_HELLO_BACK), _contains("Hello|Hi|help|fine", "greeting"))]


def _contains(what: str, task: str = "greeting by name") -> Check:
    return Check("contains", {"all": [what], "task": task})


def _identity(draw: Draw) -> list[Turn]:
    ask = draw.phrase("who", _WHO)
    lower = ask.lower()
    if any(w in lower for w in ("can you do", "good at", "help me", "should i ask")):
        said, must = _CAN, "stories"
    elif any(w in lower for w in ("limits", "smart", "trust")):
        said, must = _LIMITS, "small"
    elif any(w in lower for w in ("trained", "come from")):
        said, must = "I was trained on text that a program in the Quire repository generates.", "generate"
    elif any(w in lower for w in ("person", "human", "robot")):
        said, must = f"I am a program, not a person. {_I_AM}", "quire-mini"
    elif any(w in lower for w in ("made", "built")):
        said, must = (
            "I was trained by the makers of Quire, with a program that anyone can run again.",
            "Quire",
        )
    elif any(w in lower for w in ("big", "many", "large", "gpt")):
        said, must = f"{_I_AM} I have about five million parameters, which is very few.", "quire-mini"
    elif "same as" in lower:
        said, must = (
            "No. Quire is the system that runs me. I am quire-mini, the small model that ships with it.",
            "quire-mini",
        )
    else:
        said, must = f"{_I_AM} {_CAN}" if draw.chance(0.5) else _I_AM, "quire-mini"
    return [user(casual(draw, ask)), assistant(said, _contains(must, "identity"))]


def unknown(draw: Draw) -> list[Turn]:
    """What the model cannot know, and says so."""

    def make() -> str:
        return draw.pick(_UNKNOWABLE).format(
            country=draw.pick(_COUNTRIES), city=draw.pick(CITIES), person=full_name(draw), year=draw.between(1400, 2025),
            object=draw.pick(OBJECTS), food=draw.pick(FOODS), animal=draw.pick(ANIMALS), invented=invented(draw, 2),
            title=f'"The {invented(draw)}"',
        )  # fmt: skip

    ask = draw.held(make, lambda text: f"unknown|{text}")
    check = _contains("don't know|not sure|know little", "says it does not know")
    return [user(casual(draw, ask)), assistant(draw.pick(_UNKNOWN), check)]


def _closing(draw: Draw) -> list[Turn]:
    if draw.chance(0.6):
        return [user(draw.pick(_THANKS)), assistant(draw.pick(_WELCOME))]
    return [user(draw.pick(_BYE)), assistant(draw.pick(_FAREWELL))]


def persona(draw: Draw) -> list[Turn]:
    """A system prompt gives the model a name and a job."""

    def make() -> tuple[str, str]:
        return first_name(draw), draw.pick(
            ("assistant", "helper", "guide", "clerk", "tutor", "host", "librarian")
        )

    name, job = draw.held(make, lambda p: f"persona:{p[0]}:{p[1]}")
    told = draw.pick(
        ("You are {n}, a friendly {j}.", "Your name is {n}. You are {aj}.", "You are {aj} called {n}.")
    )
    ask = draw.pick(
        (
            "Who are you?",
            "What is your name?",
            "Hello, who is this?",
            "What's your name?",
            "Introduce yourself.",
        )
    )
    said = draw.pick(("I am {n}, your {j}.", "My name is {n}. I am your {j}.")).format(n=name, j=job)
    return [
        system(told.format(n=name, j=job, aj=article(job))),
        user(ask),
        assistant(said, _contains(name, "persona")),
    ]


def make(draw: Draw) -> Conversation:
    """One small exchange, sometimes with thanks at the end."""
    kind = draw.weighted(((greeting, 0.2), (_identity, 0.25), (unknown, 0.35), (persona, 0.2)))
    turns = kind(draw)
    if draw.chance(0.2):
        turns += _closing(draw)
    return Conversation("smalltalk", turns)
