"""Tools that the conversations offer: names, parameters, questions that need them, results and answers."""

# ruff: noqa: ARG005 -- every result maker takes the draw and the arguments, whether it needs them or not
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .draw import Draw
from .words import (
    ANIMALS,
    COLORS,
    FOODS,
    HOBBIES,
    OBJECTS,
    PLACES,
    WEEKDAYS,
    city,
    code,
    first_name,
    full_name,
    invented,
)

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Param:
    """One argument. `slot` names it in the questions; `names` are what the tool may call it."""

    slot: str
    names: tuple[str, ...]
    schema: dict[str, Any]
    note: str
    value: Callable[[Draw], Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool family. `result` makes what the tool returns; `answers` may use arguments and result keys."""

    names: tuple[str, ...]
    notes: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    result: Callable[[Draw, Values], Values]
    answers: tuple[str, ...]


def _str(slot: str, names: str, note: str, value: Callable[[Draw], str]) -> Param:
    return Param(slot, tuple(names.split()), {"type": "string"}, note, value)


def _int(slot: str, names: str, note: str, low: int, high: int) -> Param:
    return Param(slot, tuple(names.split()), {"type": "integer"}, note, lambda d: d.between(low, high))


def _enum(slot: str, names: str, note: str, options: str) -> Param:
    values = options.split()
    return Param(
        slot, tuple(names.split()), {"type": "string", "enum": values}, note, lambda d: d.pick(values)
    )


def _tool(names: str, notes: tuple[str, ...], params: tuple[Param, ...], asks: tuple[str, ...],
          result: Callable[[Draw, Values], Values], *answers: str) -> Tool:  # fmt: skip
    return Tool(tuple(names.split()), notes, params, asks, result, answers)


def _clock(draw: Draw) -> str:
    return f"{draw.between(0, 23):02d}:{draw.between(0, 11) * 5:02d}"


def _price(draw: Draw) -> float:
    return draw.between(1, 900) + draw.pick((0.1, 0.25, 0.5, 0.75, 0.99))


_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
_LANGUAGES = "French German Spanish Italian Dutch Polish Turkish Swedish"
_CURRENCIES = "EUR USD GBP JPY CHF SEK"
_MESSAGES = (
    "I am running late", "dinner is ready", "call me back", "the meeting moved to noon", "see you tomorrow",
    "thanks for the help", "the train is delayed", "happy birthday", "please bring the keys", "I will be home soon",
)  # fmt: skip
_TASKS = (
    "water the plants", "buy milk", "call the bank", "feed the cat", "pay the rent", "book the hotel", "clean the desk",
    "send the report", "pick up the parcel", "charge the phone", "read the contract", "fix the lamp",
)  # fmt: skip


def _city(slot: str = "city", names: str = "city location place town") -> Param:
    return _str(slot, names, "Name of the city.", city)


TOOLS = (
    _tool("get_weather weather current_weather lookup_weather", ("Current weather of a city.", "Get the weather for a place."),
          (_city(),),
          ("What is the weather in {city}?", "How is the weather in {city} right now?", "Is it raining in {city}?", "Weather in {city}?", "Do I need an umbrella in {city}?"),
          lambda d, v: {"temperature": d.between(-8, 38), "sky": d.pick(_SKIES)},
          "In {city} it is {temperature} degrees and {sky}.", "The weather in {city} is {sky}, {temperature} degrees."),
    _tool("get_forecast weather_forecast forecast", ("Weather forecast for some days.", "Forecast of a city for the next days."),
          (_city(), _int("days", "days num_days", "Number of days.", 2, 10)),
          ("Give me the forecast for {city} for the next {days} days.", "What will the weather be in {city} over {days} days?", "I need a {days} day forecast for {city}."),
          lambda d, v: {"high": d.between(12, 36), "low": d.between(-8, 11)},
          "For the next {days} days in {city}, expect between {low} and {high} degrees."),
    _tool("get_time current_time time_in", ("Local time of a city.", "What time it is in a place."),
          (_city(),),
          ("What time is it in {city}?", "Tell me the local time in {city}.", "Time in {city} now?"),
          lambda d, v: {"time": _clock(d)},
          "It is {time} in {city}.", "The local time in {city} is {time}."),
    _tool("calculate calculator compute evaluate", ("Evaluate an arithmetic expression.", "Compute the value of an expression."),
          (_str("expression", "expression formula input", "The expression, such as 2*3.", lambda d: f"{d.between(100, 9999)} {d.pick('+-*')} {d.between(100, 9999)}"),),
          ("Use the calculator: {expression}", "Please compute {expression} with the tool.", "Calculate {expression} exactly."),
          lambda d, v: {"value": _evaluate(v["expression"])},
          "{expression} = {value}.", "The result is {value}."),
    _tool("convert_currency exchange currency_convert", ("Convert money between currencies.", "Currency conversion."),
          (_int("amount", "amount value sum", "Amount of money.", 1, 5000), _enum("source", "source from_currency from", "Currency to convert from.", _CURRENCIES), _enum("target", "target to_currency to", "Currency to convert to.", _CURRENCIES)),
          ("How much is {amount} {source} in {target}?", "Convert {amount} {source} to {target}.", "I have {amount} {source}. What is that in {target}?"),
          lambda d, v: {"converted": round(v["amount"] * d.between(50, 190) / 100, 2)},
          "{amount} {source} is {converted} {target}."),
    _tool("get_stock_price stock_price quote", ("Latest price of a stock.", "Look up a share price by symbol."),
          (_str("symbol", "symbol ticker stock", "Stock symbol.", lambda d: "".join(d.pick("ABCDEFGHKLMNPRST") for _ in range(d.between(3, 4)))),),
          ("What is the price of {symbol} stock?", "How much is one share of {symbol}?", "Look up the stock {symbol}."),
          lambda d, v: {"price": _price(d)},
          "{symbol} trades at {price} dollars.", "One share of {symbol} costs {price} dollars."),
    _tool("send_email email mail_send", ("Send an email.", "Write an email to someone."),
          (_str("to", "to recipient address", "Who gets it.", lambda d: f"{first_name(d).lower()}@{d.pick(('mail', 'post', 'box'))}.example"), _str("body", "body text message", "Text of the email.", lambda d: d.pick(_MESSAGES))),
          ("Send an email to {to} saying: {body}", "Email {to} that {body}.", "Write to {to}: {body}"),
          lambda d, v: {"status": "sent"},
          "Your email to {to} was sent.", "Done, I emailed {to}."),
    _tool("send_message message_contact text_contact", ("Send a text message to a contact.", "Text someone."),
          (_str("contact", "contact to name", "Name of the contact.", first_name), _str("text", "text message content", "What to say.", lambda d: d.pick(_MESSAGES))),
          ("Text {contact}: {text}", "Send a message to {contact} that says {text}.", "Tell {contact} that {text}."),
          lambda d, v: {"delivered": True},
          "I sent your message to {contact}.", "{contact} has your message."),
    _tool("set_alarm alarm create_alarm", ("Set an alarm.", "Create an alarm at a time."),
          (_str("time", "time at when", "Time of day as HH:MM.", _clock),),
          ("Set an alarm for {time}.", "Wake me at {time}.", "I need an alarm at {time}."),
          lambda d, v: {"ok": True},
          "Your alarm is set for {time}.", "Done: the alarm will ring at {time}."),
    _tool("set_timer timer start_timer", ("Start a countdown timer.", "Start a timer for some minutes."),
          (_int("minutes", "minutes duration length", "Minutes to count down.", 1, 120),),
          ("Start a timer for {minutes} minutes.", "Set a {minutes} minute timer.", "Count down {minutes} minutes."),
          lambda d, v: {"started": True},
          "The timer runs for {minutes} minutes.", "Your {minutes} minute timer has started."),
    _tool("create_reminder add_reminder remind", ("Create a reminder.", "Remind the user of something."),
          (_str("task", "task what text", "What to remember.", lambda d: d.pick(_TASKS)), _str("day", "day on date", "Day of the week.", lambda d: d.pick(WEEKDAYS))),
          ("Remind me to {task} on {day}.", "On {day} I have to {task}. Please remind me.", "Add a reminder for {day}: {task}"),
          lambda d, v: {"id": d.between(10, 999)},
          "I will remind you to {task} on {day}.", "Reminder {id} is set: {task} on {day}."),
    _tool("add_event create_event calendar_add", ("Add an event to the calendar.", "Put something in the calendar."),
          (_str("title", "title event name", "Name of the event.", lambda d: f"{d.pick(('lunch', 'meeting', 'call', 'dinner'))} with {first_name(d)}"), _str("day", "day date on", "Day of the week.", lambda d: d.pick(WEEKDAYS)), _str("time", "time start at", "Start as HH:MM.", _clock)),
          ("Put {title} on {day} at {time} in my calendar.", "Schedule {title} for {day}, {time}.", "Add {title} to the calendar on {day} at {time}."),
          lambda d, v: {"saved": True},
          "I added {title} on {day} at {time}.", "{title} is in your calendar for {day} at {time}."),
    _tool("search_web web_search search", ("Search the web.", "Find pages about something."),
          (_str("query", "query q text", "What to search for.", lambda d: f"{d.pick(('history', 'price', 'care', 'meaning', 'size'))} of {d.pick(('a', 'the'))} {d.pick(ANIMALS + OBJECTS + PLACES)}"),),
          ("Search the web for {query}.", "Look up {query} online.", "Find pages about {query}."),
          lambda d, v: {"results": d.between(2, 900), "first": invented(d) + " Guide"},
          'I found {results} pages. The first one is "{first}".'),
    _tool("translate translate_text translation", ("Translate text.", "Translate words into a language."),
          (_str("text", "text words input", "Text to translate.", lambda d: d.pick(("good morning", "thank you", "where is the station", "how are you", "good night", *_MESSAGES))), _enum("language", "language target to", "Language to translate into.", _LANGUAGES)),
          ("Translate '{text}' into {language}.", "How do you say '{text}' in {language}?", "Put '{text}' into {language}, please."),
          lambda d, v: {"translation": f"{invented(d).lower()} {invented(d).lower()}"},
          "In {language} it is '{translation}'.", "'{text}' in {language} is '{translation}'."),
    _tool("get_order_status order_status track_order", ("Status of an order.", "Track an order by its number."),
          (_str("order_id", "order_id order number", "Order number.", code),),
          ("Where is my order {order_id}?", "What is the status of order {order_id}?", "Track order {order_id}."),
          lambda d, v: {"status": d.pick(("packed", "shipped", "delivered", "waiting", "delayed"))},
          "Order {order_id} is {status}.", "The status of order {order_id} is: {status}."),
    _tool("find_restaurant restaurant_search find_food", ("Find a restaurant.", "Search restaurants by dish and city."),
          (_str("dish", "dish food cuisine", "What to eat.", lambda d: d.pick(FOODS)), _city()),
          ("Find a place to eat {dish} in {city}.", "Where can I get {dish} in {city}?", "I want {dish} in {city}."),
          lambda d, v: {"name": f"{invented(d)} Kitchen", "stars": d.between(2, 5)},
          "Try {name} in {city}, which has {stars} stars."),
    _tool("book_table reserve_table table_booking", ("Book a table.", "Reserve a table at a restaurant."),
          (_str("restaurant", "restaurant place name", "Name of the restaurant.", lambda d: f"{invented(d)} Kitchen"), _int("people", "people guests party_size", "Number of guests.", 1, 12), _str("time", "time at when", "Time as HH:MM.", _clock)),
          ("Book a table for {people} at {restaurant} at {time}.", "Reserve {restaurant} for {people} people, {time}.", "We are {people} and want to eat at {restaurant} at {time}."),
          lambda d, v: {"confirmation": code(d)},
          "Your table for {people} at {restaurant} is booked. The code is {confirmation}."),
    _tool("search_flights find_flight flights", ("Search flights.", "Find flights between two cities."),
          (_str("origin", "origin from source", "City to leave from.", city), _str("destination", "destination to arrival", "City to fly to.", city), _str("day", "day date", "Day of the week.", lambda d: d.pick(WEEKDAYS))),
          ("Find a flight from {origin} to {destination} on {day}.", "I want to fly from {origin} to {destination} on {day}.", "Are there flights to {destination} from {origin} on {day}?"),
          lambda d, v: {"flight": code(d), "price": d.between(40, 900)},
          "Flight {flight} goes from {origin} to {destination} on {day} for {price} dollars."),
    _tool("play_music play_song music", ("Play music.", "Play a song by an artist."),
          (_str("song", "song title track", "Name of the song.", lambda d: f"{d.pick(COLORS).capitalize()} {d.pick(OBJECTS).capitalize()}"), _str("artist", "artist band singer", "Who plays it.", full_name)),
          ("Play {song} by {artist}.", "I want to hear {song} from {artist}.", "Put on {song} by {artist}."),
          lambda d, v: {"playing": True},
          "Now playing {song} by {artist}.", "Here is {song} by {artist}."),
    _tool("set_light lights light_control", ("Control the lights of a room.", "Switch a light."),
          (_str("room", "room place where", "Name of the room.", lambda d: d.pick(("kitchen", "bedroom", "office", "hall", "bathroom", "garage"))), _enum("state", "state status mode", "New state.", "on off dim")),
          ("Switch the light in the {room} to {state}.", "Set the {room} light to {state}.", "Turn the {room} lights {state}."),
          lambda d, v: {"ok": True},
          "The light in the {room} is now {state}.", "Done, the {room} light is {state}."),
    _tool("set_temperature thermostat heating", ("Set the thermostat.", "Change the room temperature."),
          (_int("degrees", "degrees temperature value", "Target in degrees.", 14, 28),),
          ("Set the heating to {degrees} degrees.", "Make it {degrees} degrees in here.", "Change the thermostat to {degrees}."),
          lambda d, v: {"ok": True},
          "The heating is set to {degrees} degrees.", "Done: {degrees} degrees."),
    _tool("get_distance distance route_length", ("Distance between two cities.", "How far apart two places are."),
          (_str("start", "start from origin", "First city.", city), _str("end", "end to destination", "Second city.", city)),
          ("How far is it from {start} to {end}?", "What is the distance between {start} and {end}?", "Distance from {start} to {end}?"),
          lambda d, v: {"kilometers": d.between(20, 9000)},
          "It is {kilometers} kilometers from {start} to {end}."),
    _tool("get_user find_user lookup_user", ("Look up a user by id.", "Find the record of a user."),
          (_int("user_id", "user_id id number", "Number of the user.", 1, 9999),),
          ("Who is user {user_id}?", "Look up user {user_id}.", "Show me the record of user number {user_id}."),
          lambda d, v: {"name": full_name(d), "city": city(d)},
          "User {user_id} is {name} from {city}.", "That is {name}, who lives in {city}."),
    _tool("add_to_cart cart_add buy_item", ("Add an item to the shopping cart.", "Put something in the cart."),
          (_str("item", "item product name", "What to buy.", lambda d: d.pick(OBJECTS + FOODS)), _int("quantity", "quantity count amount", "How many.", 1, 40)),
          ("Add {quantity} of the item {item} to my cart.", "Put {quantity} times {item} in the cart.", "I want to buy {item}, {quantity} of it."),
          lambda d, v: {"total": _price(d)},
          "I added {item}, {quantity} of it. The cart is now {total} dollars."),
    _tool("read_file open_file cat_file", ("Read a file.", "Show the text of a file."),
          (_str("path", "path file filename", "Path of the file.", lambda d: f"{invented(d).lower()}/{d.pick(OBJECTS)}.{d.pick(('txt', 'md', 'csv', 'log'))}"),),
          ("Read the file {path}.", "What is in {path}?", "Open {path} for me."),
          lambda d, v: {"lines": d.between(1, 900), "first_line": f"{d.pick(HOBBIES)} notes"},
          'The file has {lines} lines. The first one is "{first_line}".'),
    _tool("roll_dice dice random_dice", ("Roll dice.", "Roll some dice with so many sides."),
          (_int("count", "count number dice", "How many dice.", 1, 6), _int("sides", "sides faces", "Sides of a die.", 4, 20)),
          ("Roll {count} dice with {sides} sides.", "Throw {count} dice of {sides} sides each."),
          lambda d, v: {"total": sum(d.between(1, v["sides"]) for _ in range(v["count"]))},
          "You rolled a total of {total}.", "The dice show {total} in all."),
)  # fmt: skip


def _evaluate(expression: str) -> int:
    left, sign, right = expression.split()
    a, b = int(left), int(right)
    return a + b if sign == "+" else a - b if sign == "-" else a * b
