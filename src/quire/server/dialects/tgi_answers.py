"""Answers in TGI's form: one JSON object, or an event for every token of a stream."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from quire.engine.api import StreamDelta
from quire.logprobs import LogprobTable, PositionLogprobs
from quire.outputs import CompletionOutput
from quire.records import dataclass
from quire.server import pieces
from quire.server.dialects.tgi_types import (
    TgiEvent,
    TgiPrefillToken,
    TgiReason,
    TgiStreamDetails,
    TgiToken,
)
from quire.server.errors import event_of
from quire.server.generation import HttpGeneration
from quire.server.logprob_bodies import finite
from quire.types import FinishReason, TokenIds

NO_TOKEN = 0  # the id in an event that has no token: TGI's is unsigned
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TgiHead:
    """What a request asks of its answer, and what tokens are: their `texts`, and the `special` ones. `inputs` is ""
    unless they are repeated; `prompt` has their tokens. `top`: the most likely tokens are wanted; `prefill`: those of
    the inputs. `listed`: the answer is the only one of a list. `hidden`: tokens are not shown, as a hook edits the
    text.
    """

    texts: Callable[[int], tuple[str, bytes]]
    special: frozenset[int]
    prompt: TokenIds
    inputs: str = ""
    seed: int | None = None
    details: bool = False
    prefill: bool = False
    top: bool = False
    listed: bool = False
    hidden: bool = False


class TokenWriter:
    """The tokens of one text in their order. A character of several tokens is the text of its last one."""

    __slots__ = ("_held", "_special", "_texts")

    def __init__(self, head: TgiHead) -> None:
        self._texts, self._special = head.texts, head.special
        self._held = b""  # of an unfinished character

    def token(self, token_id: int, logprob: float | None) -> TgiToken:
        """The next token."""
        special = token_id in self._special
        text = self._text(token_id, special=special)
        return TgiToken(token_id, text, None if logprob is None else finite(logprob), special)

    def plain(self, token_id: int) -> str | None:
        """The text of the next token; None, and nothing has changed, if it is special or its characters not whole."""
        if self._held or token_id in self._special:
            return None
        raw = self._texts(token_id)[1]
        if len(raw) > pieces.SHORT_CHARS:
            return None
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return None

    def prefilled(self, token_id: int, logprob: float | None) -> TgiPrefillToken:
        """The next token of the inputs."""
        text = self._text(token_id, special=token_id in self._special)
        return TgiPrefillToken(token_id, text, None if logprob is None else finite(logprob))

    def likely(self, position: PositionLogprobs) -> list[TgiToken]:
        """The most likely tokens at a position, each as if it stood alone."""
        return [
            TgiToken(
                t.token_id, self._texts(t.token_id)[1].decode("utf-8", "replace"), finite(t.logprob),
                t.token_id in self._special,
            )
            for t in position[1:]
        ]  # fmt: skip

    def _text(self, token_id: int, *, special: bool) -> str:
        raw = self._texts(token_id)[1]
        if special:
            return raw.decode("utf-8", "replace")
        raw = self._held + raw
        text, read = codecs.utf_8_decode(raw, "replace", False)
        self._held = raw[read:]
        return text


def reason_of(sample: CompletionOutput) -> TgiReason:
    """Why a sample ended."""
    if sample.finish_reason in {FinishReason.STOP, FinishReason.CONTENT_FILTER}:
        return "stop_sequence" if isinstance(sample.stop_reason, str) else "eos_token"
    return "length"


def answer_pieces(head: TgiHead, run: HttpGeneration) -> Iterator[bytes]:
    """The JSON of a TgiAnswer, or of a list with it."""
    best, *others = _by_probability(run)
    found: list[tuple[str, pieces.Pieces]] = [("generated_text", _text(head, run, best))]
    if head.details:
        rest = [
            pieces.fields([("generated_text", _text(head, run, other)), *_sequence(head, run, other)])
            for other in others
        ]
        of_others = [("best_of_sequences", pieces.items(rest))] if others else []
        found.append(("details", pieces.fields([*_sequence(head, run, best), *of_others])))
    made = pieces.fields(found)
    return pieces.items([made]) if head.listed else made


def _by_probability(run: HttpGeneration) -> Sequence[int]:
    """The samples, those with the highest mean log-probability first."""
    if len(run.answers) == 1:
        return (0,)
    means = [answer.logprobs.mean() if answer.logprobs else 0.0 for answer in run.answers]
    return sorted(range(len(means)), key=means.__getitem__, reverse=True)


def _text(head: TgiHead, run: HttpGeneration, choice: int) -> pieces.Pieces:
    return pieces.text(head.inputs.encode(), run.answers[choice].text)


def _sequence(head: TgiHead, run: HttpGeneration, choice: int) -> Iterator[tuple[str, pieces.Pieces]]:
    """The fields of a TgiSequence."""
    sample, table = run.outputs[0].outputs[choice], run.answers[choice].logprobs
    yield "finish_reason", pieces.value(reason_of(sample))
    yield "generated_tokens", pieces.value(len(sample.token_ids))
    yield "seed", pieces.value(head.seed)
    yield "prefill", _prefill(head, run)
    writer = TokenWriter(head)
    shown = () if head.hidden else sample.token_ids
    rows = (writer.token(*row) for row in _rows(shown, table))
    yield "tokens", pieces.slices(pieces.batches(rows, 1))
    if head.top and table is not None:
        likely = (writer.likely(position) for position in table)
        yield "top_tokens", pieces.slices(pieces.batches(likely, pieces.width_of(table)))


def _prefill(head: TgiHead, run: HttpGeneration) -> pieces.Pieces:
    if not head.prefill:
        return pieces.value([])
    writer, table = TokenWriter(head), run.prompt_logprobs(0)
    unscored = run.unscored(0)
    first = (writer.prefilled(token, None) for token in head.prompt[:unscored])
    rest = (writer.prefilled(*row) for row in _rows(head.prompt[unscored:], table))
    return pieces.slices(pieces.batches(_chained(first, rest), 1))


def _chained(*parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        yield from part


def _rows(ids: Sequence[int], table: LogprobTable | None) -> Iterator[tuple[int, float | None]]:
    """Tokens with their logprobs."""
    return zip(ids, itertools.repeat(None) if table is None else table.chosen(), strict=False)


class TgiStream:
    """The events of a streamed answer: a delta in, bytes out. The last token is kept back until the end: its event has
    the whole text.
    """

    __slots__ = ("_head", "_hidden", "_index", "_kept", "_text", "_top", "_writer")

    def __init__(self, head: TgiHead) -> None:
        self._head, self._hidden, self._top = head, head.hidden, head.top
        self._writer = TokenWriter(head)
        self._text = bytearray(head.inputs.encode())
        self._index = 0
        self._kept: TgiEvent | None = None

    def chunk_of(self, _: int, delta: StreamDelta) -> bytes:
        """The events of a delta."""
        self._text += delta.text.encode()
        found = self._edited(delta) if self._hidden else self._tokens(delta)
        if delta.finish_reason is not None and found:
            self._kept = found.pop()
        return _written(found[0]) if len(found) == 1 else b"".join(map(_written, found))

    def token_of(
        self, _: int, text: str, token_id: int, logprob: float | None
    ) -> tuple[bytes, bytes, bytes] | None:
        """The event of a token, as `chunk_of` makes it, in three pieces; None unless it is plain."""
        if self._top or self._hidden or logprob is None:
            return None
        plain = self._writer.plain(token_id)
        if plain is None:
            return None
        self._text += text.encode()
        self._index += 1
        return (
            b'data: {"index":%d,"token":{"id":%d,"text":' % (self._index, token_id), _encode(plain),
            b',"logprob":%b,"special":false},"generated_text":null,"details":null}\n\n'
            % _encode(finite(logprob)),
        )  # fmt: skip

    def last(self, run: HttpGeneration) -> bytes:
        """The last event."""
        (output,) = run.outputs
        (sample,) = output.outputs
        event = self._kept or self._nothing(sample)
        event.generated_text = self._text.decode()
        if self._head.details:
            event.details = TgiStreamDetails(
                reason_of(sample), len(sample.token_ids), self._head.seed, output.usage.prompt_tokens
            )
        return _written(event)

    def _tokens(self, delta: StreamDelta) -> list[TgiEvent]:
        ids, table, made = delta.token_ids, delta.logprobs, []
        rows = ((ids[0], table.values[0]),) if table and len(ids) == 1 else _rows(ids, table)
        for row in rows:
            self._index += 1
            made.append(TgiEvent(index=self._index, token=self._writer.token(*row)))
        if self._top and table is not None:
            for event, position in zip(made, table, strict=False):
                event.top_tokens = self._writer.likely(position)
        return made

    def _edited(self, delta: StreamDelta) -> list[TgiEvent]:
        """An event of text that belongs to no token."""
        if not delta.text:
            return []
        self._index += 1
        return [TgiEvent(index=self._index, token=TgiToken(NO_TOKEN, delta.text, None, special=False))]

    def _nothing(self, sample: CompletionOutput) -> TgiEvent:
        """An event for an end that came after the last token: one without a text."""
        shown = len(sample.token_ids) and not self._head.hidden
        last = sample.token_ids[-1] if shown else NO_TOKEN
        return TgiEvent(index=self._index + 1, token=TgiToken(last, "", None, special=True))


def _written(event: TgiEvent) -> bytes:
    return event_of(_encode(event))
