"""The prompts written by hand: all kinds are there, the checks tell right from wrong, and marks cannot go stale."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.default_model import handwritten
from tools.default_model.handwritten import Item, judge, load
from tools.default_model.rendering import GENERATION_PROMPT

from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.tokenizer import Tokenizer

KINDS = (
    "greetings", "identity", "quire", "terms", "arithmetic", "world", "lists", "rewriting", "counting", "json",
    "tools", "dialogue", "system", "writing", "scope", "raw",
)  # fmt: skip
ITEMS = load()
SOME = [i for i in ITEMS if i.kind in {"greetings", "arithmetic"}]


def item(*checks: tuple[str, str], note: str = "") -> Item:
    return Item("any", "user: any", checks=checks, note=note, checked=not note)


def test_there_are_enough_of_every_kind() -> None:
    counts = Counter(i.kind for i in ITEMS)
    assert tuple(counts) == KINDS
    assert min(counts.values()) >= 15
    assert len(ITEMS) >= 300
    assert len({i.text for i in ITEMS}) == len(ITEMS)


def test_the_model_reads_what_the_template_makes(tokenizer_folder: Path) -> None:
    renderer = ChatRenderer(Tokenizer.from_dir(tokenizer_folder))
    for i in ITEMS:
        if not i.raw:
            asked = ChatAsk(messages=[t.message() for t in i.turns], tools=list(i.tools) or None)
            assert renderer.render(asked).text == i.prompt()
            assert i.prompt().endswith(GENERATION_PROMPT)
            assert i.turns[-1].role in {"user", "tool"}


@pytest.mark.parametrize(
    ("check", "data", "right", "wrong"),
    [
        ("has", "token*|piece", "TOKENS are small", "a tokamak"),
        ("has", "?", "Which city?", "Which city."),
        ("not", "ines", "Your brother is Paul.", "Paul and Ines"),
        ("text", "STOP", "STOP it", "stop it"),
        ("re", r"^\W*paris\W*$", "Paris.", "It is Paris."),
        ("number", "63", "100 - 37 = 63.", "100 - 63 = 37"),
        ("number", "3", "There are three.", "There are 33."),
        ("words", "2", "of course", "of course not"),
        ("items", "3", "apple, pear and plum", "apple, pear"),
        ("items", "3", "Fruits:\n- apple\n- pear\n- plum", "- apple\n- pear"),
        ("order", "1, 4, 7", "1, 4 and 7", "4, 1, 7"),
        ("order", "2, 1", "2, 1", "21"),
        ("upper", "", "HELLO 1", "Hello"),
        ("lower", "", "hello.", "Hello."),
        ("json", '{"name": "Rex", "age": 4}', '{"age": "4", "name": "rex"}', '{"name": "Rex"}'),
        ("json", '{"a": 1}', '{"a": 1}', '{"a": 1}.'),
        ("keys", "a, b", '{"b": 1, "a": 2}', '["a", "b"]'),
        ("declines", "", "I can’t do that.", "Sure, here it is."),
    ],
)  # fmt: skip
def test_checks(check: str, data: str, right: str, wrong: str) -> None:
    assert judge(item((check, data)), right).verdict == "pass"
    assert judge(item((check, data)), wrong).verdict == "fail"


def test_calls_only_where_one_is_right() -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"n": "5"}}\n</tool_call>'
    wanted = item(("call", '{"name": "f", "arguments": {"n": 5}}'))
    assert judge(wanted, said).verdict == "pass"
    assert judge(wanted, said.replace('"n"', '"m"')).verdict == "fail"
    assert judge(wanted, f"Well: {said}").verdict == "fail"
    assert judge(wanted, "5").verdict == "fail"
    assert judge(item(note="any"), said).why == "calls a function"


@pytest.mark.parametrize("said", ["", " \n", "hi" * 9, "a b c d. " * 6, "!" * 12, "<|im_end|>", "so \ufffd"])
def test_forms_that_are_never_sensible(said: str) -> None:
    assert judge(item(note="anything"), said).verdict == "fail"


def test_an_answer_must_end() -> None:
    assert judge(item(note="anything"), "well", ended=False).why == "does not end"
    assert judge(Item("raw", "raw: a", raw="a", note="text"), "well", ended=False).verdict == "?"


class _Echo:
    """Says a fixed answer to everything."""

    def __init__(self, said: str) -> None:
        self.said = said

    def encode(self, text: str) -> _Echo:
        self.ids = [0]
        return self

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.said

    def __call__(self, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        return [[0] for _ in prompts]


def answers(said: str) -> list[handwritten.Answer]:
    echo = _Echo(said)
    return handwritten.run(SOME, echo, echo)  # type: ignore[arg-type]


def test_a_sheet_keeps_its_marks_and_never_goes_stale() -> None:
    old = answers("Hello!\nIt is 63.")
    open_ = sum(a.verdict == "?" for a in old)
    assert open_ > 1
    sheet = handwritten.sheet_text(old)
    assert handwritten.marked(old, sheet) == old
    with pytest.raises(ValueError, match=f"{open_} answers are not marked"):
        handwritten.check_whole(old, sheet)
    filled = sheet.replace("[?] ", "[yes] ").replace("[fail] ", "[no] ")
    graded = handwritten.marked(old, filled)
    handwritten.check_whole(graded, filled)
    assert {a.verdict for a in graded} == {"pass", "yes", "no"}
    new = handwritten.marked(answers("Hi!"), filled)
    assert {a.verdict for a in new} <= {"pass", "fail", "?"}
    with pytest.raises(ValueError, match="another model"):
        handwritten.check_whole(new, filled)
    with pytest.raises(ValueError, match="is not `"):
        handwritten.marks(sheet.replace("[?]", "[maybe]", 1))


def test_tables() -> None:
    made = answers("Hello!")
    rows = handwritten.count(made)
    assert rows["all"].prompts == len(SOME)
    assert rows["all"].sensible == sum(a.verdict == "pass" for a in made)
    for graded in (False, True):
        lines = handwritten.table(rows, graded).splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert lines[-1].startswith(f"| all | {len(SOME)} |")
    found = json.loads(handwritten.as_json(made, "quire"))
    assert found["kinds"]["all"]["prompts"] == len(found["answers"]) == len(SOME)
    low, high = handwritten.interval(90, 100)
    assert (low, high) == (pytest.approx(0.8256, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert handwritten.interval(5, 5)[1] == 1.0
