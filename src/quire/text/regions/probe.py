"""Analyse a chat template by what it makes of conversations whose names, arguments and reasoning are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from quire.records import dataclass
from quire.text.chat_renderer import ChatAsk
from quire.text.regions.spec import (
    ArgumentForm,
    CallSpec,
    HeadedCall,
    Hole,
    ObjectCall,
    PythonCall,
    ReasoningSpec,
    Tags,
)
from quire.types import QuireError

Render = Callable[[ChatAsk], str]

NAMES = ("first_probe", "second_probe")
_KEYS, _VALUES = ("probe_key", "other_key"), ("probe value", "other value")
_CONTENT, _REASONING = "probe of content", "probe of reasoning"
ARGUMENTS = dict(zip(_KEYS, _VALUES, strict=True))
_IDS = ("probeid01", "probeid02")  # as templates that check them want them
PARAMETERS = {"type": "object", "properties": {key: {"type": "string"} for key in _KEYS}}
_MAX_TEXT = 200  # characters of an opener or a closer
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": PARAMETERS,
        },
    }
    for name in NAMES
]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a template makes of one assistant turn, up to the end mark: with text, one call, two calls, reasoning.

    "" where it refuses the conversation.
    """

    one: str
    two: str
    reasoned: str

    @classmethod
    def of(cls, render: Render) -> Answers:
        """Render the probes."""
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
            for call_id, name in zip(_IDS, NAMES, strict=True)
        ]
        return cls(
            _answer(render, {"content": "", "tool_calls": calls[:1]}, TOOLS),
            _answer(render, {"content": "", "tool_calls": calls}, TOOLS),
            _answer(render, {"content": _CONTENT, "reasoning_content": _REASONING}, None),
        )


def _answer(render: Render, turn: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """What a template makes of an assistant's turn: behind the prompt or the head of the turn, before its end mark."""
    user = {"role": "user", "content": "probe"}

    def rendered(*turns: Mapping[str, Any]) -> str:
        ask = ChatAsk(messages=[user, *({"role": "assistant", **turn} for turn in turns)], tools=tools,
                      add_generation_prompt=not turns)  # fmt: skip
        try:
            return render(ask)
        except QuireError:
            return ""

    text, plain, prompt = rendered(turn), rendered({"content": _CONTENT}), rendered()
    head, found, mark = plain.partition(_CONTENT)
    role = head.rsplit("probe", 1)[-1]  # what stands between the user's text and the answer
    if not found or not role:
        return ""
    if prompt and text.startswith(prompt):
        start = len(prompt)
    elif role in text:
        start = text.rfind(role) + len(role)
    else:
        return ""
    end = mark.rstrip()
    return (text.rstrip().removesuffix(end) if end else text)[start:]


def probed_calls(answers: Answers) -> CallSpec | None:
    """How calls are written, None if the template shows none or their form is not one of `spec`."""
    one, two = answers.one, answers.two
    if NAMES[0] not in one:
        return None
    for read in (_object, _headed, _tagged, _python):
        found = read(one, two)
        if found is not None:
            return found
    return None


def probed_reasoning(answers: Answers) -> ReasoningSpec | None:
    """How reasoning is written, None if the template does not show it."""
    opener, found, rest = answers.reasoned.partition(_REASONING)
    closer, content, _ = rest.partition(_CONTENT)
    if (
        not found
        or not content
        or not opener.strip()
        or not closer.strip()
        or len(opener + closer) > _MAX_TEXT
    ):
        return None
    return ReasoningSpec(name="template", opener=opener, closer=closer)


def _object(one: str, two: str) -> CallSpec | None:
    """Calls that are JSON objects, or the items of an array."""
    first = _span(one, _is_call)
    listed = _span(one, lambda value: isinstance(value, list) and len(value) == 1 and _is_call(value[0]))
    if listed is not None:
        start, end, value = listed
        second = _span(two, _is_pair)
        if second is None:
            return None
        inner = _layout(two[second[0] : second[1]])
        return _spec(_object_call(value[0], array=True, layout=inner), one[:start], one[end:], None, "")
    if first is None:
        return None
    start, end, value = first
    before, between, after = _around(one, two, start, end, _is_call)
    opener, closer, middle, again = _regions(before, between, after)
    return _spec(_object_call(value), opener, closer, middle, again)


def _layout(text: str) -> tuple[str, str, str]:
    """How an array of two objects is laid out."""
    first = _span(text, _is_call)
    assert first is not None
    second = _span(text[first[1] :], _is_other_call)
    assert second is not None
    return text[: first[0]], text[first[1] : first[1] + second[0]], text[first[1] + second[1] :]


def _object_call(
    value: Mapping[str, Any], array: bool = False, layout: tuple[str, str, str] | None = None
) -> ObjectCall:
    name = next(key for key, item in value.items() if item == NAMES[0])
    arguments = next(key for key, item in value.items() if item == ARGUMENTS)
    written_id = next((key for key, item in value.items() if item == _IDS[0]), "")
    return ObjectCall(name, arguments, written_id, array, *([layout] if layout else []))


def _headed(one: str, two: str) -> CallSpec | None:
    """Calls with a head that has the name, and JSON."""
    name = one.find(NAMES[0])
    arguments = _span(one, lambda value: value == ARGUMENTS, name)
    if arguments is None:
        return None
    middle = one[name + len(NAMES[0]) : arguments[0]]
    second = two.find(NAMES[1])
    end = _span(two, lambda value: value == ARGUMENTS)
    if second < 0 or end is None:
        return None
    before, between, after = one[:name], two[end[1] : second], one[arguments[1] :]
    return _with_heads(
        before, between, after, lambda head, tail: HeadedCall((*head, Hole.NAME, middle), tail)
    )


def _tagged(one: str, two: str) -> CallSpec | None:
    """Calls with a head, and a pair of tags for each argument."""
    places = [one.find(text) for text in (NAMES[0], _KEYS[0], _VALUES[0], _KEYS[1], _VALUES[1])]
    if min(places) < 0 or places != sorted(places):
        return None
    name, key, value, other_key, other_value = places
    middle = one[key + len(_KEYS[0]) : value]
    if "=" in middle and "(" in one[name:key]:
        return None
    inner = one[value + len(_VALUES[0]) : other_key]
    head_end = one[name + len(NAMES[0]) : key]
    opened = _common_end(inner, head_end)
    close, name_end = inner[: len(inner) - len(opened)], head_end[: len(head_end) - len(opened)]
    rest = one[other_value + len(_VALUES[1]) :]
    second = two.find(NAMES[1])
    first_end = two.find(_VALUES[1]) + len(_VALUES[1])
    if not close.strip() or not rest.startswith(close) or second < 0 or not opened.strip():
        return None
    before, between, after = one[:name], two[first_end + len(close) : second], rest[len(close) :]
    head_parts = (name_end,) if name_end else ()
    tags = Tags(opened, middle, close)
    return _with_heads(
        before,
        between,
        after,
        lambda head, tail: HeadedCall((*head, Hole.NAME, *head_parts), tail, ArgumentForm.TAGS, tags),
    )


def _python(one: str, two: str) -> CallSpec | None:
    """Calls in a list of Python."""
    start = one.find(f"[{NAMES[0]}(")
    end = one.find(")]", start)
    if start < 0 or end < 0 or f"{_KEYS[0]}=" not in one or NAMES[1] not in two:
        return None
    return _spec(PythonCall(), one[:start], one[end + 2 :], None, "")


def _with_heads(
    before: str, between: str, after: str, call: Callable[[tuple[str, ...], str], HeadedCall]
) -> CallSpec | None:
    """A spec of calls with heads: what is around each call, and around all of them."""
    head = _common_end(before, between)
    rest = between[: len(between) - len(head)]
    tail = _common_start(after, rest)
    opener, closer, middle = before[: len(before) - len(head)], after[len(tail) :], rest[len(tail) :]
    if not opener.strip():
        opener, head = head, ""
        return _spec(call((), tail), opener, "", None, middle) if opener.strip() else None
    return _spec(call((head,) if head else (), tail), opener, closer, middle, "")


def _around(one: str, two: str, start: int, end: int, fits: Callable[[Any], bool]) -> tuple[str, str, str]:
    """What stands before the first call, between two calls, and behind the last."""
    first = _span(two, fits)
    second = None if first is None else _span(two[first[1] :], _is_other_call)
    between = "" if first is None or second is None else two[first[1] : first[1] + second[0]]
    return one[:start], between, one[end:]


def _regions(before: str, between: str, after: str) -> tuple[str, str, str | None, str]:
    """Opener, closer, what is between calls of a region (None if it has one), what is between regions."""
    opener, closer = before.lstrip(), after.rstrip()
    if closer and between.startswith(closer) and opener and between.endswith(opener):
        return before, closer, None, between[len(closer) : len(between) - len(opener)]
    if not closer.strip() and opener and between.endswith(opener):
        return before, "", None, between[: len(between) - len(opener)]
    return before, closer, between or None, ""


def _spec(call: Any, opener: str, closer: str, between: str | None, again: str) -> CallSpec | None:
    lead = opener[: len(opener) - len(opener.lstrip())]
    if max(len(opener), len(closer)) > _MAX_TEXT:
        return None
    return CallSpec(
        name="template",
        call=call,
        opener=opener[len(lead) :],
        closer=closer.rstrip(" "),
        between=between,
        again=again,
        lead=lead,
    )


def _is_call(value: Any, name: str = NAMES[0]) -> bool:
    return isinstance(value, dict) and name in value.values() and ARGUMENTS in value.values()


def _is_other_call(value: Any) -> bool:
    return _is_call(value, NAMES[1])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_call(value[0]) and _is_other_call(value[1])


def _span(text: str, fits: Callable[[Any], bool], start: int = 0) -> tuple[int, int, Any] | None:
    """The first JSON value in a text that fits: its start, its end, and itself."""
    decoder = json.JSONDecoder()
    for place in range(max(0, start), len(text)):
        if text[place] in "[{":
            try:
                value, end = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue
            if fits(value):
                return place, end, value
    return None


def _common_end(one: str, two: str) -> str:
    return _common_start(one[::-1], two[::-1])[::-1].lstrip("\"'>])}|")  # not the end of another tag


def _common_start(one: str, two: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return "".join(char for char, _ in same)
