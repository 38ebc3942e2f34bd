"""The tokens of a vocabulary, found by the bytes that they begin with and by the JSON texts that they hold."""

from __future__ import annotations

import re
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Line = npt.NDArray[np.uint32]
_HEAD = 8  # bytes by which tokens are sorted
_LONGEST = 32  # bytes of a token with which a text is spelled
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.S)
_CLOSING = re.compile(rb'"|(?<=[^\s,\]])[\s,\]]')
_SCALAR = re.compile(rb'(?<![^\s,\[])[-0-9a-z][^\s,\[\]{}:"]*(?=[\s,\]])')


class UniqueTokens:
    """Takes 20 bytes a token, and a few more for each token that holds a string or the beginning of one."""

    def __init__(self, pieces: TokenBytes, trie: LLTokenizer) -> None:
        self._data, self._trie = pieces.data, trie
        ends = np.frombuffer(pieces.ends, np.int32)
        starts = np.concatenate(([0], ends[:-1])).astype(np.int32)
        self._ends, self._starts = array("i", ends.tobytes()), array("i", starts.tobytes())
        heads = np.zeros(len(ends), np.uint64)
        data = np.frombuffer(pieces.data + bytes(_HEAD), np.uint8)
        for at in range(_HEAD):
            heads <<= np.uint64(8)
            heads |= np.where(starts + at < ends, data[starts + at], 0).astype(np.uint64)
        self._order: npt.NDArray[np.int32] = np.argsort(heads, kind="stable").astype(np.int32)
        self._heads: npt.NDArray[np.uint64] = heads[self._order]
        self.whole: dict[bytes, list[int]] = {}
        self.ending: dict[bytes, list[int]] = {}
        self.closing: set[bytes] = set()
        places = np.flatnonzero(np.isin(data[:-_HEAD], np.frombuffer(b'" ,]\n\r', np.uint8)))
        owners = np.searchsorted(ends, places, "right")
        inside = (places > starts[owners]) | (data[places] == 0x22)
        for token_id in np.unique(owners[inside]).tolist():
            self._read(token_id)
        self.beginning, self.exact = lru_cache(4096)(self._beginning), lru_cache(4096)(self._exact)
        self.spelled, self._cleared = lru_cache(256)(self._spelled), lru_cache(256)(self._words)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, token_id: int) -> bytes:
        return self._data[self._starts[token_id] : self._ends[token_id]]

    def _read(self, token_id: int) -> None:
        """Fill `whole`: tokens by the strings and scalars that they hold from end to end, by b"" those that hold one
        twice; `ending`: tokens with something before a quote, by the beginning of a string that they end with; and
        `closing`: ends of strings and scalars with which tokens begin."""
        piece = self[token_id]
        self.closing.update(piece[: match.end()] for match in _CLOSING.finditer(piece))
        at = piece.find(b'"')
        # The first quote may be the start of a string, or the end of one, or one inside of it.
        found = [_SCALAR.findall(piece)] if b"," in piece else []
        while 0 <= at < len(piece) - 1:
            found.append(_STRING.findall(piece, at))
            if not found[-1] and at:
                self.ending.setdefault(piece[at:], []).append(token_id)
            at = piece.find(b'"', at + 1)
        texts = {text for some in found for text in some}
        if any(len(set(some)) < len(some) for some in found):
            texts.add(b"")
        for text in texts:
            self.whole.setdefault(text, []).append(token_id)

    def _range(self, first: bytes, last: bytes) -> npt.NDArray[np.int32]:
        low, high = (np.uint64(int.from_bytes(head, "big")) for head in (first, last))
        begin, end = np.searchsorted(self._heads, low), np.searchsorted(self._heads, high, "right")
        return self._order[begin:end]

    def _beginning(self, text: bytes) -> tuple[int, ...]:
        """The tokens that begin with a text."""
        head = text[:_HEAD]
        found = self._range(head.ljust(_HEAD, b"\0"), head.ljust(_HEAD, b"\xff"))
        if len(text) <= _HEAD:
            return tuple(found.tolist())
        return tuple(token for token in found.tolist() if self[token].startswith(text))

    def _exact(self, text: bytes) -> tuple[int, ...]:
        """The tokens with these bytes."""
        head = text[:_HEAD].ljust(_HEAD, b"\0")
        return tuple(token for token in self._range(head, head).tolist() if self[token] == text)

    def _spelled(self, text: bytes) -> list[int] | None:
        """The longest tokens of a text that grammars know; None if it has none."""
        out, at = list[int](), 0
        while at < len(text):
            for end in range(min(len(text), at + _LONGEST), at, -1):
                piece = text[at:end]
                known = (one for one in self.exact(piece) if self._trie.decode_bytes([one]) == piece)
                if (token := next(known, None)) is not None:
                    out.append(token)
                    at = end
                    break
            else:
                return None
        return out

    def clear(self, line: Line, text: bytes) -> None:
        """Take the tokens that begin with a text out of a mask."""
        found = self._cleared(text)
        if found is not None:
            words, kept = found
            line[words] &= kept

    def _words(self, text: bytes) -> tuple[npt.NDArray[np.int32], Line] | None:
        found = np.array(sorted(self.beginning(text)), np.int32)
        if not len(found):
            return None
        words, firsts = np.unique(found >> 5, return_index=True)
        bits = np.left_shift(np.uint32(1), (found & 31).astype(np.uint32))
        return words, ~np.bitwise_or.reduceat(bits, firsts)
