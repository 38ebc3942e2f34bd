"""Lark: what llguidance takes passes through; what would tokenize otherwise, or never end, is refused by name."""

from __future__ import annotations

import pytest

from helpers.byte_matcher import fits, source_of
from quire.structured.ask import GrammarError
from quire.structured.lark import check_lark


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a" b | /x+/i\nb: C{2,3} [D] -> named\n  | "z"~2 // one\nC: "c".."d" & ~/d/\nD: /[0-9]/+ # two',
         ["acc", "accc7", "azz", "xX"], ["ac", "add", "az"]),
        ("start: e\ne: e \"+\" INT | INT\n%import common.INT", ["1", "1+22+3"], ["+1", "1+"]),
        ('start: "a" "b"\n%ignore " "', ["ab", "a  b"], ["a"]),
        ('start:\n   | "a"\n   | ("b"\n | "c")', ["", "a", "b"], ["bc"]),
        ('start: "::=" | a\na[lazy]: /.*x/', ["::=", "x", "aax"], ["xa"]),
        ('start: "<think>" | %regex {"substring_chars": "abc"}', ["<think>", "bc", "abc"], ["ac"]),
    ],
)  # fmt: skip
def test_what_llguidance_takes(grammar: str, right: list[str], wrong: list[str]) -> None:
    source = source_of(grammar=grammar)
    assert [text for text in right if not fits(source, text)] == []
    assert [text for text in wrong if fits(source, text)] == []


def test_schemas_become_grammars_of_their_own() -> None:
    schemas = []
    made = check_lark(
        'start: "x" %json {"a": [1,\n 2]} b\nb: %json {} ";"', lambda schema: f"s{schemas.append(schema)}"
    )
    assert schemas == [{"a": [1, 2]}, {}]
    assert made.split() == ["start:", '"x"', "@sNone", "b", "b:", "@sNone", '";"']


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('a: "x"', "there is no rule start"),
        ('start: a\na: a "x"', "rule start never ends"),
        ("start: A\nA: B\nB: A", "never ends"),
        ("start: b{2}", "rule start refers to b, which is not defined"),
        ('start: "a"\nstart: "b"', "line 2: rule start is defined twice"),
        ("start: <think>", "the token <think> is not supported"),
        ("start: @other", "the reference @other is not supported"),
        ("start[max_tokens=3]: /a/", "line 1: rule start: the attribute max_tokens is not supported"),
        ('start[stop="x"]: /a/', "the attribute stop is not supported"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "the option no_forcing of %llguidance"),
        ('start: "a"\n%declare X', "line 2: %declare is not supported"),
        ('start: "a"{1,1000000000}', "over the limit of 65536"),
        ('start: "a"~99999999999', "is not a valid number of repetitions"),
        ('start: foo{a}\nfoo{x}: "a"', "templates and parametric rules"),
        ('start.2: "a"', "a priority is not supported"),
        ("start::_: /a/", "unexpected '_'"),
        ("start: x::incr(0)", "templates and parametric rules"),
        ('start: "a', "line 1: unexpected '\"'"),
        ('start: ("a"', "expected '\\)'"),
        ("start: " + "(" * 200 + '"a"' + ")" * 200, "nested more than 128 deep"),
        ("start: %json {", "what follows %json is not JSON"),
        ('start: %json {"a": 1, "a": 2}', "duplicate key 'a'"),
        ("start: /(?=a)b/", "look-around, including look-ahead and look-behind, is not supported"),
        (r"start: /(a)\1/", "backreferences are not supported"),
        ("start: /[/", "invalid regex"),
    ],
)
def test_what_is_refused_is_named(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        source_of(grammar=grammar, syntax="lark")
    assert raised.value.field == "grammar"
    assert len(str(raised.value)) < 600
