"""SyncEngine: the blocking engine behind the Python API and the command line."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.answers import AnswerPart
from quire.engine.api import CompiledStructure
from quire.engine.build.assemble import Built
from quire.engine.front.forming import asked_part, formed_now, forming
from quire.engine.front.grammars import GrammarService
from quire.engine.front.output import OutputBuilder
from quire.parameters import Structure
from quire.records import dataclass
from quire.types import FinishReason, Request, RequestError, RequestOutput, SamplingParams, SeqEvent, TokenIds

if TYPE_CHECKING:
    from quire.text.reading import Reading


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

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        prompt_text: str | None = None,
        reading: Reading | None = None,
        divided: bool = True,
    ) -> RequestOutput:
        """Queue a prompt (text or token ids); returns the output that grows as `step` is called.

        `prompt_text` is the text to report for a prompt given as ids. Not `divided`, the answer is one text. Raises
        RequestError naming the field when the request could never complete, or when what `params.structured` asks for
        cannot be enforced.
        """
        vocab = self.built.program.vocab
        eos = self.built.model.facts.generation.eos_token_ids
        params.check_vocab(vocab, eos)
        if isinstance(prompt, str):
            prompt_text, token_ids = prompt, self.encode(prompt)
        else:
            token_ids = list(prompt)
        self._check_prompt(token_ids, vocab)
        request = Request(
            request_id=f"request-{next(self._ids)}",
            prompt_token_ids=TokenIds(token_ids),
            params=params,
            arrival=time.perf_counter(),
            priority=priority,
            namespace=cache_salt,
            eos_token_ids=eos,
        )
        work = forming(request, reading, asked_part(params), divided=divided)
        form = formed_now(work, lambda part: self.compile(part.ask))
        request = form.request
        if request.grammar is not None:
            self._share_vocabulary()
        finish = partial(self.core.finish, request.request_id)
        following = OutputBuilder(
            request, prompt_text, self.built.model.tokenizer, finish, reading=form.reading
        )
        following.output.dropped = form.dropped
        self.core.add(request)
        self._following[request.request_id] = following
        return following.output

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

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, including the special tokens that the checkpoint adds."""
        tokenizer = self.built.model.tokenizer
        if tokenizer is None:
            raise RequestError("prompt", "this model folder has no tokenizer; give token ids")
        return tokenizer.encode(text)

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
        """End requests whose grammars could not be compiled."""
        refused, self.core.refused = self.core.refused, []
        for request_id, _ in refused:
            for sample in self._following[request_id].samples:
                index = sample.output.index
                event = SeqEvent(request_id, index, [], None, None, FinishReason.GRAMMAR_LIMIT)
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

    @staticmethod
    def _check_prompt(token_ids: list[int], vocab: int) -> None:
        if not token_ids:
            raise RequestError("prompt", "the prompt has no tokens")
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError("prompt_token_ids", f"{token!r} is not a token id below {vocab}")
