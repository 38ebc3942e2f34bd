"""Conversations with tools: choosing one of several, copying its arguments, using what it returns, or answering plainly."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import faq
from .conversation import Check, Conversation, ToolCall, Turn, assistant, system, user
from .draw import Draw, NoCombinationError
from .others import aside
from .tool_specs import TOOLS, Param, Tool, Values
from .tools_made import ENTITIES, made_tool
from .wording import ask, expand, typed, word
from .words import listed

_NO_TOOL = (
    "None of my tools can do that[, sorry].", "I have no tool for that[, sorry].", "I can't do that with my tools[, sorry].",
)  # fmt: skip
_NO_TOOL_SAYS = "no tool for|none of my tools|with my tools"
_WHICH_TOOLS = (
    "(Which|What) (tools|functions) (do you have|can you use|can you call|are there|are available)[ here| now|]?", "(List|Show|Name|Tell me) (your|the|all) (tools|functions)[ please|].", "(What|Which) tools?", "(What|Which) functions (have I given you|did I give you|were given to you)?",
)  # fmt: skip
_THANKS = ("(Thanks|Thank you|Thx|Great|Perfect|Cool|Nice|Great, thanks|Perfect, thank you|Super|Ok, thanks)[!|.|]", "(That|This) (helps|is great|is what I needed|is good to know)[, thanks|].")  # fmt: skip
_WELCOME = ("You're welcome!", "Happy to help!", "Glad I could help!")
_ERRORS = (
    "not found", "service is down", "timeout", "no connection", "access denied", "too many requests", "internal error", "unknown name",
    "server is busy", "invalid key", "nothing found", "try again later", "not allowed", "out of service",
)  # fmt: skip
_FAILED = ("That did not work: {error}.", "Sorry, the tool failed: {error}.", "I got an error: {error}.")
_GIVEN = (
    "{v}",
    "{v}[ please|, please|]",
    "(It is|It's|I mean|Take|For|Make it) {v}.",
    "{v}, (please|thanks)",
)
_SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant with tools.", "Use the tools when they help.", "Answer the user. Call a function if one fits.",
    "Call a tool only if it is needed.", "Be brief.", "You are quire-mini.",
)  # fmt: skip
# What a question about something else must not touch while a tool of the group is on offer.
_NEAR = {
    "weather": "weather|temperature|rain|warm|cold", "sum": r"\d|sum|plus|minus|times|many|much|twice|half|calc", "time": "time|date|clock|day",
    "money": "price|cost|much|money|worth", "search": "who|when|where|capital|news|happen|population|meaning|look|find|search|what", "language": "translate|french|german|spanish|say",
    "joke": "joke|laugh|funny", "user": "who|user", "food": "restaurant|eat|hungry|food", "dice": "dice|roll|random", "music": "song|play|sing|music",
    "file": "file|list", "clock": "alarm|remind|timer|calendar|wake", "message": "mail|send|message|write", "travel": "flight|hotel|far|travel", "order": "order|buy|shopping|list",
    "home": "light|door|warm|cold", "battery": "battery", "job": "job|work",
}  # fmt: skip


# What the model does itself when no tool does it.
_OWN = {"sum", "joke", "language"}


_SYNONYMS = {
    "temperature": ("temp", "degrees", "temperature_c"), "sky": ("condition", "weather", "description"), "time": ("local_time", "now", "clock"), "price": ("cost", "usd", "amount"),
    "status": ("state", "order_status"), "value": ("answer", "result", "output"), "converted": ("amount", "result", "value"), "translation": ("text", "output"), "kilometers": ("km", "distance_km"),
    "total": ("sum", "result"), "percent": ("level", "battery"), "name": ("title", "full_name"),
}  # fmt: skip


@dataclass(slots=True)
class Offered:
    """A tool under the names that this conversation gives it."""

    tool: Tool
    name: str
    note: str
    params: dict[str, str]  # slot -> name of the argument

    def description(self, draw: Draw) -> dict[str, Any]:
        """The tool as the OpenAI form describes it."""
        properties = {}
        for p in self.tool.params:
            note = {"description": p.note} if draw.chance(0.12) else {}
            properties[self.params[p.slot]] = {**p.schema, **note}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if self.tool.params:
            parameters["required"] = [self.params[p.slot] for p in self.tool.params if p.required]
        function: dict[str, Any] = {"name": self.name, "description": self.note, "parameters": parameters}
        if draw.chance(0.05):
            parameters["additionalProperties"] = False
            if draw.chance(0.5):
                function["strict"] = True
        return {"type": "function", "function": function}

    def call(self, values: Values) -> ToolCall:
        return ToolCall(
            self.name, {self.params[p.slot]: values[p.slot] for p in self.tool.params if p.slot in values}
        )


@dataclass(slots=True)
class Request:
    """A wording of a request, the arguments it names and the slots it leaves out."""

    offered: Offered
    form: str
    values: Values
    missing: list[Param]

    def said(self, draw: Draw) -> dict[str, str]:
        return {
            p.slot: p.said(draw, self.values[p.slot])
            for p in self.offered.tool.params
            if p.slot in self.values
        }


def offer(draw: Draw, tool: Tool) -> Offered:
    params: dict[str, str] = {}
    for p in tool.params:
        params[p.slot] = draw.pick([n for n in p.names if n not in params.values()])
    return Offered(tool, draw.pick(tool.names), draw.pick(tool.notes), params)


def request(draw: Draw, among: Sequence[Offered], vague: bool = False) -> Request:
    """A request for one of the tools; tool and arguments together belong to one split."""

    def make() -> Request:
        while True:
            offered = draw.pick(among)
            tool = offered.tool
            form = expand(draw, draw.pick(tool.vague if vague else tool.asks))
            named = [p for p in tool.params if "{" + p.slot + "}" in form]
            values = {p.slot: p.value(draw) for p in named}
            texts = [v for v in values.values() if isinstance(v, str)]
            if len(texts) == len(set(texts)):
                missing = [p for p in tool.params if p.required and p not in named]
                return Request(offered, form, values, missing)

    def key(r: Request) -> str:
        return f"tool:{r.offered.tool.names[0]}:{json.dumps(r.values) if r.values else r.form}"

    made = draw.held(make, key)
    if draw.chance(0.1):
        plain = [
            p.slot
            for p in made.offered.tool.params
            if p.schema == {"type": "string"} and p.slot in made.values
        ]
        made.values |= {slot: made.values[slot].lower() for slot in plain}
    return made


def call_check(calls: tuple[ToolCall, ...], task: str) -> Check:
    data = {"calls": [{"name": c.name, "arguments": c.arguments} for c in calls], "task": task}
    return Check("tool_call", data)


def _calling(calls: tuple[ToolCall, ...], task: str) -> Turn:
    return Turn("assistant", "", calls, call_check(calls, task))


def _answered(
    draw: Draw, made: Request, calls: tuple[ToolCall, ...], task: str, ends: float = 0.35
) -> list[Turn]:
    """The call, mostly with the tool's result and the sentence that says it."""
    turns = [_calling(calls, task)]
    if draw.chance(ends):
        return turns
    if draw.chance(0.1):
        error = draw.pick(_ERRORS)
        content = draw.pick(
            (json.dumps({"error": error}), f"error: {error}", json.dumps({"ok": False, "error": error}))
        )
        check = Check("contains", {"all": [error], "task": "error of a tool"})
        return [*turns, Turn("tool", content), assistant(word(draw, _FAILED, error=error), check)]
    tool = made.offered.tool
    result = tool.result(draw, made.values)
    used = [(k, a) for a in tool.answers for k in result if "{" + k + "}" in a]
    said = _sentence(draw, tool, made.values, result)
    must = [str(result[k]) for k in dict.fromkeys(k for k, _ in used) if str(result[k]) in said]
    used_check = Check("contains", {"all": must, "task": "use the result"}) if must else None
    content = _content(draw, result)
    return [*turns, Turn("tool", content), assistant(said, used_check)]


def _content(draw: Draw, result: dict[str, Any]) -> str:
    """A result as tools write it: mostly JSON, under one name or another, now and then plain text."""
    if draw.chance(0.4):
        result = {draw.pick(_SYNONYMS.get(k, (k,))): v for k, v in result.items()}
    form = draw.weighted((("json", 0.8), ("lines", 0.1), ("values", 0.1)))
    if form == "json":
        return json.dumps(result)
    if form == "lines" or any(isinstance(v, bool) for v in result.values()):
        return ", ".join(f"{k}: {v}" for k, v in result.items())
    return ", ".join(str(v) for v in result.values())


def _sentence(draw: Draw, tool: Tool, values: Values, result: dict[str, Any]) -> str:
    shown = {
        p.slot: p.said(draw, values[p.slot]) if not p.forms else values[p.slot]
        for p in tool.params
        if p.slot in values
    }
    fitting = [
        a
        for a in tool.answers
        if all(slot in shown or slot in result for slot in re.findall(r"\{(\w+)\}", a))
    ]
    return draw.pick(fitting).format(**{**shown, **result})


def exchange(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """Question, call, result, answer; sometimes the same again with another value."""
    made = request(draw, offered)
    call = made.offered.call(made.values)
    again = draw.chance(0.2)
    turns = [
        user(ask(draw, made.form, made.said(draw))),
        *_answered(draw, made, (call,), "call", 0.1 if again else 0.35),
    ]
    if not again or turns[-1].calls or not made.values:
        return turns
    if draw.chance(0.25):
        return [*turns, user(ask(draw, _THANKS)), assistant(draw.pick(_WELCOME))]
    changed = [p for p in made.offered.tool.params if p.required and p.slot in made.values and not p.texts][
        -1:
    ]
    if not changed:
        return turns
    new = changed[0].value(draw)
    other = Request(made.offered, "", {**made.values, changed[0].slot: new}, [])
    text = ask(draw, made.offered.tool.follow, {"v": changed[0].said(draw, new)})
    return [
        *turns,
        user(text),
        *_answered(draw, other, (other.offered.call(other.values),), "call after a follow-up", 0.5),
    ]


def _asks_back(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """A required argument is missing: the model asks for it, and calls when it is given."""
    vague = [o for o in offered if o.tool.vague]
    if not vague:
        return exchange(draw, offered)
    made = request(draw, vague, vague=True)
    check = Check("exact", {"text": made.missing[0].question, "task": "asks for an argument"})
    turns = [user(ask(draw, made.form, made.said(draw))), assistant(made.missing[0].question, check)]
    if len(made.missing) > 1 or draw.chance(0.3):
        return turns
    slot = made.missing[0].slot
    made.values[slot] = made.missing[0].value(draw)
    text = ask(draw, _GIVEN, {"v": made.missing[0].said(draw, made.values[slot])})
    return [
        *turns,
        user(text),
        *_answered(draw, made, (made.offered.call(made.values),), "call after asking", 0.5),
    ]


def _two_calls(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """Two calls in one answer: one tool with two values, or two tools."""
    first, second = request(draw, offered), request(draw, offered)
    same = first.offered is second.offered
    slots = list(first.values)
    twice = len(slots) == 1 and slots == list(second.values) and first.offered.tool.group != "clock"
    if first.values == second.values or (same and not twice):
        return exchange(draw, offered)
    if same:
        both = f"{first.said(draw)[slots[0]]} and {second.said(draw)[slots[0]]}"
        text = ask(draw, first.form, {slots[0]: both})
    else:
        form = re.sub(r"\{(\w+)\}", r"{b_\1}", second.form)
        kept = first.said(draw) | {f"b_{k}": v for k, v in second.said(draw).items()}
        joined = (
            first.form.rstrip(".?!")
            + draw.pick((". And ", ". Also, ", " and ", "? And "))
            + form[0].lower()
            + form[1:]
        )
        text = ask(draw, joined, kept)
    calls = (first.offered.call(first.values), second.offered.call(second.values))
    turns = [user(text), _calling(calls, "two calls")]
    if draw.chance(0.5):
        return turns
    results = [r.offered.tool.result(draw, r.values) for r in (first, second)]
    said = [
        _sentence(draw, r.offered.tool, r.values, v) for r, v in zip((first, second), results, strict=True)
    ]
    return [*turns, *[Turn("tool", json.dumps(v)) for v in results], assistant(" ".join(said))]


def _near(offered: Sequence[Offered]) -> str:
    groups = {o.tool.group for o in offered}
    return "|".join(_NEAR.get(g) or g.replace(" ", "|") for g in sorted(groups))


def _no_tool(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """A request that needs a tool, and none on offer does it."""
    groups = {o.tool.group for o in offered}
    taken = {word for g in groups for word in g.split()}
    other = [offer(draw, t) for t in TOOLS if t.group not in groups | _OWN] if draw.chance(0.6) else []
    entities = [e for e in ENTITIES if e not in taken]
    made = request(draw, other or [offer(draw, made_tool(draw, draw.pick(entities)))])
    said = word(draw, _NO_TOOL)
    return [
        user(ask(draw, made.form, made.said(draw))),
        assistant(said, Check("contains", {"all": [_NO_TOOL_SAYS], "task": "no tool fits"})),
    ]


def _names(draw: Draw, offered: list[Offered]) -> list[Turn]:
    asked = draw.held(lambda: expand(draw, draw.pick(_WHICH_TOOLS)), lambda text: f"which tools|{text}")
    names = [o.name for o in offered]
    said = (
        f"I have one tool: {names[0]}." if len(names) == 1 else f"I have {len(names)} tools: {listed(names)}."
    )
    return [
        user(typed(draw, [asked])),
        assistant(said, Check("contains", {"all": names, "task": "names of tools"})),
    ]


def _plain(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """What needs no tool."""
    kind = draw.weighted((("aside", 0.6), ("no tool", 0.24), ("faq", 0.11), ("names", 0.05)))
    if kind == "no tool":
        return _no_tool(draw, offered)
    if kind == "names":
        return _names(draw, offered)
    if kind == "faq":
        return faq.question(draw, faq.load("tools"), "no tool needed")
    return _no_call(aside(draw, _near(offered)))


def _no_call(turns: list[Turn]) -> list[Turn]:
    """The turns, their answers graded as what is answered without a tool."""
    none = Check("tool_call", {"calls": []})
    return [
        replace(t, check=replace(t.check or none, data={**(t.check or none).data, "task": "no tool needed"}))
        if t.role == "assistant"
        else t
        for t in turns
    ]


def _offers(draw: Draw) -> list[Offered]:
    count = draw.weighted(((1, 0.64), (2, 0.28), (3, 0.06), (4, 0.014), (5, 0.006)))
    entity = draw.pick(ENTITIES)
    tools: list[Tool] = []
    while len(tools) < count:
        if draw.chance(0.5):
            tool = TOOLS[0] if draw.chance(0.1) else draw.pick(TOOLS)
        else:
            tool = made_tool(draw, entity if draw.chance(0.6) else draw.pick(ENTITIES))
        if all(tool.group != other.group and not set(tool.names) & set(other.names) for other in tools):
            tools.append(tool)
    offered = [offer(draw, tool) for tool in tools]
    if len({o.name for o in offered}) < count:
        raise NoCombinationError("two tools of one name")
    return offered


def make(draw: Draw) -> Conversation:
    """Tools on offer, and one to three things asked; nearly half of the conversations need no tool."""
    offered = _offers(draw)
    turns: list[Turn] = []
    if draw.chance(0.1):
        turns.append(system(draw.pick(_SYSTEMS)))
    plain = draw.chance(0.45)
    if plain:
        turns += _plain(draw, offered)
        if draw.chance(0.15):
            turns += _plain(draw, offered)
    else:
        if draw.chance(0.08):
            turns += _plain(draw, offered)
        if len(offered) > 1 and draw.chance(0.15):
            turns += exchange(draw, offered)
        turns += draw.weighted(((exchange, 0.76), (_asks_back, 0.13), (_two_calls, 0.11)))(draw, offered)
        if draw.chance(0.1):
            turns += _plain(draw, offered)
    return Conversation("tools", turns, [o.description(draw) for o in offered])
