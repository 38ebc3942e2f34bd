"""The chapters: every number is computed or said to be given, and what they name is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.main import main
from quire.cli.serve import simulated
from quire.learn.chapter_numbers import number
from quire.learn.chapters import Chapter, chapter, chapters, directives
from quire.learn.lesson_listings import listings
from quire.learn.offered import offer
from quire.learn.quiz import questions
from quire.learn.simulations import simulation, simulations
from quire.planner import formulas
from quire.server.pages.on_engine import ON_ENGINE
from quire.server.pages.see import SIGHTS

offer(simulated)
ALL = [*chapters().values()]
DOCS = Path(quire.__file__).parents[2] / "docs"
PATH = [one for one in ALL if one.number is not None]

# What is written with digits and is no quantity: names, widths of formats, ids of papers.
NAMES = re.compile(r"Llama \d(\.\d)?|RTX \d+|PCIe \d\.\d|\b(2|3|4|8|16|32)[ -]bits?\b")
UNITS = r"(?:[GMkT]i?B(?:/s)?|ms|µs|s|%|×|tokens|bytes|FLOPs?|TFLOPS)"
TYPED = re.compile(rf"(?<![\w.,/-])(\d[\d,]*\d(?:\.\d+)?|\d\.\d+|\d(?= ?{UNITS}(?!\w)))(?!\w)")


def typed_numbers(text: str, given: Any) -> list[str]:
    """Numbers that stand in a text as digits, and are neither given nor part of a name."""
    found = []
    for name, _, body in directives(text):
        if name == "worked":
            continue
        prose = re.sub(r"^(run|shows): .*$", "", body, flags=re.MULTILINE)
        prose = re.sub(
            r"```.*?```|`[^`]*`|\{\{[^{}]*\}\}|\]\([^)]*\)|^\d+\. ", "", prose, flags=re.DOTALL | re.MULTILINE
        )
        prose = " ".join(prose.split())
        for one in given:
            prose = prose.replace(one, "")
        found += TYPED.findall(NAMES.sub("", prose))
    return found


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every node of a page."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(one)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_numbers_are_computed_or_given(one: Chapter) -> None:
    assert typed_numbers(one.text, one.given) == []
    prose = " ".join(one.text.split())
    assert [given for given in one.given if given not in prose] == []


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_what_a_chapter_names_is_there(one: Chapter) -> None:
    for node in nodes(one.page()):
        kind = node.get("kind")
        if kind == "simulation":
            simulation(node["name"]).values(node["values"])
        elif kind == "listing":
            assert node["name"] in listings()
        elif kind == "see":
            assert node["name"] in SIGHTS
        elif kind == "link":
            names = {
                "/",
                "/dashboard",
                "/docs",
                *(f"#{name}" for name in (*chapters(), *simulations(), "quiz")),
            }
            href = node["href"].partition("#")[0]
            assert node["href"] in names or href.startswith("https://") or (href and (DOCS / href).is_file())
        elif kind == "number":
            assert node["text"]
            assert node["source"].startswith(("quire ", "config.json of "))


def test_chapters_follow_the_path() -> None:
    assert [one.number for one in PATH] == [*range(len(PATH))]
    for one in PATH:
        kinds = [name for name, _, _ in directives(one.text)]
        assert kinds.count("exercise") >= 2, one.name
        assert "rubric" in kinds, one.name
        assert one.simulations, one.name
        assert "see" in kinds or {"lifecycle", *ON_ENGINE} & {*one.simulations}, one.name
        assert chapter(str(one.number)) is one is chapter(one.name)
        assert one.name not in simulations()
    assert {one.chapter for one in questions()} == {*range(11)}


def test_every_part_has_its_place() -> None:
    named = {(kind, words.split()[0]) for one in ALL for kind, words, _ in directives(one.text) if words}
    assert {name for kind, name in named if kind == "simulation"} == {*simulations()}
    assert {name for kind, name in named if kind == "listing"} == {*listings()}
    assert {name for kind, name in named if kind == "see"} == {*SIGHTS}


def demonstrations() -> list[tuple[str, str, str]]:
    """Question, command, and a part of what it prints."""
    found = []
    for one in ALL:
        for name, words, body in directives(one.text):
            if name == "question":
                fields = dict(line.partition(":")[::2] for line in body.partition("\n---\n")[0].splitlines())
                found.append((words, fields["run"].strip(), fields["shows"].strip()))
    return found


@pytest.mark.parametrize(("question", "command", "shows"), demonstrations())
def test_an_answer_is_demonstrated(
    question: str, command: str, shows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command)
    assert program == "quire"
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.strip()
    assert shows in printed


def test_questions_and_mistakes_are_all_there() -> None:
    page = chapter("interview").page()
    at = [i for i, node in enumerate(page) if node["kind"] == "heading"]
    kinds = [node["kind"] for node in page]
    assert kinds[at[0] : at[1]].count("question") >= 12
    assert kinds[at[1] :].count("question") >= 14


def test_a_typed_number_is_found() -> None:
    assert typed_numbers("It takes 40.82 ms, 5 GB, or {{x | y}} and 1,024 of `99`, Llama 3 70B in 16 bits.", {}) == [
        "40.82", "5", "1,024",
    ]  # fmt: skip
    assert typed_numbers("It takes 40 ms.\n:::note\nand 50 ms\n:::", {"40 ms": "an example"}) == ["50"]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("throughput --params-b 70", "must be COMMAND"),
        ("throughput --params-b 70 | tokens", "bandwidth_gb_s: needed"),
        ("throughputs --params-b 70 | tokens", "did you mean throughput"),
        ("throughput --params-b 70 --device h100 | token", "did you mean tokens"),
        ("throughput --params-b | tokens", "each with a value"),
        ("throughput --colour 1 | tokens", "has no --colour"),
        ("kv-cache --model lama-3-70b | of a token", "did you mean llama-3-70b"),
        ("model llama-3-70b | layer", "did you mean layers"),
        ("sim memory precision=INT3 | weights", "precision: 'INT3' must be one of"),
    ],
)
def test_a_reference_that_leads_nowhere_is_quoted(reference: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        number(reference)
    assert message in str(caught.value)


def test_a_changed_sum_changes_the_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has no number of its own."""
    monkeypatch.setattr(formulas, "decode_bound", lambda *_: 1234.0)
    shown = {node["text"] for node in nodes(chapter("0").page()) if node.get("kind") == "number"}
    assert "1,234 tokens/s" in shown


def test_the_command_shows_a_chapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "chapter", "0"]) == 0
    text = capsys.readouterr().out
    assert "95.71 tokens/s" in text
    assert "Simulation: quire learn lifecycle" in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["learn", "what-inference-is"]) == 0
    assert capsys.readouterr().out == text
    assert main(["learn", "list"]) == 0
    assert "what-inference-is" in capsys.readouterr().out
    assert main(["learn", "chapter", "99"]) == 2
    assert "no chapter '99'" in capsys.readouterr().err


def test_mistakes_of_an_author_are_named() -> None:
    def page(text: str) -> None:
        Chapter(number=None, name="x", title="", about="", given={}, text=text).page()

    with pytest.raises(ValueError, match="did you mean listing"):
        page(":::listin kv-cache")
    with pytest.raises(ValueError, match="needs an answer behind ---"):
        page(":::exercise core\nWhy?\n:::")
    with pytest.raises(ValueError, match="worked: no figure 'nothing'"):
        page(":::worked\nnothing\n:::")
