"""Logprobs in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.engine.api import AsyncEngine
from quire.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprobBody,
    TopLogprob,
)
from quire.types import PositionLogprobs

MIN_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI writes this
_REMEMBERED = 8192


class TokenTexts:
    """Tokens as responses spell them. A token that is only part of a character is "bytes:\\xf0\\x9f", as OpenAI
    writes it, so that no two tokens of one place look the same.
    """

    def __init__(self, engine: AsyncEngine, *, as_ids: bool = False) -> None:
        self._engine, self._as_ids = engine, as_ids
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of a token."""
        found = self._known.get(token_id)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        raw = self._engine.token_bytes(token_id)
        if self._as_ids:
            return f"token_id:{token_id}", list(raw)
        try:
            text = raw.decode("utf-8") if raw else self._engine.pieces([token_id])[0]
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text, list(raw)


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(positions: Sequence[PositionLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Logprobs of some tokens of a message."""
    content = []
    for chosen, *top in positions:
        text, raw = texts(chosen.token_id)
        likely = [TopLogprob(texts(t.token_id)[0], finite(t.logprob), texts(t.token_id)[1]) for t in top]
        content.append(TokenLogprobBody(text, finite(chosen.logprob), raw, likely))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """Logprobs of one completion as its parts come in; keeps the place in the text.

    text_offset counts characters of the returned text; a token that begins inside a character has the place
    where that character begins.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """The echoed prompt's part; its first token has no logprob."""
        part = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            self._add(part, token_id, position)
        return part

    def push(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """The part of some generated tokens."""
        part = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=False):
            self._add(part, token_id, position)
        return part

    def _add(self, part: CompletionLogprobs, token_id: int, position: PositionLogprobs | None) -> None:
        text, raw = self._texts(token_id)
        part.tokens.append(text)
        part.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(bytes(raw)))
        if position is None:
            part.token_logprobs.append(None)
            part.top_logprobs.append(None)
            return
        chosen, *top = position
        part.token_logprobs.append(finite(chosen.logprob))
        likely = {self._texts(t.token_id)[0]: finite(t.logprob) for t in reversed(top)}
        part.top_logprobs.append(dict(reversed(likely.items())) | {text: finite(chosen.logprob)})


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Two neighbouring parts as one."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(positions: Sequence[PositionLogprobs | None], engine: AsyncEngine) -> PromptLogprobs:
    """vLLM's prompt_logprobs: per position, token id to candidate; null for the first."""
    found: PromptLogprobs = []
    for position in positions:
        if position is None:
            found.append(None)
            continue
        pieces = engine.pieces([t.token_id for t in position])
        found.append({
            str(t.token_id): PromptLogprob(finite(t.logprob), t.rank, piece)
            for t, piece in zip(position, pieces, strict=True)
        })  # fmt: skip
    return found
