"""Word lists shared by the domains, and invented words that no list holds."""

# ruff: noqa: SIM905 -- word lists read better as text
from __future__ import annotations

import re

from .draw import Draw

_AN = re.compile(r"\b([Aa]) (?=[aeiou]|hour|honest)(?!one\b|once|uni|us|eu)", re.IGNORECASE)
GIRLS = (
    "Mia Lily Anna Zoe Emma Nora Ruby Clara Ivy Ella Lucy Rosa Maya Sara Leah Alma Nina Tara Vera Iris "
    "Hana Freya Amina Priya Yuki Elena Sofia Greta Ada Olga Paula Jade Hazel Wendy Tess Fiona Marta Ines "
    "Lena Dora "
    "Alice Mary Jane Julia Laura Kate Emily Grace Hannah Eva Linda Susan Karen Nancy Helen Diana Eve Carol Sophie Chloe "
    "Bella Amy Megan Rachel Rita Stella Sandra Monica Ingrid Astrid Fatima Aisha Leila Mei Naomi Carla Bianca Petra Judy "
    "Molly Daisy Rose Victoria Claire Elsa Irene Jenny Lisa Maria Nadia Silvia Tina Yasmin Zara"
).split()
BOYS = (
    "Tom Ben Max Leo Sam Finn Jack Owen Noah Eli Hugo Omar Ravi Kenji Luca Felix Oscar Theo Adam Milo "
    "Ivan Jonas Marco Pedro Karl Dylan Hassan Peter Simon Victor Walter Henry George Nico Otto Emil Rowan "
    "Jasper Arjun Mateo "
    "John Bob James David Michael Robert Daniel Paul Mark Steve Alex Chris Frank Kevin Brian Eric Carlos Juan Luis Jose "
    "Ahmed Omid Ali Yusuf Wei Chen Ken Hiro Anton Boris Dmitri Stefan Lukas Hans Fritz Pierre Louis Andre Bruno Diego "
    "Enzo Fred Gary Harry Ian Joe Kyle Larry Martin Nick Patrick Ralph Roger Scott Tim Will Zack Charlie Arthur Edgar"
).split()
NAMES = GIRLS + BOYS
SURNAMES = (
    "Baker Carter Evans Fisher Gray Hill Jensen Kim Lopez Moore Nash Olsen Patel Quinn Reed Stone Turner "
    "Vogel Walsh Young Abbott Brandt Costa Duval Engel Ferrari Gupta Hansen Ito Kaya Lund Meyer Novak "
    "Okafor Price Rossi Silva Tanaka Weber Zhang Bishop Clarke Dixon Foster Grant Hayes Keller Larsen "
    "Morgan Parker"
).split()
ANIMALS = (
    "cat dog fox bear owl rabbit mouse duck frog horse goat sheep hen turtle hedgehog squirrel deer wolf "
    "otter badger crow penguin lion tiger monkey elephant whale seal bee snail beaver pony parrot robin "
    "mole lamb"
).split()
COLORS = ("red blue green yellow white black brown purple orange pink grey silver gold").split()
FOODS = (
    "bread cheese soup rice apple pear cake honey butter pasta salad carrot potato tomato onion egg milk "
    "banana cherry lemon plum peach corn bean mushroom garlic pepper fish nut berry pie grape melon "
    "pumpkin spinach"
).split()
OBJECTS = (
    "key lamp book chair table clock mirror basket bottle bell rope box cup spoon knife ladder umbrella "
    "blanket pillow pencil brush candle kite ball coin ring hat coat boot scarf glove map letter drum "
    "flute wheel bucket hammer shovel button lantern kettle plate bag drawer window door shelf wagon "
    "compass whistle"
).split()
PLACES = (
    "forest village river lake garden farm market castle mountain meadow beach harbor town island valley "
    "bridge library school bakery barn mill hill station park cave desert"
).split()
CITIES = (
    "Paris London Berlin Madrid Rome Oslo Vienna Prague Lisbon Dublin Athens Cairo Tokyo Delhi Lima "
    "Boston Denver Chicago Toronto Sydney Seoul Bangkok Nairobi Zurich Geneva Munich Hamburg Lyon Porto "
    "Milan Naples Warsaw Budapest Helsinki Stockholm Copenhagen Brussels Amsterdam Istanbul Austin "
    "Seattle Dallas Miami Montreal "
    "Barcelona Valencia Florence Venice Turin Marseille Nice Bergen Malmo Tallinn Riga Vilnius Krakow Belgrade Zagreb Sofia "
    "Bucharest Kyiv Ankara Tehran Baghdad Riyadh Dubai Mumbai Karachi Dhaka Hanoi Manila Jakarta Singapore Taipei Osaka "
    "Kyoto Beijing Shanghai Perth Brisbane Auckland Houston Phoenix Atlanta Detroit Portland Vancouver Ottawa Havana "
    "Bogota Quito Santiago Casablanca Lagos Accra Tunis Leeds Bristol Glasgow Edinburgh Cardiff Cologne Frankfurt Basel"
).split()
JOBS = (
    "teacher doctor nurse baker farmer painter driver pilot writer cook gardener carpenter lawyer "
    "engineer singer dentist plumber tailor librarian journalist mechanic architect chemist florist "
    "sailor"
).split()
HOBBIES = (
    "chess painting swimming running cooking reading hiking fishing gardening dancing singing cycling "
    "knitting skating climbing sailing pottery photography yoga surfing"
).split()
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ("January February March April May June July August September October November December").split()
ADJECTIVES = (
    "small large old new bright dark quiet loud soft warm cold happy sad brave shy kind proud quick slow "
    "clean gentle strong heavy light smooth sweet fresh deep tall round"
).split()
MEALS = [
    "soup", "bread", "cake", "pasta", "rice", "pizza", "salad", "apple pie", "cheese", "fish", "toast", "stew", "chocolate", "ice cream",
    "pancakes", "sushi", "potatoes", "noodles", "eggs",
]  # fmt: skip
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
# Lower-case words that the word puzzles use.
PLAIN_WORDS = sorted({*ANIMALS, *COLORS, *FOODS, *OBJECTS, *PLACES, *JOBS, *HOBBIES, *ADJECTIVES})

_ONSETS = ("b br c cl d dr f fl g gr h j k kr l m n p pl qu r s sh sk st t th tr v w y z").split()
_VOWELS = ("a e i o u ai ea ee oo ou").split()
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "k", "x", "nd", "th", "rn"]


def invented(draw: Draw, syllables: int = 2) -> str:
    """A pronounceable word that is in no list, capitalised: what teaches a model to copy rather than to recall."""
    parts = [draw.pick(_ONSETS) + draw.pick(_VOWELS) for _ in range(syllables)]
    return ("".join(parts) + draw.pick(_CODAS)).capitalize()


def first_name(draw: Draw) -> str:
    return invented(draw) if draw.chance(0.15) else draw.pick(NAMES)


def full_name(draw: Draw) -> str:
    surname = invented(draw) if draw.chance(0.25) else draw.pick(SURNAMES)
    return f"{first_name(draw)} {surname}"


def city(draw: Draw) -> str:
    return invented(draw, draw.between(2, 3)) if draw.chance(0.25) else draw.pick(CITIES)


def code(draw: Draw, letters: int = 2, digits: int = 3) -> str:
    """An identifier such as "QX-417"."""
    head = "".join(draw.pick("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(letters))
    return head + "-" + "".join(str(draw.below(10)) for _ in range(digits))


def article(noun: str) -> str:
    """The noun with "a" or "an"."""
    return articled(f"a {noun}")


def articled(text: str) -> str:
    """The text with "an" for "a" before a vowel."""
    return _AN.sub(r"\1n ", text)


def plural(noun: str) -> str:
    """The plural of a noun from the lists above."""
    irregular = {
        "goldfish": "goldfish", "salmon": "salmon",
        "mouse": "mice", "sheep": "sheep", "deer": "deer", "wolf": "wolves", "fish": "fish", "knife": "knives",
        "goose": "geese", "shelf": "shelves", "scarf": "scarves", "bread": "loaves of bread", "rice": "bags of rice",
        "milk": "bottles of milk", "honey": "jars of honey", "butter": "sticks of butter", "corn": "ears of corn",
        "pasta": "packs of pasta", "soup": "bowls of soup", "cheese": "pieces of cheese", "garlic": "heads of garlic",
        "salad": "bowls of salad", "spinach": "bags of spinach",
    }  # fmt: skip
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "x", "ch", "sh", "potato", "tomato")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def listed(items: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
