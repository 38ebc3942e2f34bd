"""What people tell of themselves and of others: how it is said, how it is asked back, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .draw import Draw
from .records import COUNTRIES, clock, date, email, person_name, title
from .words import (
    ANIMALS,
    BOYS,
    CITIES,
    COLORS,
    FOODS,
    GIRLS,
    HOBBIES,
    JOBS,
    OBJECTS,
    PLACES,
    PLAIN_WORDS,
    WEEKDAYS,
    article,
    city,
    code,
    first_name,
    full_name,
    invented,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something the user tells of {v}: patterns of telling and asking, the answer, and what it is called."""

    topic: str
    thing: str
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    value: Callable[[Draw], str]
    acknowledge: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """Something said of a person {n}: patterns of saying it and of asking for it, the answer, and the yes or no question."""

    topic: str
    say: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    value: Callable[[Draw], str]


def _animal(draw: Draw) -> str:
    return draw.pick(ANIMALS)


def _place(draw: Draw) -> str:
    return draw.pick(PLACES)


def _word(draw: Draw) -> str:
    return invented(draw).lower() if draw.chance(0.5) else draw.pick(PLAIN_WORDS)


def _secret(draw: Draw) -> str:
    return draw.pick((_word(draw), code(draw), f"{_word(draw)}{draw.between(1, 99)}"))


def _company(draw: Draw) -> str:
    return invented(draw)


def _origin(draw: Draw) -> str:
    return draw.pick(COUNTRIES) if draw.chance(0.5) else city(draw)


def _two_names(draw: Draw) -> str:
    return " and ".join(draw.sample(GIRLS + BOYS, 2))


def _relative(relation: str, names: list[str]) -> Fact:
    tell = (
        "My {r} is (called|named) {v}.",
        "My {r}'s name is {v}.",
        "I have a {r} called {v}.",
        "The name of my {r} is {v}.",
    )
    asks = (
        "(What is|What's) my {r}'s name?",
        "What is my {r} called?",
        "Who is my {r}?",
        "Do you (know|remember) the name of my {r}?",
        "(What is|What's) the name of my {r}?",
    )
    return Fact(
        relation, f"the name of your {relation}", tuple(t.replace("{r}", relation) for t in tell), tuple(a.replace("{r}", relation) for a in asks),
        f"Your {relation} is called {{v}}.", lambda d: d.pick(names),
    )  # fmt: skip


_RELATIVES = (
    *((relation, GIRLS) for relation in ("sister", "mother", "wife", "daughter", "aunt")),
    *((relation, BOYS) for relation in ("brother", "father", "husband", "son", "uncle")),
)

FACTS = (
    Fact("name", "your name", ("My name is {v}[.|!]", "I am {v}.", "I'm {v}.", "[You can |Please |Just ]call me {v}.", "(Hello|Hi|Hey), I'm {v}[.|!]", "(Hi|Hello|Hey), my name is {v}[.|!]", "(My friends|People|They) call me {v}.", "{v} is my name.", "This is {v}[ speaking|]."),
         ("(What is|What's|Tell me|Say) my name?", "Do you (remember|know|recall) my name?", "Who am I?", "What did I say my name was?", "What am I called?", "[And ]what was my name[ again|]?", "my name?", "Can you tell me my name?", "What's my name again?", "How am I called?", "Did you forget my name?"), "Your name is {v}.", person_name,
         ("Nice to meet you, {v}!", "Hello {v}, nice to meet you!", "Hi {v}! How can I help you?")),
    Fact("city", "where you live", ("I live in {v}.", "I (just |)moved to {v}[ last year|].", "My home is in {v}.", "My city is {v}.", "I have lived in {v} for (years|ten years|a long time).", "Greetings from {v}!"),
         ("Where do I live?", "(Which|What) city do I live in?", "What city is my home?", "Do you (know|remember) where I live?", "In which (city|town) do I live?", "What is my (city|town|home)?"), "You live in {v}.", city),
    Fact("pet", "what pet you have", ("I have a {v}.", "My pet is a {v}.", "At home I (keep|have) a {v}.", "We (got|have) a {v}.", "I (bought|adopted) a {v}."),
         ("(What|Which) pet do I have?", "(Which|What) animal do I (have|keep)?", "What kind of (pet|animal) is mine?", "What is my pet?", "Do you know what pet I have?"), "You have {av}.", _animal),
    Fact("pet name", "the name of your pet", ("My (dog|cat|pet|rabbit|parrot) is (called|named) {v}.", "I have a (dog|cat) called {v}.", "The name of my (pet|dog|cat) is {v}.", "My (dog|cat|pet)'s name is {v}."),
         ("(What is|What's) the name of my (pet|dog|cat|animal)?", "What is my (pet|dog|cat) called?", "What's my (dog|cat|pet)'s name?", "Do you remember the name of my (pet|dog|cat)?"), "Your pet is called {v}.", first_name),
    Fact("color", "your favorite color", ("My favorite color is {v}.", "I (love|like) the color {v}[ best| most|].", "The color I like best is {v}.", "{v} is my favorite color.", "I paint everything {v}, it is my favorite color."),
         ("(What is|What's|Tell me) my favorite color?", "(Which|What) color do I like[ best| most|]?", "Do you (remember|know) my favorite color?", "my favorite color?", "What color did I say I like?"), "Your favorite color is {v}.", lambda d: d.pick(COLORS)),
    Fact("food", "your favorite food", ("My favorite food is {v}.", "I (love|like) to eat {v}.", "I could eat {v} every day.", "{v} is my favorite food.", "Nothing tastes better than {v}, it is my favorite food."),
         ("(What is|What's|Tell me) my favorite food?", "What do I (love|like) to eat?", "(Which|What) food do I like[ best|]?", "Do you (remember|know) my favorite food?"), "Your favorite food is {v}.", lambda d: d.pick(FOODS)),
    Fact("job", "your job", ("I work as a {v}.", "I am a {v} by trade.", "My job is {v}.", "I am a {v}.", "I earn my money as a {v}.", "I'm a {v}."),
         ("(What is|What's|Tell me) my job?", "What do I (work as|do for a living|do)?", "Do you (remember|know) my job?", "What did I say I do[ for work|]?", "(Which|What) job do I have?"), "You work as {av}.", lambda d: d.pick(JOBS)),
    Fact("hobby", "your hobby", ("My hobby is {v}.", "On weekends I (like|enjoy) {v}.", "I enjoy {v}.", "In my free time I like {v}.", "I am crazy about {v}.", "{v} is my hobby."),
         ("(What is|What's|Tell me) my hobby?", "What do I (like|do|enjoy) (on weekends|in my free time)?", "What do I enjoy?", "Do you (remember|know) my hobby?", "(Which|What) hobby do I have?"), "Your hobby is {v}.", lambda d: d.pick(HOBBIES)),
    Fact("age", "your age", ("I am {v} years old.", "I turned {v} (this year|yesterday|last week).", "My age is {v}.", "I'm {v}[ years old|].", "I just turned {v}."),
         ("How old am I?", "(What is|What's|Tell me) my age?", "Do you (know|remember) (my age|how old I am)?", "How old did I say I am?"), "You are {v} years old.", lambda d: str(d.between(8, 90))),
    Fact("code", "the code", ("The [door |safe |]code is {v}.", "Remember (this|the) code: {v}.", "The code for (today|the door|the safe) is {v}.", "Please (remember|note|keep|save) the code {v}.", "My code is {v}."),
         ("(What is|What's) the[ door|] code?", "What was the code[ again|]?", "(Which|What) code did I (tell|give) you?", "Do you (remember|still know) the code?", "(Tell|Give) me the code.", "the code?"), "The code is {v}.", code),
    Fact("friend", "who your best friend is", ("My best friend is {v}.", "My best friend is called {v}.", "{v} is my best friend.", "I have a best friend, {v}.", "My best friend's name is {v}."),
         ("Who is my best friend?", "What is my[ best|] friend called?", "(What is|What's) the name of my[ best|] friend?", "Do you (know|remember) my best friend?", "Who did I say is my best friend?"), "Your best friend is {v}.", person_name),
    Fact("appointment", "when your appointment is", ("My appointment is on {v}.", "I see the dentist on {v}.", "The appointment is[ set|] for {v}.", "I have an appointment on {v}."),
         ("When is my appointment?", "(On which|Which|What) day is my appointment?", "What day do I see the dentist?", "Do you (know|remember) when my appointment is?"), "Your appointment is on {v}.", lambda d: d.pick(WEEKDAYS)),
    Fact("number", "the number", ("My (lucky|favorite) number is {v}.", "(Remember|Keep in mind|Note|Save|Memorize) the number {v}.", "The number (to keep|is|to remember is) {v}.", "Please remember this number: {v}", "remember {v}", "Here is a number for you to remember: {v}."),
         ("(What is|What's) (my lucky|my favorite|my|the) number?", "(Which|What) number did I (tell|give) you?", "What was the number[ again|]?", "(Tell|Give) me the number.", "Do you (remember|still know) the number?", "Which number should you remember?", "the number?"), "The number is {v}.", lambda d: str(d.between(2, 9999))),
    Fact("word", "the word", ("(Remember|Keep in mind|Note|Save|Memorize) the word {v}.", "The (secret |magic |)word is {v}.", "Please remember this word: {v}", "My word for you is {v}."),
         ("(What is|What's|What was) the (secret |magic |)word[ again|]?", "(Which|What) word did I (tell|give) you?", "(Tell|Give) me the word.", "Do you (remember|still know) the word?", "Which word should you remember?"), "The word is {v}.", _word),
    Fact("password", "the password", ("(The|My) password is {v}.", "Remember (the|my|this) password: {v}", "I set the password to {v}.", "The new password is {v}."),
         ("(What is|What's|What was) (the|my) password[ again|]?", "(Which|What) password did I (tell|give) you?", "(Tell|Give) me the password.", "Do you (remember|still know) (the|my) password?", "I forgot my password. What was it?"), "The password is {v}.", _secret),
    Fact("drink", "your favorite drink", ("My favorite drink is {v}.", "I (always|only) drink {v}.", "I like {v} most of all drinks."), ("(What is|What's) my favorite drink?", "What do I (like to|always) drink?", "(Which|What) drink do I like[ best|]?"), "Your favorite drink is {v}.",
         lambda d: d.pick(("tea", "coffee", "milk", "water", "apple juice", "cocoa", "lemonade", "orange juice", "mint tea"))),
    Fact("birthday", "your birthday", ("My birthday is[ on|] {v}.", "I was born on {v}.", "I have my birthday on {v}."), ("When is my birthday?", "(What is|What's) (my birthday|the date of my birthday)?", "(On which day|When) was I born?", "Do you (remember|know) my birthday?"), "Your birthday is on {v}.", date),
    Fact("trip", "where you want to travel", ("I (am going|want to travel|plan to travel|will travel|want to go) to {v}[ this summer| next week| in May|].", "My next trip is to {v}.", "I am planning a trip to {v}."), ("Where (do I want to|will I|am I going to) (travel|go)?", "Where is my next trip[ to|]?", "(Which|What) city will I visit?", "What was my travel plan?"), "You want to travel to {v}.", city),
    Fact("meeting", "when the meeting is", ("The meeting is at {v}.", "Our meeting starts at {v}.", "I have a meeting at {v}."), ("When is (the|my|our) meeting?", "(What time|When) does the meeting start?", "At what time is my meeting?"), "The meeting is at {v}.", clock),
    Fact("car", "the color of your car", ("My car is {v}.", "I drive a {v} car.", "I (bought|have) a {v} car."), ("(What color is|Which color has) my car?", "(What is|What's) the color of my car?", "Do you know the color of my car?"), "Your car is {v}.", lambda d: d.pick(COLORS)),
    Fact("keys", "where your keys are", ("I (put|left|hid) my keys in the {v}.", "My keys are in the {v}.", "The keys lie in the {v}."), ("Where are my keys?", "Where did I (put|leave|hide) my keys?", "I can't find my keys. Where are they?"), "Your keys are in the {v}.", lambda d: d.pick(("kitchen", "drawer", "car", "basket", "bathroom", "hall", "blue bag", "box", "garage", "coat"))),
    *(_relative(relation, names) for relation, names in _RELATIVES),
    Fact("origin", "where you are from", ("I (am|come) from {v}.", "I'm from {v}.", "I was born in {v}.", "I grew up in {v}."), ("Where (am I|do I come) from?", "Where was I born?", "Do you (know|remember) where I am from?", "Which place do I come from?"), "You are from {v}.", _origin),
    Fact("pets", "the names of your pets", ("I have two (cats|dogs|rabbits), {v}.", "My (cats|dogs|rabbits|pets) are called {v}.", "My two (cats|dogs) are {v}."), ("What are my (pets|cats|dogs) called?", "(What are|Tell me) the names of my (pets|cats|dogs)?", "Who are my (pets|cats|dogs)?"), "Your pets are called {v}.", _two_names),
    Fact("allergy", "what you are allergic to", ("I am allergic to {v}.", "I can't eat {v}, I am allergic to it.", "I have an allergy to {v}."), ("What am I allergic to?", "(Which|What) allergy do I have?", "What (can't|must) I not eat?"), "You are allergic to {v}.", lambda d: d.pick(FOODS)),
    Fact("seat", "your seat", ("My seat is {v}.", "I sit in seat {v}.", "I have seat {v}."), ("(What is|What's|Which is) my seat?", "Where do I sit?", "Which seat do I have?"), "Your seat is {v}.", lambda d: f"{d.between(1, 40)}{d.pick('ABCDEF')}"),
    Fact("flight", "when your flight leaves", ("My (flight|train|bus) leaves at {v}.", "I have to catch the (train|bus|plane) at {v}."), ("When (does|will) my (flight|train|bus) leave?", "When do I have to leave?", "What time is my (flight|train|bus)?"), "It leaves at {v}.", clock),
    Fact("dream", "what you want to become", ("I want to (become|be) a {v}[ one day|].", "My dream is to become a {v}.", "When I grow up I will be a {v}."), ("What do I want to (become|be)?", "(What is|What's) my dream?"), "You want to become {av}.", lambda d: d.pick(JOBS)),
    Fact("boss", "who your boss is", ("My boss is {v}.", "I work for {v}, my boss.", "My boss is called {v}."), ("Who is my boss?", "(What is|What's) the name of my boss?", "What is my boss called?"), "Your boss is {v}.", full_name),
    Fact("company", "where you work", ("I work at {v}.", "I work for a company called {v}.", "The company I work for is {v}."), ("Where do I work?", "(Which|What) company do I work (for|at)?", "(What is|What's) my company called?"), "You work at {v}.", _company),
    Fact("book", "which book you read", ("I am reading {v}.", "The book I read is {v}.", "My favorite book is {v}."), ("(What|Which) book (am I reading|do I read|is my favorite)?", "What am I reading?", "(What is|What's) my book called?"), "Your book is {v}.", title),
    Fact("email", "your email address", ("My email[ address|] is {v}.", "You can reach me at {v}.", "Write to me at {v}."), ("(What is|What's) my email[ address|]?", "How can (you|people) reach me?", "Do you know my email[ address|]?"), "Your email address is {v}.", email),
    Fact("room", "your room", ("My room is {v}.", "I am in room {v}.", "I stay in room {v}."), ("(What is|What's|Which is) my room[ number|]?", "In which room am I?", "Which room do I have?"), "Your room is {v}.", lambda d: f"{d.pick('ABCD')}{d.between(1, 60)}"),
    Fact("children", "how many children you have", ("I have {v} children.", "I am a parent of {v} children.", "We have {v} kids."), ("How many (children|kids) do I have?", "Do you know how many (children|kids) I have?"), "You have {v} children.", lambda d: d.pick(("two", "three", "four", "five", "2", "3", "4"))),
    Fact("language", "which language you learn", ("I (am learning|learn|study) {v}.", "I take lessons in {v}.", "The language I learn is {v}."), ("(Which|What) language (do I learn|am I learning|do I study)?", "What am I learning?"), "You learn {v}.", lambda d: d.pick(("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Turkish", "Swedish", "Japanese", "Greek"))),
    Fact("goal", "your plan for the weekend", ("On the weekend I (want to|will) go to the {v}.", "My plan for the weekend is a trip to the {v}."), ("(What is|What's|What was) my plan for the weekend?", "Where do I want to go on the weekend?", "What will I do on the weekend?"), "You want to go to the {v} on the weekend.", _place),
)  # fmt: skip

STATES = (
    State("age", ("{n} is {v} years old", "{n} is {v}", "{n} turned {v} this year"), ("How old is {n}?", "(What is|What's) {n}'s age?", "What is the age of {n}?", "Do you know how old {n} is?"), "{n} is {v} years old.", lambda d: str(d.between(3, 90))),
    State("city", ("{n} lives in {v}", "{n} comes from {v}", "{n} moved to {v}", "{n}'s home is in {v}"), ("Where does {n} live?", "(In which|Which|What) city does {n} live[ in|]?", "Where is {n} from?"), "{n} lives in {v}.", city),
    State("job", ("{n} works as {v}", "{n} is {v}", "{n} has worked as {v} for years"), ("(What is|What's) {n}'s job?", "What does {n} do[ for a living| for work|]?", "What does {n} work as?"), "{n} works as {v}.", lambda d: article(d.pick(JOBS))),
    State("pet", ("{n} has {v}", "{n} owns {v}", "{n}'s pet is {v}"), ("(What|Which) pet does {n} have?", "(What|Which) animal does {n} (have|own|keep)?", "(What is|What's) {n}'s pet?"), "{n} has {v}.", lambda d: article(d.pick(ANIMALS))),
    State("color", ("{n}'s favorite color is {v}", "{n} likes the color {v}", "{n} loves the color {v}"), ("(What is|What's) {n}'s favorite color?", "(Which|What) color does {n} like?", "What is the favorite color of {n}?"), "{n}'s favorite color is {v}.", lambda d: d.pick(COLORS)),
    State("food", ("{n}'s favorite food is {v}", "{n} loves to eat {v}", "{n} likes {v} most of all food"), ("(What is|What's) {n}'s favorite food?", "What does {n} (like|love) to eat?", "(Which|What) food does {n} like?"), "{n}'s favorite food is {v}.", lambda d: d.pick(FOODS)),
    State("hobby", ("{n}'s hobby is {v}", "{n} enjoys {v}", "{n} spends weekends on {v}"), ("(What is|What's) {n}'s hobby?", "What does {n} enjoy?", "What does {n} do (on weekends|in the free time)?"), "{n}'s hobby is {v}.", lambda d: d.pick(HOBBIES)),
    State("birthday", ("{n}'s birthday is on {v}", "{n} was born on {v}"), ("When is {n}'s birthday?", "When was {n} born?", "(What is|What's) the birthday of {n}?"), "{n}'s birthday is on {v}.", date),
    State("room", ("{n} is in room {v}", "{n} has room {v}"), ("(In which|Which|What) room is {n}[ in|]?", "(What is|What's) {n}'s room?", "Where can I find {n}?"), "{n} is in room {v}.", lambda d: f"{d.pick('ABCD')}{d.between(1, 60)}"),
    State("car", ("{n} drives a {v} car", "{n}'s car is {v}"), ("What color is {n}'s car?", "(Which|What) color has {n}'s car?", "(What is|What's) the color of {n}'s car?"), "{n}'s car is {v}.", lambda d: d.pick(COLORS)),
    State("friend", ("{n}'s best friend is {v}", "{n} has a good friend called {v}"), ("Who is {n}'s[ best|] friend?", "(What is|What's) {n}'s[ best|] friend called?", "Who is the[ best|] friend of {n}?"), "{n}'s best friend is {v}.", first_name),
    State("trip", ("{n} travels to {v} next week", "{n} is going to {v}", "{n} plans a trip to {v}"), ("Where (does {n} travel|is {n} going|will {n} go)?", "(Which|What) city will {n} visit?", "Where does {n} want to go?"), "{n} is going to {v}.", lambda d: d.pick(CITIES)),
    State("gift", ("{n} wants {v} as a gift", "{n} wishes for {v}", "{n} asked for {v}"), ("What does {n} want[ as a gift|]?", "What should I (buy|get) for {n}?", "What does {n} wish for?"), "{n} wants {v}.", lambda d: article(d.pick(OBJECTS))),
)  # fmt: skip

# What a thing of the user can be or do; the answer says it again.
THINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("dog cat rabbit parrot pony", "name", ("is called {v}", "is named {v}")),
    ("dog cat rabbit car bike house", "color", ("is {v}",)),
    (
        "sister brother mother father uncle aunt neighbor cousin friend teacher",
        "city",
        ("lives in {v}", "moved to {v}", "works in {v}"),
    ),
    ("sister brother mother father uncle aunt neighbor cousin friend", "job", ("is {v}", "works as {v}")),
    ("meeting lesson party concert flight train", "time", ("starts at {v}", "is at {v}")),
    ("meeting party exam trip concert wedding", "day", ("is on {v}", "was moved to {v}")),
    ("car phone computer bike watch", "price", ("cost {v} dollars",)),
    ("sister brother son daughter uncle cousin", "age", ("is {v} years old", "turned {v}")),
    ("dog cat rabbit", "small age", ("is {v} years old", "turned {v}")),
    ("boss neighbor teacher doctor dentist cousin", "name", ("is called {v}", "is {v}")),
    ("house office hotel school shop", "city", ("is in {v}",)),
)
THING_VALUES: dict[str, Callable[[Draw], str]] = {
    "name": first_name, "color": lambda d: d.pick(COLORS), "city": city, "job": lambda d: article(d.pick(JOBS)), "time": clock,
    "day": lambda d: d.pick(WEEKDAYS), "price": lambda d: str(d.between(20, 9000)), "age": lambda d: str(d.between(2, 80)), "small age": lambda d: str(d.between(2, 14)),
}  # fmt: skip
