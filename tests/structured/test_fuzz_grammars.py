"""Hostile and random structures: each is compiled or refused by name, and what is compiled never comes to a dead end.

`make test-fuzz`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from helpers.grammar_bytes import END, byte_tokenizer
from helpers.random_grammars import check_grammar, random_gbnf
from quire import StructuredOutput
from quire.structured.ask import GrammarError
from quire.structured.compile_bounds import CPU_SECONDS, PROCESS_BYTES
from quire.structured.grammar_limits import parser_limits
from quire.structured.pool import GrammarPool
from quire.types import RequestError

pytestmark = pytest.mark.fuzz
ROUNDS, STEPS = 400, 40
# Under load, a second of processor time takes longer.
GUARD = 25.0


def deep(unit: str, count: int, end: str = "") -> str:
    return unit * count + end * count


# By the names under which such inputs have become known.
KNOWN: dict[str, dict[str, Any]] = {
    "bad regex": {"regex": "[z-a"},
    "ReDoS": {"regex": "(a+)+" * 40 + "!"},
    "ReDoS, nested": {"regex": "(((((a|aa)+)+)+)+)+b"},
    "ReDoS, alternatives": {"regex": "(a|a|a|aa|aaa)*" * 60 + "c"},
    "pattern with bad escape": {"regex": r"\d\q{3}"},
    "pattern with bad escape in a schema": {"json": {"type": "string", "pattern": "\\"}},
    "bad regex in a schema": {"json": {"type": "object", "patternProperties": {"[": {}}}},
    "missing type": {"json": {"properties": {"a": {"minimum": 3}}}},
    "type weird": {"json": {"type": "something"}},
    "deep nesting of a schema": {"json": deep('{"type":"array","items":', 3000, "}")},
    "deep nesting of objects": {"json": deep('{"properties":{"a":', 5000, "}}")},
    "deep nesting of allOf": {"json": deep('{"allOf":[', 800, "]}")},
    "deep nesting of groups": {"regex": deep("(", 200_000, ")")},
    "deep nesting of rules": {"grammar": "root ::= " + deep("(", 100_000, ")")},
    "deep nesting of tags": {"structural_tag": deep('{"format":', 50_000, "}")},
    "huge repetition": {"regex": "a{1,1000000000}"},
    "huge repetition, nested": {"regex": "((a{1,999}){1,999}){1,999}"},
    "huge repetition in a grammar": {"grammar": 'root ::= "a"{1,1000000000}'},
    "huge repetition in Lark": {"grammar": 'start: "a"{1000000000}'},
    "huge maxItems": {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**15}},
    "huge minItems": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "huge maxLength": {"json": {"type": "string", "maxLength": 10**15}},
    "huge minLength": {"json": {"type": "string", "pattern": "a*", "minLength": 10**9}},
    "huge enum": {"json": {"enum": [f"value {i}" for i in range(40_000)]}},
    "recursive rules": {"grammar": "root ::= a\na ::= b\nb ::= a"},
    "recursive rules without an end": {"grammar": 'root ::= "a" root'},
    "doubling rules": {"grammar": 'root ::= "(" root ")" | a0\n'
                       + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(60)) + 'a60 ::= "a"?'},
    "left recursion": {"grammar": 'root ::= root "+" root | "1"'},
    "recursive $ref": {"json": {"$ref": "#"}},
    "recursive $ref through a property": {"json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "remote $ref": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "file $ref": {"json": {"$ref": "file:///etc/passwd"}},
    "contradictory bounds": {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    "empty class": {"regex": "[^\\s\\S]"},
    "10 MB": {"grammar": 'root ::= "' + "a" * 10_000_000 + '"'},
    "a million characters": {"regex": "ab" * 500_000},
    "many alternatives": {"regex": "|".join(f"k{i}" for i in range(100_000))},
    "many rules": {"grammar": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(8000)) + 'r8000 ::= "a"'},
    "many intersections": {"grammar": "start: A\nA: " + " & ".join(f"/(?s:.*)x{i}(?s:.*)/" for i in range(3000))},
    "many triggers": {"structural_tag": {"triggers": [f"<{i}>" for i in range(1500)],
                      "structures": [{"begin": f"<{i}>", "schema": True, "end": "<e>"} for i in range(1500)]}},
}  # fmt: skip


def outcome(pool: GrammarPool, ask: dict[str, Any]) -> str | None:
    """The grammar, or None for a refusal, which names a field; another end fails."""
    began = time.monotonic()
    try:
        made = pool.compile_now(StructuredOutput(**ask))
        source, size, field = made.grammar.source, 0, "none"
        assert made.seconds <= CPU_SECONDS
    except RequestError as error:
        source, size, field = None, len(str(error)), error.field
    assert field
    assert size < 1000
    assert time.monotonic() - began < GUARD
    return source


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_hurt(pool: GrammarPool, name: str) -> None:
    source = outcome(pool, KNOWN[name])
    if source is not None:
        walk(source, name)
    assert outcome(pool, {"regex": "[ab]c"}) is not None


def walk(source: str, seed: str) -> None:
    """Generate at random, as an engine would: every answer goes on or may end."""
    draw = random.Random(seed)
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():  # out of fuel, which the engine reports for this answer alone
            assert re.search("limit|too complex|fuel|too many", matcher.get_error()), matcher.get_error()
            return
        allowed = [i for i in range(END + 1) if mask[i >> 3] >> (i & 7) & 1]
        assert allowed, source[:2000]
        token = draw.choice(allowed)
        assert matcher.consume_token(token), source[:2000]
        if token == END or matcher.is_stopped():
            return


def random_regex(draw: random.Random) -> str:
    atoms = [
        "a",
        "b",
        ".",
        "[a-c]",
        r"\d",
        r"[^\n]",
        r"\w+",
        "(?:ab|c)",
        "é",
        r"\x41",
        "(a)",
        r"\.",
        "^",
        "$",
        r"\b",
        "(?=a)",
        r"\1",
    ]
    weights = [8] * 12 + [1] * 5
    marks = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,200}", "*?", "**"]

    def part(depth: int) -> str:
        if depth == 0 or draw.random() < 0.4:
            return draw.choices(atoms, weights)[0] + draw.choice(marks)
        inner = draw.choice(["|", ""]).join(part(depth - 1) for _ in range(draw.randint(1, 4)))
        return f"({inner}){draw.choice(marks)}"

    return "".join(part(draw.randint(0, 4)) for _ in range(draw.randint(1, 5)))


def random_schema(draw: random.Random, depth: int = 3) -> Any:
    words: dict[str, Callable[[], Any]] = {
        "type": lambda: draw.choice(
            ["string", "integer", "object", "array", ["null", "number"], "boolean", "odd", 3]
        ),
        "properties": lambda: {draw.choice("abc"): random_schema(draw, depth - 1) for _ in range(2)},
        "required": lambda: draw.sample(["a", "b", "c"], draw.randint(0, 3)),
        "items": lambda: random_schema(draw, depth - 1),
        "additionalProperties": lambda: draw.choice([True, False, {"type": "string"}]),
        "anyOf": lambda: [random_schema(draw, depth - 1) for _ in range(draw.randint(0, 3))],
        "allOf": lambda: [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 2))],
        "not": lambda: random_schema(draw, depth - 1),
        "enum": lambda: draw.sample(["a", 1, None, {"a": 1}, [2], 1.5, "é"], draw.randint(0, 4)),
        "pattern": lambda: random_regex(draw),
        "minLength": lambda: draw.choice([0, 3, 10**9, -1]),
        "maxItems": lambda: draw.choice([0, 3, 10**15, 1.5]),
        "minimum": lambda: draw.choice([0, -5, 1e300, "1"]),
        "maximum": lambda: draw.choice([0, 7, -1e300]),
        "multipleOf": lambda: draw.choice([1, 0.1, 0, 1e-9]),
        "format": lambda: draw.choice(["date", "uuid", "ipv6", "nothing"]),
        "uniqueItems": lambda: True,
        "$ref": lambda: draw.choice(["#", "#/$defs/a", "#/properties/a", "http://127.0.0.1:9/"]),
        "$defs": lambda: {"a": random_schema(draw, depth - 1)},
    }
    if depth <= 0:
        return draw.choice([True, False, {}, {"type": "string"}, {"type": "integer"}])
    return {word: words[word]() for word in draw.sample(sorted(words), draw.randint(1, 4))}


def random_ask(draw: random.Random) -> dict[str, Any]:
    """Something of each kind, often with a few characters changed."""
    kind = draw.choice(["regex", "gbnf", "lark", "choice", "json", "tag"])
    if kind == "choice":
        alphabet = 'ab"\\\n\x00\x7fé😀|/#'
        return {
            "choice": [
                "".join(draw.choices(alphabet, k=draw.randint(0, 6))) for _ in range(draw.randint(1, 9))
            ]
        }
    if kind == "json":
        return {"json": mutated(draw, json.dumps(random_schema(draw))), "strict": draw.random() < 0.7}
    if kind == "tag":
        tags = [
            {
                "begin": f"<{name}>",
                "content": {"type": "regex", "pattern": random_regex(draw)},
                "end": draw.choice(["", "</x>"]),
            }
            for name in draw.sample("abc", 2)
        ]
        form = {"type": "triggered_tags", "triggers": [tag["begin"] for tag in tags], "tags": tags}
        return {"structural_tag": mutated(draw, json.dumps({"format": form}))}
    if kind == "lark":
        pattern = draw.choice(["[a-z]+", "x{2,5}", "[", "(?=a)"])
        body = f'start: a ("," a)* | /{pattern}/\na: "(" start ")" | %json {{"type": "integer"}}'
        return {"grammar": mutated(draw, body), "syntax": "lark"}
    text = random_regex(draw) if kind == "regex" else random_gbnf(draw.randrange(10**6))
    return {"regex" if kind == "regex" else "grammar": mutated(draw, text)}


def mutated(draw: random.Random, text: str) -> str:
    chars = list(text)
    for _ in range(draw.choice([0, 0, 1, 3])):
        place = draw.randrange(len(chars) + 1)
        chars[place : place + draw.choice([0, 1])] = draw.choice(
            ["", "(", ")", "{", "*", '"', "\\", "[", "::=", "\x00", "é", "9" * 12]
        )
    return "".join(chars)


@pytest.mark.parametrize("part", range(5))
def test_random_structures(pool: GrammarPool, part: int) -> None:
    accepted = 0
    for seed in range(part * ROUNDS, (part + 1) * ROUNDS):
        ask = random_ask(random.Random(seed))
        try:
            source = outcome(pool, ask)
            if source is not None:
                accepted += 1
                if "syntax" not in ask:  # in Lark, dead ends are the grammar's own
                    walk(source, str(seed))
        except BaseException:
            print(seed, ask)
            raise
    assert accepted > ROUNDS / 5
    assert pool.pid is None or resident_peak(pool.pid) < PROCESS_BYTES


def resident_peak(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", file.read())[0])


@pytest.mark.parametrize("part", range(10))
def test_random_grammars_keep_their_texts(part: int) -> None:
    assert sum(map(check_grammar, range(1000 + 300 * part, 1300 + 300 * part))) > 60


def test_a_refusal_is_noticed(pool: GrammarPool) -> None:
    """Negative control."""
    assert outcome(pool, {"regex": "("}) is None
    with pytest.raises(GrammarError):
        pool.compile_now(StructuredOutput(regex="("))
