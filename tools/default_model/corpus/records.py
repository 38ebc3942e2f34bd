"""Kinds of records that the extraction tasks describe in prose: fields, values and the sentences that state them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .draw import Draw
from .words import (
    ANIMALS,
    COLORS,
    FOODS,
    GIRLS,
    HOBBIES,
    JOBS,
    MONTHS,
    OBJECTS,
    WEEKDAYS,
    city,
    code,
    first_name,
    full_name,
    invented,
    listed,
)


@dataclass(frozen=True, slots=True)
class Field:
    """One fact: possible key names, JSON schema, a value, and sentences with {s} subject and {v} value.

    For booleans `sentences` state true and `negated` state false.
    """

    keys: tuple[str, ...]
    schema: dict[str, Any]
    value: Callable[[Draw], Any]
    sentences: tuple[str, ...]
    negated: tuple[str, ...] = ()

    def state(self, draw: Draw, subject: str, value: Any) -> str:
        """A sentence that states the value."""
        options = self.negated if value is False else self.sentences
        said = listed([str(v) for v in value]) if isinstance(value, list) else str(value)
        return draw.pick(options).format(s=subject, v=said)


@dataclass(frozen=True, slots=True)
class Record:
    """A kind of thing: how its paragraph opens (with {v} the name), and what may be said of it."""

    kind: str
    name: Field
    subjects: tuple[str, ...]
    fields: tuple[Field, ...]


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


def _date(draw: Draw) -> str:
    return f"{draw.between(1, 28)} {draw.pick(MONTHS)}"


def _time(draw: Draw) -> str:
    return f"{draw.between(6, 22):02d}:{draw.pick(('00', '15', '30', '45'))}"


def _title(draw: Draw) -> str:
    first = draw.pick(("The", "A", "My", "Under the", "Beyond the"))
    middle = draw.pick([*COLORS, "Last", "Silent", "Hidden", "Broken", "Distant"]).capitalize()
    return f"{first} {middle} {draw.pick(OBJECTS + ANIMALS).capitalize()}"


def _brand(draw: Draw) -> str:
    return f"{invented(draw)} {draw.pick(('Labs', 'Foods', 'Motors', 'Systems', 'Books', 'Works', 'Tools'))}"


_CITY = _text("city town", city, "{s} lives in {v}.", "{s} moved to {v} last year.", "{s} has a home in {v}.")
_EMAIL_HOSTS = ("mail.example", "post.example", "box.example")


def _email(draw: Draw) -> str:
    return f"{draw.pick(GIRLS).lower()}{draw.between(1, 99)}@{draw.pick(_EMAIL_HOSTS)}"


RECORDS = (
    Record(
        "person",
        _text("name full_name person", full_name, "{v} introduced themselves.", "This is about {v}.", "Meet {v}."),
        ("She", "He"),
        (
            _whole("age age_years", 18, 90, "{s} is {v} years old.", "{s} turned {v} this year.", "At {v}, {s} feels young."),
            _text("job occupation", lambda d: d.pick(JOBS), "{s} works as a {v}.", "{s} is a {v} by trade.", "{s} has been a {v} for years."),
            _CITY,
            _list("hobbies interests", HOBBIES, "{s} enjoys {v}.", "In the evenings {s} likes {v}.", "{s} spends weekends on {v}."),
            _flag("has_children is_parent", ("{s} has two children.", "{s} is a proud parent."), ("{s} has no children.", "{s} does not have children.")),
            _flag("is_married married", ("{s} is married.", "{s} got married in spring."), ("{s} is not married.", "{s} has never been married.")),
            _text("email contact", _email, "The email address is {v}.", "You can write to {v}."),
        ),
    ),
    Record(
        "pet",
        _text("name pet_name", first_name, "There is a pet called {v}.", "The family adopted {v}.", "Everyone loves {v}."),
        ("It", "The pet"),
        (
            _text("species animal kind", lambda d: d.pick(ANIMALS), "{s} is a {v}.", "{s} happens to be a {v}."),
            _whole("age age_years", 1, 19, "{s} is {v} years old.", "{s} has lived for {v} years."),
            _text("color colour", lambda d: d.pick(COLORS), "{s} is {v} all over.", "{s} has a {v} coat."),
            _text("owner owner_name", full_name, "{s} belongs to {v}.", "The owner is {v}."),
            _flag("vaccinated is_vaccinated", ("{s} is vaccinated.", "{s} has had every vaccine."), ("{s} is not vaccinated yet.", "{s} still needs its vaccines.")),
            _enum("size build", "small medium large", "{s} is of {v} size.", "For its kind {s} is {v}."),
            _list("favorite_foods food likes", FOODS, "{s} likes to eat {v}.", "{s} is fond of {v}."),
        ),
    ),
    Record(
        "product",
        _text("name product product_name", lambda d: f"{invented(d)} {d.pick(OBJECTS)}", "The {v} is new in the shop.", "We tested the {v}.", "Our catalog lists the {v}."),
        ("It", "The product"),
        (
            _price("price cost", 400, "{s} costs {v} dollars.", "The price is {v} dollars.", "You pay {v} dollars."),
            _text("color colour", lambda d: d.pick(COLORS), "{s} comes in {v}.", "{s} is painted {v}."),
            _whole("stock quantity units", 0, 500, "There are {v} in stock.", "The warehouse holds {v} units."),
            _text("brand maker", _brand, "{s} is made by {v}.", "The maker is {v}."),
            _flag("in_stock available", ("{s} is available now.", "{s} can be ordered today."), ("{s} is sold out.", "{s} is not available now.")),
            _text("sku code", code, "The item code is {v}.", "Its number in the list is {v}."),
            _enum("condition state", "new used refurbished", "Its condition is {v}.", "{s} is sold as {v}."),
        ),
    ),
    Record(
        "book",
        _text("title book", _title, '"{v}" is on the table.', 'She finished reading "{v}".', 'The library bought "{v}".'),
        ("It", "The book"),
        (
            _text("author writer", full_name, "{s} was written by {v}.", "The author is {v}."),
            _whole("year published", 1900, 2024, "{s} came out in {v}.", "{s} was published in {v}."),
            _whole("pages page_count", 60, 900, "{s} has {v} pages.", "{s} runs to {v} pages."),
            _enum("genre category", "novel poetry history science mystery", "Its genre is {v}.", "Shops file it under {v}."),
            _text("publisher house", _brand, "{v} published it.", "The publisher is {v}."),
            _flag("translated is_translation", ("{s} is a translation.", "{s} was translated."), ("{s} is not a translation.", "{s} was never translated.")),
            _price("price cost", 60, "A copy costs {v} dollars.", "{s} sells for {v} dollars."),
        ),
    ),
    Record(
        "event",
        _text("event name title", lambda d: f"{invented(d)} {d.pick(('Festival', 'Meeting', 'Concert', 'Workshop', 'Fair'))}", "The {v} is coming up.", "Plans for the {v} are ready.", "You are invited to the {v}."),
        ("It", "The event"),
        (
            _text("city location place", city, "{s} takes place in {v}.", "{v} will host it."),
            _text("date on", _date, "{s} is on {v}.", "Save the date: {v}."),
            _text("time start_time start", _time, "{s} starts at {v}.", "Doors open at {v}."),
            _whole("guests attendees people", 10, 900, "{v} people are expected.", "There is room for {v} people."),
            _text("organizer host", full_name, "The organizer is {v}.", "{v} is in charge."),
            _flag("free is_free", ("Entry is free.", "You pay nothing to get in."), ("Entry is not free.", "You need to buy a ticket.")),
            _text("weekday day", lambda d: d.pick(WEEKDAYS), "{s} falls on a {v}.", "That day is a {v}."),
        ),
    ),
    Record(
        "flight",
        _text("flight flight_number number", code, "Flight {v} is on the board.", "Passengers of flight {v}, please listen.", "The next flight is {v}."),
        ("It", "The flight"),
        (
            _text("origin from departure_city", city, "{s} leaves from {v}.", "The journey begins in {v}."),
            _text("destination to arrival_city", city, "{s} goes to {v}.", "{s} will land in {v}."),
            _text("departure departure_time departs", _time, "Take-off is at {v}.", "{s} departs at {v}."),
            _text("gate boarding_gate", lambda d: f"{d.pick('ABCDEF')}{d.between(1, 40)}", "Boarding is at gate {v}.", "The gate is {v}."),
            _whole("seats passengers", 20, 400, "There are {v} seats.", "{s} carries {v} passengers."),
            _flag("delayed is_delayed", ("{s} is delayed.", "{s} is running late."), ("{s} is on time.", "{s} is not delayed.")),
            _text("airline carrier", lambda d: f"{invented(d)} Air", "{s} is run by {v}.", "The airline is {v}."),
        ),
    ),
    Record(
        "booking",
        _text("guest guest_name name", full_name, "{v} made a booking.", "We have a reservation for {v}.", "A guest named {v} called."),
        ("The guest", "The booking"),
        (
            _text("hotel hotel_name", lambda d: f"Hotel {invented(d)}", "The stay is at {v}.", "{v} is the hotel."),
            _whole("nights stay_nights", 1, 21, "The stay is for {v} nights.", "It is a booking of {v} nights."),
            _text("room room_number", lambda d: str(d.between(100, 899)), "The room number is {v}.", "The key opens room {v}."),
            _text("arrival check_in", _date, "Check-in is on {v}.", "The guest arrives on {v}."),
            _flag("breakfast breakfast_included", ("Breakfast is included.", "The price covers breakfast."), ("Breakfast is not included.", "There is no breakfast.")),
            _enum("bed bed_type", "single double twin king", "The bed type is {v}.", "A {v} bed was asked for."),
            _whole("guests adults", 1, 6, "The party counts {v} in all.", "The room is for a party of {v}."),
        ),
    ),
    Record(
        "recipe",
        _text("dish recipe name", lambda d: f"{d.pick(FOODS)} {d.pick(('soup', 'pie', 'salad', 'stew', 'cake'))}", "Today we make {v}.", "Here is how to cook {v}.", "Grandma loves {v}."),
        ("It", "The dish"),
        (
            _list("ingredients needs", FOODS, "You need {v}.", "The ingredients are {v}."),
            _whole("minutes time_minutes duration", 5, 180, "{s} takes {v} minutes.", "Plan {v} minutes for it."),
            _whole("servings serves", 1, 12, "{s} serves {v}.", "{s} is enough for {v} people."),
            _flag("vegetarian is_vegetarian", ("{s} is vegetarian.", "{s} has no meat."), ("{s} is not vegetarian.", "{s} contains meat.")),
            _enum("difficulty level", "easy medium hard", "The difficulty is {v}.", "Cooks call it {v}."),
            _text("cook chef", full_name, "The recipe is by {v}.", "{v} invented it."),
            _whole("temperature oven_temperature", 120, 240, "Set the oven to {v} degrees.", "{s} bakes at {v} degrees."),
        ),
    ),
    Record(
        "house",
        _text("address street", lambda d: f"{d.between(1, 240)} {invented(d)} Street", "The house at {v} is for sale.", "We visited {v}.", "There is a home at {v}."),
        ("It", "The house"),
        (
            _text("city town", city, "{s} is in {v}.", "The town is {v}."),
            _whole("bedrooms rooms", 1, 9, "{s} has {v} bedrooms.", "You get {v} bedrooms."),
            _whole("price asking_price", 100, 990, "The price is {v} thousand.", "The owners ask for {v} thousand."),
            _flag("garden has_garden", ("{s} has a garden.", "There is a garden behind it."), ("{s} has no garden.", "There is no garden.")),
            _whole("year_built built", 1850, 2023, "{s} was built in {v}.", "{s} dates from {v}."),
            _text("agent seller", full_name, "The agent is {v}.", "Call {v} for a visit."),
            _enum("heating heat_source", "gas oil wood electric", "Its heating is {v}.", "{s} is heated by {v}."),
        ),
    ),
    Record(
        "car",
        _text("model car name", lambda d: f"{invented(d)} {d.between(1, 9)}", "The {v} stands outside.", "They drive a {v}.", "A {v} is for rent."),
        ("It", "The car"),
        (
            _whole("year model_year", 1990, 2024, "{s} was made in {v}.", "{s} is from {v}."),
            _text("color colour", lambda d: d.pick(COLORS), "{s} is {v}.", "{s} has {v} paint."),
            _whole("doors door_count", 2, 5, "{s} has {v} doors.", "There are {v} doors."),
            _enum("fuel fuel_type", "petrol diesel electric hybrid", "The fuel type is {v}.", "Its drive is {v}."),
            _text("plate license_plate", code, "The plate reads {v}.", "Its plate is {v}."),
            _text("owner driver", full_name, "{s} is owned by {v}.", "The owner is {v}."),
            _flag("insured is_insured", ("{s} is insured.", "The insurance is paid."), ("{s} is not insured.", "{s} has no insurance.")),
        ),
    ),
    Record(
        "company",
        _text("company name", _brand, "{v} is growing.", "The news today is about {v}.", "An old friend works at {v}."),
        ("It", "The company"),
        (
            _text("ceo boss", full_name, "{v} runs it.", "The chief is {v}."),
            _text("city headquarters based_in", city, "{s} is based in {v}.", "Its main office is in {v}."),
            _whole("employees staff", 3, 999, "{s} employs {v} people.", "The staff counts {v}."),
            _whole("founded founded_year", 1880, 2023, "{s} was founded in {v}.", "{s} began in {v}."),
            _list("products sells", OBJECTS, "{s} makes things such as {v}.", "The shop window shows {v}."),
            _flag("public is_public", ("{s} is listed on the market.", "Anyone can buy its shares."), ("{s} is not listed on the market.", "{s} is in private hands.")),
            _enum("sector industry", "food energy retail transport health", "Its sector is {v}.", "{s} works in {v}."),
        ),
    ),
    Record(
        "match",
        _text("winner winning_team", lambda d: f"{invented(d)} {d.pick(('United', 'Rovers', 'City', 'Stars'))}", "{v} won the match.", "The match went to {v}.", "Fans of {v} are happy."),
        ("It", "The match"),
        (
            _text("loser losing_team", lambda d: f"{invented(d)} {d.pick(('United', 'Rovers', 'City', 'Stars'))}", "The other side, {v}, lost.", "{v} went home beaten."),
            _whole("goals winner_goals", 1, 9, "The winners scored {v}.", "They put {v} in the net."),
            _whole("spectators crowd", 50, 990, "{v} people watched.", "The crowd counted {v}."),
            _text("city venue_city", city, "{s} was played in {v}.", "The venue was in {v}."),
            _text("scorer best_player", full_name, "{v} scored first.", "The best player was {v}."),
            _flag("extra_time overtime", ("{s} went to extra time.", "Extra time was needed."), ("No extra time was needed.", "{s} ended in normal time.")),
            _text("date played_on", _date, "{s} was on {v}.", "They met on {v}."),
        ),
    ),
)  # fmt: skip

GROUP_KEYS = ("details", "info", "data", "more", "facts")
