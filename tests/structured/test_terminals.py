"""Grammars that are cut into terminals fit what a definition of the rules says, text by text."""

from __future__ import annotations

import pytest

from helpers.byte_matcher import fits
from helpers.random_grammars import check_grammar, reference_texts
from quire.structured.gbnf import parse_gbnf
from quire.structured.lark_text import write_lark


@pytest.mark.parametrize("part", range(4))
def test_random_grammars_keep_their_texts(part: int) -> None:
    accepted = sum(check_grammar(seed) for seed in range(25 * part, 25 * part + 25))
    assert accepted > 5


def test_a_lexer_without_cuts_would_lose_texts() -> None:
    """Negative control: the largest parts without recursion as terminals."""
    rules = parse_gbnf('root ::= [a]* "ab" | "(" root ")"\n')
    assert "aab" in reference_texts(rules, "root")
    assert not fits('start: A "ab" | "(" start ")"\nA: /[a]*/', "aab")
    assert fits(write_lark(rules, "root"), "aab")
