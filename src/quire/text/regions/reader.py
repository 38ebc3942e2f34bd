"""Divide the output of a sample into text, reasoning and calls, token by token, for every format of `spec`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Sequence

from quire.answers import AnswerPart, PartKind
from quire.text.regions.arriving import MalformedError, Pausing, words
from quire.text.regions.calls import CallReader, Tools, call_id
from quire.text.regions.markers import CHANNEL_MARKERS, Markers
from quire.text.regions.scanners import Delimiters
from quire.text.regions.spec import ChannelCall, ObjectCall, PythonCall, RegionSpec

__all__ = ["RegionReader", "Tools", "call_id", "read_whole"]

_WHITE = " \t\r\n"
_HELD_SPACE = 64  # characters of white space that may belong to a region behind it
_TO = " to="
_HEAD = re.compile(r"[^<\n\ud800-\udfff]*")
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


class RegionReader(CallReader):
    """Reads one sample (text.parts.PartReader). The parts of a sample add up to the same whatever its tokens are
    pushed with, and no text is lost: what turns out not to be a call comes back as text.

    `tools` are the functions that may be called, None if calls are not read at all (tool_choice none, no tools).
    `thinking`: the prompt left the thinking region open (`ReasoningSpec.opened_by`). `eager`: arguments are parts
    as they arrive, for a sample whose grammar keeps calls to their format; otherwise a call is held back until it
    is whole. `heads`: a grammar keeps the answer to calls, which begin with one of these texts, or to a text of some
    format, in which no region begins. `counts` is by CALL_OUTCOMES. `seed` determines generated ids: it names the
    request and the sample. `hide`: markers that mean nothing where they stand are left out of the text, as
    skip_special_tokens asks.
    """

    __slots__ = (
        "_blank", "_channels", "_closers", "_first", "_gap", "_heads", "_hide", "_later", "_openers", "_quick",
        "_reading", "_regions", "_shown", "_starts", "_thinking", "_uncalled", "reasoning_tokens",
    )  # fmt: skip

    def __init__(
        self,
        spec: RegionSpec,
        markers: Markers | None = None,
        *,
        tools: Tools | None = None,
        thinking: bool = False,
        eager: bool = False,
        heads: Sequence[str] | None = None,
        counts: Counter[str] | None = None,
        hide: bool = True,
        seed: str = "",
    ) -> None:
        calls = spec.calls if tools is not None else None
        super().__init__(calls, markers or Markers(), tools, eager, seed, counts)
        self._hide = hide
        self._thinking = thinking
        self._blank = True  # no text since the last region, or the start
        self._gap = False  # a region has just ended: newlines belong to it
        self._shown = False  # text of the answer is out
        self.reasoning_tokens = 0  # of the tokens so far, with those that open and close the region
        self._regions = self._boundaries(spec)
        self._starts = self._start_characters()
        # which openers count at the start of the answer, and which behind text: spelled thinking only at the start
        self._first = Delimiters(self._regions)
        self._later = Delimiters(
            word for word, kind in self._regions.items() if kind != "reasoning" or len(word) == 1
        )
        self._heads = None if heads is None or self._channels else [*map(self._markers.encode, heads)]
        if self._heads is not None:
            self._later = Delimiters(word for word, kind in self._regions.items() if kind == "answer")
            self._hide = False
        self._uncalled = Delimiters(word for word, kind in self._regions.items() if kind != "calls")
        self._closers = self._reasoning_closers(spec)
        # While nothing is held back: text in which none of these begins is shown as it is, without the generators.
        self._quick: Delimiters | None = None
        self._reading: Pausing | None = self._answer()
        next(self._reading)

    def _boundaries(self, spec: RegionSpec) -> dict[str, str]:
        """Texts where text of the answer ends -> what begins there."""
        encode = self._markers.encode
        found: dict[str, str] = {}
        for text in spec.answer:
            found[encode(text).strip()] = "answer"
        reasoning = spec.reasoning
        self._channels = isinstance(spec.calls.call if spec.calls else None, ChannelCall) or bool(
            reasoning and reasoning.channel
        )
        self._openers: frozenset[str] = frozenset()
        if self._channels:
            start, channel, _constrain, message, *ends = map(encode, CHANNEL_MARKERS)
            found |= {start: "head", channel: "head", message: "answer", **dict.fromkeys(ends, "answer")}
        else:
            if reasoning is not None:
                found[encode(reasoning.opener).strip()] = "reasoning"
            if self._written is not None:
                openers = [self._written.opener, *self._written.others]
                self._openers = frozenset(opener.strip() for opener in openers if opener.strip())
                found |= dict.fromkeys(self._openers, "calls")
        found.pop("", None)
        return found

    def _start_characters(self) -> str:
        """What a region without an opener begins with."""
        written = self._written
        if written is None or written.opener.strip() or self._channels:
            return ""
        if isinstance(written.call, ObjectCall):
            return "[{" if written.call.array else "{"
        return "[" if isinstance(written.call, PythonCall) else ""

    def _reasoning_closers(self, spec: RegionSpec) -> Delimiters:
        if self._channels:
            start, channel, _constrain, _message, *ends = map(self._markers.encode, CHANNEL_MARKERS)
            return Delimiters([start, channel, *ends])
        reasoning = spec.reasoning
        if reasoning is None:
            return Delimiters([])
        closers = words([self._markers.encode(reasoning.closer)])
        return Delimiters([*closers, *(self._openers if reasoning.at_calls else ())])

    # -- what arrives ------------------------------------------------------------------------------

    @property
    def calls(self) -> int:
        """Number of calls that are whole."""
        return self._calls

    def marks(self, token_id: int, /) -> bool:
        """Whether a token is a marker."""
        return token_id in self._markers.by_id

    def push(self, token_id: int, text: str, /) -> list[AnswerPart]:
        """Append a token (-1 for text without one) and the text that it makes final; the parts that are certain now."""
        marker = self._markers.by_id.get(token_id)
        quick = self._quick
        if quick is not None and marker is None and text and not quick.may_begin_in(text):
            if self._thinking:
                self.reasoning_tokens += token_id >= 0
                return [AnswerPart(PartKind.REASONING, text)]
            if text[-1] not in _WHITE:
                self._blank = False
                return [AnswerPart(PartKind.TEXT, text)]
        if marker is not None:
            text = text.removesuffix(marker[1]) + marker[0]
        thinking = self._thinking
        if text:
            self._feed(text)
        if token_id >= 0 and (thinking or self._thinking):
            self.reasoning_tokens += 1
        parts, self._parts = self._parts, []
        return parts

    def finish(self, text: str = "", /) -> list[AnswerPart]:
        """The last text, which belongs to no new token, and what was held back: the sample has ended."""
        self._ended = True
        self._feed(text)
        parts, self._parts = self._parts, []
        return parts

    def _feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self._quick = None
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None

    # -- regions -----------------------------------------------------------------------------------

    def _answer(self) -> Pausing:
        yield
        if self._thinking:
            yield from self._reason()
        if self._channels and (yield from self._word(_TO)):  # the prompt has written the head up to here
            yield from self._attempt(_TO, "head")
        while True:
            word = yield from self._text_until_region()
            if not word:
                return
            kind = self._regions.get(word, "calls")
            if kind == "answer":
                self._gap = True
                self._unshown.clear()
            elif kind == "reasoning":
                self._unshown.clear()
                yield from self._reason()
            else:
                yield from self._attempt(word, kind)

    def _attempt(self, word: str, kind: str) -> Pausing:
        """A region of calls, or a message with a head, which may turn out to be text."""
        begun = self._calls
        try:
            if kind == "head":
                yield from self._message(word)
            elif self._written is not None:
                yield from self._region_calls(self._written)
        except MalformedError:
            if kind == "calls" or _TO in "".join(self._unshown):
                self._counts["cut" if self._ended else "malformed"] += 1
            self._drop_call()
        if self._unshown:
            text = self._markers.spell("".join(self._unshown))
            self._unshown.clear()
            self._gap = False
            self._say(text)
        elif self._calls > begun:
            self._blank, self._gap = True, True

    def _text_until_region(self) -> Generator[None, None, str]:
        """Text of the answer up to the next region; returns what opens it, "" at the end of the sample."""
        while True:
            calls = self._heads is None or (not self._shown and (yield from self._comes(self._heads)))
            if calls and self._starts and not self._shown:
                char = yield from self._start()
                if char and char in self._starts:
                    return char
            search = self._later if self._shown else self._first if calls else self._uncalled
            start, word = search.find(self._text, self._at, self._ended)
            text = self._text[self._at : start]
            bare = text.rstrip(_WHITE)
            space = len(text) - len(bare)
            if word is not None:
                if self._regions[word] == "reasoning" and len(word) > 1 and bare:
                    self._say(text + word)  # thinking that is spelled begins an answer, or is text
                    self._at = start + len(word)
                    continue
                self._end_text(text, space, self._regions[word])
                self._at = start
                self._take(start + len(word))
                return word
            if self._ended:
                if bare or not self._blank or not (self._calls or self._gap):
                    self._say(text)
                self._at = len(self._text)
                return ""
            held = min(space, _HELD_SPACE)
            self._say(text[: len(text) - held])
            self._at = start - held
            if self._shown and not self._gap and self._at == len(self._text):
                self._quick = search
            yield

    def _comes(self, heads: Sequence[str]) -> Generator[None, None, bool]:
        """Whether one of these texts comes next; nothing is read."""
        before, found = len(self._unshown), False
        for head in heads:
            found = yield from self._maybe(head)
            if found:
                break
        self._unread(before)
        return found

    def _start(self) -> Generator[None, None, str]:
        """The first character of the answer, if no text is out; white space before it stays unread."""
        while True:
            rest = self._text[self._at :].lstrip(_WHITE)
            if len(self._text) - len(rest) - self._at > _HELD_SPACE:
                return ""
            if rest or self._ended:
                break
            yield
        if not rest or rest[0] not in self._starts:
            return ""
        self._at = len(self._text) - len(rest)
        return rest[0]

    def _end_text(self, text: str, space: int, kind: str) -> None:
        """Text before a region: the white space that the template writes between them is left out."""
        if self._blank and space == len(text):
            text = text[: max(0, space - _HELD_SPACE)]
        elif kind == "calls" and self._written is not None and (lead := self._written.lead):
            text = text.removesuffix(lead)
        self._say(text)

    def _say(self, text: str) -> None:
        """Show text of the answer."""
        if self._gap:
            text = text.lstrip("\n")
        text = self._markers.spell(text, hide=self._hide)
        if text:
            self._show(PartKind.TEXT, text)
            self._gap = False
            self._shown = True
            self._blank = self._blank and not text.strip()

    def _reason(self) -> Pausing:
        """Reasoning up to its closer, or to the end. The newlines next to opener and closer are not part of it."""
        self._thinking = True
        if not self._channels:
            yield from self._word("\n")
            self._unshown.clear()
        while True:
            self._quick = self._closers if self._at == len(self._text) else None
            piece, end = yield from self._until(self._closers)
            self._unshown.clear()
            self._show(PartKind.REASONING, self._markers.spell(piece))
            if end is not None:
                break
        self._thinking = False
        self._blank = self._gap = True
        if end and (end in self._openers or (self._channels and self._regions[end] == "head")):
            self._at -= len(end)

    # -- messages with heads -----------------------------------------------------------------------

    def _message(self, word: str) -> Pausing:
        """A message of harmony: its head, and its body if it is a call or reasoning. The body of others is text."""
        _start, channel, constrain, message, *ends = map(self._markers.encode, CHANNEL_MARKERS)
        pieces = [word, (yield from self._run(_HEAD))]
        if (yield from self._word(channel)):
            pieces += [channel, (yield from self._run(_HEAD))]
        if (yield from self._word(constrain)):
            pieces += yield from self._run(_HEAD)
        if not (yield from self._word(message)):
            raise MalformedError
        head = self._markers.spell("".join(pieces))
        named = _CHANNEL.search(head)
        recipient = _RECIPIENT.search(head)
        if recipient is not None and self._written is not None:
            yield from self._space()
            if (yield from self._peek()) != "{":
                raise MalformedError
            self._begin(recipient.group(1).removeprefix("functions."))
            yield from self._json(True)
            self._end_call()
            if not (yield from self._maybe(ends[1])):
                yield from self._maybe(ends[0])
            self._unshown.clear()
        elif recipient is not None:
            raise MalformedError
        elif named is not None and named.group(1) == "analysis":
            self._unshown.clear()
            yield from self._reason()
        else:
            self._unshown.clear()
            self._gap = True


def read_whole(
    spec: RegionSpec,
    text: str,
    tools: Tools | None = None,
    *,
    thinking: bool = False,
    seed: str = "",
) -> Sequence[AnswerPart]:
    """The parts of a whole text, in which markers are spelled."""
    reader = RegionReader(spec, tools=tools, thinking=thinking, seed=seed)
    parts = [*reader.push(-1, text), *reader.finish()]
    joined: list[AnswerPart] = []
    for part in parts:
        if (
            joined
            and part.kind is not PartKind.CALL
            and joined[-1].kind is part.kind
            and joined[-1].call == part.call
        ):
            joined[-1].text += part.text
        else:
            joined.append(part)
    return joined
