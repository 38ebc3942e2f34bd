"""The generator: deterministic, split without overlap, and right by its own checks."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.default_model.corpus import arithmetic, glossary, styles
from tools.default_model.corpus.draw import Draw, Split, split_of
from tools.default_model.corpus.glossary_facts import ENTRIES, QUESTIONS
from tools.default_model.corpus.mixture import DOMAINS, conversation, of_domain, stream
from tools.default_model.corpus.records import RECORDS
from tools.default_model.corpus.schema_check import fits
from tools.default_model.corpus.tool_specs import TOOLS
from tools.default_model.evaluate import items_of
from tools.default_model.grading import grade, parse_calls
from tools.default_model.rendering import answer, segments

ROOT = Path(__file__).parents[2]


def _digest(seed: int, split: Split, count: int) -> str:
    texts = ("".join(s.text for s in segments(c)) for c in islice(stream(seed, split), count))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def test_equal_seeds_give_equal_text_in_another_process() -> None:
    code = (
        "import tests.default_model.test_default_model_corpus as t;"
        "from tools.default_model.corpus.draw import Split;"
        "print(t._digest(9, Split.TRAIN, 200))"
    )
    env = {"PYTHONHASHSEED": "123", "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PATH": "/usr/bin"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == _digest(9, Split.TRAIN, 200)


def test_conversation_is_a_function_of_its_index() -> None:
    made = list(islice(stream(4, Split.TRAIN, start=50), 20))
    assert made == [conversation(4, Split.TRAIN, 50 + i) for i in range(20)]
    assert _digest(4, Split.TRAIN, 50) != _digest(5, Split.TRAIN, 50)


def test_draws_stay_in_range_and_cover_it() -> None:
    draw = Draw("x", Split.TRAIN)
    assert {draw.between(3, 5) for _ in range(200)} == {3, 4, 5}
    assert sorted(draw.shuffled(range(20))) == list(range(20))
    assert len(set(draw.sample(range(10), 7))) == 7
    assert {draw.weighted((("a", 1.0), ("b", 0.0), ("c", 2.0))) for _ in range(200)} == {"a", "c"}


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_key_lies_in_its_own_split(domain: str) -> None:
    for split in Split:
        made = of_domain(domain, 2, split, 60)
        assert all(split_of(key) is split for c in made for key in c.keys)
        assert all(c.keys for c in made)


def test_no_combination_and_no_graded_prompt_is_in_both_splits() -> None:
    train = list(islice(stream(1, Split.TRAIN), 3000))
    held = [c for domain in DOMAINS for c in of_domain(domain, 1000, Split.EVAL, 80)]
    assert not {k for c in train for k in c.keys} & {k for c in held for k in c.keys}
    seen = {(i.prompt, i.expected) for i in items_of(train)}
    assert not seen & {(i.prompt, i.expected) for i in items_of(held)}


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_generator_passes_its_own_checks(domain: str) -> None:
    items = [i for split in Split for i in items_of(of_domain(domain, 6, split, 150))]
    assert len(items) > 100
    for item in items:
        assert grade(item.check, item.expected).right, item
        assert not grade(item.check, "QzZ").right or item.check.kind == "tool_call"


def test_json_fits_its_schema_in_the_schema_s_order() -> None:
    checks = [t.check for c in of_domain("extraction", 3, Split.TRAIN, 300) for t in c.turns if t.check]
    made = [c.data for c in checks if c.kind == "json" and isinstance(c.data["value"], dict)]
    assert len(made) > 150
    for data in made:
        assert fits(data["value"], data["schema"])
        assert list(data["value"]) == list(data["schema"]["properties"])


def test_schema_check_refuses() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "e": {"enum": ["a"]}},
        "required": ["n"],
    }
    assert fits({"n": 1}, schema)
    for bad in ({}, {"n": "1"}, {"n": True}, {"n": 1.5}, {"n": 1, "e": "b"}, [], None):
        assert not fits(bad, schema)
    with pytest.raises(ValueError, match="pattern"):
        fits("a", {"type": "string", "pattern": "a"})


def test_calls_name_an_offered_tool_with_all_its_arguments() -> None:
    for made in of_domain("tools", 3, Split.TRAIN, 200):
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in made.tools}
        for turn in made.turns:
            for call in turn.calls:
                assert fits(call.arguments, offered[call.name])
                given = list(offered[call.name]["properties"])
                assert list(call.arguments) == [name for name in given if name in call.arguments]
            wanted = [{"name": c.name, "arguments": c.arguments} for c in turn.calls]
            if turn.role == "assistant":
                assert parse_calls(answer(turn)) == wanted


def test_requests_for_tools_name_what_is_required() -> None:
    for tool in TOOLS:
        slots = ["{" + p.slot + "}" for p in tool.params if p.required]
        assert all(slot in ask for ask in tool.asks for slot in slots), tool.names
        assert all(any(slot not in ask for slot in slots) for ask in tool.vague), tool.names


def test_nearly_half_of_the_conversations_with_tools_call_none() -> None:
    made = of_domain("tools", 5, Split.TRAIN, 600)
    plain = sum(not any(t.calls for t in c.turns) for c in made)
    assert 0.42 * len(made) < plain < 0.58 * len(made)


@given(st.sampled_from(["add", "subtract", "multiply"]), st.integers(0, 9999), st.integers(0, 9999))
@settings(max_examples=300)
def test_working_is_right_line_by_line(kind: str, a: int, b: int) -> None:
    a, b = (a % 1000, b % 10) if kind == "multiply" else (max(a, b), min(a, b))
    lines = arithmetic.working(kind, a, b).split("\n")
    digits = []
    for line in lines:
        if "=" in line:
            for part in line.removeprefix("So ").split(": ")[-1].split(", "):
                if "=" in part:
                    left, right = part.replace("×", "*").split("=")
                    assert eval(left) == int(right)
        if "write" in line:
            digits.append(line.split("write ")[1].rstrip(".").split(",")[0])
    value = arithmetic.result(kind, a, b)
    assert arithmetic.answer(kind, a, b).endswith(f" = {value}.")
    if digits:
        assert int("".join(reversed(digits))) == value


def test_every_term_and_question_is_taught() -> None:
    taught = {t.content for i in range(4000) for t in glossary.make(Draw(f"g{i}", Split.TRAIN)).turns}
    assert all(f"{e.short} {e.more}" in taught for e in ENTRIES)
    assert all(q.answer in taught for q in QUESTIONS)


def test_names_within_a_record_or_tool_do_not_clash() -> None:
    for record in RECORDS:
        names = [k for f in (record.name, *record.fields) for k in f.keys]
        assert len(names) == len(set(names)), record.kind
    for tool in TOOLS:
        names = [n for p in tool.params for n in p.names]
        assert len(names) == len(set(names)), tool.names
    assert len({n for t in TOOLS for n in t.names}) == sum(len(t.names) for t in TOOLS)


@pytest.mark.parametrize("style", styles.STYLES)
def test_styles_show(style: str) -> None:
    for split in Split:
        for i in range(60):
            made = styles.styled(style, 1, split, i)
            said = [t.content for t in made.turns if t.role == "assistant"]
            assert said
            assert all(map(styles.STYLES[style].shown, said))
