"""The tokens of a model as grammars see them: their bytes in a trie, and the canonical tokens of a text."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from quire.text.token_bytes import TokenBytes
from quire.types import QuireError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from quire.text.tokenizer import Tokenizer

# A longer forced text is tokenized in pieces: of each piece, the last tokens are left to the next one.
MAX_PIECE, HELD_TOKENS = 2048, 8
# Answers of one schema force the same texts again and again: short ones are tokenized once. At most 1.5 MiB.
KEPT_TEXTS, KEPT_CHARS = 1024, 128


class GrammarTokens:
    """The vocabulary for llguidance. A mask has a bit per token, and one more that says whether the output may end."""

    def __init__(self, pieces: TokenBytes, tokenizer: Tokenizer | None) -> None:
        from llguidance import LLTokenizer

        self.vocab = len(pieces)
        self.words = self.vocab // 32 + 1
        speller = _Speller(pieces, tokenizer)
        # Without an end-of-sequence token llguidance adds one with the next id: it stands for those of each request.
        # It holds the interpreter lock all the time: in two parts, so that the step loop runs in between.
        bare = LLTokenizer(speller, slices=[])  # type: ignore[arg-type]
        self.trie = speller.trie = bare.with_slices(LLTokenizer.general_slices())


class _Speller:
    """What llguidance needs of a tokenizer: the bytes of its tokens, and a call that tokenizes a text."""

    is_tokenizer_wrapper = True
    eos_token_id = None
    bos_token_id = None
    special_token_ids = ()
    trie: LLTokenizer | None = None

    def __init__(self, pieces: TokenBytes, tokenizer: Tokenizer | None) -> None:
        self._pieces, self._tokenizer = pieces, tokenizer
        self._kept = lru_cache(KEPT_TEXTS)(self._encode)

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of every token. Of several tokens of one byte, only that of texts has it."""
        pieces = self._pieces.all()
        ids: dict[bytes, list[int]] = {}
        for token_id, piece in enumerate(pieces):
            if len(piece) == 1 and piece < b"\x80":
                ids.setdefault(piece, []).append(token_id)
        for piece, several in ids.items():
            if len(several) > 1 and len(used := self._encode(piece.decode())) == 1:
                for token_id in {*several} - {*used}:
                    pieces[token_id] = b""
        return pieces

    def __call__(self, text: str) -> list[int]:
        """The canonical tokens of a text inside an output; of a long one, those of its start.

        Never raises: llguidance calls it.
        """
        if len(text) <= KEPT_CHARS:
            return self._kept(text)
        size = MAX_PIECE
        while size < len(text):
            ids = self._encode(text[:size])
            if len(ids) > 2 * HELD_TOKENS:
                return ids[:-HELD_TOKENS]
            size *= 2  # few tokens, as of many spaces
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        """Behind a line break if the tokenizer puts a space before every text; the longest tokens if it changes texts,
        as one that normalizes them does."""
        if self._tokenizer is not None:
            wanted = text.encode()
            try:
                for lead in ("", "\n"):
                    ids = self._tokenizer.encode_inside(lead + text)
                    spelled = list(map(self._pieces.__getitem__, ids))
                    while ids and lead and sum(map(len, spelled)) > len(wanted):
                        del ids[0], spelled[0]
                    if b"".join(spelled) == wanted:
                        return ids
            except (QuireError, IndexError):
                pass
        return self.trie.greedy_tokenize(text) if self.trie else []
