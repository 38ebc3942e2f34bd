"""Convert token ids to text as they are generated.

The joined deltas of a sequence equal the library's decode of all its ids, and no delta ends in half a character. Text
that a later token can still change is held back: the bytes of an unfinished character (byte level), or an open run of
byte tokens (SentencePiece style, where one bad byte turns the whole run into U+FFFD).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

# Tokens of context kept by the windowed fallback. A character has at most 4 bytes, so 3 tokens can be open;
# the others are for decoders that depend on neighbours.
_WINDOW = 8


class Detokenizer(Protocol):
    """Text of one sequence, token by token. It never ends a sample (sample_text.SampleText): `matched` is None."""

    @property
    def matched(self) -> str | None: ...

    def push(self, token_ids: Iterable[int]) -> str:
        """Append ids and return the text that is final now. Unknown ids add nothing.

        Raises OverflowError for a negative id.
        """
        ...

    def prime(self, token_ids: Iterable[int]) -> None:
        """Take ids as context whose text was already shown, so that the deltas continue the text of the prompt.

        Otherwise the first token is the start of the text, where SentencePiece-style vocabularies drop a space. A
        character that the context leaves unfinished is returned whole once it is complete.
        """
        ...

    def finish(self) -> str:
        """Return the held-back rest, with U+FFFD for incomplete characters. What comes later is a text of its own."""
        ...


class ByteLevelDetokenizer:
    """Byte table and UTF-8: O(bytes) per token; holds at most 3 bytes."""

    __slots__ = ("_held", "_table")
    matched: str | None = None

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._table = table
        self._held = b""  # of an unfinished character

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._held + b"".join(map(self._table.__getitem__, token_ids))
        text, read = utf_8_decode(data, "replace", False)
        self._held = data[read:]
        return text

    def prime(self, token_ids: Iterable[int]) -> None:
        self.push(token_ids)

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class PieceDetokenizer:
    """Pieces of text and single bytes; an open run of bytes is held until a piece of text ends it."""

    __slots__ = ("_run", "_strip", "_strip_left", "_table")
    matched: str | None = None

    def __init__(self, table: Mapping[int, str | int | None], strip: str = "", strip_count: int = 0) -> None:
        self._table = table
        self._run = bytearray()
        self._strip = strip
        self._strip_left = strip_count

    def push(self, token_ids: Iterable[int]) -> str:
        table = self._table
        run = self._run
        parts: list[str] = []
        for token_id in token_ids:
            piece = table[token_id]
            if isinstance(piece, str):
                if run:
                    parts.append(self._end_run())
                parts.append(piece)
            elif piece is not None:
                run.append(piece)
        text = "".join(parts)
        return self._without_start(text) if self._strip_left and text else text

    def prime(self, token_ids: Iterable[int]) -> None:
        self.push(token_ids)
        try:
            shown = self._run.decode("utf-8")
        except UnicodeDecodeError:
            return
        self._run.clear()
        if shown:
            self._without_start(shown)

    def finish(self) -> str:
        text = self._end_run()
        return self._without_start(text) if self._strip_left and text else text

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _without_start(self, text: str) -> str:
        """Strip the rest of the prefix at the start; the first other character ends stripping."""
        cut = 0
        while cut < self._strip_left and text.startswith(self._strip, cut):
            cut += 1
        self._strip_left = self._strip_left - cut if cut == len(text) else 0
        return text[cut:]


class WindowedDetokenizer:
    """Any other decoder: decode a short window twice, with and without the new tokens, and emit the difference.

    Equal to the whole decode for every decoder in which a token depends only on a few neighbours and the start of the
    text (word pieces, BPE suffixes, Metaspace). Text is held while it ends in U+FFFD or a byte token.
    """

    __slots__ = ("_decode", "_ids", "_keep", "_open", "_read")
    matched: str | None = None

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        keep: Callable[[int], bool],
        is_open: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._keep = keep  # false for ids that decoding skips: the window must contain visible tokens only
        self._open = is_open
        self._ids: list[int] = []
        self._read = 0  # ids[:_read] have been shown

    def push(self, token_ids: Iterable[int]) -> str:
        keep = self._keep
        fresh = [token_id for token_id in token_ids if keep(token_id)]
        if not fresh:
            return ""
        self._ids.extend(fresh)
        if self._open(self._ids[-1]):
            return ""
        return self._advance(final=False)

    def prime(self, token_ids: Iterable[int]) -> None:
        self._ids.extend(token_id for token_id in token_ids if self._keep(token_id))
        self._advance(final=False)

    def finish(self) -> str:
        return self._advance(final=True) if self._read < len(self._ids) else ""

    def _advance(self, *, final: bool) -> str:
        shown, whole = self._decode(self._ids[: self._read]), self._decode(self._ids)
        if not final and (whole.endswith("\ufffd") or not whole.startswith(shown)):
            return ""
        self._read = len(self._ids)
        self._shrink(whole)
        return whole[len(shown) :]

    def _shrink(self, whole: str) -> None:
        """Forget all but the last tokens, unless they are so few that they would become the start of the text."""
        if len(self._ids) < 2 * _WINDOW or not whole:
            return
        tail = self._ids[-_WINDOW:]
        if self._decode(tail[:1]) and whole.endswith(self._decode(tail[1:])):
            self._ids = tail
            self._read = len(tail)
