"""The tools on offer: names, arguments, requests, results and answers."""

# ruff: noqa: ARG005 -- one signature for all results

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .draw import Draw
from .records import COUNTRIES, clock, date, email
from .words import (
    ANIMALS,
    COLORS,
    FOODS,
    HOBBIES,
    JOBS,
    OBJECTS,
    PLACES,
    WEEKDAYS,
    city,
    code,
    first_name,
    full_name,
    invented,
    listed,
)

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Param:
    """An argument: the slot that requests fill, names it may have, its schema and a value.

    A request without the slot of an optional argument leaves it out; without one that is required, the model asks
    `question`. `texts` are values that are not said as they are written, `forms` parts of a value
    that may be said in another way.
    """

    slot: str
    names: tuple[str, ...]
    note: str
    schema: dict[str, Any]
    value: Callable[[Draw], Any]
    question: str = ""
    texts: tuple[tuple[Any, str], ...] = ()
    forms: tuple[tuple[str, str], ...] = ()

    @property
    def required(self) -> bool:
        return bool(self.question)

    def said(self, draw: Draw, value: Any) -> str:
        """The value as a request says it."""
        if self.forms and draw.chance(0.5):
            old, new = draw.pick([form for form in self.forms if form[0] in value] or [("", "")])
            return str(value).replace(old, new) if old else str(value)
        for known, text in self.texts:
            if known == value:
                return text
        return listed([str(v) for v in value]) if isinstance(value, list) else str(value)


FOLLOW = ("(And|What about|How about|Now|And for|The same for) {v}?", "{v}?", "and {v}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `asks` are patterns that name arguments by slot, `vague` lack one that is required, `answers` also use results.

    Tools of one `group` do nearly the same, so none stands for another that is not offered. `follow` asks again with
    another value of the last required argument.
    """

    names: tuple[str, ...]
    notes: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    result: Callable[[Draw, Values], dict[str, Any]]
    answers: tuple[str, ...]
    vague: tuple[str, ...] = ()
    group: str = ""
    follow: tuple[str, ...] = FOLLOW


def text(slot: str, names: str, note: str, value: Callable[[Draw], str], question: str = "") -> Param:
    return Param(slot, tuple(names.split()), note, {"type": "string"}, value, question)


def _int(slot: str, names: str, note: str, low: int, high: int, question: str = "") -> Param:
    return Param(
        slot, tuple(names.split()), note, {"type": "integer"}, lambda d: d.between(low, high), question
    )


def _enum(slot: str, names: str, note: str, options: str, question: str = "") -> Param:
    values = options.split()
    schema = {"type": "string", "enum": values}
    return Param(slot, tuple(names.split()), note, schema, lambda d: d.pick(values), question)


def _flag(slot: str, names: str, note: str, yes: str, no: str, question: str = "") -> Param:
    texts = ((True, yes), (False, no))
    return Param(
        slot, tuple(names.split()), note, {"type": "boolean"}, lambda d: d.chance(0.5), question, texts
    )


def _list(slot: str, names: str, note: str, value: Callable[[Draw], list[str]], question: str = "") -> Param:
    schema = {"type": "array", "items": {"type": "string"}}
    return Param(slot, tuple(names.split()), note, schema, value, question)


def _tool(names: str, notes: tuple[str, ...], params: tuple[Param, ...], asks: tuple[str, ...],
          result: Callable[[Draw, Values], dict[str, Any]], *answers: str, vague: tuple[str, ...] = (), group: str = "",
          follow: tuple[str, ...] = ()) -> Tool:  # fmt: skip
    return Tool(tuple(names.split()), notes, params, asks, result, answers, vague, group, (*follow, *FOLLOW))


def price(draw: Draw) -> float:
    return draw.between(2, 300) + draw.pick((0.25, 0.5, 0.75, 0.99))


_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
_LANGUAGES = "French German Spanish Italian Dutch"
_CURRENCIES = "EUR USD GBP JPY"
_MESSAGES = (
    "I am running late", "dinner is ready", "call me back", "the meeting moved to noon", "see you tomorrow", "thanks for the help",
    "the train is delayed", "happy birthday", "please bring the keys", "I will be home soon", "the door is open", "we won the game",
    "lunch is at one", "good luck today", "I found your hat", "the cat is fine", "where are you", "the report is done",
)  # fmt: skip
_TASKS = (
    "water the plants", "buy milk", "call the bank", "feed the cat", "pay the rent", "book the hotel", "clean the desk", "send the report",
    "pick up the parcel", "charge the phone", "read the contract", "fix the lamp", "walk the dog", "wash the car", "buy bread", "renew the ticket",
)  # fmt: skip
_PHRASES = (
    "good morning",
    "thank you",
    "where is the station",
    "how are you",
    "good night",
    "I am hungry",
    *_MESSAGES,
)


def _place(draw: Draw) -> str:
    return f"{city(draw)}, {draw.pick(COUNTRIES)}" if draw.chance(0.05) else city(draw)


def _city(slot: str = "city", names: str = "city location place town") -> Param:
    return text(slot, names, "Name of the city.", _place, "Which city?")


def _sum(draw: Draw) -> str:
    high = draw.pick((20, 100, 1000, 10000))
    return f"{draw.between(2, high)} {draw.pick('+-*')} {draw.between(2, high)}"


TOOLS = (
    _tool("get_weather weather current_weather get_current_weather get_temperature", ("Get the current weather of a city.", "Get the weather for a place.", "Get the current weather in a given location.", "Get current temperature for a given location."),
          (_city(), _enum("unit", "unit units scale", "Unit of the temperature.", "celsius fahrenheit")),
          ("(What is|What's|How is|How's) the weather[ like] in {city}[ right now| today| now|]?", "Is it (raining|cold|warm|sunny|hot|snowing) in {city}[ now| today|]?", "weather in {city}", "Weather {city}", "{city} weather", "(Do|Will) I need (an umbrella|a coat|a jacket) in {city}[ today|]?", "(What is|How is) the weather in {city} in {unit}?", "(Tell me|Give me|Check|Get|Look up|Show me) the weather (in|for) {city}[, in {unit}|].", "How (warm|cold|hot) is it in {city}[, in {unit}| now| today|]?", "(I am|I'm) (going|flying|travelling) to {city}[ today|]. (What is the weather there|How is the weather|What should I wear)?", "What is the temperature in {city}[ in {unit}|]?"),
          lambda d, v: {"temperature": d.between(-8, 38), "sky": d.pick(_SKIES)},
          "In {city} it is {temperature} degrees and {sky}.", "It is {temperature} degrees and {sky} in {city}.",
          vague=("(What is|What's|How is) the weather[ like][ today| now|]?", "weather please", "Is it raining?", "(Check|Get|Tell me) the weather.", "Do I need an umbrella?", "How is the weather there?"), group="weather", follow=("(And|What about|How about) in {v}?", "and in {v}?", "In {v}?")),
    _tool("get_forecast weather_forecast forecast", ("Get the weather forecast for some days.", "Forecast the weather of a city."),
          (_city(), _int("days", "days num_days", "Number of days.", 2, 10, "For how many days?")),
          ("(Give me|Show me|Get|I need) the forecast for {city} for [the next |]{days} days.", "What will the weather be in {city} over [the next ]{days} days?", "(I need|Give me) a {days} day forecast for {city}.", "{days} day forecast {city}", "forecast {city} {days} days"),
          lambda d, v: {"high": d.between(12, 36), "low": d.between(-8, 11)},
          "For the next {days} days in {city}, expect between {low} and {high} degrees.",
          vague=("(Give me|Show me) the forecast for {city}.", "forecast for {city}"), group="weather"),
    _tool("get_time current_time time_in", ("Get the local time of a city.", "Tell what time it is in a city."),
          (_city(),),
          ("What time is it in {city}[ now| right now|]?", "(Tell me|Give me|What is|What's) the [local |current ]time in {city}.", "time in {city}[ now|]?", "What's the time in {city}?", "How late is it in {city}?", "(Can|Should) I call somebody in {city} now, or is it night there?"),
          lambda d, v: {"time": clock(d)},
          "It is {time} in {city}.", "In {city} it is {time}.",
          vague=("What time is it[ there|]?", "What's the time?", "Tell me the local time."), group="time", follow=("(And|What about|How about) in {v}?", "And in {v}")),
    _tool("calculate calculator compute evaluate", ("Calculate the value of an expression.", "Evaluate an arithmetic expression."),
          (replace(text("expression", "expression formula input", "The expression, such as 2*3.", _sum, "What should I calculate?"), forms=(("+", "plus"), (" + ", "+"), ("-", "minus"), (" - ", "-"), ("*", "times"), (" * ", "*"), ("*", "x"))),),
          ("What is {expression}?", "(Calculate|Compute|Work out|Evaluate|Solve) {expression}[ exactly| please|].", "{expression}", "{expression} = ?", "How much is {expression}?", "(Use the calculator|Use your tool|With the calculator): {expression}", "(Please|Can you) (compute|calculate) {expression}[ with the tool|]", "I need the result of {expression}."),
          lambda d, v: {"value": evaluate(v["expression"])},
          "{expression} = {value}.", "The result is {value}.",
          vague=("(Calculate|Compute) something[ for me|].", "(I need|Do|Help me with) a calculation.", "Use the calculator."), group="sum"),
    _tool("convert_currency exchange currency_convert", ("Convert money between currencies.", "Change an amount into another currency."),
          (_int("amount", "amount value sum", "Amount of money.", 1, 5000, "How much money?"), _enum("source", "source from_currency from", "Currency to convert from.", _CURRENCIES, "From which currency?"), _enum("target", "target to_currency to", "Currency to convert to.", _CURRENCIES, "Into which currency?")),
          ("How (much|many) is {amount} {source} in {target}?", "(Convert|Change|Exchange) {amount} {source} (to|into) {target}.", "I have {amount} {source}. What is that in {target}?", "{amount} {source} (in|to) {target}", "What do I get for {amount} {source} in {target}?"),
          lambda d, v: {"converted": round(v["amount"] * d.between(50, 190) / 100, 2)},
          "{amount} {source} is {converted} {target}.",
          vague=("(Convert|Change) {amount} {source}.", "How much is {amount} {source}?"), group="money", follow=("(And|What about) in {v}?",)),
    _tool("get_stock_price stock_price quote", ("Get the price of a stock.", "Look up a share price by symbol."),
          (text("symbol", "symbol ticker stock", "Stock symbol.", lambda d: "".join(d.pick("ABCDEFGHKLMNPRST") for _ in range(d.between(3, 4))), "Which stock?"),),
          ("What is the price of {symbol}[ stock| shares|]?", "How much is (one share|a share) of {symbol}?", "(Look up|Check|Get) the stock {symbol}.", "{symbol} stock price", "(How is|How's) {symbol} doing[ today|]?", "(What is|What's) {symbol} (trading|worth)[ at|]?"),
          lambda d, v: {"price": price(d)},
          "{symbol} trades at {price} dollars.", "One share of {symbol} costs {price} dollars.",
          vague=("What is the stock price?", "(Check|Look up) a stock[ price|] for me."), group="money"),
    _tool("send_email email mail_send", ("Send an email.", "Write an email to someone."),
          (text("to", "to recipient address", "Who gets it.", email, "Who should get the email?"), text("body", "body text message", "Text of the email.", lambda d: d.pick(_MESSAGES), "What should the email say?")),
          ("(Send an email|Send a mail|Write an email|Write) to {to} (saying|that says|with the text): {body}", "(Email|Mail) {to} that {body}.", "Write to {to}: {body}", "(Send|Mail) {to} (this|the message): {body}", "(Please|Can you) (email|write to) {to}: {body}"),
          lambda d, v: {"status": "sent"},
          "Your email to {to} was sent.", "Done, I sent the email to {to}.",
          vague=("(Send an email|Write an email|Write|Email) to {to}.", "Email {to}", "(Send|Write) an email that says: {body}"), group="message"),
    _tool("send_message message_contact text_contact", ("Send a text message to a contact.", "Text someone."),
          (text("contact", "contact to name", "Name of the contact.", first_name, "Who should get the message?"), text("text", "text message content", "What to say.", lambda d: d.pick(_MESSAGES), "What should the message say?")),
          ("(Text|Message) {contact}: {text}", "(Send|Write) a message to {contact} (that says|saying|with) {text}.", "(Tell|Text|Let) {contact} (that|know) {text}.", "(Please|Can you) (text|message|tell) {contact}: {text}", "Send {contact} the message {text}."),
          lambda d, v: {"delivered": True},
          "I sent your message to {contact}.", "{contact} has your message.",
          vague=("(Text|Message) {contact}[ for me|].", "Send a message to {contact}.", "(Send|Write) a message: {text}"), group="message"),
    _tool("set_alarm alarm create_alarm", ("Set an alarm.", "Create an alarm at a time."),
          (text("time", "time at when", "Time of day as HH:MM.", clock, "For what time?"), text("label", "label name title", "Name of the alarm.", lambda d: d.pick((*HOBBIES, "work", "school", "breakfast")))),
          ("Set an alarm for {time}[ called {label}|].", "Wake me[ up|] at {time}[ tomorrow|].", "(I need|Make|Create|I want) an alarm (at|for) {time}[ with the label {label}|].", "alarm {time}", "I (have to|must) get up at {time}.", "(Please|Can you) (wake me at|set an alarm for) {time}?"),
          lambda d, v: {"ok": True},
          "Your alarm is set for {time}.", "Done: the alarm will ring at {time}.",
          vague=("Set an alarm[ for tomorrow| for me|].", "Wake me up[ tomorrow|].", "I need an alarm."), group="clock", follow=("(And|Also) at {v}[ please|].",)),
    _tool("set_timer timer start_timer", ("Start a timer for some minutes.", "Set a countdown timer."),
          (_int("minutes", "minutes duration length", "Minutes to count down.", 2, 120, "For how many minutes?"),),
          ("(Start|Set|Make) a timer for {minutes} minutes.", "(Set|Start) a {minutes} minute timer.", "Count down {minutes} minutes.", "{minutes} minute timer", "timer {minutes} min", "(Tell me|Beep|Ring) when {minutes} minutes are over.", "My (eggs|pasta|cake|tea) (need|needs) {minutes} minutes. (Set|Start) a timer."),
          lambda d, v: {"started": True},
          "The timer runs for {minutes} minutes.", "Your timer for {minutes} minutes has started.",
          vague=("(Start|Set) a timer[ please|].", "I need a timer."), group="clock"),
    _tool("create_reminder add_reminder remind", ("Create a reminder.", "Remind the user of a task."),
          (text("task", "task what text", "What to remember.", lambda d: d.pick(_TASKS), "What should I remind you of?"), text("day", "day on date", "Day of the week.", lambda d: d.pick(WEEKDAYS), "On which day?")),
          ("Remind me to {task} on {day}.", "On {day} I (have to|must) {task}. [Please |]remind me.", "(Add|Set|Make|Create) a reminder for {day}: {task}", "(Don't let me forget|I must not forget) to {task} on {day}.", "reminder {day} {task}"),
          lambda d, v: {"id": d.between(10, 999)},
          "I will remind you to {task} on {day}.", "Your reminder is set: {task} on {day}.",
          vague=("Remind me to {task}.", "(Set|Create) a reminder for {day}.", "I have to {task}. Remind me."), group="clock"),
    _tool("add_event create_event calendar_add", ("Add an event to the calendar.", "Put an event in the calendar."),
          (text("title", "title event name", "Name of the event.", lambda d: f"{d.pick(('lunch', 'meeting', 'call', 'dinner', 'breakfast', 'walk'))} with {first_name(d)}", "What is the event?"), text("day", "day date on", "Day of the week.", lambda d: d.pick(WEEKDAYS), "On which day?"), text("time", "time start at", "Start as HH:MM.", clock, "At what time?")),
          ("(Put|Add|Enter) {title} (on|for) {day} at {time} (in|into|to) my calendar.", "Schedule {title} for {day}, {time}.", "(Plan|Book) {title} on {day} at {time}.", "calendar: {title} {day} {time}", "I have {title} on {day} at {time}. (Add it to|Put it in) my calendar."),
          lambda d, v: {"saved": True},
          "I added {title} on {day} at {time}.", "{title} is in your calendar for {day} at {time}.",
          vague=("(Put|Add) {title} on {day} (in|to) my calendar.", "Schedule {title} for {day}."), group="clock"),
    _tool("invite_people send_invites invite", ("Invite people to an event.", "Send invitations."),
          (_list("people", "people guests names", "Names of the guests.", lambda d: [first_name(d) for _ in range(d.between(1, 3))], "Who should I invite?"), text("event", "event title occasion", "Name of the event.", lambda d: d.pick(("lunch", "dinner", "the party", "the meeting", "the picnic", "the concert")), "To which event?")),
          ("Invite {people} to {event}.", "(Send invitations|Send invites) for {event} to {people}.", "I want {people} at {event}. Invite them.", "(Please|Can you) invite {people} to {event}?"),
          lambda d, v: {"sent": len(v["people"])},
          "I invited {people} to {event}.", vague=("(Send invitations|Invite people) for {event}.", "Invite {people}."), group="message"),
    _tool("search_web web_search search", ("Search the web.", "Find pages about something."),
          (text("query", "query q text", "What to search for.", lambda d: f"{d.pick(('history', 'price', 'care', 'meaning', 'size'))} of {d.pick(('a', 'the'))} {d.pick(ANIMALS + OBJECTS + PLACES)}", "What should I search for?"),),
          ("Search[ the web|] for {query}.", "(Look up|Find|Google) {query} online.", "Find (pages|something) about {query}.", "search {query}", "(Can you|Please) (look up|search for) {query}[ on the web|]?", "What does the web say about {query}?"),
          lambda d, v: {"results": d.between(2, 900), "first": invented(d) + " Guide"},
          'I found {results} pages. The first one is "{first}".', vague=("Search the web[ for me|].", "(Look something up|Search) for me."), group="search"),
    _tool("translate translate_text translation", ("Translate text into a language.", "Translate words."),
          (text("text", "text words input", "Text to translate.", lambda d: d.pick(_PHRASES), "What should I translate?"), _enum("language", "language target to", "Language to translate into.", _LANGUAGES, "Into which language?")),
          ("Translate '{text}' (into|to) {language}.", "How do you say '{text}' in {language}?", "Put '{text}' into {language}[, please].", "'{text}' in {language}?", "What is '{text}' in {language}?", "translate to {language}: {text}"),
          lambda d, v: {"translation": f"{invented(d).lower()} {invented(d).lower()}"},
          "In {language} it is '{translation}'.", "'{text}' in {language} is '{translation}'.", vague=("Translate '{text}'.", "Translate something (into|to) {language}."), group="language", follow=("And in {v}?", "(Now|And) (to|into|in) {v}[ please|]")),
    _tool("get_order_status order_status track_order", ("Get the status of an order.", "Track an order by its number."),
          (text("order_id", "order_id order number", "Order number.", code, "What is the number of your order?"),),
          ("Where is my order {order_id}?", "(What is|What's) the status of order {order_id}?", "(Track|Check|Follow) [my |]order {order_id}.", "order {order_id} status", "When does (my |)order {order_id} come?", "I ordered something, the number is {order_id}. Where is it?", "Has order {order_id} been (sent|shipped)?"),
          lambda d, v: {"status": d.pick(("packed", "shipped", "delivered", "waiting", "delayed"))},
          "Order {order_id} is {status}.", "Your order {order_id} is {status}.", vague=("Where is my order?", "(Track|Check) my order.", "When does my package come?"), group="order"),
    _tool("find_restaurant restaurant_search find_food", ("Find a restaurant.", "Search restaurants by dish and city."),
          (text("dish", "dish food cuisine", "What to eat.", lambda d: d.pick(FOODS), "What would you like to eat?"), _city()),
          ("Find a (place|restaurant) to eat {dish} in {city}.", "Where can I (get|eat) {dish} in {city}?", "I want {dish} in {city}.", "restaurant with {dish} in {city}", "(I am|I'm) hungry for {dish} and I am in {city}. Where should I go?"),
          lambda d, v: {"name": f"{invented(d)} Kitchen", "stars": d.between(2, 5)},
          "Try {name} in {city}, which has {stars} stars.", vague=("Find a restaurant in {city}.", "Where can I get {dish}?", "I want to eat {dish}."), group="food", follow=("And in {v}?",)),
    _tool("book_table reserve_table table_booking", ("Book a table at a restaurant.", "Reserve a table."),
          (text("restaurant", "restaurant place name", "Name of the restaurant.", lambda d: f"{invented(d)} Kitchen", "At which restaurant?"), _int("people", "people guests party_size", "Number of guests.", 1, 12, "For how many people?"), text("time", "time at when", "Time as HH:MM.", clock, "At what time?")),
          ("Book a table for {people} at {restaurant} at {time}.", "Reserve {restaurant} for {people} people, {time}.", "We are {people} and want to eat at {restaurant} at {time}.", "table for {people}, {restaurant}, {time}"),
          lambda d, v: {"confirmation": code(d)},
          "Your table at {restaurant} is booked. The code is {confirmation}.", vague=("Book a table (at|in) {restaurant} for {people}.", "Book a table at {restaurant} at {time}."), group="food"),
    _tool("search_flights find_flight flights", ("Search flights.", "Find flights between two cities."),
          (text("origin", "origin from source", "City to leave from.", city, "From which city?"), text("destination", "destination to arrival", "City to fly to.", city, "To which city?"), text("day", "day date", "Day of the week.", lambda d: d.pick(WEEKDAYS), "On which day?")),
          ("(Find|Search|Book|Look for) a flight from {origin} to {destination} on {day}.", "I (want|need|have) to fly from {origin} to {destination} on {day}.", "Are there flights to {destination} from {origin} on {day}?", "flights {origin} to {destination} {day}"),
          lambda d, v: {"flight": code(d), "price": d.between(40, 900)},
          "Flight {flight} goes from {origin} to {destination} on {day} for {price} dollars.", vague=("(Find|Search) a flight from {origin} to {destination}.", "I want to fly to {destination} on {day}."), group="travel", follow=("And on {v}?",)),
    _tool("play_music play_song music", ("Play music.", "Play a song."),
          (text("song", "song title track", "Name of the song.", lambda d: f"{d.pick(COLORS).capitalize()} {d.pick(OBJECTS).capitalize()}", "Which song?"), text("artist", "artist band singer", "Who plays it.", full_name)),
          ("(Play|Put on|Start) {song}[ by {artist}|][, please|].", "I (want|would like) to (hear|listen to) {song}[ by {artist}|].", "play {song}", "(Please|Can you) play {song} by {artist}?"),
          lambda d, v: {"playing": True},
          "Now playing {song}.", "{song} is playing.", vague=("Play (some music|a song|music)[ please|].", "I want to hear music.", "Play something by {artist}."), group="music"),
    _tool("set_light lights light_control", ("Control the lights of a room.", "Switch a light."),
          (text("room", "room place where", "Name of the room.", lambda d: d.pick(("kitchen", "bedroom", "office", "hall", "bathroom", "garage", "cellar", "attic", f"{invented(d)} room")), "In which room?"), _enum("state", "state status mode", "New state.", "on off dim", "Should the light be on, off or dim?")),
          ("(Switch|Set|Turn) the light in the {room} (to |){state}.", "Set the {room} light to {state}.", "Turn the {room} lights {state}.", "{room} light {state}", "(Please|Can you) (switch|turn|set) the lights in the {room} {state}?"),
          lambda d, v: {"ok": True},
          "The light in the {room} is now {state}.", "Done, the {room} light is {state}.", vague=("Turn the light {state}.", "(Switch|Change) the light in the {room}.", "Lights {state}[ please|]."), group="home"),
    _tool("lock_door door_lock door_control", ("Lock or unlock a door.", "Control the lock of a door."),
          (text("door", "door name which", "Name of the door.", lambda d: d.pick(("front door", "back door", "garage door", "garden gate", "cellar door")), "Which door?"), _flag("locked", "locked lock closed", "Whether it is locked.", "lock", "unlock", "Should I lock it or unlock it?")),
          ("[Please |Can you ]{locked} the {door}.", "{locked} {door}", "I want you to {locked} the {door}[ now|]."),
          lambda d, v: {"ok": True},
          "Done with the {door}.", "The {door} is done.", group="home"),
    _tool("set_temperature thermostat heating", ("Set the temperature of the room.", "Set the thermostat."),
          (_int("degrees", "degrees temperature value", "Target in degrees.", 14, 28, "To how many degrees?"),),
          ("(Set|Turn|Change) the (heating|thermostat|temperature) to {degrees}[ degrees|].", "Make it {degrees} degrees in here.", "heating {degrees}", "I want {degrees} degrees in (here|this room|my room).", "It is too (cold|warm) here. Make it {degrees} degrees."),
          lambda d, v: {"ok": True},
          "The heating is set to {degrees} degrees.", "Done: {degrees} degrees.", vague=("(Set|Change|Turn up|Turn down) the (heating|thermostat|temperature).", "Make it warmer[ in here|]."), group="home"),
    _tool("get_distance distance route_length", ("Get the distance between two cities.", "Tell how far apart two cities are."),
          (text("start", "start from origin", "First city.", city, "From where?"), text("end", "end to destination", "Second city.", city, "To where?")),
          ("How far is (it from |){start} (to|from) {end}?", "(What is|What's) the distance (between|from) {start} (and|to) {end}?", "distance {start} to {end}", "How many kilometers is it from {start} to {end}?", "How long is the way from {start} to {end}?"),
          lambda d, v: {"kilometers": d.between(20, 9000)},
          "It is {kilometers} kilometers from {start} to {end}.", vague=("How far is {end}?", "How far is it to {end}?"), group="travel", follow=("And to {v}?",)),
    _tool("get_user find_user lookup_user", ("Look up a user by id.", "Find the record of a user."),
          (_int("user_id", "user_id id number", "Number of the user.", 1, 9999, "Which user?"),),
          ("Who is user [number |]{user_id}?", "(Look up|Find|Get|Show me) user {user_id}.", "Show me the record of user number {user_id}.", "user {user_id}"),
          lambda d, v: {"name": full_name(d), "city": city(d)},
          "User {user_id} is {name} from {city}.", vague=("(Look up|Find) a user.", "Who is this user?"), group="user"),
    _tool("add_to_cart cart_add buy_item", ("Add an item to the shopping cart.", "Put an item in the cart."),
          (text("item", "item product name", "What to buy.", lambda d: d.pick(OBJECTS + FOODS), "What would you like to buy?"), _int("quantity", "quantity count amount", "How many.", 2, 40)),
          ("(Add|Put) {quantity} (of the item |times |x |){item} (to|in|into) (my|the) cart.", "I want to (buy|order) {item}[, {quantity} of it|].", "(Buy|Order|Get me) {quantity} {item}.", "Add {item} to (my|the) cart[, please|].", "cart: {quantity} {item}"),
          lambda d, v: {"total": price(d)},
          "I added {item} to your cart. The total is {total} dollars.", vague=("(Add|Put) something (to|in) my cart.", "I want to buy something."), group="order"),
    _tool("shopping_list add_items list_add", ("Add items to the shopping list.", "Write things on the shopping list."),
          (_list("items", "items things products", "What to add.", lambda d: d.sample(FOODS, d.between(1, 4)), "What should I add?"),),
          ("(Add|Put|Write) {items} (to|on) (my|the) shopping list.", "I need {items}. (Put it|Write it) on the list.", "shopping list: {items}", "We are out of {items}, add it to the list."),
          lambda d, v: {"count": d.between(4, 30)},
          "I added {items}. Your list has {count} items now.", vague=("(Add|Put) something (to|on) my shopping list.",), group="order"),
    _tool("read_file open_file cat_file", ("Read a file.", "Show the text of a file."),
          (text("path", "path file filename", "Path of the file.", lambda d: f"{invented(d).lower()}/{d.pick(OBJECTS)}.{d.pick(('txt', 'md', 'csv', 'log'))}", "Which file?"),),
          ("(Read|Open|Show)[ me|] the file {path}.", "What is in {path}?", "Open {path}[ for me|].", "cat {path}", "(Show|Print) {path}[, please|]"),
          lambda d, v: {"lines": d.between(1, 900), "first_line": f"{d.pick(HOBBIES)} notes"},
          'The file has {lines} lines. The first one is "{first_line}".', vague=("(Read|Open) (the|a|my) file[ for me|].",), group="file"),
    _tool("list_files dir show_files", ("List the files of the current folder.", "Show which files there are."),
          (), ("(List|Show)[ me|] (the|my|all) files.", "(What|Which) files (are|do I have) (there|here)?", "ls", "What is in this folder?"),
          lambda d, v: {"files": f"{d.pick(OBJECTS)}.txt, {invented(d).lower()}.md"},
          "The files are {files}.", group="file"),
    _tool("roll_dice dice random_dice", ("Roll dice.", "Roll some dice with so many sides."),
          (_int("count", "count number dice", "How many dice.", 1, 6, "How many dice?"), _int("sides", "sides faces", "Sides of a die.", 4, 20)),
          ("(Roll|Throw) {count} dice[ with {sides} sides|].", "(Roll|Throw) {count} dice of {sides} sides[ each|].", "roll {count} dice"),
          lambda d, v: {"total": sum(d.between(1, v.get("sides", 6)) for _ in range(v["count"]))},
          "You rolled a total of {total}.", "The dice show {total} in all.", vague=("Roll (some|the) dice.", "Throw the dice[ for me|]."), group="dice"),
    _tool("tell_joke get_joke joke", ("Get a joke.", "Fetch a joke from the joke server."),
          (), ("Tell me a joke.", "(I need|Give me|Get me) a joke.", "Make me laugh.", "joke please", "Do you know a joke?"),
          lambda d, v: {"joke": f"Why did the {d.pick(ANIMALS)} cross the {d.pick(PLACES)}? To buy a {d.pick(OBJECTS)}."},
          "{joke}", group="joke"),
    _tool("get_battery battery_level battery", ("Get the level of the battery.", "Check the battery of the phone."),
          (), ("How full is (my|the) battery?", "(What is|Check) (my|the) battery level.", "battery?", "Do I need to charge my phone?", "How much battery do I have[ left|]?"),
          lambda d, v: {"percent": d.between(1, 100)},
          "Your battery is at {percent} percent.", group="battery"),
    _tool("find_job search_jobs job_search", ("Search open jobs in a city.", "Find jobs by title and city."),
          (text("title", "title job role", "Name of the job.", lambda d: d.pick(JOBS), "Which job are you looking for?"), _city(), _flag("remote", "remote home_office is_remote", "Work from home only.", "from home", "at the office")),
          ("(Find|Search|Look for) (jobs|work) as {title} in {city}[, {remote}|].", "Are there any {title} jobs in {city}?", "I am a {title} and look for work in {city}.", "{title} jobs {city}"),
          lambda d, v: {"jobs": d.between(1, 90), "company": f"{invented(d)} Works"},
          "There are {jobs} jobs in {city}. One is at {company}.", vague=("(Find|Search) jobs in {city}.", "(Find|Search) jobs as {title}."), group="job"),
    _tool("book_room hotel_booking reserve_hotel", ("Book a hotel room.", "Reserve a room in a hotel."),
          (_city(), text("arrival", "arrival check_in from", "First day.", date, "On which day do you arrive?"), _int("nights", "nights stay length", "Number of nights.", 1, 14, "For how many nights?"), _flag("breakfast", "breakfast with_breakfast", "Breakfast included.", "with breakfast", "without breakfast")),
          ("Book a (hotel|room|hotel room) in {city} (from|on) {arrival} for {nights} nights[, {breakfast}|].", "I need a room in {city} for {nights} nights from {arrival}[ {breakfast}|].", "hotel {city} {arrival} {nights} nights"),
          lambda d, v: {"hotel": f"Hotel {invented(d)}", "price": d.between(40, 900)},
          "{hotel} in {city} is booked for {nights} nights. It costs {price} dollars.", vague=("Book a (hotel|room) in {city} for {nights} nights.", "I need a room in {city} from {arrival}."), group="travel"),
)  # fmt: skip


def evaluate(expression: str) -> int:
    left, sign, right = expression.split()
    a, b = int(left), int(right)
    return a + b if sign == "+" else a - b if sign == "-" else a * b
