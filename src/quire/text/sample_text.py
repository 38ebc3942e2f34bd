"""The one way from the tokens of a sample to its text: the detokenizer, and what looks at the text behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.text.detokenizer import Detokenizer
from quire.text.stop import StopMatcher


class SampleText(Protocol):
    """Text of one sample, token by token. A Detokenizer is one, which never ends a sample.

    Every token goes through `push`, whether its text is then streamed at once or kept: what looks at the text of a
    sample wraps the detokenizer here.
    """

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if one was."""

    def push(self, token_ids: Sequence[int], /) -> str:
        """Append ids; the text that may be shown now."""

    def finish(self) -> str:
        """What was held back: the sample has ended."""


class StoppedText:
    """Text until the first stop string. Text of the first `min_tokens` tokens is not searched: it may not end the
    sample yet.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_tokens", "matched")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int) -> None:
        self._detokenizer, self._matcher = detokenizer, matcher
        self._min_tokens, self._tokens = min_tokens, 0
        self.matched: str | None = None

    def push(self, token_ids: Sequence[int], /) -> str:
        self._tokens += len(token_ids)
        return self._search(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        text = self._search(self._detokenizer.finish())
        return text if self.matched is not None else text + self._matcher.finish()

    def _search(self, text: str) -> str:
        if self._tokens <= self._min_tokens:
            return text
        text, self.matched = self._matcher.push(text)
        return text
