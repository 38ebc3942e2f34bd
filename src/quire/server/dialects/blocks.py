"""An answer as a list of blocks in their order: text, reasoning and calls, as APIs with content blocks have it.

Whole and streamed answers are made of the same steps, which depend on the texts of the parts and not on their cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from enum import Enum
from typing import NamedTuple

import msgspec

from quire.answers import AnswerPart, PartKind
from quire.engine.api import StreamDelta
from quire.records import dataclass
from quire.server.generation import Answer
from quire.server.logprob_bodies import TokenTexts, chat_logprobs

_encode = msgspec.json.Encoder().encode


class BlockChange(Enum):
    """What a step does to the latest block."""

    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


class BlockStep(NamedTuple):
    """One step of an answer: a block of `kind` TEXT, REASONING or CALL opens, grows by `text` or closes.

    Of a call that opens, `text` is the name of the function.
    """

    change: BlockChange
    kind: PartKind
    text: str = ""
    call_id: str = ""


class BlockReader:
    """Turns the parts of an answer into steps. Space between other blocks is not a block of text; space before a text
    is part of it.
    """

    __slots__ = ("_space", "called", "count", "kind")

    def __init__(self) -> None:
        self.count = 0  # of blocks
        self.called = False
        self.kind: PartKind | None = None  # of the open block
        self._space = ""

    def push(self, part: AnswerPart) -> Iterator[BlockStep]:
        """The steps of the next part."""
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        if part.kind is PartKind.CALL:
            self.called = True
            yield from self._open(kind, part.text, part.call_id)
        elif kind is self.kind:
            if part.text:
                yield BlockStep(BlockChange.GROW, kind, part.text)
        elif kind is PartKind.TEXT and not part.text.strip():
            self._space += part.text
        elif part.text:
            text = self._space + part.text if kind is PartKind.TEXT else part.text
            yield from self._open(kind)
            yield BlockStep(BlockChange.GROW, kind, text)

    def end(self) -> Iterator[BlockStep]:
        """The steps after the last part: an answer of nothing but space has a block all the same."""
        if not self.count and self._space:
            text = self._space
            yield from self._open(PartKind.TEXT)
            yield BlockStep(BlockChange.GROW, PartKind.TEXT, text)
        yield from self._close()

    def _open(self, kind: PartKind, name: str = "", call_id: str = "") -> Iterator[BlockStep]:
        yield from self._close()
        self.count, self.kind, self._space = self.count + 1, kind, ""
        yield BlockStep(BlockChange.OPEN, kind, name, call_id)

    def _close(self) -> Iterator[BlockStep]:
        if self.kind is not None:
            kind, self.kind = self.kind, None
            yield BlockStep(BlockChange.CLOSE, kind)


@dataclass(slots=True)
class Block:
    """A block of an answer that is not streamed; its text in UTF-8. `call_id` and `name` are those of a call, `scores`
    the log-probabilities of its tokens.
    """

    kind: PartKind
    text: bytearray
    call_id: str = ""
    name: str = ""
    scores: bytearray = field(default_factory=bytearray)


class BlockAnswer(Answer):
    """An answer that is not streamed, as blocks. With `texts` it keeps the log-probabilities of its tokens, as JSON
    with commas between them; it must have one block, as it is not known to which block a token belongs.
    """

    __slots__ = ("_reader", "_scores", "_texts", "blocks")

    def __init__(self, texts: TokenTexts | None = None) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self._texts, self._scores = texts, bytearray()
        self._reader = BlockReader()

    @property
    def size(self) -> int:
        """Bytes of all texts."""
        return sum(len(block.text) for block in self.blocks)

    @property
    def called(self) -> bool:
        """Whether there is a call."""
        return self._reader.called

    def add(self, delta: StreamDelta) -> int:
        """Add a delta; returns the bytes of its texts."""
        self.score(delta)
        for _ in self.steps(parts_of(delta), ended=delta.finish_reason is not None):
            pass
        return sum(len(part.text.encode()) for part in parts_of(delta))

    def score(self, delta: StreamDelta) -> bytes:
        """Add the log-probabilities of a delta, and return them."""
        if self._texts is None or not delta.logprobs:
            return b""
        added = _encode(chat_logprobs(delta.logprobs, self._texts).content)[1:-1]
        self._scores += b"," + added if self._scores else added
        return added

    def grow(self, parts: Sequence[AnswerPart]) -> str:
        """Add a part, if it is the only one and continues the open block; returns its text, else "".

        Nearly all parts of a stream do.
        """
        (part,) = parts if len(parts) == 1 else (None,)
        if part is None or part.kind is not self._reader.kind or part.kind is PartKind.CALL:
            return ""
        self.blocks[-1].text += part.text.encode()
        return part.text

    def steps(self, parts: Iterable[AnswerPart], *, ended: bool) -> Iterator[BlockStep]:
        """Add parts, and end the answer behind them; yields each step, taken."""
        for part in parts:
            yield from map(self._take, self._reader.push(part))
        if ended:
            yield from map(self._take, self._reader.end())

    def _take(self, step: BlockStep) -> BlockStep:
        if step.change is BlockChange.OPEN:
            self.blocks.append(Block(step.kind, bytearray(), step.call_id, step.text, self._scores))
        elif step.change is BlockChange.GROW:
            self.blocks[-1].text += step.text.encode()
        return step


def parts_of(delta: StreamDelta) -> list[AnswerPart]:
    """The parts of a delta; a text where the answer is not divided."""
    if delta.parts is not None:
        return delta.parts
    return [AnswerPart(PartKind.TEXT, delta.text)] if delta.text else []
