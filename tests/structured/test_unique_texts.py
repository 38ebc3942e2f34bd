"""Keys and items that come once: answers found at random have none twice, and without what follows them, they do."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from helpers.byte_matcher import source_of
from helpers.grammars import pieces, tiny_tokenizer
from helpers.region_cases import CASES, A, Case, markers_of, tokens_of
from quire.structured.grammar_limits import parser_limits
from quire.structured.grammar_tokens import GrammarTokens
from quire.structured.json_schema import compile_json_schema, json_object_grammar
from quire.structured.matcher import GrammarState
from quire.structured.tool_grammar import ToolChoice, ToolFunction, tool_grammar
from quire.structured.unique_needs import UniqueNeeds
from quire.structured.unique_texts import UniqueTexts
from quire.structured.unique_tokens import UniqueTokens
from quire.text.regions.spec import ChannelCall, RegionSpec
from quire.text.token_bytes import TokenBytes
from quire.types import FinishReason

END = 1


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises AssertionError for a key that comes twice."""
    assert len({key for key, _ in pairs}) == len(pairs), [key for key, _ in pairs]
    return dict(pairs)


class Words:
    """A vocabulary of these tokens behind one that ends an answer."""

    def __init__(self, *words: str) -> None:
        ends, data = [0, 0], b""
        for word in words:
            data += word.encode()
            ends.append(len(data))
        self.pieces = TokenBytes(data, np.array(ends, np.int32).tobytes())
        self.tokens = GrammarTokens(self.pieces, None)
        self.unique = UniqueTokens(self.pieces, self.tokens.trie)

    def start(self, source: str, *, follow: bool = True) -> GrammarState:
        matcher = LLMatcher(self.tokens.trie, source, log_level=0, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        needs = UniqueNeeds.of(source)
        return GrammarState(matcher, UniqueTexts(self.unique, needs) if needs and follow else None)

    def allowed(self, state: GrammarState) -> list[int]:
        line = np.zeros(self.tokens.words, np.uint32)
        state.fill(line, len(self.pieces), (END,))
        return np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist()

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode()

    def walk(self, state: GrammarState, rng: random.Random, length: int = 25) -> list[int]:
        """An answer by a model that prefers a few tokens; empty if it does not end soon."""
        out, liking = list[int](), [rng.random() ** 4 + 1e-6 for _ in range(len(self.pieces))]
        while not state.complete:
            forced = state.forced
            chosen = forced[:1] or self.allowed(state)
            assert chosen, f"dead end behind {self.text(out)}"
            if END in chosen:
                if len(out) > length or rng.random() < 0.3:
                    break
                chosen.remove(END)
            if len(out) > length:
                closing = [token for token in chosen if self.pieces[token][:1] in (b'"', b"}", b"]")]
                chosen = closing or chosen
            if len(out) > 10 * length:
                return []
            token = rng.choices(chosen, [liking[token] for token in chosen])[0]
            state.step([token])
            out.append(token)
        return out


@cache
def tiny() -> Words:
    """The vocabulary of the other tests of grammars."""
    made = Words.__new__(Words)
    made.pieces = pieces()
    made.tokens = GrammarTokens(made.pieces, tiny_tokenizer())
    made.unique = UniqueTokens(made.pieces, made.tokens.trie)
    return made


@cache
def few() -> Words:
    """Words that leave few other keys, several of them across the signs between two properties."""
    return Words(
        "{", "}", "[", "]", ":", ",", '"', " ", "\n", "\r", "\t", "a", "b", "c", "1", "2", "0", "-", ".", "\\", "n",
        'a"', '"a"', '"a":1', ',"a":1', '{"a":1,"a":1', '","a":"', '","', '"b', ',"b', "ab", '"ab":', "},", '":', "[]",
        ' "a"', ",1,", "1,", "12", '","a', "\\n", '{"', "e", "t", "r", "u", "l", "f", "s", "u0001", '":{"a":',
    )  # fmt: skip


NAMED = {
    "properties": {"a": {"type": "integer"}},
    "additionalProperties": {"type": "object"},
    "type": "object",
}
OPEN: list[Any] = [
    {"type": "object"},
    {"type": "object", "additionalProperties": {"enum": [1, 2]}, "minProperties": 3},
    {"type": "object", "patternProperties": {"^[ab]*$": {"const": 1}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^[ab]+c$": {"const": 1}}, "additionalProperties": False,
     "minProperties": 2},
    {"type": "object", "propertyNames": {"pattern": "^[abc]{4}$"}, "additionalProperties": {"const": 1},
     "minProperties": 4},
    {"type": "object", "additionalProperties": NAMED},
    {"type": "array", "items": {"anyOf": [{"type": "object", "required": ["b"]}, {"type": "string"}]}, "minItems": 1},
]  # fmt: skip


@pytest.mark.parametrize("words", [tiny, few], ids=["tiny", "few"])
@pytest.mark.parametrize("schema", OPEN, ids=lambda schema: json.dumps(schema)[:50])
def test_no_key_comes_twice(schema: Any, words: Any) -> None:
    for whitespace in (True, False):
        source = compile_json_schema(schema, whitespace=whitespace).source
        for seed in range(2):
            made = words()
            tokens = made.walk(made.start(source), random.Random(seed))
            if tokens:
                json.loads(made.text(tokens), object_pairs_hook=distinct)


def test_without_what_follows_them_keys_come_twice() -> None:
    """The control of the test above."""
    twice = 0
    for schema in OPEN:
        source = compile_json_schema(schema).source
        for seed in range(6):
            tokens = few().walk(few().start(source, follow=False), random.Random(seed))
            try:
                json.loads(few().text(tokens) or "{}", object_pairs_hook=distinct)
            except AssertionError:
                twice += 1
    assert twice > 8


ITEMS: list[Any] = [
    {"type": "string"}, {"type": "integer"}, {"type": "integer", "minimum": -3, "maximum": 90}, {"type": "number"},
    {"type": ["string", "boolean", "null"], "maxLength": 2}, {"type": "string", "pattern": "^[ab]{6}$"},
]  # fmt: skip


@pytest.mark.parametrize("items", ITEMS, ids=json.dumps)
def test_no_item_comes_twice(items: Any) -> None:
    unique = {"type": "array", "items": items, "uniqueItems": True, "minItems": 3}
    plain = {"type": "array", "items": {"enum": [1]}, "minItems": 2}
    schema = {"type": "object", "properties": {"a": unique, "b": plain}, "required": ["a", "b"]}
    source = compile_json_schema(schema).source
    for words in (few(), tiny()):
        for seed in range(2):
            tokens = words.walk(words.start(source), random.Random(seed))
            if tokens:
                found = json.loads(words.text(tokens), object_pairs_hook=distinct)["a"]
                assert len({(isinstance(one, bool), one) for one in found}) == len(found) >= 3


def test_an_item_that_could_be_in_an_array_of_unique_items_is_excluded_there_alone() -> None:
    schema = {"anyOf": [{"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                        {"type": "array", "items": {"type": "integer"}}]}  # fmt: skip
    source = compile_json_schema(schema).source
    state = few().start(source)
    state.step(spelled('["a","a'))
    assert '"' not in allowed_texts(state)
    state = few().start(source)
    state.step(spelled("[1,1"))
    assert {",", "]"} <= allowed_texts(state)


def spelled(text: str) -> list[int]:
    found = few().unique.spelled(text.encode())
    assert found is not None
    return found


def allowed_texts(state: GrammarState) -> set[str]:
    return {few().text([token]) for token in few().allowed(state)}


def test_a_key_is_excluded_in_its_object_and_spelling() -> None:
    state = few().start(json_object_grammar())
    state.step(spelled('{"a":{"b":1,"a'))
    assert {'"', '":'} <= allowed_texts(state), "a is a key of the outer object"
    state.step(spelled('":{},"a'))
    assert not {'"', '":'} & allowed_texts(state)
    assert {"a", "b", "\\"} <= allowed_texts(state)
    state.step(spelled("b"))
    assert {'"', '":'} <= allowed_texts(state)


def test_tokens_across_signs_are_seen_through() -> None:
    state = few().start(json_object_grammar())
    state.step(spelled('{"b":"'))
    assert '","a":"' in allowed_texts(state)
    state.step(spelled('","a":"'))
    assert '","a":"' not in allowed_texts(state)
    assert {'","', '","a'} <= allowed_texts(state)
    fresh = few().start(json_object_grammar())
    assert "{" in allowed_texts(fresh)
    assert '{"a":1,"a":1' not in allowed_texts(fresh)


TAGGED = {
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
    "triggers": ["<a>"],
}


def test_json_begins_where_the_grammar_allows_nothing_else() -> None:
    words = Words(*(chr(code) for code in (*range(32, 127), 9, 10, 13)))
    source = source_of(structural_tag=TAGGED)
    state = words.start(source)
    for text in ('{"a":1,"a', '":1} "{', '<a>{"a":1,"a'):
        found = words.unique.spelled(text.encode())
        assert found is not None
        state.step(found)
        allowed = {words.text([token]) for token in words.allowed(state)}
        assert ('"' in allowed) == ("<a>" not in text)
    for text in ('b":{}}</a>, {"a":1,"a', '"}<a>{"a":1,"a'):
        found = words.unique.spelled(text.encode())
        assert found is not None
        state.step(found)
        allowed = {words.text([token]) for token in words.allowed(state)}
        assert ('"' in allowed) == ("<a>" not in text)


def test_states_taken_back_and_forks_are_those_that_were_stepped_there() -> None:
    rng = random.Random(0)
    source = json_object_grammar()
    for seed in range(5):
        state = few().start(source)
        tokens = few().walk(state, random.Random(seed), 20)
        kept = rng.randint(0, len(tokens))
        fork, fresh = state.fork(), few().start(source)
        fork.rollback(len(tokens) - kept)
        fresh.step(tokens[:kept])
        for _ in range(6):
            allowed = few().allowed(fork)
            assert allowed == few().allowed(fresh)
            if not allowed:
                break
            token = rng.choice(allowed)
            fork.step([token])
            fresh.step([token])
        again = few().start(source)
        again.step(tokens)
        assert few().allowed(state) == few().allowed(again), "the fork moved, its origin did not"


def test_a_state_that_holds_too_much_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.structured.unique_texts.UNIQUE_BYTES", 300)
    state = few().start(json_object_grammar())
    state.step(spelled('{"a":1,"b":{"a":1,"b":2},"c":1,"ab":[1]'))
    assert state.failure is None
    state.step(spelled(',"ba":1'))
    assert state.failure is FinishReason.GRAMMAR_LIMIT


def test_what_is_closed_needs_no_following() -> None:
    closed = {"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": False}
    assert UniqueNeeds.of(compile_json_schema(closed).source) is None
    assert UniqueNeeds.of(json_object_grammar()) == UniqueNeeds()
    assert UniqueNeeds.of(source_of(structural_tag=TAGGED)) == UniqueNeeds()
    needs = UniqueNeeds.of(compile_json_schema({"items": {"type": "number"}, "uniqueItems": True}).source)
    assert needs == UniqueNeeds(items=True, tails=True)


OPEN_ARGUMENTS = {"type": "object", "additionalProperties": {"type": ["integer", "object"]}}
FORMATS = [case for case in CASES if A in case.text and not case.text.startswith("<|python")]


@cache
def marked() -> Words:
    """256 bytes, and tokens for markers."""
    made = Words(*([""] * 295))
    ends = np.minimum(np.arange(1, 298), 256).astype(np.int32)
    made.pieces = TokenBytes(bytes(range(256)), ends.tobytes())
    made.tokens = GrammarTokens(made.pieces, None)
    made.unique = UniqueTokens(made.pieces, made.tokens.trie)
    return made


@pytest.mark.parametrize("case", FORMATS, ids=[case.calls for case in FORMATS])
def test_no_argument_of_a_call_comes_twice(case: Case) -> None:
    """In every format whose calls hold JSON: in each call for itself, whatever stands around it."""
    functions = [ToolFunction("f", OPEN_ARGUMENTS), ToolFunction("g", None)]
    markers, spec = markers_of(case.spec), RegionSpec(case.spec.calls)
    made = tool_grammar(spec, markers, functions, ToolChoice(mode="required"), compile_schema=ours)
    assert made is not None
    channel = isinstance(case.spec.calls.call, ChannelCall)
    opener = case.spec.calls.opener.strip() + " to=" * channel
    head, _, tail = case.text[case.text.index(opener) :].partition(A)
    state = marked().start(made.source)
    for step, closes in (
        (f'{head}{{"a": 1, "b": {{"a', True), ('":2, "b', True), ('": {}}, "a', False), ('b":3, "b', False),
    ):  # fmt: skip
        state.step(tokens_of(markers, step))
        assert state.failure is None, step
        assert (ord('"') in marked().allowed(state)) is closes, step
    state.step(tokens_of(markers, f'c": 4}}{"" if channel else tail}'))
    assert state.failure is None


def ours(schema: object, strict: bool) -> tuple[str, tuple[str, ...]]:
    return compile_json_schema(schema, strict=strict).source, ()
