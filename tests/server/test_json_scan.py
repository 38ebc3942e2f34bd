"""The scan of request bodies: what it refuses, against Python's own reader of JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire._native import scan_json
from quire.server.dialects.responses_types import ResponsesRequest
from quire.server.errors import ApiError
from quire.server.json_input import MAX_DEPTH, MAX_PARTS, MAX_VALUES, decode

LIMITS = (MAX_DEPTH, MAX_PARTS, MAX_VALUES)
NAMES = ["", "a", "b", "\\", '"', "é", "\U0001f600", "\n", "a" * 40, "{", "]", ":,"]


def written(rng: random.Random, text: str) -> str:
    """A JSON string, its characters escaped in one of the ways that JSON has."""
    pairs = text.encode("utf-16-be").hex()
    units = [pairs[i : i + 4] for i in range(0, len(pairs), 4)]
    if rng.random() < 0.3:
        return '"' + "".join(f"\\u{rng.choice((unit.upper(), unit))}" for unit in units) + '"'
    return json.dumps(text, ensure_ascii=rng.random() < 0.5)


def document(rng: random.Random, depth: int = 0) -> str:
    """JSON in which keys may repeat, with spaces of all kinds."""
    kind = rng.random() * (1.0 if depth < 4 else 0.4)
    if kind < 0.2:
        return rng.choice(["1", "-2.5e3", "true", "null"])
    if kind < 0.4:
        return written(rng, rng.choice(NAMES))
    space = rng.choice(["", " ", "\n\t", "\r "])
    inner = [document(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.6:
        return f"[{space}" + f"{space},".join(inner) + "]"
    pairs = [f"{written(rng, rng.choice(NAMES))}{space}:{space}{one}" for one in inner]
    return "{" + f",{space}".join(pairs) + f"{space}}}"


def repeats(text: str) -> bool:
    found = False

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found |= len({name for name, _ in items}) < len(items)
        return dict(items)

    json.loads(text, object_pairs_hook=pairs)
    return found


def test_repeated_keys_are_found_and_no_others() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(3000):
        text = document(rng)
        keys, refused, key = scan_json(text.encode(), *LIMITS)
        assert bool(refused) == (key is not None) == repeats(text), text
        seen.add(bool(refused))
        if not refused:
            value = json.loads(text)
            assert set(keys) == set(value if isinstance(value, dict) else ()), text
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("text", "why", "key"),
    [
        ('{"a":1,"b":[{"c":1,"\\u0063":2}]}', "occurs twice in one object (byte 19)", "c"),
        ('{"":1,"":2}', "occurs twice in one object (byte 6)", ""),
        ('{"\\ud83d\\ude00":1,"\U0001f600":2}', "occurs twice in one object (byte 18)", "\U0001f600"),
        ('{"\\ud800":1}', "the key at byte 1 is not a valid string", None),
        ('{"\\ud800\\u0041":1}', "the key at byte 1 is not a valid string", None),
        ('{"a\\q":1}', "the key at byte 1 is not a valid string", None),
        ('{"\\u00":1}', "the key at byte 1 is not a valid string", None),
        ("[[[[]]]]", "nested more than 3 levels deep", None),
        ('["a",{},"b"]', "more than 5 keys, strings, objects and arrays", None),
        ("[1,2,3,4,5,6]", "more than 5 values", None),
        ('["a,b,c,d,e,f",1]', "", None),
        ('{"a":{"a":1}}', "", None),
        # Malformed: the decode refuses it.
        ('{"a":1,"a', "", None),
        ('{"a\\', "", None),
        ("]]}}", "", None),
    ],
)
def test_what_is_refused_and_where(text: str, why: str, key: str | None) -> None:
    parts = 5 if "5 keys" in why else 50
    assert scan_json(text.encode(), 3, parts, 5)[1:] == (why, key)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{}", "invalid_type", "input: is missing"),
        ('{"input": [], "model": 1}', "invalid_value", "input: expected `array` of length >= 1"),
        ('{"input": "x", "model": 1}', "invalid_type", "model: expected string | null, got integer"),
        ('{"input": "x", "top_p": "1"}', "invalid_type", "top_p: expected number | null, got string"),
        ('{"input": "x", "tools": [{"type": "function"}]}', "invalid_type", "tools[0].name: is missing"),
        (
            '{"input": "x", "tools": [{"type": "a"}]}',
            "invalid_value",
            "tools[0].type: 'a' is not one of its values",
        ),
        ("[]", "invalid_type", "expected object, got array"),
    ],
)
def test_what_a_field_should_be_is_said_in_the_words_of_json(text: str, code: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(text.encode(), ResponsesRequest)
    assert (caught.value.code, str(caught.value)) == (code, message)
    assert caught.value.param == (message.split(": ", maxsplit=1)[0] if ": " in message else None)
