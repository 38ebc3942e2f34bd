"""Which texts fit what is asked of an answer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llguidance

from helpers.grammar_bytes import END, byte_tokenizer
from quire import StructuredOutput
from quire.structured.compile import compile_grammar
from quire.structured.grammar_limits import parser_limits


@lru_cache(8)
def _matcher(source: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def fits(source: str, text: str) -> bool:
    """Whether a grammar gives this text, and may end after it."""
    ids = [*text.encode(), END]
    return _matcher(source).validate_tokens(ids) == len(ids)


def source_of(**ask: Any) -> str:
    """The grammar of an ask, compiled here."""
    return compile_grammar(StructuredOutput(**ask)).grammar.source
