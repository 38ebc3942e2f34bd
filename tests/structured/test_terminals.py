"""Grammars that are cut into terminals fit what a definition of the rules says, text by text."""

from __future__ import annotations

import pytest

from helpers.byte_matcher import fits
from helpers.random_grammars import TEXTS, random_gbnf, reference_texts
from quire.structured.ask import GrammarError
from quire.structured.gbnf import parse_gbnf
from quire.structured.lark_text import write_lark


def check_grammar(seed: int) -> bool:
    """Compare a random grammar with the definition; False for one that is refused."""
    text = random_gbnf(seed)
    try:
        rules = parse_gbnf(text)
    except GrammarError:
        return False
    source = write_lark(rules, "root")
    found = {word for word in TEXTS if fits(source, word)}
    expected = reference_texts(rules, "root")
    assert found == expected, (text, source, sorted(found ^ expected))
    return True


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
