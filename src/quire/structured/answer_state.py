"""Where a sequence is in an answer whose grammar holds in regions of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from quire.structured.matcher import GrammarState, Line
from quire.structured.region_machine import RegionMachine, RegionState
from quire.types import FinishReason

if TYPE_CHECKING:
    from llguidance import LLMatcher

_EVERY = np.uint32(0xFFFFFFFF)


class AnswerState:
    """A GrammarState that begins where the regions say, as often as they say. Outside of the grammar every token may
    come, but for the closer of the thinking when its budget is spent. `start` is a matcher that no one steps.
    """

    __slots__ = ("_grammar", "_machine", "_place", "_start")

    def __init__(self, machine: RegionMachine, start: LLMatcher) -> None:
        self._machine, self._start = machine, start
        self._place: RegionState = machine.start()
        self._grammar = self._begin() if self._place.enforced else None

    @property
    def failure(self) -> FinishReason | None:
        """Why the grammar allows no token; None while it does."""
        return None if self._grammar is None else self._grammar.failure

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self._grammar is not None and self._grammar.complete

    @property
    def forced(self) -> list[int]:
        """The tokens that must come next."""
        closer = self._machine.forced(self._place)
        if closer or self._grammar is None:
            return list(closer)
        return self._grammar.forced

    def step(self, token_ids: Iterable[int]) -> None:
        """Step over tokens that the masks allowed."""
        for token in token_ids:
            if self._grammar is not None:
                self._grammar.step((token,))
            before, self._place = self._place, self._machine.step(self._place, token)
            if self._place.runs > before.runs:
                self._grammar = self._begin()
            if self.complete:
                self._place = self._machine.complete(self._place)
            if not self._place.enforced:
                self._grammar = None

    def fork(self) -> AnswerState:
        """A state of its own at the same place."""
        copy = AnswerState.__new__(AnswerState)
        copy._machine, copy._start, copy._place = self._machine, self._start, self._place
        copy._grammar = None if self._grammar is None else self._grammar.fork()
        return copy

    def fill(self, line: Line, vocab: int, ends: Collection[int]) -> None:
        """See GrammarState."""
        matcher = self.begin_fill(line)
        if matcher is not None:
            matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            self.end_fill(line, vocab, ends)

    def begin_fill(self, line: Line) -> LLMatcher | None:
        """See GrammarState."""
        closer = self._machine.forced(self._place)
        if closer:
            line[:] = 0
            line[closer[0] >> 5] |= np.uint32(1 << (closer[0] & 31))
            return None
        if self._grammar is None:
            line[:] = _EVERY
            return None
        return self._grammar.begin_fill(line)

    def end_fill(self, line: Line, vocab: int, ends: Collection[int]) -> None:
        """See GrammarState."""
        assert self._grammar is not None
        self._grammar.end_fill(line, vocab, ends)

    def _begin(self) -> GrammarState:
        return GrammarState(self._start.deep_copy())
