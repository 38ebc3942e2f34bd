"""Kinds of records that the extraction tasks describe in prose: fields, values and the sentences that state them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .draw import Draw
from .wording import expand
from .words import (
    ANIMALS,
    BOYS,
    CITIES,
    COLORS,
    FOODS,
    GIRLS,
    HOBBIES,
    JOBS,
    MONTHS,
    OBJECTS,
    WEEKDAYS,
    article,
    city,
    code,
    first_name,
    full_name,
    invented,
    listed,
)


@dataclass(frozen=True, slots=True)
class Field:
    """One fact: possible key names, JSON schema, a value, and patterns of sentences with {s} subject and {v} value.

    For booleans `sentences` state true and `negated` state false.
    """

    keys: tuple[str, ...]
    schema: dict[str, Any]
    value: Callable[[Draw], Any]
    sentences: tuple[str, ...]
    negated: tuple[str, ...] = ()

    def state(self, draw: Draw, value: Any) -> str:
        """A sentence that states the value, with {s} where its subject stands and without its full stop."""
        options = self.negated if value is False else self.sentences
        said = listed([str(v) for v in value]) if isinstance(value, list) else str(value)
        text = expand(draw, draw.pick(options))
        return text.replace(" a {v}", f" {article(said)}").replace("{v}", said)


@dataclass(frozen=True, slots=True)
class Record:
    """A kind of thing: how its paragraph opens (with {v} the name), and what may be said of it.

    `named` is the name as a subject, `subjects` stand for it later.
    """

    kind: str
    name: Field
    subjects: tuple[str, ...]
    fields: tuple[Field, ...]
    named: str = "{v}"

    def paragraph(self, draw: Draw, values: dict[int, Any], said: Collection[Field]) -> str:
        """The name and the facts `said` in random order."""
        name = str(values[id(self.name)])
        later = draw.pick(self.subjects)
        if self.subjects == PEOPLE:
            first = name.split(" ", maxsplit=1)[0]
            later = "She" if first in GIRLS else "He" if first in BOYS else later
        facts = [f.state(draw, values[id(f)]) for f in draw.shuffled(list(said))]
        starts = [f for f in facts if f.startswith("{s} ")]
        if starts and draw.chance(0.6):
            facts.remove(starts[0])
            facts.insert(0, starts[0])
            lines = [facts[0].replace("{s}", self.named.replace("{v}", name))]
            rest = facts[1:]
        else:
            lines, rest = [self.name.state(draw, name)], facts
        for fact in rest:
            if (
                len(lines) == 1
                and fact.startswith("{s} ")
                and starts
                and fact != starts[0]
                and draw.chance(0.6)
            ):
                lines[0] += " and" + fact.removeprefix("{s}")
            else:
                lines.append(fact.replace(" {s}", f" {later.lower()}").replace("{s}", later))
        return " ".join(line[0].upper() + line[1:] + "." for line in lines)


PEOPLE = ("She", "He")


def _text(keys: str, value: Callable[[Draw], str], *sentences: str) -> Field:
    return Field(tuple(keys.split()), {"type": "string"}, value, sentences)


def _whole(keys: str, low: int, high: int, *sentences: str) -> Field:
    return Field(tuple(keys.split()), {"type": "integer"}, lambda d: d.between(low, high), sentences)


def _price(keys: str, high: int, *sentences: str) -> Field:
    def value(draw: Draw) -> float:
        return draw.between(1, high) + draw.pick((0.25, 0.5, 0.75, 0.95, 0.99))

    return Field(tuple(keys.split()), {"type": "number"}, value, sentences)


def _flag(keys: str, yes: tuple[str, ...], no: tuple[str, ...]) -> Field:
    return Field(tuple(keys.split()), {"type": "boolean"}, lambda d: d.chance(0.5), yes, no)


def _enum(keys: str, options: str, *sentences: str) -> Field:
    values = options.split()
    return Field(tuple(keys.split()), {"type": "string", "enum": values}, lambda d: d.pick(values), sentences)


def _list(keys: str, options: list[str], *sentences: str) -> Field:
    schema = {"type": "array", "items": {"type": "string"}}
    return Field(tuple(keys.split()), schema, lambda d: d.sample(options, d.between(1, 4)), sentences)


def person_name(draw: Draw) -> str:
    return first_name(draw) if draw.chance(0.6) else full_name(draw)


def date(draw: Draw) -> str:
    return (
        f"{draw.between(1, 28)} {draw.pick(MONTHS)}"
        if draw.chance(0.6)
        else f"{draw.pick(MONTHS)} {draw.between(1, 28)}"
    )


def clock(draw: Draw) -> str:
    return f"{draw.between(6, 22):02d}:{draw.pick(('00', '15', '30', '45'))}"


def title(draw: Draw) -> str:
    first = draw.pick(("The", "A", "My", "Under the", "Beyond the"))
    middle = draw.pick([*COLORS, "Last", "Silent", "Hidden", "Broken", "Distant"]).capitalize()
    return f"{first} {middle} {draw.pick(OBJECTS + ANIMALS).capitalize()}"


def brand(draw: Draw) -> str:
    return f"{invented(draw)} {draw.pick(('Labs', 'Foods', 'Motors', 'Systems', 'Books', 'Works', 'Tools'))}"


def team(draw: Draw) -> str:
    return f"{draw.pick(CITIES) if draw.chance(0.5) else invented(draw)} {draw.pick(('United', 'Rovers', 'Stars', 'Tigers'))}"


def email(draw: Draw) -> str:
    host = draw.pick(("mail", "post", "box", "example", invented(draw).lower()))
    number = str(draw.between(1, 99)) if draw.chance(0.4) else ""
    return f"{first_name(draw).lower()}{number}@{host}.{draw.pick(('com', 'org', 'net', 'example'))}"


def phone(draw: Draw) -> str:
    return f"555-{draw.between(0, 9999):04d}"


COUNTRIES = "France Germany Spain Italy Japan India Brazil Canada Mexico Kenya Norway Sweden Poland Greece Chile Ireland".split()  # noqa: SIM905

RECORDS = (
    Record(
        "person",
        _text("name full_name person", person_name, "{v} introduced themselves", "This is about {v}", "Meet {v}", "(This is|Here is|I know|I met) {v}", "My (friend|neighbor|cousin|colleague)'s name is {v}", "The name is {v}", "There is a (person|customer|user) called {v}"),
        PEOPLE,
        (
            _whole("age age_years years", 2, 95, "{s} is {v} years old", "{s} is {v}", "{s} turned {v} (this year|last week|yesterday)", "{s} is aged {v}", "{s} just turned {v}"),
            _text("job occupation profession", lambda d: d.pick(JOBS), "{s} works as a {v}", "{s} is a {v}", "{s} is a {v} by trade", "{s} has been a {v} for years", "{s} earns money as a {v}"),
            _text("city town home location", city, "{s} lives in {v}", "{s} moved to {v}[ last year]", "{s} has a home in {v}", "{s} is from {v}", "{s} comes from {v}", "{s} is based in {v}"),
            _list("hobbies interests likes", HOBBIES, "{s} (enjoys|likes|loves) {v}", "In the evenings {s} likes {v}", "{s} spends weekends on {v}", "{s} is into {v}"),
            _flag("has_children is_parent", ("{s} has two children", "{s} is a proud parent", "{s} has a (son|daughter)"), ("{s} has no children", "{s} does not have children", "{s} doesn't have kids")),
            _flag("is_married married", ("{s} is married", "{s} got married in spring"), ("{s} is not married", "{s} has never been married", "{s} is single")),
            _text("email contact mail", email, "The email address is {v}", "You can write to {v}", "{s} can be reached at {v}", "{s} uses the email {v}"),
            _text("phone phone_number tel", phone, "The phone number is {v}", "Call {v} to reach them", "{s} has the phone number {v}"),
            _text("country nation", lambda d: d.pick(COUNTRIES), "The home country is {v}", "{s} was born in {v}", "{s} grew up in {v}"),
            _text("favorite_color color", lambda d: d.pick(COLORS), "{s} likes the color {v}", "{s} always wears {v}", "The favorite color is {v}"),
        ),
    ),
    Record(
        "pet",
        _text("name pet_name", first_name, "There is a pet called {v}", "The family adopted {v}", "(Everyone loves|This is|Meet|We have) {v}", "My pet is called {v}"),
        ("It", "The pet"),
        (
            _text("species animal kind", lambda d: d.pick(ANIMALS), "{s} is a {v}", "{s} happens to be a {v}", "{s} is a (young|lovely|small|friendly) {v}"),
            _whole("age age_years", 1, 19, "{s} is {v} years old", "{s} has lived for {v} years", "{s} turned {v}"),
            _text("color colour", lambda d: d.pick(COLORS), "{s} is {v} all over", "{s} has a {v} coat", "{s} has {v} fur"),
            _text("owner owner_name", full_name, "{s} belongs to {v}", "The owner is {v}", "{s} lives with {v}"),
            _flag("vaccinated is_vaccinated", ("{s} is vaccinated", "{s} has had every vaccine"), ("{s} is not vaccinated[ yet]", "{s} still needs its vaccines")),
            _enum("size build", "small medium large", "{s} is of {v} size", "For its kind {s} is {v}", "{s} is {v} in size"),
            _list("favorite_foods food likes", FOODS, "{s} likes to eat {v}", "{s} is fond of {v}", "{s} loves {v}"),
            _whole("weight weight_kg", 1, 60, "{s} weighs {v} kg", "The weight is {v} kg"),
        ),
    ),
    Record(
        "product",
        _text("name product product_name item", lambda d: f"{invented(d)} {d.pick(OBJECTS)}", "The {v} is new in the shop", "We tested the {v}", "Our catalog lists the {v}", "(Look at|Buy|I want|We sell) the {v}"),
        ("It", "The product"),
        (
            _price("price cost", 400, "{s} costs {v} dollars", "The price is {v} dollars", "You pay {v} dollars", "{s} sells for {v}", "{s} costs ${v}"),
            _text("color colour", lambda d: d.pick(COLORS), "{s} comes in {v}", "{s} is painted {v}", "{s} is {v}", "The color is {v}"),
            _whole("stock quantity units", 0, 500, "There are {v} in stock", "The warehouse holds {v} units", "We have {v} (left|of them)"),
            _text("brand maker manufacturer", brand, "{s} is made by {v}", "The maker is {v}", "{s} comes from {v}"),
            _flag("in_stock available", ("{s} is available[ now]", "{s} can be ordered today", "{s} is in stock"), ("{s} is sold out", "{s} is not available[ now]", "{s} is out of stock")),
            _text("sku code id", code, "The item code is {v}", "Its number in the list is {v}", "{s} has the code {v}"),
            _enum("condition state", "new used refurbished", "Its condition is {v}", "{s} is sold as {v}"),
            _whole("rating stars", 1, 5, "{s} has a rating of {v}", "Customers give it {v} stars", "{s} got {v} stars"),
        ),
        named="The {v}",
    ),
    Record(
        "book",
        _text("title book name", title, '"{v}" is on the table', '(She|He) finished reading "{v}"', 'The library bought "{v}"', 'I am reading "{v}"', "My favorite book is {v}"),
        ("It", "The book"),
        (
            _text("author writer", full_name, "{s} was written by {v}", "The author is {v}", "{s} is by {v}", "{s} is a book by {v}"),
            _whole("year published", 1900, 2024, "{s} came out in {v}", "{s} was published in {v}", "{s} is from {v}"),
            _whole("pages page_count", 60, 900, "{s} has {v} pages", "{s} runs to {v} pages", "{s} is {v} pages long"),
            _enum("genre category", "novel poetry history science mystery", "Its genre is {v}", "Shops file it under {v}"),
            _text("publisher house", brand, "{v} published it", "The publisher is {v}", "{s} was printed by {v}"),
            _flag("translated is_translation", ("{s} is a translation", "{s} was translated"), ("{s} is not a translation", "{s} was never translated")),
            _price("price cost", 60, "A copy costs {v} dollars", "{s} sells for {v} dollars", "{s} costs {v}"),
        ),
        named='"{v}"',
    ),
    Record(
        "movie",
        _text("title movie film", title, 'We watched "{v}"', 'The cinema shows "{v}"', "I saw {v} (last night|yesterday|on Sunday)", "My favorite movie is {v}"),
        ("It", "The movie", "The film"),
        (
            _text("director directed_by", full_name, "{s} was directed by {v}", "{v} directed it", "{s} is a film by {v}"),
            _whole("year release_year released", 1930, 2025, "{s} came out in {v}", "{s} is from {v}", "{s} was released in {v}"),
            _whole("minutes length duration", 60, 220, "{s} is {v} minutes long", "{s} lasts {v} minutes", "{s} runs for {v} minutes"),
            _enum("genre category", "comedy drama horror action romance", "{s} is a {v}", "The genre is {v}", "People call it a {v}"),
            _whole("rating stars", 1, 10, "{s} has a rating of {v}", "Critics gave it {v} points", "I give it {v} out of 10"),
            _list("actors cast", GIRLS, "{s} stars {v}", "The actors are {v}", "You can see {v} in it"),
        ),
        named='"{v}"',
    ),
    Record(
        "event",
        _text("event name title", lambda d: f"{invented(d)} {d.pick(('Festival', 'Meeting', 'Concert', 'Workshop', 'Fair', 'Party'))}", "The {v} is coming up", "Plans for the {v} are ready", "You are invited to the {v}", "(Join|Come to|Don't miss) the {v}"),
        ("It", "The event"),
        (
            _text("city location place venue", city, "{s} takes place in {v}", "{v} will host it", "{s} is (held|organized) in {v}", "{s} is in {v}"),
            _text("date on", date, "{s} is on {v}", "Save the date: {v}", "{s} takes place on {v}", "The date is {v}"),
            _text("time start_time start", clock, "{s} starts at {v}", "Doors open at {v}", "{s} begins at {v}"),
            _whole("guests attendees people", 10, 900, "{v} people are expected", "There is room for {v} people", "{s} has {v} guests"),
            _text("organizer host", full_name, "The organizer is {v}", "{v} is in charge", "{s} is organized by {v}"),
            _flag("free is_free", ("Entry is free", "You pay nothing to get in", "{s} is free"), ("Entry is not free", "You need to buy a ticket", "{s} is not free")),
            _text("weekday day", lambda d: d.pick(WEEKDAYS), "{s} falls on a {v}", "That day is a {v}", "{s} is on {v}"),
        ),
        named="The {v}",
    ),
    Record(
        "flight",
        _text("flight flight_number number", code, "Flight {v} is on the board", "Passengers of flight {v}, please listen", "The next flight is {v}", "(I am on|My flight is|We took) {v}"),
        ("It", "The flight"),
        (
            _text("origin from departure_city", city, "{s} leaves from {v}", "The journey begins in {v}", "{s} starts in {v}"),
            _text("destination to arrival_city", city, "{s} goes to {v}", "{s} will land in {v}", "{s} flies to {v}"),
            _text("departure departure_time departs", clock, "Take-off is at {v}", "{s} departs at {v}", "{s} leaves at {v}"),
            _text("gate boarding_gate", lambda d: f"{d.pick('ABCDEF')}{d.between(1, 40)}", "Boarding is at gate {v}", "The gate is {v}", "{s} leaves from gate {v}"),
            _whole("seats passengers", 20, 400, "There are {v} seats", "{s} carries {v} passengers", "{s} has {v} seats"),
            _flag("delayed is_delayed", ("{s} is delayed", "{s} is running late", "{s} is late"), ("{s} is on time", "{s} is not delayed")),
            _text("airline carrier", lambda d: f"{invented(d)} Air", "{s} is run by {v}", "The airline is {v}", "{s} is operated by {v}"),
        ),
        named="Flight {v}",
    ),
    Record(
        "booking",
        _text("guest guest_name name", full_name, "{v} made a booking", "We have a reservation for {v}", "A guest named {v} called", "The room is booked for {v}"),
        ("The guest", "The booking"),
        (
            _text("hotel hotel_name", lambda d: f"Hotel {invented(d)}", "The stay is at {v}", "{v} is the hotel", "The hotel is {v}"),
            _whole("nights stay_nights", 1, 21, "The stay is for {v} nights", "It is a booking of {v} nights", "They stay {v} nights"),
            _text("room room_number", lambda d: str(d.between(100, 899)), "The room number is {v}", "The key opens room {v}", "It is room {v}"),
            _text("arrival check_in", date, "Check-in is on {v}", "The guest arrives on {v}", "The arrival is on {v}"),
            _flag("breakfast breakfast_included", ("Breakfast is included", "The price covers breakfast"), ("Breakfast is not included", "There is no breakfast")),
            _enum("bed bed_type", "single double twin king", "The bed type is {v}", "A {v} bed was asked for", "It has a {v} bed"),
            _whole("guests adults", 1, 6, "The party counts {v} in all", "The room is for a party of {v}"),
        ),
    ),
    Record(
        "recipe",
        _text("dish recipe name", lambda d: f"{d.pick(FOODS)} {d.pick(('soup', 'pie', 'salad', 'stew', 'cake'))}", "Today we make {v}", "Here is how to cook {v}", "Grandma loves {v}", "I want to cook {v}"),
        ("It", "The dish"),
        (
            _list("ingredients needs", FOODS, "You need {v}", "The ingredients are {v}", "{s} needs {v}", "{s} is made of {v}"),
            _whole("minutes time_minutes duration", 5, 180, "{s} takes {v} minutes", "Plan {v} minutes for it", "{s} cooks for {v} minutes"),
            _whole("servings serves", 1, 12, "{s} serves {v}", "{s} is enough for {v} people", "{s} makes {v} servings"),
            _flag("vegetarian is_vegetarian", ("{s} is vegetarian", "{s} has no meat"), ("{s} is not vegetarian", "{s} contains meat")),
            _enum("difficulty level", "easy medium hard", "The difficulty is {v}", "Cooks call it {v}", "{s} is {v} to make"),
            _text("cook chef", full_name, "The recipe is by {v}", "{v} invented it", "{s} was cooked by {v}"),
            _whole("temperature oven_temperature", 120, 240, "Set the oven to {v} degrees", "{s} bakes at {v} degrees"),
        ),
        named="The {v}",
    ),
    Record(
        "house",
        _text("address street", lambda d: f"{d.between(1, 240)} {invented(d)} Street", "The house at {v} is for sale", "We visited {v}", "There is a home at {v}", "The address is {v}"),
        ("It", "The house"),
        (
            _text("city town", city, "{s} is in {v}", "The town is {v}", "{s} stands in {v}"),
            _whole("bedrooms rooms", 1, 9, "{s} has {v} bedrooms", "You get {v} bedrooms", "There are {v} bedrooms"),
            _whole("price asking_price", 100, 990, "The price is {v} thousand", "The owners ask for {v} thousand", "{s} costs {v} thousand"),
            _flag("garden has_garden", ("{s} has a garden", "There is a garden behind it"), ("{s} has no garden", "There is no garden")),
            _whole("year_built built", 1850, 2023, "{s} was built in {v}", "{s} dates from {v}"),
            _text("agent seller", full_name, "The agent is {v}", "Call {v} for a visit", "{s} is sold by {v}"),
            _enum("heating heat_source", "gas oil wood electric", "Its heating is {v}", "{s} is heated by {v}"),
        ),
        named="The house at {v}",
    ),
    Record(
        "car",
        _text("model car name", lambda d: f"{invented(d)} {d.between(1, 9)}", "The {v} stands outside", "They drive a {v}", "A {v} is for rent", "I bought a {v}"),
        ("It", "The car"),
        (
            _whole("year model_year", 1990, 2024, "{s} was made in {v}", "{s} is from {v}", "{s} was built in {v}"),
            _text("color colour", lambda d: d.pick(COLORS), "{s} is {v}", "{s} has {v} paint", "The color is {v}"),
            _whole("doors door_count", 2, 5, "{s} has {v} doors", "There are {v} doors"),
            _enum("fuel fuel_type", "petrol diesel electric hybrid", "The fuel type is {v}", "Its drive is {v}"),
            _text("plate license_plate", code, "The plate reads {v}", "Its plate is {v}", "{s} has the plate {v}"),
            _text("owner driver", full_name, "{s} is owned by {v}", "The owner is {v}", "{s} belongs to {v}"),
            _flag("insured is_insured", ("{s} is insured", "The insurance is paid"), ("{s} is not insured", "{s} has no insurance")),
        ),
        named="The {v}",
    ),
    Record(
        "company",
        _text("company name", brand, "{v} is growing", "The news today is about {v}", "An old friend works at {v}", "I work for {v}"),
        ("It", "The company"),
        (
            _text("ceo boss", full_name, "{v} runs it", "The chief is {v}", "{s} is led by {v}", "The boss is {v}"),
            _text("city headquarters based_in", city, "{s} is based in {v}", "Its main office is in {v}", "{s} is in {v}"),
            _whole("employees staff", 3, 999, "{s} employs {v} people", "The staff counts {v}", "{s} has {v} employees"),
            _whole("founded founded_year", 1880, 2023, "{s} was founded in {v}", "{s} began in {v}", "{s} started in {v}"),
            _list("products sells", OBJECTS, "{s} makes things such as {v}", "The shop window shows {v}"),
            _flag("public is_public", ("{s} is listed on the market", "Anyone can buy its shares"), ("{s} is not listed on the market", "{s} is in private hands")),
            _enum("sector industry", "food energy retail transport health", "Its sector is {v}", "{s} works in {v}"),
        ),
    ),
    Record(
        "match",
        _text("winner winning_team", team, "{v} won the match", "The match went to {v}", "Fans of {v} are happy", "{v} won"),
        ("It", "The match"),
        (
            _text("loser losing_team", team, "The other side, {v}, lost", "{v} went home beaten", "{v} lost"),
            _whole("goals winner_goals", 1, 9, "The winners scored {v}", "They put {v} in the net", "They scored {v} goals"),
            _whole("spectators crowd", 50, 990, "{v} people watched", "The crowd counted {v}"),
            _text("city venue_city", city, "The match was played in {v}", "The venue was in {v}"),
            _text("scorer best_player", full_name, "{v} scored first", "The best player was {v}"),
            _flag("extra_time overtime", ("The match went to extra time", "Extra time was needed"), ("No extra time was needed", "The match ended in normal time")),
            _text("date played_on", date, "The match was on {v}", "They met on {v}"),
        ),
    ),
    Record(
        "order",
        _text("order order_id id number", code, "This is order {v}", "Order {v} came in", "We received order {v}", "The order number is {v}"),
        ("It", "The order"),
        (
            _text("customer buyer client", person_name, "The customer is {v}", "{v} placed it", "{s} is for {v}", "{s} was placed by {v}"),
            _text("product item", lambda d: d.pick(OBJECTS), "The product is a {v}", "{s} is for a {v}", "Someone wants a {v}"),
            _whole("quantity count amount", 1, 60, "The quantity is {v}", "{v} pieces are needed", "{s} asks for {v} pieces"),
            _price("total price sum", 600, "The total is {v} dollars", "{s} costs {v} dollars", "The customer pays {v}"),
            _enum("status state", "open paid shipped delivered", "The status is {v}", "{s} is {v}"),
            _flag("express is_express", ("{s} goes by express", "Express delivery is wanted"), ("{s} does not go by express", "Normal delivery is enough")),
            _text("date ordered_on", date, "The date is {v}", "{s} was made on {v}"),
        ),
        named="Order {v}",
    ),
    Record(
        "course",
        _text("course name title", lambda d: f"{d.pick(('Basic', 'Advanced', 'Modern', 'Practical'))} {d.pick(HOBBIES).capitalize()}", "The course is called {v}", "We offer {v}", "A new course is {v}", "I signed up for {v}"),
        ("It", "The course"),
        (
            _text("teacher instructor", full_name, "The teacher is {v}", "{s} is taught by {v}", "{v} teaches it"),
            _whole("weeks duration", 2, 40, "{s} lasts {v} weeks", "{s} takes {v} weeks", "It goes on for {v} weeks"),
            _text("room place", lambda d: f"{d.pick('ABCD')}{d.between(1, 60)}", "The room is {v}", "{s} meets in room {v}"),
            _text("day weekday", lambda d: d.pick(WEEKDAYS), "{s} is on {v}", "Lessons are on {v}", "{s} takes place every {v}"),
            _whole("students seats", 3, 60, "There are {v} students", "{s} has {v} students"),
            _price("price fee", 300, "The fee is {v} dollars", "{s} costs {v} dollars"),
            _flag("online is_online", ("{s} is online", "You can follow it online"), ("{s} is not online", "You must come in person")),
        ),
    ),
)  # fmt: skip

GROUP_KEYS = ("details", "info", "data", "more", "facts")
