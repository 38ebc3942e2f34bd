"""The generator: deterministic, split without overlap, and right by its own checks."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.default_model.corpus import columns, grammar, manner, mixture, styles, system_prompts, tasks, texts
from tools.default_model.corpus.conversation import Check, Conversation, assistant, system, user
from tools.default_model.corpus.draw import Draw, Split, split_of
from tools.default_model.corpus.mixture import DOMAINS, conversation, of_domain, stream
from tools.default_model.corpus.records import RECORDS
from tools.default_model.corpus.schema_check import fits
from tools.default_model.corpus.tool_specs import TOOLS
from tools.default_model.corpus.wording import parse
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


# How many conversations are looked at, of the most that a test has; all of them behind the marker.
shares = pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.model)])


@shares
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_key_lies_in_its_own_split(domain: str, share: float) -> None:
    for split in Split:
        made = of_domain(domain, 2, split, int(share * 60))
        assert all(split_of(key) is split for c in made for key in c.keys)
        assert all(c.keys for c in made)


@shares
def test_no_combination_and_no_graded_prompt_is_in_both_splits(share: float) -> None:
    train = list(islice(stream(1, Split.TRAIN), int(share * 3000)))
    held = [c for domain in DOMAINS for c in of_domain(domain, 1000, Split.EVAL, int(share * 80))]
    assert not {k for c in train for k in c.keys} & {k for c in held for k in c.keys}
    seen = {(i.prompt, i.expected) for i in items_of(train)}
    assert not seen & {(i.prompt, i.expected) for i in items_of(held)}


@shares
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_generator_passes_its_own_checks(domain: str, share: float) -> None:
    items = [i for split in Split for i in items_of(of_domain(domain, 6, split, int(share * 150)))]
    assert len(items) > share * 100
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


@given(st.sampled_from(["add", "subtract", "multiply", "divide"]), st.integers(0, 9999), st.integers(1, 9999))
@settings(max_examples=400)
def test_working_is_right_line_by_line(kind: str, a: int, b: int) -> None:
    if kind == "multiply":
        a, b = (a, b % 10) if b % 2 else (a % 100, b % 100)
    if kind == "divide":
        b = b % 9 + 1
    value = columns.result(kind, a, b)
    said = columns.answer(kind, a, b)
    end = f" = {value}" + (f" remainder {a % b}" if kind == "divide" and a % b else "")
    assert said.endswith(f"{end}.")
    assert said.startswith(f"{a} ") == columns.is_direct(kind, a, b)
    for line in said.rstrip(".").split("\n"):
        if "=" in line:
            left, right = (
                re.sub(r"^(So|[A-Z][a-z ]+:) ", "", line).replace("×", "*").replace("/", "//").split("=")
            )
            assert eval(left) == int(re.split(" rest | remainder ", right)[0])


@pytest.mark.parametrize("name", sorted(path.stem for path in tasks.FOLDER.glob("*.txt")))
def test_wordings_of_the_tasks_are_patterns(name: str) -> None:
    for lines in tasks.sections(name).values():
        assert lines
        for line in lines:
            parse(line)


def test_names_within_a_record_or_tool_do_not_clash() -> None:
    for record in RECORDS:
        names = [k for f in (record.name, *record.fields) for k in f.keys]
        assert len(names) == len(set(names)), record.kind
    for tool in TOOLS:
        names = [n for p in tool.params for n in p.names]
        assert len(names) == len(set(names)), tool.names
    assert len({n for t in TOOLS for n in t.names}) == sum(len(t.names) for t in TOOLS)


# What the callers of each grammar choose themselves.
_SLOTS = {
    "texts": {*texts.people(Draw("t", Split.TRAIN))},
    "poems": {"t", "b", "x", "name", "day"},
    "system_prompts": {"x", "q", "brand", "city", "company"},
}


@pytest.mark.parametrize("name", _SLOTS)
def test_grammars_name_only_what_they_have(name: str) -> None:
    said = grammar.load(name)
    sections = set(said)
    used = {symbol for section in sections for symbol in said.symbols(section)}
    assert used <= sections | _SLOTS[name]


def test_grammar_says_a_slot_once_and_numbered_ones_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "@start\n{^a} <b> {a}, {c1} {c2}: a <v> \\(x\\)\\[y\\]\\n.\n@a\n(one|two)\n@b\nis\n@c\np\nq\n@v\napple\n"
    (tmp_path / "g.txt").write_text(lines)
    monkeypatch.setattr(grammar, "_FOLDER", tmp_path)
    said = {grammar.load.__wrapped__("g").text(Draw(str(i), Split.TRAIN), "start") for i in range(60)}
    ends = [" p q: an apple (x)[y]\n.", " q p: an apple (x)[y]\n."]
    assert said == {f"{a.capitalize()} is {a},{end}" for a in ("one", "two") for end in ends}
    (tmp_path / "g.txt").write_text("@a\n(b\n")
    with pytest.raises(ValueError, match=r"g.txt:2"):
        grammar.load.__wrapped__("g")


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("upper", "", "HELLO, MIA! IT IS HOT. BYE."),
        ("lower", "", "hello, mia! it is hot. bye."),
        ("json", "out", '{"out": "Hello, Mia! It is hot. Bye."}'),
        ("end", "Over.", "Hello, Mia! It is hot. Bye. Over."),
        ("begin", "So,", "So, Hello, Mia! It is hot. Bye."),
        ("bullets", "", "- Hello, Mia!\n- It is hot.\n- Bye."),
        ("numbers", "", "1. Hello, Mia!\n2. It is hot.\n3. Bye."),
        ("brief", "", "Hello, Mia!"),
        ("excited", "", "Hello, Mia! It is hot! Bye!"),
        ("character", "cat", "Meow! Hello, Mia! It is hot. Bye. Purr."),
    ],
)
def test_manners(kind: str, value: str, said: str) -> None:
    wish = manner.Manner(kind, value)
    text = "Hello, Mia! It is hot. Bye."
    assert manner.follow(Draw("m", Split.TRAIN), wish, text) == said
    assert manner.follows(wish, said)
    assert not manner.follows(wish, text)


def test_a_manner_keeps_the_check_of_the_answer() -> None:
    made = Conversation(
        "d", [user("2+2?"), assistant("Four.", Check("contains", {"all": ["four"], "task": "t"}))]
    )
    kinds = set()
    for i in range(300):
        styled = system_prompts.obeyed(Draw(f"o{i}", Split.TRAIN), made)
        if styled is None:
            continue
        check = styled.turns[-1].check
        assert check is not None
        kinds.add(check.data["task"])
        assert grade(check, styled.turns[-1].content).right
        assert not grade(check, styled.turns[-1].content.lower().replace("four", "five")).right
    assert {"upper", "lower", "pirate", "json", "end", "begin", "name", "two wishes"} <= kinds


def test_a_prompt_that_changes_nothing_has_many_wordings() -> None:
    assert len({system_prompts.neutral(Draw(f"n{i}", Split.TRAIN)) for i in range(1000)}) > 600
    made = Conversation("d", [system("Be brief."), user("hi"), assistant("Hello!")])
    assert system_prompts.obeyed(Draw("o", Split.TRAIN), made) is None


@pytest.mark.parametrize("style", styles.STYLES)
def test_styles_show(style: str) -> None:
    for split in Split:
        for i in range(60):
            made = styles.styled(style, 1, split, i)
            said = [t.content for t in made.turns if t.role == "assistant"]
            assert said
            assert all(map(styles.STYLES[style].shown, said))


def test_prompts_written_by_hand_are_not_in_training() -> None:
    """Longer ones, whatever their case and marks; negative control: the guard knows them."""
    asked = "Which is BIGGER, an elephant or a mouse?"
    assert mixture.asks_by_hand(Conversation("world", [user("Hi"), assistant("Hello!"), user(asked)]))
    assert not mixture.asks_by_hand(Conversation("world", [user("Who are you?")]))
    assert not any(map(mixture.asks_by_hand, islice(mixture.stream(3, Split.TRAIN), 300)))
