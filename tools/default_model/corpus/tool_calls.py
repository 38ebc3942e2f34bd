"""Conversations with tools: choosing one of several, copying its arguments, using what it returns, or answering plainly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import arithmetic, glossary, smalltalk
from .conversation import Check, Conversation, ToolCall, Turn, assistant, system, user
from .draw import Draw
from .tool_specs import TOOLS, Tool, Values
from .words import casual

_NO_TOOL = (
    "I have no tool for that, and I cannot do it myself.",
    "None of my tools can do that, sorry.",
    "I cannot help with that: no tool here fits.",
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "Use the tools when they help.",
    "Answer the user. Call a function if one fits.",
)


@dataclass(slots=True)
class Offered:
    """A tool under the names that this conversation gives it."""

    tool: Tool
    name: str
    params: dict[str, str]  # slot -> name of the argument

    def description(self, draw: Draw) -> dict[str, Any]:
        """The tool as the OpenAI form describes it."""
        properties = {}
        for p in self.tool.params:
            note = {} if draw.chance(0.3) else {"description": p.note}
            properties[self.params[p.slot]] = {**p.schema, **note}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": draw.pick(self.tool.notes), "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, values: Values) -> ToolCall:
        return ToolCall(self.name, {self.params[p.slot]: values[p.slot] for p in self.tool.params})


def offer(draw: Draw, tool: Tool) -> Offered:
    return Offered(tool, draw.pick(tool.names), {p.slot: draw.pick(p.names) for p in tool.params})


def asked(draw: Draw, tools: Sequence[Tool]) -> tuple[Tool, Values]:
    """One of the tools and the arguments of a call; tool and arguments together belong to one split."""

    def make() -> tuple[Tool, Values]:
        while True:
            tool = draw.pick(tools)
            values = {p.slot: p.value(draw) for p in tool.params}
            texts = [v for v in values.values() if isinstance(v, str)]
            if len(texts) == len(set(texts)):
                return tool, values

    return draw.held(make, lambda c: f"tool:{c[0].names[0]}:{json.dumps(c[1])}")


def call_check(calls: tuple[ToolCall, ...], task: str) -> Check:
    data = {"calls": [{"name": c.name, "arguments": c.arguments} for c in calls], "task": task}
    return Check("tool_call", data)


def exchange(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """Question, call of one of the tools, result, answer."""
    tool, values = asked(draw, [o.tool for o in offered])
    calls = (next(o for o in offered if o.tool is tool).call(values),)
    result = tool.result(draw, values)
    form = draw.pick(tool.answers)
    said = form.format(**values, **result)
    used = [str(v) for k, v in result.items() if "{" + k + "}" in form]
    check = Check("contains", {"all": used, "task": "use the result"}) if used else None
    return [
        user(casual(draw, draw.pick(tool.asks).format(**values))),
        Turn("assistant", "", calls, call_check(calls, "call")),
        Turn("tool", json.dumps(result)),
        assistant(said, check),
    ]


def _parallel(draw: Draw, offered: list[Offered]) -> list[Turn]:
    """Two calls in one turn, for tools with one argument."""
    tool, first = asked(draw, [o.tool for o in offered])
    slot = tool.params[0].slot
    second = {slot: tool.params[0].value(draw)}
    if first[slot] == second[slot]:
        return exchange(draw, offered)
    caller = next(o for o in offered if o.tool is tool)
    calls = (caller.call(first), caller.call(second))
    results = [tool.result(draw, v) for v in (first, second)]
    answer = draw.pick(tool.answers)
    said = " ".join(answer.format(**v, **r) for v, r in zip((first, second), results, strict=True))
    both = {slot: f"{first[slot]} and {second[slot]}"}
    return [
        user(tool.asks[0].format(**both)),
        Turn("assistant", "", calls, call_check(calls, "two calls")),
        *[Turn("tool", json.dumps(r)) for r in results],
        assistant(said),
    ]


def _plain(draw: Draw, tools: list[Tool]) -> list[Turn]:
    """A question that no tool on offer answers."""
    kind = draw.weighted((("other tool", 0.4), ("sum", 0.25), ("glossary", 0.2), ("greeting", 0.15)))
    if kind == "other tool":
        missing, values = asked(draw, [t for t in TOOLS if t not in tools])
        ask = draw.pick(missing.asks).format(**values)
        return [
            user(ask),
            assistant(draw.pick(_NO_TOOL), Check("tool_call", {"calls": [], "task": "no tool fits"})),
        ]
    if kind == "sum":
        a, b = arithmetic.operands(draw, "add", 1)
        return [
            user(f"What is {a} + {b}?"),
            assistant(f"{a} + {b} = {a + b}.", arithmetic.number_check("add", a, b)),
        ]
    return glossary.question(draw) if kind == "glossary" else smalltalk.greeting(draw)


def make(draw: Draw) -> Conversation:
    """One to three exchanges with one to four tools on offer."""
    tools = draw.sample(TOOLS, draw.weighted(((1, 0.25), (2, 0.3), (3, 0.25), (4, 0.2))))
    offered = [offer(draw, tool) for tool in tools]
    turns: list[Turn] = []
    if draw.chance(0.45):
        turns.append(system(draw.pick(_SYSTEMS)))
    for _ in range(draw.weighted(((1, 0.75), (2, 0.2), (3, 0.05)))):
        kind = draw.weighted((("call", 0.74), ("two", 0.06), ("plain", 0.2)))
        single = [o for o in offered if len(o.tool.params) == 1]
        if kind == "two" and single:
            turns += _parallel(draw, single)
        elif kind == "plain":
            turns += _plain(draw, tools)
        else:
            turns += exchange(draw, offered)
    return Conversation("tools", turns, [o.description(draw) for o in offered])
