"""Where a sequence is in the regions of its answer, by its tokens: in the engine process, beside its grammar."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.answers import AnswerRegions

_MOST_REST = 3  # bytes of a character behind its first


class RegionState(NamedTuple):
    """A place in an answer; a value, so that drafts are stepped over in copies.

    `enforced`: the grammar holds for the next token. `runs` counts how often it has begun: a higher number than before
    means that it begins with the next token, from its start.
    """

    thinking: bool = False
    spent: int = 0  # tokens of thinking
    enforced: bool = False
    runs: int = 0
    closing: int = 0  # tokens of the closer that were forced
    last: tuple[int, ...] = ()  # tokens that may begin the opener
    tail: bytes = b""  # of the thinking's text: may begin the closer, or a character
    past: bool = False  # no region of thinking may open any more


class RegionMachine:
    """Steps over the tokens of answers with the same regions. `token_bytes` is needed for a closer that is spelled,
    and to finish a character before a budget closes the thinking.
    """

    __slots__ = ("_bytes", "_regions")

    def __init__(self, regions: AnswerRegions, token_bytes: Callable[[int], bytes] | None = None) -> None:
        self._regions, self._bytes = regions, token_bytes

    @property
    def always(self) -> bool:
        """Whether the grammar holds in every answer: behind its thinking, not behind a trigger."""
        return not self._regions.triggers

    def start(self) -> RegionState:
        """Before the first token of the answer."""
        regions = self._regions
        enforced = not regions.triggers and not (regions.thinking and regions.closer >= 0)
        return RegionState(regions.thinking, enforced=enforced, runs=int(enforced))

    def forced(self, state: RegionState) -> tuple[int, ...]:
        """The tokens that must come next: the closer, when the budget of thinking is spent. A character that has begun
        is finished first: the rest of its bytes may be as many tokens.
        """
        budget = self._regions.budget
        if not state.thinking or budget is None:
            return ()
        if not state.closing and state.spent < budget + _MOST_REST * _within_character(state.tail):
            return ()
        return self._regions.close[state.closing :]

    def step(self, state: RegionState, token: int) -> RegionState:
        """The state behind a token."""
        if state.thinking:
            return self._think(state, token)
        regions = self._regions
        if not state.enforced:
            if token in regions.triggers and not (regions.once and state.runs):
                return state._replace(enforced=True, runs=state.runs + 1, last=())
        elif regions.triggers:
            return state
        if not regions.opener or state.past or (token not in regions.opener and not state.last):
            return state if state.past or not regions.opens_first else state._replace(past=True)
        last = (*state.last, token)[-len(regions.opener) :]
        if last == regions.opener:
            return state._replace(thinking=True, last=(), tail=b"", closing=0)
        return state._replace(last=last, past=regions.opens_first and last != regions.opener[: len(last)])

    def complete(self, state: RegionState) -> RegionState:
        """The grammar has come to its end: behind a trigger the answer goes on without it."""
        if not self._regions.triggers or self._regions.once:
            return state
        return state._replace(enforced=False)

    def _think(self, state: RegionState, token: int) -> RegionState:
        regions = self._regions
        forced = self.forced(state)
        closing = state.closing + 1 if forced and token == forced[0] else 0
        text = state.tail + (self._bytes(token) if self._bytes is not None else b"")
        if regions.closer >= 0:
            closed = token == regions.closer
        else:
            closed = regions.closer_bytes in text
            closed = closed or (self._bytes is None and closing == len(regions.close) > 0)
        tail = text[-max(_MOST_REST, len(regions.closer_bytes) - 1) :]
        if not closed:
            return state._replace(spent=state.spent + 1, closing=closing, tail=tail)
        begins = not regions.triggers and not state.enforced
        return state._replace(
            thinking=False,
            closing=0,
            tail=b"",
            enforced=state.enforced or begins,
            runs=state.runs + begins,
            past=regions.opens_first,
        )


def _within_character(text: bytes) -> bool:
    """Whether a text ends before the last byte of a character."""
    for count, byte in enumerate(reversed(text[-_MOST_REST:]), 1):
        if byte >= 0xC0:
            return count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            break
    return False
