"""Where a sequence is in its grammar: stepped token by token, asked for the tokens that may come next.

Where the grammar leaves no choice about the next bytes, they are written in the tokens that the model's tokenizer gives
for them. A forced run is found once, when the tokens before it are known, and holds until all of it has been stepped
over. So an output has the same tokens whether a run is sampled token by token or added at once, and a state built from
the tokens so far is in the same run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.structured.unique_texts import UniqueTexts
from quire.types import FinishReason

if TYPE_CHECKING:
    from llguidance import LLMatcher

Line = npt.NDArray[np.uint32]
_Run = tuple[list[int], int]  # forced tokens, and how many of them are behind
_NO_RUN: _Run = ([], 0)


class GrammarState:
    """One sequence in its grammar. `start` is a matcher that no one else steps, `unique` what else it must keep to.

    A state that has failed allows no token, and `failure` says why.
    """

    __slots__ = ("_history", "_matcher", "_run", "_unique", "failure")

    def __init__(self, start: LLMatcher, unique: UniqueTexts | None = None) -> None:
        self._matcher, self._unique = start, unique
        self._history: list[_Run] = []  # the run before each token
        self.failure: FinishReason | None = None
        self._run = self._forced_run()

    @property
    def complete(self) -> bool:
        """Whether the output matches the grammar as it is, and nothing may follow."""
        return self.failure is None and self._matcher.is_stopped()

    @property
    def forced(self) -> list[int]:
        """The tokens that must come next."""
        run, behind = self._run
        return run[behind:]

    def step(self, token_ids: Iterable[int]) -> None:
        """Step over tokens that the masks allowed."""
        for token in token_ids:
            self._history.append(self._run)
            if self.failure is not None:
                continue
            if self._unique is not None:
                self._unique.step(token, self._matcher)
                if self._unique.full:
                    self.failure = FinishReason.GRAMMAR_LIMIT
                    continue
            if not self._matcher.consume_token(token):
                self._fail()
                continue
            run, behind = self._run
            if behind + 1 < len(run) and run[behind] == token:
                self._run = run, behind + 1
            else:
                self._run = self._forced_run()

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if count:
            self._run = self._history[-count]
            del self._history[-count:]
            if self.failure is None and not self._matcher.rollback(count):
                self._fail()
            elif self._unique is not None:
                self._unique.rollback(count)

    def fork(self) -> GrammarState:
        """A state of its own at the same place."""
        copy = GrammarState.__new__(GrammarState)
        copy._matcher, copy._history = self._matcher.deep_copy(), list(self._history)
        copy._run, copy.failure = self._run, self.failure
        copy._unique = None if self._unique is None else self._unique.copy()
        return copy

    def fill(self, line: Line, vocab: int, ends: Collection[int]) -> None:
        """Write the tokens that may come next into a line of a bitmask, with those of `ends` where the output may end.

        The line has a bit more than the `vocab` of them, for llguidance's own end.
        """
        matcher = self.begin_fill(line)
        if matcher is not None:
            matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            self.end_fill(line, vocab, ends)

    def begin_fill(self, line: Line) -> LLMatcher | None:
        """Fill a line that is known; otherwise the matcher to compute it, after which `end_fill` must follow."""
        run, behind = self._run
        if behind == len(run) and self.failure is None and not self._matcher.is_stopped():
            return self._matcher
        line[:] = 0
        if behind < len(run) and self.failure is None:
            _allow(line, run[behind])
        return None

    def end_fill(self, line: Line, vocab: int, ends: Collection[int]) -> None:
        """See `fill`."""
        if self._matcher.is_error():
            self._fail()
            line[:] = 0
            return
        if int(line[vocab >> 5]) >> (vocab & 31) & 1:
            line[vocab >> 5] ^= np.uint32(1 << (vocab & 31))
            for token in ends:
                _allow(line, token)
        if self._unique is not None:
            self._unique.filter(line, self._matcher)

    def _forced_run(self) -> _Run:
        if self.failure is not None or self._matcher.is_stopped():
            return _NO_RUN
        run = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            self._fail()
        return (run, 0) if run else _NO_RUN

    def _fail(self) -> None:
        dead_end = "NoExtension" in self._matcher.get_error()
        self.failure = FinishReason.GRAMMAR_DEAD_END if dead_end else FinishReason.GRAMMAR_LIMIT


def _allow(line: Line, token_id: int) -> None:
    line[token_id >> 5] |= np.uint32(1 << (token_id & 31))
