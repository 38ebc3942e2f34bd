"""A tokenizer that starts at once: for each text, it gives the library only the tokens that can occur in it.

The BPE tokens of a word (Sennrich et al. 2016) depend only on the vocabulary entries inside the word and on the merges
among them. So a text of a few words needs a few hundred of a hundred thousand entries: they are looked up in a compiled
file, and the library builds a small tokenizer from them that gives the same ids. From the second text on, a thread
builds the whole tokenizer, which then takes over.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import tokenizers

from quire.records import dataclass
from quire.text.compiled import CompiledTokenizer

_MAX_CHARS = 4096
_MAX_LOOKUPS = 50_000  # about 30 ms; a text that needs more waits for the whole tokenizer
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True, slots=True)
class Ids:
    """The parts of the library's Encoding that Quire uses."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.ids)

    def token_to_chars(self, index: int) -> tuple[int, int] | None:
        """The range of characters of a token."""
        return self.offsets[index]


class _Whole:
    """The whole tokenizer of a compiled one, built when it pays off."""

    def __init__(self, build: Callable[[], tokenizers.Tokenizer]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._uses = 0
        self.made: tokenizers.Tokenizer | None = None

    def get(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self.made is None:
                self.made = self._build()
            return self.made

    def used(self) -> None:
        """Count a text: the second one starts building in a thread."""
        self._uses += 1
        if self._uses == 2:
            # no daemon: the interpreter must not end while the library works
            threading.Thread(target=self.get, name="quire-tokenizer").start()


class SparseTokenizer:
    """The interface of tokenizers.Tokenizer that quire.text.tokenizer needs, with the same results."""

    def __init__(self, compiled: CompiledTokenizer, build: Callable[[], tokenizers.Tokenizer]) -> None:
        self._compiled, self._whole = compiled, _Whole(build)
        self._added: list[dict[str, Any]] = compiled.state["added_tokens"]
        self._set_parts()

    def _set_parts(self) -> None:
        self._added_ids: dict[str, int] = {token["content"]: token["id"] for token in self._added}
        self._added_texts: dict[int, str] = {token["id"]: token["content"] for token in self._added}
        self._special = {token["content"] for token in self._added if token["special"]}
        bare = self._small({}, [], [])
        self.normalizer, self.pre_tokenizer = bare.normalizer, bare.pre_tokenizer
        self.decoder, self.post_processor = bare.decoder, bare.post_processor

    # -- the library's interface -------------------------------------------------------------------

    def encode(
        self, text: str, pair: str | None = None, add_special_tokens: bool = True
    ) -> Ids | tokenizers.Encoding:
        if pair is not None:
            return self._library().encode(text, pair, add_special_tokens=add_special_tokens)
        whole = self._whole.made
        if whole is None:
            found = self._encode_sparsely(text) if len(text) <= _MAX_CHARS else None
            self._whole.used()
            if found is not None:
                before, after = self._compiled.around if add_special_tokens else ([], [])
                nowhere = (0, 0)
                return Ids(
                    [*before, *found.ids, *after],
                    [nowhere] * len(before) + found.offsets + [nowhere] * len(after),
                )
        return self._library().encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        return self._library().encode_batch(texts, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self._special if skip_special_tokens else frozenset()
        if not all(0 <= number < 2**32 for number in ids):
            raise OverflowError
        named = map(self.id_to_token, ids)
        tokens = [token for token in named if token is not None and token not in hidden]
        return self.decoder.decode(tokens) if self.decoder is not None else " ".join(tokens)

    def decode_batch(self, many: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return self._whole.get().decode_batch(many, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, number: int) -> str | None:
        return self._added_texts.get(number) or self._compiled.bytes_of(number).decode() or None

    def token_to_id(self, token: str) -> int | None:
        found = self._added_ids.get(token)
        return self._compiled.find(token.encode()) if found is None else found

    @property
    def is_whole(self) -> bool:
        """Whether the whole tokenizer has taken over."""
        return self._whole.made is not None

    @property
    def highest_id(self) -> int:
        """The largest token id."""
        return self._compiled.highest_id

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return self._compiled.size if with_added_tokens else len(self.get_vocab(False))

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        return {
            token["id"]: tokenizers.AddedToken(
                **{key: value for key, value in token.items() if key not in {"id", "special"}},
                special=token["special"],
            )
            for token in self._added
        }

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self._whole.get().get_vocab(with_added_tokens=with_added_tokens)

    def to_str(self, pretty: bool = False) -> str:
        return self._whole.get().to_str(pretty=pretty)

    def twin(self) -> SparseTokenizer:
        """The same tokenizer without added tokens."""
        twin = copy.copy(self)
        twin._added = []
        twin._set_parts()
        return twin

    def added_in(self, text: str) -> Ids:
        """The added tokens in a text, without those of the model."""
        small, numbers = self._adder
        encoding = small.encode(text, add_special_tokens=False)
        return Ids([numbers[at] for at in encoding.ids], encoding.offsets)

    @cached_property
    def _adder(self) -> tuple[tokenizers.Tokenizer, dict[int | None, int]]:
        """A tokenizer with the added tokens alone, and a map from its ids to theirs."""
        small = self._small({}, [], _numbered(self._added, 0), byte_fallback=False, unk_token=None)
        small.pre_tokenizer = self.pre_tokenizer
        return small, {small.token_to_id(token["content"]): token["id"] for token in self._added}

    # -- small tokenizers --------------------------------------------------------------------------

    def _library(self) -> tokenizers.Tokenizer:
        """The whole tokenizer, with the changes of this one."""
        whole = self._whole.get()
        if self._added:
            return whole
        plain = tokenizers.Tokenizer(whole.model)
        plain.normalizer, plain.pre_tokenizer = self.normalizer, self.pre_tokenizer
        plain.post_processor = self.post_processor
        return plain

    def _small(
        self,
        vocab: dict[str, int],
        merges: list[tuple[str, str]],
        added: Iterable[dict[str, Any]],
        **options: Any,
    ) -> tokenizers.Tokenizer:
        model = {**self._compiled.state["model"], **options, "vocab": vocab, "merges": merges}
        state = {**self._compiled.state, "model": model, "added_tokens": list(added)}
        return tokenizers.Tokenizer.from_str(json.dumps(state))

    def _encode_sparsely(self, text: str) -> Ids | None:
        """Ids of a text by a small tokenizer; None if looking up its tokens would take too long."""
        added = [token for token in self._added if token["normalized"] or token["content"] in text]
        found = self._tokens_in(self._words(text, added))
        if found is None:
            return None
        found |= {number for token in added if (number := self._model_id(token["content"])) is not None}
        real = sorted(found)
        spelled = {number: self._compiled.bytes_of(number).decode() for number in real}
        merges = sorted(
            merge
            for number in real
            for merge in self._compiled.merges_into(number)
            if merge[1] in spelled and merge[2] in spelled
        )
        small = self._small(
            {spelled[number]: at for at, number in enumerate(real)},
            [(spelled[left], spelled[right]) for _, left, right in merges],
            _numbered(added, len(real)),
        )
        small.pre_tokenizer = self.pre_tokenizer
        encoding = small.encode(text, add_special_tokens=False)
        names = {small.token_to_id(token["content"]): token["id"] for token in added}
        ids = [names[at] if at in names else real[at] for at in encoding.ids]
        return Ids(ids, encoding.offsets)

    def _words(self, text: str, added: list[dict[str, Any]]) -> set[str]:
        """The words of a text that the model sees, after normalizing and splitting.

        The library itself finds them with a vocabulary of bytes.
        """
        options = {"byte_fallback": True, "unk_token": None, "ignore_merges": False}
        vocab = {name: byte for byte, name in enumerate(_BYTES)}
        bytewise = self._small(vocab, [], _numbered(added, 256), **options)
        bytewise.pre_tokenizer = self.pre_tokenizer
        encoding = bytewise.encode(text, add_special_tokens=False)
        pairs = zip(encoding.word_ids, encoding.ids, strict=True)
        words = groupby(((word, byte) for word, byte in pairs if byte < 256), key=lambda pair: pair[0])
        return {bytes(byte for _, byte in group).decode() for _, group in words}

    def _tokens_in(self, words: set[str]) -> set[int] | None:
        """Ids of all tokens inside words, and of the tokens for uncovered characters."""
        longest, find = self._compiled.longest, self._compiled.find
        if sum(len(word) * min(len(word), longest) for word in words) > _MAX_LOOKUPS:
            return None
        model = self._compiled.state["model"]
        pieces = {
            word[begin:end]
            for word in words
            for begin in range(len(word))
            for end in range(begin + 1, min(len(word), begin + longest) + 1)
        }
        pieces |= {model["unk_token"]} if model["unk_token"] else set()
        pieces |= set(_BYTES) if model["byte_fallback"] else set()
        return {number for piece in pieces if (number := find(piece.encode())) is not None}

    def _model_id(self, token: str) -> int | None:
        return self._compiled.find(token.encode())


def _numbered(added: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Added tokens with the ids that the library will assign."""
    return [{**token, "id": first + at} for at, token in enumerate(added)]
