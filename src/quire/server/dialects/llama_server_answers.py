"""Answers in llama-server's form: one JSON object for each completion, or events of which the last has all fields."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.answers import PromptProgress
from quire.engine.api import StreamDelta
from quire.logprobs import PositionLogprobs, TokenLogprob
from quire.outputs import CompletionOutput, RequestOutput
from quire.records import dataclass
from quire.server import pieces
from quire.server.dialects.llama_server_types import LlamaServerTimings
from quire.server.generation import HttpGeneration
from quire.server.logprob_bodies import TokenTexts, finite
from quire.server.responses import PromptProgressBody
from quire.types import FinishReason

_encode = msgspec.json.Encoder().encode
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class LlamaServerHead:
    """What the answers of a request have in common. `prompts` are as the model reads them, `fields` those that are
    wanted, all if there are none. `prompt_only`: the one token that was sampled is not part of the answer. `hidden`:
    tokens are not shown, as a hook edits the text.
    """

    model: str
    settings: dict[str, Any]
    prompts: Sequence[str]
    texts: TokenTexts
    fields: Sequence[str] = ()
    tokens: bool = False
    listed: bool = False
    probabilities: bool = False
    per_token: bool = False
    prompt_only: bool = False
    hidden: bool = False


def timings_of(output: RequestOutput, predicted: int, now: float) -> LlamaServerTimings:
    """Where the time of an answer with so many tokens went, up to `now` while it runs."""
    usage, times = output.usage, output.timings
    end = times.finished or now
    first = times.first_token or end
    prompt, generation = 1e3 * (first - (times.scheduled or first)), 1e3 * (end - first)
    computed = usage.prompt_tokens - usage.cached_tokens
    made = LlamaServerTimings(
        cache_n=usage.cached_tokens,
        prompt_n=computed,
        prompt_ms=prompt,
        prompt_per_token_ms=_ratio(prompt, computed),
        prompt_per_second=_ratio(1e3 * computed, prompt),
        predicted_n=predicted,
        predicted_ms=generation,
        predicted_per_token_ms=_ratio(generation, predicted),
        predicted_per_second=_ratio(1e3 * predicted, generation),
    )
    if usage.draft_tokens:
        made.draft_n, made.draft_n_accepted = usage.draft_tokens, usage.accepted_draft_tokens
    return made


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


def _place(run: HttpGeneration, choice: int) -> tuple[int, RequestOutput, CompletionOutput]:
    """The number of the prompt of a choice, its output, and that of the choice."""
    prompt, sample = divmod(choice, len(run.outputs[0].outputs))
    output = run.outputs[prompt]
    return prompt, output, output.outputs[sample]


def ending(
    head: LlamaServerHead, run: HttpGeneration, choice: int, *, new_line: bool
) -> dict[str, pieces.Pieces]:
    """The fields that an answer has at its end, except for its content, tokens and probabilities."""
    prompt, output, sample = _place(run, choice)
    predicted = 0 if head.prompt_only else len(sample.token_ids)
    stop = "" if head.prompt_only or not isinstance(sample.stop_reason, str) else sample.stop_reason
    kind = "limit" if head.prompt_only or sample.finish_reason is FinishReason.LENGTH else "eos"
    found: dict[str, Any] = {
        "id_slot": NO_SLOT,
        "stop": True,
        "model": head.model,
        "tokens_predicted": predicted,
        "tokens_evaluated": output.usage.prompt_tokens,
        "generation_settings": head.settings,
        "has_new_line": new_line,
        "truncated": False,
        "stop_type": "word" if stop else kind,
        "stopping_word": stop,
        "tokens_cached": output.usage.cached_tokens,
        "timings": timings_of(output, predicted, time.monotonic()),
    }
    text = head.prompts[prompt].encode() if head.prompts else b""
    return {name: pieces.value(given) for name, given in found.items()} | {"prompt": pieces.text(text)}


def picked(
    fields: dict[str, pieces.Pieces], settings: dict[str, Any], wanted: Sequence[str]
) -> Iterator[bytes]:
    """An object of the wanted fields, all if none are named: "generation_settings/x" is a field of the settings."""
    if not wanted:
        return pieces.fields(fields.items())
    found = {name: fields[name] for name in wanted if name in fields}
    for name in wanted:
        group, _, inner = name.partition("/")
        if group == "generation_settings" and inner in settings:
            found[name] = pieces.value(settings[inner])
    return pieces.fields((_encode(name)[1:-1].decode(), given) for name, given in found.items())


def probability(texts: TokenTexts, token: TokenLogprob) -> dict[str, Any]:
    """A token with its probability; a token that is part of a character has its bytes alone."""
    text, raw = texts(token.token_id)
    shown = raw.decode("utf-8", "ignore") if raw else text
    return {"id": token.token_id, "token": shown, "bytes": list(raw), "logprob": finite(token.logprob)}


def probabilities(texts: TokenTexts, positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    """The tokens of some positions, each with the most likely ones."""
    return [
        probability(texts, chosen) | {"top_logprobs": [probability(texts, token) for token in top]}
        for chosen, *top in positions
    ]


def answer_pieces(head: LlamaServerHead, run: HttpGeneration) -> Iterator[bytes]:
    """The JSON of a LlamaServerCompletion, or of a list of them."""
    made = (_answer(head, run, choice) for choice in range(len(run.answers)))
    return pieces.items(made) if head.listed else iter(next(made))


def _answer(head: LlamaServerHead, run: HttpGeneration, choice: int) -> Iterator[bytes]:
    answer, (_, _, sample) = run.answers[choice], _place(run, choice)
    text = b"" if head.prompt_only else answer.text
    tokens = sample.token_ids if head.tokens and not head.prompt_only else ()
    found: dict[str, pieces.Pieces] = {
        "index": pieces.value(choice),
        "content": pieces.text(text),
        "tokens": pieces.numbers(tokens),
    } | ending(head, run, choice, new_line=b"\n" in text)
    table = answer.logprobs
    if head.probabilities and not head.prompt_only and table is not None:
        batches = pieces.batches(table, pieces.width_of(table))
        found["completion_probabilities"] = pieces.slices(
            probabilities(head.texts, batch) for batch in batches
        )
    return picked(found, head.settings, head.fields)


def _further(name: str, given: object) -> bytes:
    """A field behind others."""
    return b',"%b":%b' % (name.encode(), _encode(given))


class LlamaServerStream:
    """The events of a streamed answer: a delta in, bytes out. The last event of each choice has all fields."""

    __slots__ = ("_ends", "_extended", "_head", "_hidden", "_lines", "_predicted", "_run", "_starts")

    def __init__(self, head: LlamaServerHead, evaluated: Sequence[int], samples: int) -> None:
        """`evaluated`: tokens of each prompt, of which each has so many `samples`."""
        self._head, self._hidden = head, head.hidden
        choices = range(len(evaluated) * samples)
        self._starts = [b'data: {"index":%d,"content":' % choice for choice in choices]
        self._ends = [b',"tokens_evaluated":%d' % evaluated[choice // samples] for choice in choices]
        self._extended = head.per_token or head.probabilities
        self._predicted = [0 for _ in choices]
        self._lines = [False for _ in choices]
        self._run: HttpGeneration | None = None

    def begun(self, run: HttpGeneration) -> None:
        """The run whose deltas will come."""
        self._run = run

    def chunk_of(self, choice: int, delta: StreamDelta) -> bytes:
        """The event of a delta."""
        if not delta.text and not delta.token_ids:
            return b""
        self._predicted[choice] += len(delta.token_ids)
        if "\n" in delta.text:
            self._lines[choice] = True
        ids = () if self._hidden else delta.token_ids
        return self._event(choice, delta.text, ids, self._more(choice, delta) if self._extended else b"")

    def progress(self, choice: int, progress: PromptProgress) -> bytes:
        """The event that says how far the prompt of a choice is."""
        body = PromptProgressBody(
            progress.total, progress.cached, progress.processed, round(1e3 * progress.seconds)
        )
        return self._event(choice, "", (), _further("prompt_progress", body))

    def last(self, run: HttpGeneration) -> bytes:
        """The last event of each choice."""
        return b"".join([self._ended(run, choice) for choice in range(len(self._predicted))])

    def _event(self, choice: int, text: str, ids: Sequence[int], more: bytes) -> bytes:
        return b'%b%b,"tokens":%b,"stop":false,"id_slot":%d,"tokens_predicted":%d%b%b}\n\n' % (
            self._starts[choice], _encode(text), _encode(ids), NO_SLOT, self._predicted[choice],
            self._ends[choice], more,
        )  # fmt: skip

    def _more(self, choice: int, delta: StreamDelta) -> bytes:
        more = b""
        if self._head.per_token and self._run is not None:
            _, output, _ = _place(self._run, choice)
            more += _further("timings", timings_of(output, self._predicted[choice], time.monotonic()))
        if self._head.probabilities and delta.logprobs is not None:
            more += _further("completion_probabilities", probabilities(self._head.texts, delta.logprobs))
        return more

    def _ended(self, run: HttpGeneration, choice: int) -> bytes:
        found: dict[str, pieces.Pieces] = {
            "index": pieces.value(choice),
            "content": pieces.value(""),
            "tokens": pieces.value(()),
        } | ending(self._head, run, choice, new_line=self._lines[choice])
        return b"data: " + b"".join(picked(found, self._head.settings, self._head.fields)) + b"\n\n"
