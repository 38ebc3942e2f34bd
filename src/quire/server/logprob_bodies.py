"""Logprobs in the shapes of OpenAI's two APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from quire.engine.api import Engine
from quire.logprobs import PositionLogprobs
from quire.server import pieces
from quire.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprobBody,
    TopLogprob,
)

LogprobEntry = tuple[int, PositionLogprobs | None]
Entries = Callable[
    [], Iterable[LogprobEntry]
]  # token ids with their logprobs; each call starts from the beginning

T = TypeVar("T")

MIN_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI sends this value instead
_REMEMBERED = 8192


class TokenTexts:
    """Tokens as they are spelled in responses. A token that is only part of a character is "bytes:\\xf0\\x9f", as in
    OpenAI's API, so that no two candidates at one position look the same. One object serves all requests.
    """

    def __init__(self, engine: Engine, *, as_ids: bool = False) -> None:
        self._engine, self._as_ids = engine, as_ids
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of a token."""
        found = self._known.get(token_id)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        raw = self._engine.token_bytes(token_id)
        if self._as_ids:
            return f"token_id:{token_id}", raw
        try:
            text = raw.decode("utf-8") if raw else self._engine.pieces([token_id])[0]
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text, raw


def finite(logprob: float) -> float:
    """A logprob that JSON can represent."""
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(positions: Sequence[PositionLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Logprobs of some tokens of a message."""
    content = []
    for chosen, *top in positions:
        text, raw = texts(chosen.token_id)
        likely = [
            TopLogprob(texts(t.token_id)[0], finite(t.logprob), list(texts(t.token_id)[1])) for t in top
        ]
        content.append(TokenLogprobBody(text, finite(chosen.logprob), list(raw), likely))
    return ChatLogprobs(content)


def token_pieces(positions: Sequence[PositionLogprobs], texts: TokenTexts) -> pieces.Pieces:
    """The JSON of the logprobs of all tokens of a message: an array of TokenLogprobBody."""
    batches = pieces.batches(positions, pieces.width_of(positions))
    return pieces.slices(chat_logprobs(batch, texts).content for batch in batches)


def chat_pieces(positions: Sequence[PositionLogprobs], texts: TokenTexts) -> pieces.Pieces:
    """The JSON of a responses.ChatLogprobs with all of a message."""
    return pieces.fields([("content", token_pieces(positions, texts)), ("refusal", pieces.value(None))])


class CompletionLogprobsWriter:
    """Logprobs of one completion as its parts arrive; tracks the offset in the text.

    text_offset counts characters of the returned text; a token that begins inside a character has the offset of that
    character.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """The next tokens have none: another server has sent them."""
        for token_id in token_ids:
            self._offset += len(self._decoder.decode(self._texts(token_id)[1]))

    def push(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """Logprobs of the next generated tokens."""
        part = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=False):
            self._add(part, token_id, position)
        return part

    def _add(self, part: CompletionLogprobs, token_id: int, position: PositionLogprobs) -> None:
        text, raw = self._texts(token_id)
        part.tokens.append(text)
        part.text_offset.append(self._offset)
        self._offset += len(self._decoder.decode(raw))
        part.token_logprobs.append(finite(position[0].logprob))
        part.top_logprobs.append(_top(text, position, self._texts))


def _top(text: str, position: PositionLogprobs, texts: TokenTexts) -> dict[str, float]:
    chosen, *top = position
    likely = {texts(t.token_id)[0]: finite(t.logprob) for t in reversed(top)}
    return dict(reversed(likely.items())) | {text: finite(chosen.logprob)}


def completion_pieces(entries: Entries, width: int, texts: TokenTexts) -> pieces.Pieces:
    """The JSON of all logprobs of a completion, including an echoed prompt; `width` candidates per position."""

    def lists(of: Iterable[T], width: int = 1) -> pieces.Pieces:
        return pieces.slices(pieces.batches(of, width))

    chosen = (None if position is None else finite(position[0].logprob) for _, position in entries())
    likely = (
        None if position is None else _top(texts(token)[0], position, texts) for token, position in entries()
    )
    return pieces.fields([
        ("tokens", lists(texts(token)[0] for token, _ in entries())),
        ("token_logprobs", lists(chosen)),
        ("top_logprobs", lists(likely, width)),
        ("text_offset", lists(_offsets((token for token, _ in entries()), texts))),
    ])  # fmt: skip


def _offsets(token_ids: Iterable[int], texts: TokenTexts) -> Iterator[int]:
    """The text offset of each token; see CompletionLogprobsWriter."""
    decoder, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for token_id in token_ids:
        yield offset
        offset += len(decoder.decode(texts(token_id)[1]))


def prompt_pieces(positions: Sequence[PositionLogprobs], unscored: int, engine: Engine) -> pieces.Pieces:
    """The JSON of vLLM's prompt_logprobs: per position, token id to candidate; null for the `unscored` first ones."""

    def candidates(position: PositionLogprobs) -> dict[str, PromptLogprob]:
        spelled = engine.pieces([t.token_id for t in position])
        return {
            str(t.token_id): PromptLogprob(finite(t.logprob), t.rank, piece)
            for t, piece in zip(position, spelled, strict=True)
        }

    batches = pieces.batches(positions, pieces.width_of(positions))
    rest = ([candidates(position) for position in batch] for batch in batches)
    return pieces.slices(itertools.chain([[None] * unscored], rest))
