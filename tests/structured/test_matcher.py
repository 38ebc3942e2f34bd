"""States of grammars: masks, forced runs, rollback and forks."""

from __future__ import annotations

import json
import random

import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLMatcher

from helpers.grammars import VOCAB, grammar, pieces, schema_grammar, text_of, tiny_tokenizer
from quire.structured.grammar_limits import parser_limits
from quire.structured.grammar_tokens import MAX_PIECE, GrammarTokens, _Speller
from quire.structured.matcher import GrammarState
from quire.types import FinishReason, Grammar

TOKENS = GrammarTokens(pieces(), tiny_tokenizer())
ENDS = (1, 2)
PERSON = schema_grammar(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "orderid": {"type": "array", "items": {"enum": ["age", "agent", 12]}},
        },
        "required": ["name", "orderid"],
        "additionalProperties": False,
    }
)
FREE = grammar('start: /[a-d]*/ ("name" | "nam" "." | "orde" "r"+)')


def start(one: Grammar) -> GrammarState:
    made = LLMatcher(TOKENS.trie, one.source, log_level=0, limits=parser_limits())
    assert not made.is_error(), made.get_error()
    return GrammarState(made)


def mask(state: GrammarState) -> npt.NDArray[np.bool_]:
    line = np.full(TOKENS.words, 2**32 - 1, np.uint32)
    state.fill(line, VOCAB, ENDS)
    bits = np.unpackbits(line.view(np.uint8), bitorder="little").astype(np.bool_)
    assert not bits[VOCAB:].any()
    return bits[:VOCAB]


def walk(state: GrammarState, rng: random.Random, count: int) -> list[int]:
    """Step over up to `count` tokens that the masks allow."""
    tokens: list[int] = []
    while len(tokens) < count and not state.complete:
        token = rng.choice(np.flatnonzero(mask(state)).tolist())
        if token in ENDS:
            break
        state.step([token])
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("one", [PERSON, FREE], ids=["schema", "lark"])
def test_rollback_and_forks_are_states_that_were_stepped_there(one: Grammar) -> None:
    rng = random.Random(0)
    for _ in range(60):
        state = start(one)
        tokens = walk(state, rng, rng.randint(1, 30))
        kept = rng.randint(0, len(tokens))
        fresh = start(one)
        fresh.step(tokens[:kept])
        fork = state.fork()
        fork.rollback(len(tokens) - kept)
        for other in (fork, fresh.fork()):
            assert other.forced == fresh.forced
            assert (mask(other) == mask(fresh)).all()
        more = walk(fork, rng, 5)
        fresh.step(more)
        assert (mask(fork) == mask(fresh)).all()
        again = start(one)
        again.step(tokens)  # the fork moved, its origin did not
        assert (mask(state) == mask(again)).all()
        assert state.complete == again.complete


def test_a_draft_that_is_refused_harms_only_the_fork() -> None:
    state = start(PERSON)
    wrong = tiny_tokenizer().encode("z")
    fork = state.fork()
    fork.step(wrong)
    assert fork.failure is not None
    assert not mask(fork).any()
    assert state.failure is None
    assert mask(state).any()


@pytest.mark.parametrize("text", ['{"name":"orderid","age":12}', "true", "nullnull,,nameorde"])
def test_forced_bytes_are_tokenized_as_the_tokenizer_does(text: str) -> None:
    state = start(grammar(f"start: {json.dumps(text)}"))
    made: list[int] = []
    while state.forced:
        made += state.forced
        state.step(state.forced)
    assert state.complete
    assert made == tiny_tokenizer().encode(text)


def test_a_run_stops_where_its_last_tokens_could_be_others() -> None:
    """After "na" may come "me", a token with it, or "n"."""
    state = start(grammar('start: "12na" ("me" | "n")'))
    assert text_of(state.forced) == "12"
    state.step(state.forced)
    allowed = {text_of([int(token)]) for token in np.flatnonzero(mask(state))}
    assert allowed >= {"name", "na"}
    assert "order" not in allowed


def test_a_long_forced_text_is_forced_in_pieces_of_the_same_tokens() -> None:
    text = "order12,name" * (MAX_PIECE // 4)
    state = start(grammar(f"start: {json.dumps(text)}"))
    made: list[int] = []
    while state.forced:
        assert len(state.forced) <= MAX_PIECE
        made += state.forced
        state.step(state.forced)
    assert state.complete
    assert made == tiny_tokenizer().encode(text)


def test_a_long_text_of_few_tokens_is_forced() -> None:
    speller = tiny_tokenizer().encode("0" * 4)
    assert len(speller) == 2  # "00" twice
    text = "00" * (2 * MAX_PIECE)
    few = _Speller(pieces(), tiny_tokenizer())
    few._encode = lambda text: [speller[0]] * (len(text) // 1000)  # type: ignore[method-assign]
    assert few(text) == [speller[0]] * 8
    assert len(few("0" * 40_000)) == 24  # of 32,768 characters, without the last tokens


def test_the_end_is_allowed_where_the_grammar_accepts() -> None:
    state = start(grammar('start: "name" /[a-c]*/'))
    state.step(state.forced)
    assert not state.complete
    assert mask(state)[list(ENDS)].all()
    assert not mask(start(PERSON))[list(ENDS)].any()


def test_a_dead_end_and_a_limit_have_names() -> None:
    dead = start(grammar('start: "na" "\\u00e9"'))
    dead.step(dead.forced)
    assert not mask(dead).any()
    assert dead.failure is FinishReason.GRAMMAR_DEAD_END
