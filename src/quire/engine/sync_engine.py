"""SyncEngine: the blocking engine behind the Python API and the command line."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.answers import AnswerPart
from quire.engine.api import Ask, CompiledStructure
from quire.engine.build.assemble import Built
from quire.engine.front.forming import asked_part, formed_now, forming
from quire.engine.front.grammars import GrammarService
from quire.engine.front.output import OutputBuilder
from quire.engine.front.prompt_embeds import PromptEmbeds, embedded
from quire.engine.front.text_tokens import text_tokens
from quire.engine.request_forms import check_prediction, guided
from quire.outputs import RequestOutput
from quire.parameters import Structure
from quire.records import dataclass
from quire.types import FinishReason, Request, RequestError, SeqEvent, TokenIds

if TYPE_CHECKING:
    from quire.lora.adapter_service import AdapterService
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The result of one step for one sample: new text (may be empty) and new token ids."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    parts: list[AnswerPart] | None = None  # of a chat: text, reasoning and calls in order


class SyncEngine:
    """Adds requests and runs steps until they have finished. One thread calls it."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.core = built.core
        self._following: dict[str, OutputBuilder] = {}
        self._ids = itertools.count()
        self._grammars = GrammarService(built.plan.parts["compiler"])

    def add(self, ask: Ask, ids: tuple[Sequence[int], ...] | None = None) -> RequestOutput:
        """Queue a prompt; returns the output that grows as `step` is called.

        `ids` is what `encode` has made of it. Raises RequestError naming the field when the request could never
        complete, or when what `params.structured` asks for cannot be enforced.
        """
        params = ask.params
        vocab = self.built.program.ids if ask.pooling and self.built.program.ids else self.built.program.vocab
        eos = self.built.model.facts.generation.eos_token_ids
        params.check_vocab(vocab, eos)
        prompt, predicted, negative = ids or self.encode(ask)
        if not prompt:
            raise RequestError("prompt", "the prompt has no tokens")
        for name, given in (("prompt_token_ids", prompt), ("negative_prompt", negative)):
            for token in given:
                if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                    raise RequestError(name, f"{token!r} is not a token id below {vocab}")
        check_prediction(predicted, vocab, self.built.plan.limits.max_len)
        request = Request(
            request_id=f"request-{next(self._ids)}",
            prompt_token_ids=TokenIds(prompt),
            params=params,
            arrival=time.perf_counter(),
            priority=ask.priority,
            namespace=ask.cache_salt,
            eos_token_ids=eos,
            prediction=TokenIds(predicted) if predicted else None,
            beams=ask.beams,
            pooling=ask.pooling,
            texts=text_tokens(params, self.built.model.tokenizer),
            adapter=self.adapters.version(ask.adapter) if ask.adapter else "",
        )
        request = guided(request, negative)
        if isinstance(prompt, PromptEmbeds):
            request = embedded(request, prompt)
        work = forming(request, ask.reading, asked_part(params), divided=ask.divided)
        form = formed_now(work, lambda part: self.compile(part.ask))
        request = form.request
        if request.grammar is not None:
            self._share_vocabulary()
        finish = partial(self.core.finish, request.request_id)
        following = OutputBuilder(
            request,
            ask.prompt if isinstance(ask.prompt, str) else None,
            self.built.model.tokenizer,
            finish,
            reading=form.reading,
        )
        following.output.dropped = form.dropped
        self.core.add(request)
        self._following[request.request_id] = following
        return following.output

    @property
    def adapters(self) -> AdapterService:
        """The adapters of the engine. Raises RequestError without enable_lora."""
        if self.core.adapters is None:
            raise RequestError("adapter", "this engine has no adapters: use enable_lora=True")
        return self.core.adapters

    def compile(self, asked: Structure) -> CompiledStructure:
        """The grammar of an answer; any thread may call this. Raises GrammarError naming the field of `asked`."""
        return self._grammars.compile_now(asked)

    def close(self) -> None:
        """End what was started beside the steps."""
        self._grammars.close()

    def _share_vocabulary(self) -> None:
        """Give the core the bytes of all tokens, before the first request with a grammar."""
        if self.core.vocabulary is None:
            tokenizer = self.built.model.tokenizer
            if tokenizer is None:
                raise RequestError("structured", "this model folder has no tokenizer, which a grammar needs")
            self.core.vocabulary = tokenizer.all_bytes(self.built.program.vocab)

    def encode(self, ask: Ask) -> tuple[Sequence[int], ...]:
        """Token ids of a prompt, with the special tokens that the checkpoint adds, of its prediction, and of its
        negative prompt."""
        prompt, predicted, negative = ask.prompt, ask.prediction, ask.negative_prompt
        if isinstance(prompt, str):
            prompt = self._tokenizer("prompt").encode(prompt)
        if isinstance(predicted, str):
            predicted = (
                self._tokenizer("prediction").encode(predicted, add_special_tokens=False) if predicted else []
            )
        if isinstance(negative, str):
            negative = self._tokenizer("negative_prompt").encode(negative) if negative else []
        return prompt, predicted, negative

    def _tokenizer(self, name: str) -> Tokenizer:
        tokenizer = self.built.model.tokenizer
        if tokenizer is None:
            raise RequestError(name, "this model folder has no tokenizer; give token ids")
        return tokenizer

    def abort(self, request_id: str) -> None:
        """End a request now; its output is marked finished."""
        self._take(self.core.abort(request_id))

    def has_work(self) -> bool:
        return self.core.has_work()

    def step(self) -> list[TextDelta]:
        """Run one step; returns its deltas, sample by sample."""
        events = self.core.step()
        if self.core.refused:
            self._end_refused()
        for request_id in self.core.started:
            if request_id in self._following:
                self._following[request_id].started(self.core.records[-1].start)
        return self._take(events)

    def _end_refused(self) -> None:
        """End requests whose grammars could not be compiled, or whose adapters could not be loaded."""
        refused, self.core.refused = self.core.refused, []
        for request_id, error in refused:
            reason = FinishReason.ERROR if error.field == "adapter" else FinishReason.GRAMMAR_LIMIT
            for sample in self._following[request_id].samples:
                index = sample.output.index
                event = SeqEvent(request_id, index, [], None, None, reason)
                self._take([event])

    def _take(self, events: list[SeqEvent]) -> list[TextDelta]:
        """Apply events; returns the deltas, sample by sample. Finished requests are forgotten."""
        now = time.perf_counter()
        deltas = []
        for event in events:
            following = self._following.get(event.request_id)
            delta = None if following is None else following.apply(event, now)
            if following is None or delta is None:
                continue
            deltas.append(
                TextDelta(
                    event.request_id,
                    delta.index,
                    delta.text,
                    delta.token_ids,
                    delta.finish_reason,
                    delta.parts,
                )
            )
            if following.output.finished:
                del self._following[event.request_id]
        return deltas
