"""The text of a sample in parts: its answer, its reasoning and its calls, read by the regions of the model's format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.answers import AnswerPart, PartKind, ToolCall
from quire.text.detokenizer import Detokenizer
from quire.text.stop import StopMatcher

_PLAIN = (PartKind.TEXT, PartKind.REASONING)
_TEXTUAL = frozenset((PartKind.TEXT, PartKind.REASONING, PartKind.ARGUMENTS))


class PartReader(Protocol):
    """Divides the output of one sample into parts, token by token."""

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens so far that are reasoning, with those that open and close it."""

    def marks(self, token_id: int, /) -> bool:
        """Whether a token may begin or end a part."""

    def push(self, token_id: int, text: str, /) -> list[AnswerPart]:
        """Append a token (-1 for text alone), and the text that it makes final; a new list of the parts that are
        certain now.
        """

    def finish(self, text: str, /) -> Iterable[AnswerPart]:
        """The last text, which belongs to no new token, and what was held back: the sample has ended."""


class PartedText:
    """SampleText in parts. `push` returns the text of the answer alone; `take` has all parts since it was last called.

    Stop strings are searched in the text of the answer, not in reasoning and calls, and not across them. Without
    `parallel` a second call ends the sample before it begins.
    """

    __slots__ = (
        "_called", "_detokenizer", "_matcher", "_min_tokens", "_parallel", "_parts", "_reader", "_text",
        "matched", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        reader: PartReader,
        matcher: StopMatcher | None = None,
        *,
        min_tokens: int = 0,
        parallel: bool = True,
    ) -> None:
        self._detokenizer, self._reader = detokenizer, reader
        self._matcher, self._min_tokens = matcher, min_tokens
        self._parallel = parallel
        self.tokens = 0  # that were read: none behind what ends the sample
        self._called = False
        self._parts: list[AnswerPart] = []
        self._text = ""  # of the answer, since the last push
        self.matched: str | None = None

    @property
    def may_end(self) -> bool:
        """Whether what is written may end the sample."""
        return self._matcher is not None or not self._parallel

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens that are reasoning."""
        return self._reader.reasoning_tokens

    def push(self, token_ids: Sequence[int], /, hidden: int = 0) -> str:
        """Append ids, the last `hidden` of which add no text."""
        shown = len(token_ids) - hidden
        for position, token_id in enumerate(token_ids):
            if self.matched is not None:
                break
            self.tokens += 1
            if self._reader.marks(token_id) and (rest := self._detokenizer.finish()):
                self._add(
                    self._reader.push(-1, rest)
                )  # an unfinished character does not reach into the next part
            text = self._detokenizer.push((token_id,)) if position < shown else ""
            parts = self._reader.push(token_id, text)
            if len(parts) == 1 and parts[0].kind in _PLAIN and self._matcher is None and not self._parts:
                self._parts = parts  # as nearly always
                if parts[0].kind is PartKind.TEXT:
                    self._text += parts[0].text
            else:
                self._add(parts)
        return self._new_text()

    def finish(self) -> str:
        if self.matched is None:
            self._add(self._reader.finish(self._detokenizer.finish()))
        if self.matched is None:
            self._release()
        return self._new_text()

    def take(self) -> list[AnswerPart]:
        """The parts since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            if self.matched is not None:
                return
            if part.kind is PartKind.TEXT:
                self._add_text(part)
                continue
            self._release()
            if part.kind is PartKind.CALL:
                if self._called and not self._parallel:
                    self.matched = ""
                    return
                self._called = True
            append(self._parts, part)

    def _show(self, part: AnswerPart) -> None:
        self._text += part.text
        append(self._parts, part)

    def _add_text(self, part: AnswerPart) -> None:
        if self._matcher is not None and self.tokens > self._min_tokens:
            text, self.matched = self._matcher.push(part.text)
            part = AnswerPart(PartKind.TEXT, text)
        if part.text:
            self._show(part)

    def _release(self) -> None:
        """Text that might have been the start of a stop string: the region of text has ended."""
        if self._matcher is not None and (held := self._matcher.finish()):
            self._show(AnswerPart(PartKind.TEXT, held))

    def _new_text(self) -> str:
        text, self._text = self._text, ""
        return text


def append(parts: list[AnswerPart], part: AnswerPart) -> None:
    """Add a part; text that goes on with the last part is joined to it."""
    if parts and part.kind in _TEXTUAL and (last := parts[-1]).kind is part.kind and last.call == part.call:
        # a new part: the last one may have been handed out
        parts[-1] = AnswerPart(part.kind, last.text + part.text, part.call)
    else:
        parts.append(part)


def add_call_part(calls: list[ToolCall], part: AnswerPart) -> None:
    """Add a CALL or ARGUMENTS to the calls of a sample: a whole answer is what its stream adds up to."""
    if part.kind is PartKind.CALL:
        calls.append(ToolCall(part.call_id, part.text, ""))
        return
    # with one reference a string grows in place; with two it would be copied for every token
    whole, calls[-1].arguments = calls[-1].arguments, ""
    whole += part.text
    calls[-1].arguments = whole
