"""Grammars in the step loop: masks for the rows of a step, states stepped over what was accepted.

Masks are filled after the forward pass, when the processors are free, by one thread while they are cheap. A row whose
mask takes long is filled apart, beside the pass; if it is not ready in time, its row sits the step out, so that it does
not hold up the others. One that keeps taking long ends its sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.structured.answer_state import AnswerState
from quire.structured.matcher import GrammarState, Line
from quire.structured.prototypes import Prototypes, yield_to_others
from quire.structured.region_machine import RegionMachine
from quire.text.token_bytes import TokenBytes
from quire.types import FinishReason, Grammar, NewSeq, RequestError, ScheduledSeq, SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from quire.text.tokenizer import Tokenizer

# Masks take this thread so long before others help: most take microseconds, and waking threads takes a hundred.
ALONE_SECONDS = 0.0003
SLICE_SECONDS = 0.005  # that a mask may take on the processor
APART_SECONDS = 0.001  # above, a mask is filled apart; and that a step waits for those
ROW_SECONDS = 0.0002  # that a mask takes in general, at most
LONG_MASKS = 16  # masks over the slice that a sequence may have
LONG_OUTPUT = 64  # tokens: a longer output is stepped over apart
MAX_THREADS = 8


class _Row:
    """A running sequence with a grammar."""

    __slots__ = (
        "apart", "barred", "filled", "grammar", "job", "line", "long", "new", "own", "state", "tokens",
    )  # fmt: skip

    def __init__(self, new: NewSeq, grammar: Grammar, words: int) -> None:
        self.new, self.grammar = new, grammar
        self.tokens = new.token_ids[new.prompt_len :]
        self.state: GrammarState | AnswerState | None = None
        self.line: Line = np.zeros(words, np.uint32)  # a mask that is filled apart
        self.filled = False  # that line is the mask of the state
        self.job: Future[None] | None = None  # owns the row until it has ended
        self.apart = False  # its masks are filled apart
        self.long = 0  # masks over the slice
        self.own = False  # its lexer is shared with no other sequence
        params = new.params
        allowed, out = params.allowed_token_ids, {*new.stop_ids, *params.banned_token_ids}
        # What becomes of these tokens is for the sampler to say: they are not added unsampled.
        self.barred: Callable[[int], bool] = (
            out.__contains__ if allowed is None else lambda token: token in out or token not in allowed
        )


class GrammarStepper:
    """The Grammars of an engine: for steps with up to `rows` positions that are sampled, over `vocab` tokens.

    `tokenizer` gives the model's tokenizer when the first grammar is compiled; compiled grammars share `memory`. With
    `jump`, tokens that a grammar forces are added unsampled. Without `late_rows` a step waits for every mask: a model
    with a state per sequence cannot run its last token again.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer | None],
        memory: int,
        vocab: int,
        rows: int,
        *,
        threads: int = 1,
        jump: bool = True,
        late_rows: bool = True,
    ) -> None:
        self._prototypes = Prototypes(tokenizer, memory)
        self._vocab, self._jump, self._late_rows = vocab, jump, late_rows
        self._max_rows, self._threads = rows, min(threads, MAX_THREADS)
        self._rows: dict[int, _Row] = {}
        self._late: set[int] = set()  # sequences of this step
        self._step: list[tuple[ScheduledSeq, _Row]] = []  # rows of this step that sample
        self._lines: npt.NDArray[np.uint32] = np.empty((0, 0), np.uint32)
        self._executor: LLExecutor | None = None
        self._lane: ThreadPoolExecutor | None = None
        self.added_tokens = 0  # unsampled
        self.late_steps = 0  # that rows sat out

    def prepare(self, grammar: Grammar, tokens: TokenBytes) -> bool:
        """Whether sequences with this grammar may run; until then it waits or is compiled, and must be asked for again.

        Raises RequestError if it cannot be compiled.
        """
        self._prototypes.pieces = tokens
        return self._prototypes.get(grammar) is not None

    def begin(self, out: SchedulerOutput) -> None:
        """Take in the sequences of a step, and begin with the masks that take long."""
        for seq_id in out.gone:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._prototypes.unpin(row.grammar.digest)
        for new in out.new:
            if new.grammar is not None:
                self._prototypes.pin(new.grammar.digest)
                self._rows[new.seq_id] = _Row(new, new.grammar, self._vocab // 32 + 1)
        self._late.clear()
        self._step = []
        if not self._rows:
            return
        for item in out.scheduled:
            row = self._rows.get(item.seq_id)
            if row is None or not item.logits:
                continue
            self._step.append((item, row))
            if row.job is None:
                if row.state is None:
                    self._start(row)
                elif row.state.failure is FinishReason.GRAMMAR_LIMIT and not row.own:
                    # The lexer that it shares may be full of the states of others: once more with one of its own.
                    self._prototypes.drop(row.grammar.digest)
                    row.job = self._work_apart(self._start_anew, row)
                elif row.apart and not row.filled:
                    row.job = self._work_apart(self._fill_apart, row)

    def masks(self) -> Mapping[int, npt.NDArray[np.int32]]:
        """The masks of the step that was begun last."""
        if not self._step:
            return {}
        if not len(self._lines):
            self._lines = np.zeros((self._max_rows, self._vocab // 32 + 1), np.uint32)
        deadline = time.perf_counter() + APART_SECONDS
        at = 0
        spans: dict[int, slice] = {}
        together: list[tuple[LLMatcher, int, _Row]] = []
        others: list[tuple[_Row, ScheduledSeq, int]] = []
        for item, row in self._step:
            spans[item.seq_id] = slice(at, at + item.logits)
            if row.job is not None or row.state is None or row.filled or item.logits > 1:
                others.append((row, item, at))
            elif (matcher := row.state.begin_fill(self._lines[at])) is not None:
                together.append((matcher, at, row))
            at += item.logits
        if together:
            self._fill(together)
        for row, item, first in others:
            self._take(row, item, self._lines[first : first + item.logits], deadline)
        for _, row in self._step:
            if row.state is not None and row.state.failure is FinishReason.GRAMMAR_LIMIT and not row.own:
                self._late.add(row.new.seq_id)
        words = (self._vocab + 31) // 32
        lines = self._lines.view(np.int32)[:, :words]
        return {seq_id: lines[span] for seq_id, span in spans.items()}

    def advance(self, out: SchedulerOutput, result: StepOutput) -> Mapping[int, list[int]]:
        """Step over the tokens that the rows of `out` accepted, and add those that must follow.

        Rows that sat the step out, that failed and whose output is complete are noted in `result`. Returns the added
        tokens by sequence.
        """
        added: dict[int, list[int]] = {}
        if not self._step:
            return added
        places = {item.seq_id: i for i, item in enumerate(out.scheduled)}
        for item, row in self._step:
            i = places[item.seq_id]
            if item.seq_id in self._late:
                if result.failed.get(i) is FinishReason.NO_TOKEN:
                    del result.failed[i]
                    result.late.add(i)
                    self.late_steps += 1
                continue
            assert row.state is not None
            if i in result.failed:
                if row.state.failure is not None and result.failed[i] is FinishReason.NO_TOKEN:
                    result.failed[i] = row.state.failure
                continue
            if row.long > LONG_MASKS:
                result.failed[i] = FinishReason.GRAMMAR_LIMIT
                result.token_ids[i] = []
                continue
            accepted = result.token_ids[i]
            if row.new.stop_ids and not set(row.new.stop_ids).isdisjoint(accepted):
                continue  # the sequence ends
            self._advance_row(row, accepted)
            if self._jump and item.goes_on(accepted) and row.new.params.logprobs is None:
                forced = self._force(row)
                if forced:
                    accepted += forced
                    added[item.seq_id] = forced
            if row.state.complete:
                result.complete.add(i)
        return added

    # -- states -------------------------------------------------------------------------------------------

    def _start(self, row: _Row) -> None:
        """Make the state of a row, if its grammar is there: it may have been forgotten while the sequence waited."""
        try:
            prototype = self._prototypes.get(row.grammar)
            while prototype is None and not self._late_rows:
                time.sleep(SLICE_SECONDS)
                prototype = self._prototypes.get(row.grammar)
        except RequestError:  # although it could be compiled before
            row.job = self._work_apart(self._start_anew, row)
            return
        if prototype is None:
            return
        if len(row.tokens) > LONG_OUTPUT:
            row.job = self._work_apart(self._rebuild, row, prototype)
        else:
            self._rebuild(row, prototype)

    def _rebuild(self, row: _Row, prototype: LLMatcher) -> None:
        state: GrammarState | AnswerState
        unique = self._prototypes.unique(row.grammar)
        if row.new.regions is None:
            state = GrammarState(prototype.deep_copy(), unique)
        else:
            pieces = self._prototypes.pieces
            machine = RegionMachine(row.new.regions, None if pieces is None else pieces.__getitem__)
            state = AnswerState(machine, prototype, unique, row.new.stop_ids)
        state.step(row.tokens)
        row.state, row.filled = state, False

    def _start_anew(self, row: _Row) -> None:
        """A state that shares nothing with other sequences, and its mask."""
        row.own = True
        self._rebuild(row, self._prototypes.compile(row.grammar))
        self._fill_apart(row)

    @staticmethod
    def _advance_row(row: _Row, tokens: list[int]) -> None:
        assert row.state is not None
        row.tokens += tokens
        row.state.step(tokens)
        row.filled = False

    def _force(self, row: _Row) -> list[int]:
        """Step over the tokens that must come next, up to the first that is for the sampler."""
        assert row.state is not None
        made: list[int] = []
        while forced := row.state.forced:
            end = next((at for at, token in enumerate(forced) if row.barred(token)), len(forced))
            self._advance_row(row, forced[:end])
            made += forced[:end]
            if end < len(forced):
                break
        self.added_tokens += len(made)
        return made

    # -- masks --------------------------------------------------------------------------------------------

    def _fill(self, together: list[tuple[LLMatcher, int, _Row]]) -> None:
        """Compute masks together. If that takes too long, each is filled apart the next time, to see which it is.

        Too long for the step and on the processors: where others run on them, no mask is to blame.
        """
        lines, line_bytes = self._lines, self._lines.strides[0]
        started, spent = time.perf_counter(), time.process_time()
        limit = SLICE_SECONDS + len(together) * ROW_SECONDS
        left = len(together)
        for matcher, at, _ in together:
            if time.perf_counter() - started > ALONE_SECONDS:
                break
            matcher.unsafe_compute_mask_ptr(lines.ctypes.data + at * line_bytes, line_bytes)
            left -= 1
        if left:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(self._threads)
            rest = [(matcher, at) for matcher, at, _ in together[-left:]]
            self._executor.unsafe_compute_mask_ptr(rest, lines.ctypes.data, line_bytes, len(lines))
        for _, at, row in together:
            assert row.state is not None
            row.state.end_fill(lines[at], self._vocab, row.new.stop_ids)
        apart = time.perf_counter() - started > limit < time.process_time() - spent
        for _, _, row in together:
            row.apart = apart

    def _fill_apart(self, row: _Row) -> None:
        """On a thread: fill the line of a row, and note whether that took long on the processor."""
        assert row.state is not None
        started = time.thread_time()
        row.state.fill(row.line, self._vocab, row.new.stop_ids)
        spent = time.thread_time() - started
        row.apart = spent > APART_SECONDS
        row.long += spent > SLICE_SECONDS
        row.filled = True

    def _take(self, row: _Row, item: ScheduledSeq, lines: npt.NDArray[np.uint32], deadline: float) -> None:
        """The lines of a row that was not filled with the others; zeros if they are not ready in time."""
        lines[:] = 0
        if row.job is not None:
            left = max(0.0, deadline - time.perf_counter()) if self._late_rows else None
            if not wait([row.job], left).done:
                self._late.add(item.seq_id)
                return
            job, row.job = row.job, None
            job.result()
        if row.state is None:
            self._late.add(item.seq_id)
            return
        if not row.filled:
            row.state.fill(row.line, self._vocab, row.new.stop_ids)
            row.filled = True
        lines[0] = row.line
        if item.drafts:
            # Lines behind a draft that the grammar refuses stay 0: they are not sampled.
            parents = item.parents or range(item.drafts)
            heirs = {parent: draft for draft, parent in enumerate(parents, 1)}  # that take over the state
            states = {0: row.state.fork()}
            drafts = zip(parents, item.token_ids[-item.drafts :], strict=True)
            for draft, (parent, token) in enumerate(drafts, 1):
                state = states[parent]
                states[draft] = state if heirs[parent] == draft else state.fork()
                states[draft].step([token])
                states[draft].fill(lines[draft], self._vocab, row.new.stop_ids)

    def _work_apart(self, work: Callable[..., None], *args: object) -> Future[None]:
        if self._lane is None:
            self._lane = ThreadPoolExecutor(2, "masks", initializer=yield_to_others)
        return self._lane.submit(work, *args)
