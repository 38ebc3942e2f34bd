"""Structural tags: free text ends exactly where a trigger or an end begins; what has no such meaning is refused."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.byte_matcher import fits, source_of
from quire.structured.ask import GrammarError

NUMBER = {"type": "regex", "pattern": "[0-9]+"}
ANY = {"type": "any_text"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALL = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [tag("<f=x>", NUMBER, "</f>"), tag("<f=y>", const("q"), "</f>")],
}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (tag("<a>", ANY, "</a>"), ["<a>x</a>", "<a></a>", "<a></a</a>"], ["<a>x", "<a>x</a>y", "x"]),
        (tag("<a>", ANY, ["</a>", "</b>"]), ["<a>x</a>", "<a>x</b>"], ["<a>x</a></b>"]),
        (CALL, ["", "hi", "a<f=x>12</f>b<f=y>q</f>", "<f<f=x>1</f>", "<f"], ["a<f=z>", "a<f=x>q</f>", "<f=", "<f=x>1"]),
        (CALL | {"at_least_one": True}, ["<f=x>12</f>b"], ["a<f=x>12</f>", ""]),
        (CALL | {"stop_after_first": True}, ["<f=x>12</f>", "a<f=x>12</f>", "a"], ["<f=x>12</f>b"]),
        (CALL | {"stop_after_first": True, "at_least_one": True}, ["<f=y>q</f>"], ["a<f=x>12</f>", "<f=y>q</f>b"]),
        (CALL | {"excludes": ["bad"]}, ["ba<f=x>1</f>d"], ["bad", "a bad<f=x>1</f>"]),
        (tag("<t>", CALL, "</t>"), ["<t>a<f=x>1</f>b</t>", "<t></t>"], ["<t>a<f=x>1</f>b", "<t>a</t>b"]),
        ({"type": "sequence", "elements": [const("<t>"), ANY, const("</t>"), NUMBER]}, ["<t></t>1"], ["<t>", "<t>a1"]),
        ({"type": "sequence", "elements": [NUMBER, const("!"), ANY]}, ["1!", "12!ab\n"], ["!a"]),
        ({"type": "tags_with_separator", "tags": [tag("<x>", NUMBER, "</x>")], "separator": ","},
         ["", "<x>1</x>", "<x>1</x>,<x>2</x>"], [",", "<x>1</x>,"]),
        ({"type": "or", "elements": [NUMBER, const("abc")]}, ["12", "abc"], ["12abc", ""]),
        ({"type": "repeat", "min": 2, "max": 3, "content": const("ab")}, ["abab", "ababab"], ["ab", "abababab"]),
        ({"type": "optional", "content": NUMBER}, ["", "1"], ["a"]),
        ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
        (ANY | {"excludes": ["bad", "é"]}, ["ba d", "good"], ["so bad", "é"]),
        ({"type": "dispatch", "rules": [["<x>", tag("", NUMBER, ";")], ["<y>", const("z")]], "excludes": ["!"]},
         ["a<x>1;b<y>zc", "q"], ["a!", "<y>a"]),
        ({"type": "dispatch", "rules": [["<y>", const("z")]], "loop": False}, ["a<y>z", "a"], ["<y>za"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["b", "aab"], ["a"]),
    ],
)  # fmt: skip
def test_texts_fit_as_the_format_says(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    source = source_of(structural_tag={"type": "structural_tag", "format": form})
    assert [text for text in right if not fits(source, text)] == []
    assert [text for text in wrong if fits(source, text)] == []


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ({}, "structural_tag", "the field format is missing"),
        ({"structures": [], "triggers": ["<"]}, "structural_tag.structures", "empty"),
        ({"format": {"type": "token", "token": 3}}, "structural_tag.format", "the format token is not supported"),
        ({"format": {"type": "other"}}, "structural_tag.format", "the format 'other' is not supported"),
        ({"format": const("a") | {"more": 1}}, "structural_tag.format.more", "not supported"),
        ({"format": {"type": "const_string"}}, "structural_tag.format", "the field value is missing"),
        ({"format": tag("<", ANY, 5)}, "structural_tag.format.end", "must be a string or a list, not 5"),
        ({"format": ANY | {"max_tokens": 3}}, "structural_tag.format.max_tokens", "3 is not supported"),
        ({"format": {"type": "json_schema", "style": "qwen_xml"}}, "structural_tag.format.style", "qwen_xml"),
        ({"format": {"type": "regex", "pattern": "(a"}}, "structural_tag.format.pattern", "is not closed"),
        ({"format": CALL | {"triggers": ["<f=", "<f"]}}, "structural_tag.format.tags[0].begin", "one of the triggers"),
        ({"format": CALL | {"triggers": ["<f=", "<g"]}}, "structural_tag.format.triggers", "no tag begins with"),
        ({"format": CALL | {"excludes": ["f"]}}, "structural_tag.format", "'<f=' contains 'f'"),
        ({"format": {"type": "sequence", "elements": [ANY, NUMBER]}}, "structural_tag", "is ambiguous"),
        ({"format": {"type": "repeat", "min": 0, "max": 10**9, "content": NUMBER}}, "structural_tag.format", "max 10"),
        ({"format": {"type": "grammar", "grammar": "start: x"}}, "structural_tag.format.grammar", "EBNF"),
        ('{"format": {}, "format": {}}', "structural_tag", "duplicate key"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(value: Any, field: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        source_of(structural_tag=value)
    assert raised.value.field == field


def test_formats_are_not_nested_without_end() -> None:
    form: dict[str, Any] = NUMBER
    for _ in range(200):
        form = {"type": "optional", "content": form}
    with pytest.raises(GrammarError, match="nested more than 128 deep"):
        source_of(structural_tag={"format": form})
