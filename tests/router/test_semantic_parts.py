"""Parts of the semantic cache: which requests and answers, which marks, and the nearest within a bound of memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config.routing import RouterConfig
from quire.config.semantic import parse_semantic
from quire.router.router_context import semantic_memory
from quire.router.semantic_request import chat_question, kept_chat
from quire.routing.near_answers import MOST_OF_KEY, NearAnswers
from quire.routing.question_marks import marks_of, same_marks

BODY: dict[str, Any] = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "Why?"}]}


def question(body: Any, *, sampled: bool = False) -> Any:
    return chat_question(body if isinstance(body, bytes) else json.dumps(body).encode(), b"", sampled=sampled)


@pytest.mark.parametrize("change", [
    {"temperature": None}, {"temperature": 0.5}, {"temperature": False}, {"seed": 1}, {"n": 2}, {"n": True},
    {"logprobs": True}, {"mirostat": 2}, {"dynatemp_range": 0.5},
    {"model": None}, {"model": ""}, {"some_field": 1}, {"stream": 1}, {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}}, {"prompt_logprobs": 1}, {"messages": []},
    {"messages": [{"role": "user", "content": " "}]}, {"messages": [{"role": "user", "content": "x" * 2001}]},
    {"messages": [{"role": "assistant", "content": "x"}]}, {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}, *BODY["messages"]]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}, *BODY["messages"]]},
])  # fmt: skip
def test_chats_that_are_not_answered(change: dict[str, Any]) -> None:
    assert question(BODY) is not None
    assert question({**BODY, **change}) is None


def test_bodies_that_are_none() -> None:
    for body in (
        b"",
        b"[]",
        b"{",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        json.dumps({**BODY, "user": "x" * 300_000}).encode(),
    ):
        assert question(body) is None


def test_sampled_chats_are_answered_if_that_is_asked_for() -> None:
    warm = {**BODY, "temperature": 0.7}
    assert question(warm) is None
    assert question(warm, sampled=True) is not None
    assert question({**warm, "seed": 1}, sampled=True) is None


def test_parts_of_a_text_and_names_of_fields_in_any_order() -> None:
    one = question(BODY)
    other = question({**dict(reversed(BODY.items())), "stream": True, "request_id": "r"})
    assert (one.key, one.text, other.stream) == (other.key, other.text, True)
    parts = {**BODY, "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]}
    assert question(parts).text == "Why?"


def test_answers_that_are_cut_or_no_answers() -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    whole = data + b"data: [DONE]\n\n"
    assert kept_chat(whole, stream=True) is not None
    noted = b": ids 1 2 3\n\n: ids 4\n" + whole
    assert kept_chat(noted, stream=True) == kept_chat(whole, stream=True), "comments are no part of it"
    assert question({**BODY, "resumed_output": {}}) is None
    two = json.dumps(
        {"choices": [{"index": 1, "delta": {"content": "Hi"}, "finish_reason": "stop"}]}
    ).encode()
    error = b'data: {"error": {}, "choices": []}\n\n'
    bad = (data, whole[:-20], b"data: [DONE]\n\n", b"data: {\n\n" + whole, error + whole,
           b"data: " + two + b"\n\n" + whole, whole + data, b"data: 1\n\n" + whole)  # fmt: skip
    for body in bad:
        assert kept_chat(body, stream=True) is None, body
    for body in (
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"finish_reason": "stop", "message": {"content": ""}}]}',
    ):
        assert kept_chat(body, stream=False) is None, body


@pytest.mark.parametrize(("one", "other"), [
    ("What is 17 times 23?", "What is 17 times 24?"), ("Is it on Monday?", "Is it on Tuesday?"),
    ("Can I pay?", "Can't I pay?"), ("How do I open it?", "How do I close it?"),
    ("Celsius to Fahrenheit, how?", "Fahrenheit to Celsius, how?"), ("Say 'yes' to Ann", "Say 'no' to Ann"),
    ("Translate: I like cats", "Translate: I like dogs"), ("Fix this:\na = 1", "Fix this:\na = b"),
    ("Who won?", "When was it won?"), ("Is 3 + 4 prime?", "Is 3 * 4 prime?"), ("two eggs", "three eggs"),
    ("Wer ist der Kanzler?", "Wer ist der Präsident?"), ("convert 5 km to miles", "convert 5 miles to km"),
    ("translate from english to french", "translate from french to english"),
    ("Do dogs chase cats?", "do cats chase dogs"), ("Was kostet das in Rom?", "Was kostet das in Köln?"),
])  # fmt: skip
def test_questions_that_differ_in_their_marks(one: str, other: str) -> None:
    assert same_marks(marks_of(one), marks_of(one))
    assert not same_marks(marks_of(one), marks_of(other))


@pytest.mark.parametrize(("one", "other"), [
    ("What is the capital of France?", "Which city is the capital of France?"),
    ("How do I reset my password?", "please, i forgot how i reset the password"),
    ("What’s the biggest animal?", "What is the largest animal"), ("Don't you eat it?", "Do you not eat it?"),
    ("", " "),
])  # fmt: skip
def test_questions_of_the_same_marks(one: str, other: str) -> None:
    assert same_marks(marks_of(one), marks_of(other))


def vector_of(draw: random.Random, size: int = 16) -> Any:
    made = np.array([draw.choice((-1.0, 0.0, 1.0)) for _ in range(size - 1)] + [1.0], np.float32)
    return made / np.linalg.norm(made)


def test_the_nearest_is_found_as_by_looking_at_all() -> None:
    draw, now = random.Random(7), 0.0
    answers, kept = NearAnswers(2**22, 0.9, 50.0), list[tuple[bytes, Any, bytes, bytes, float]]()
    for number in range(3000):
        now += 0.1
        key, marks, vector = (draw.choice((b"a", b"b", b"c")), draw.choice((b"x", b"y")), vector_of(draw, 6))
        found = answers.find(key, vector, marks, "w", now)
        able = [
            (float(each[1] @ vector), each[3]) for each in kept
            if each[0] == key and each[2] == marks and each[4] > now and float(each[1] @ vector) >= 0.9
        ]  # fmt: skip
        best = max((cosine for cosine, _ in able), default=None)
        assert (found is None) == (best is None)
        if found is not None:
            assert found.similarity == pytest.approx(best, abs=1e-6)
            assert any(answer == found.answer for cosine, answer in able if cosine > best - 1e-6)
        if draw.random() < 0.5:
            answer = str(number).encode()
            answers.keep(key, vector, marks, answer, "w", now)
            kept = [
                each for each in kept
                if not (each[0] == key and each[2] == marks and float(each[1] @ vector) >= 0.9999)
            ]  # fmt: skip
            kept.append((key, vector, marks, answer, now + 50.0))
    assert answers.evicted == 0
    assert answers.held <= 2**22


def test_memory_is_bounded_whatever_comes() -> None:
    """By what it counts and by what Python has allocated: many short answers, alone of their kind, then long ones."""
    size = 2**20
    draw = random.Random(3)
    numbers = np.random.default_rng(3)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    answers = NearAnswers(size, 0.9, 1e9)
    most = 0
    for number in range(4000):
        vector = numbers.standard_normal(32).astype(np.float32)
        vector /= np.linalg.norm(vector)
        length = draw.choice((1, 20, 200)) if number < 3000 else draw.choice((20, 50_000, 10**6))
        answers.keep(
            draw.randbytes(32), vector, draw.randbytes(32), b"x" * length, f"w{number % 3}", float(number)
        )
        assert answers.held <= size
        if number % 50 == 0:
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    assert answers.evicted > 1000
    assert 0 < most <= size, f"{most} bytes"


def test_those_not_given_for_the_longest_time_go_first() -> None:
    answers, draw = NearAnswers(2**20, 0.99, 1e9), random.Random(1)
    first, second = np.eye(16, dtype=np.float32)[:2]
    for vector in (first, second):
        answers.keep(b"k", vector, b"", b"x" * 1000, "w", 0.0)
    while not answers.evicted:
        assert answers.find(b"k", first, b"", None, 0.0) is not None
        answers.keep(draw.randbytes(32), vector_of(draw), b"", b"x" * 1000, "w", 0.0)
    assert answers.find(b"k", second, b"", None, 0.0) is None
    assert answers.find(b"k", first, b"", None, 0.0) is not None


def test_a_key_has_a_bounded_number_of_answers() -> None:
    answers = NearAnswers(2**25, 0.999, 1e9)
    vectors = np.random.default_rng(1).standard_normal((MOST_OF_KEY + 10, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for number, vector in enumerate(vectors):
        answers.keep(b"k", vector, b"", b"%d" % number, "w", 0.0)
    assert len(answers) + answers.evicted == MOST_OF_KEY + 10
    assert len(answers) <= MOST_OF_KEY
    assert answers.find(b"k", vectors[0], b"", "w", 0.0) is None
    for number in (10, 700, MOST_OF_KEY + 9):
        found = answers.find(b"k", vectors[number], b"", "w", 0.0)
        assert found is not None
        assert found.answer == b"%d" % number


def test_options(tmp_path: Path) -> None:
    found = parse_semantic("url=http://h:1, threshold=0.9,size=2MiB,seconds=60,timeout=0.2,sampled=yes")
    assert (found.threshold, found.size, found.sampled) == (0.9, 2**21, True)
    for text, problem in (
        ("threshold=0.9", "url: missing"), ("url=h,thershold=1", "'thershold=1' is not understood"),
        ("url=h,threshold=1.1", "threshold: 1.1 is not above 0"), ("url=h,size=1KiB", "size: 1KiB is below 1MiB"),
        ("url=h,seconds=nan", "seconds: nan"), ("url=h,sampled=1", "sampled: '1' is neither"),
        ("url=h,url=h", "'url=h' is not understood"), (f"url=h,key-file={tmp_path}", "is not a file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"semantic_cache: .*{problem}"):
            RouterConfig(backend=("http://h:1",), semantic_cache=text)
    assert semantic_memory(None) == 0
    assert semantic_memory("url=h,size=2MiB") > 2**21
