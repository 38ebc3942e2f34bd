"""Answers in SGLang's form: one JSON object for each prompt and sample, or events with all of the text so far."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.engine.api import StreamDelta
from quire.logprobs import PositionLogprobs, TokenLogprob
from quire.records import dataclass
from quire.server import pieces
from quire.server.chunks import DONE
from quire.server.dialects.sglang_types import SglangLogprob, SglangReason
from quire.server.exchange import ChunkPiece
from quire.server.generation import HttpGeneration
from quire.server.logprob_bodies import TokenTexts, finite
from quire.types import FinishReason, TokenIds

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class SglangHead:
    """What the answers of a request have in common: the ids and tokens of its prompts, the logprobs that it wants, and
    whether these have `texts`. `start`: the token of the prompt from which it wants them. `prompt_only`: the one token
    that was sampled is not part of the answer. `hidden`: ids are not shown, as a hook edits the text.
    """

    ids: Sequence[str]
    prompts: Sequence[TokenIds]
    samples: int = 1
    listed: bool = False
    logprobs: bool = False
    top: bool = False
    texts: TokenTexts | None = None
    start: int | None = None
    prompt_only: bool = False
    hidden: bool = False


def meta_of(
    head: SglangHead, run: HttpGeneration, choice: int, completion: int, *, ended: bool
) -> dict[str, Any]:
    """The facts about an answer of so many tokens, but for its logprobs."""
    prompt, number = divmod(choice, head.samples)
    output = run.outputs[prompt]
    found: dict[str, Any] = {
        "id": head.ids[prompt],
        "finish_reason": None,
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": completion,
        "cached_tokens": output.usage.cached_tokens,
    }
    if ended:
        sample = output.outputs[number]
        if head.prompt_only or sample.finish_reason is FinishReason.LENGTH:
            found["finish_reason"] = SglangReason("length", length=completion)
        else:
            found["finish_reason"] = SglangReason("stop", matched=sample.stop_reason)
        found["e2e_latency"] = (output.timings.finished or time.monotonic()) - output.timings.arrival
    return found


def answer_pieces(head: SglangHead, run: HttpGeneration) -> Iterator[bytes]:
    """The JSON of an SglangAnswer, or of a list of them."""
    made = (_answer(head, run, choice) for choice in range(len(run.answers)))
    return pieces.items(made) if head.listed else next(made)


def _answer(head: SglangHead, run: HttpGeneration, choice: int) -> Iterator[bytes]:
    prompt, number = divmod(choice, head.samples)
    ids = () if head.prompt_only else run.outputs[prompt].outputs[number].token_ids
    text = b"" if head.prompt_only else run.answers[choice].text
    facts = meta_of(head, run, choice, len(ids), ended=True)
    ids = () if head.hidden else ids
    meta = [(name, pieces.value(given)) for name, given in facts.items()]
    return pieces.fields([
        ("text", pieces.text(text)),
        ("output_ids", pieces.numbers(ids)),
        ("meta_info", pieces.fields([*meta, *_logprobs(head, run, choice)])),
    ])  # fmt: skip


def _logprobs(head: SglangHead, run: HttpGeneration, choice: int) -> Iterator[tuple[str, pieces.Pieces]]:
    """The fields with logprobs of an answer and its prompt."""
    if not head.logprobs:
        return
    table = None if head.prompt_only else run.answers[choice].logprobs
    prompt = choice // head.samples
    before = None if head.start is None else run.prompt_logprobs(prompt)
    yield "input_token_logprobs", pieces.items(_positions(head, before, prompt, top=False))
    yield "output_token_logprobs", pieces.items(_each(head, table or (), top=False))
    if head.top:
        yield "input_top_logprobs", pieces.items(_positions(head, before, prompt, top=True))
        yield "output_top_logprobs", pieces.items(_each(head, table or (), top=True))


def _positions(
    head: SglangHead, table: Sequence[PositionLogprobs] | None, prompt: int, *, top: bool
) -> Iterator[pieces.Pieces]:
    """The logprobs of a prompt from `start` on, whose first token has none."""
    if table is None or head.start is None:
        return
    first = TokenLogprob(head.prompts[prompt][head.start], 0.0, 0)
    yield pieces.value(None if top else (None, *_triple(head, first)[1:]))
    yield from _each(head, table, top=top)


def _each(head: SglangHead, table: Sequence[PositionLogprobs], *, top: bool) -> Iterator[pieces.Pieces]:
    """The logprobs of positions: of the chosen token, or of the `top` ones."""
    for batch in pieces.batches(table, pieces.width_of(table)):
        for chosen, *likely in batch:
            made = [_triple(head, token) for token in likely] if top else _triple(head, chosen)
            yield pieces.value(made)


def _triple(head: SglangHead, token: TokenLogprob) -> SglangLogprob:
    text = None if head.texts is None else head.texts(token.token_id)[0]
    return finite(token.logprob), token.token_id, text


class _Choice:
    """What the next event of a choice repeats: its beginning with the text so far, the ids so far, and what stands
    around the number of its tokens.
    """

    __slots__ = ("around", "count", "ids", "text")

    def __init__(self) -> None:
        self.text, self.ids, self.count = bytearray(b'data: {"text":"'), bytearray(b'","output_ids":['), 0
        self.around = (b"", b"")


class SglangStream:
    """The events of a streamed answer: a delta in, bytes out. Each event has all of the text of its choice so far."""

    __slots__ = ("_choices", "_head", "_hidden", "_run")

    def __init__(self, head: SglangHead) -> None:
        self._head, self._hidden = head, head.hidden
        self._choices = [_Choice() for _ in range(len(head.ids) * head.samples)]
        self._run: HttpGeneration | None = None

    def begun(self, run: HttpGeneration) -> None:
        """The run whose deltas will come."""
        self._run = run

    def chunk_of(self, number: int, delta: StreamDelta) -> bytes:
        """The event of a delta."""
        ended, choice, ids = delta.finish_reason is not None, self._choices[number], delta.token_ids
        if not delta.text and not ids and not ended:
            return b""
        choice.text += _encode(delta.text)[1:-1]
        choice.count += len(ids)
        if ids and not self._hidden:
            choice.ids += (b"%b" if choice.ids.endswith(b"[") else b",%b") % _encode(ids)[1:-1]
        if ended or not choice.around[0]:
            choice.around = self._around(number, choice, ended=ended)
        return b"".join((choice.text, choice.ids, choice.around[0], b"%d" % choice.count, choice.around[1]))

    def token_of(
        self, number: int, text: str, token_id: int, _: float | None
    ) -> tuple[ChunkPiece, ChunkPiece, bytes] | None:
        """The event of a token behind others, in three pieces."""
        choice = self._choices[number]
        before, behind = choice.around
        if not choice.count or self._hidden or len(text) > pieces.SHORT_CHARS:
            return None
        choice.text += _encode(text)[1:-1]
        choice.ids += b",%d" % token_id
        choice.count += 1
        return choice.text, choice.ids, b"%b%d%b" % (before, choice.count, behind)

    def _around(self, number: int, choice: _Choice, *, ended: bool) -> tuple[bytes, bytes]:
        """What stands around the number of tokens in an event: it is the same until the last one."""
        assert self._run is not None
        meta = _encode(meta_of(self._head, self._run, number, choice.count, ended=ended))
        before, name, after = meta.partition(b'"completion_tokens":')
        index = b',"index":%d' % number if self._head.listed else b""
        rest = after.removeprefix(b"%d" % choice.count)
        return b'],"meta_info":%b%b' % (before, name), b"%b%b}\n\n" % (rest, index)

    def last(self, _: HttpGeneration) -> bytes:
        """The end of the stream."""
        return DONE
