"""Which texts fit a grammar, with one token per byte."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from quire import StructuredOutput
from quire.structured.compile import compile_grammar
from quire.structured.limits import parser_limits


class _Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


@cache
def _tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()))


@lru_cache(8)
def _matcher(source: str) -> Any:
    from llguidance import LLMatcher

    matcher = LLMatcher(_tokenizer(), source, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def fits(source: str, text: str) -> bool:
    """Whether a grammar gives this text, and may end after it."""
    ids = [*text.encode(), _Bytes.eos_token_id]
    return int(_matcher(source).validate_tokens(ids)) == len(ids)


def source_of(**ask: Any) -> str:
    """The grammar of an ask, compiled here."""
    return compile_grammar(StructuredOutput(**ask)).grammar.source
