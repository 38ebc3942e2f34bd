"""Which texts fit what is asked of an answer."""

from __future__ import annotations

from typing import Any

from helpers.grammar_bytes import accepts as fits
from quire import StructuredOutput
from quire.structured.compile import compile_grammar

__all__ = ["fits", "source_of"]


def source_of(**ask: Any) -> str:
    """The grammar of an ask, compiled here."""
    return compile_grammar(StructuredOutput(**ask)).grammar.source
