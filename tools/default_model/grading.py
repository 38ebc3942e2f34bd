"""Whether an answer is right: one function per kind of check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .corpus.conversation import Check
from .corpus.manner import Manner, follows
from .corpus.schema_check import fits

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Grade:
    """`right` is the verdict; `marks` are parts of it that the tables show on their own."""

    right: bool
    marks: dict[str, bool]


def grade(check: Check, answer: str) -> Grade:
    """Compare an answer with its check."""
    verdict = _KINDS[check.kind](check.data, answer.strip())
    return verdict if isinstance(verdict, Grade) else Grade(verdict, {})


def parse_json(text: str) -> Any:
    """The value, or a marker that equals nothing when the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return _MISSING


def parse_calls(text: str) -> list[Any]:
    """Every tool call in the text, parsed."""
    return [parse_json(body) for body in _CALL.findall(text)]


def _exact(data: dict[str, Any], answer: str) -> bool:
    return answer == str(data["text"])


def _number(data: dict[str, Any], answer: str) -> bool:
    numbers = re.findall(r"-?\d+", answer)
    return bool(numbers) and int(numbers[-1]) == data["value"]


def _match(data: dict[str, Any], answer: str) -> bool:
    return re.fullmatch(data["pattern"], answer, re.DOTALL) is not None


def _contains(data: dict[str, Any], answer: str) -> bool:
    low = answer.lower()
    return all(any(option.lower() in low for option in part.split("|")) for part in data["all"])


def _one_of(data: dict[str, Any], answer: str) -> bool:
    return answer in data["options"]


def _json(data: dict[str, Any], answer: str) -> Grade:
    value = parse_json(answer)
    valid = value is not _MISSING
    fitting = valid and fits(value, data["schema"])
    same = valid and value == data["value"]
    ordered = same and json.dumps(value) == json.dumps(data["value"])
    return Grade(
        same, {"valid JSON": valid, "fits the schema": fitting, "facts right": same, "key order": ordered}
    )


def _json_shape(data: dict[str, Any], answer: str) -> Grade:
    value = parse_json(answer)
    valid = value is not _MISSING
    return Grade(valid and fits(value, data["schema"]), {"valid JSON": valid})


def _tool_call(data: dict[str, Any], answer: str) -> Grade:
    calls = parse_calls(answer)
    wanted = data["calls"]
    if not wanted:
        return Grade("<tool_call>" not in answer, {})
    parsed = bool(calls) and all(isinstance(c, dict) and {"name", "arguments"} <= set(c) for c in calls)
    named = parsed and [c["name"] for c in calls] == [c["name"] for c in wanted]
    return Grade(named and calls == wanted, {"valid call": parsed, "right tool": named})


def _sentences(data: dict[str, Any], answer: str) -> bool:
    return len(_SENTENCE_END.findall(answer)) == data["count"] and data["about"] in answer.lower()


def _list(data: dict[str, Any], answer: str) -> bool:
    if data["form"] == "commas":
        items = answer.rpartition(": ")[2].removesuffix(".").split(", ")
    else:
        lines = answer.split("\n")
        starts = [f"{n}. " if data["form"] == "numbers" else "- " for n in range(1, len(lines) + 1)]
        if not all(line.startswith(start) for line, start in zip(lines, starts, strict=True)):
            return False
        items = [line.removeprefix(start) for line, start in zip(lines, starts, strict=True)]
    return len(items) == data["count"] == len(set(items)) and set(items) <= set(data["options"])


def _lines(data: dict[str, Any], answer: str) -> bool:
    return len(answer.split("\n")) == int(data["count"])


def _manner(data: dict[str, Any], answer: str) -> bool:
    if not all(follows(Manner(kind, value), answer) for kind, value in data["manners"]):
        return False
    then = data["then"]
    return then is None or grade(Check(then["kind"], then["data"]), answer).right


def _without(data: dict[str, Any], answer: str) -> bool:
    return _contains(data, answer) and str(data["text"]).lower() not in answer.lower()


def _one_word(data: dict[str, Any], answer: str) -> bool:
    said = answer.lower().rstrip(".!")
    return " " not in said and any(said.startswith(word.lower()) for word in data["any"])


_KINDS: dict[str, Callable[[dict[str, Any], str], bool | Grade]] = {
    "exact": _exact,
    "number": _number,
    "match": _match,
    "contains": _contains,
    "one_of": _one_of,
    "json": _json,
    "json_shape": _json_shape,
    "tool_call": _tool_call,
    "sentences": _sentences,
    "list": _list,
    "lines": _lines,
    "manner": _manner,
    "without": _without,
    "one_word": _one_word,
}
