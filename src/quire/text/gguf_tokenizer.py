"""Build the tokenizer of a GGUF file with the tokenizers library.

Two kinds. "gpt2": byte-level BPE with its merges and the name of its word expression, which splits a text into words.
"llama": SentencePiece BPE with a score per piece, bytes for characters without a piece, and a space before the text.
Token types and keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of word expressions: llama.cpp's
`tokenizer.ggml.pre`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from quire.records import dataclass
from quire.text.kept_tokenizers import kept_tokenizer
from quire.text.outline import TokenizerOutline
from quire.text.pretokenizers import WORDS, Words
from quire.text.sparse import SparseTokenizer
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import MAX_TEMPLATE_BYTES
from quire.types import CheckpointError, UnsupportedModelError
from quire.util.kept import KeptFiles

MAX_TOKENS = 2**22
MAX_MERGES = 2**23
MAX_TOKEN_CHARS = 2**14
MAX_PIECE_WORK = 2**28  # characters compared to find all merges; 2^24 for the largest vocabularies
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Name in a key -> role. Files before 2024-10 have shorter names for the tokens of fill-in-the-middle.
_NAMED = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
    "prefix": "prefix_token", "suffix": "suffix_token", "middle": "middle_token",
    "fim_pre": "prefix_token", "fim_suf": "suffix_token", "fim_mid": "middle_token",
}  # fmt: skip
_NO_ID = 2**32 - 1
_SPACE = "\u2581"


class LazyArray(Protocol):
    """An array of the metadata, decoded on demand."""

    def __len__(self) -> int: ...

    def strings(self) -> list[str]: ...

    def numbers(self) -> npt.NDArray[np.generic]: ...


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens by id and their types."""

    tokens: list[str]
    types: list[int]

    def of(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


class _Metadata:
    """Checked reads of the `tokenizer.*` keys."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: {message}")

    def array(self, key: str, limit: int) -> LazyArray:
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is missing")
        if not hasattr(value, "strings") or not hasattr(value, "numbers"):
            raise self.error(key, "is not an array")
        array = cast(LazyArray, value)
        if len(array) > limit:
            raise self.error(key, f"{len(array)} entries exceed the limit of {limit}")
        return array

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "is not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "is not a boolean")
        return value

    def token_id(self, key: str, tokens: int) -> int | None:
        value = self.values.get(key)
        if value is None or value == _NO_ID:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"{value!r} is not the id of a token")
        return value if 0 <= value < tokens else None  # spec/generation_config reports ids that matter


def gguf_tokenizer(
    values: Mapping[str, object],
    where: str,
    cache: KeptFiles | None = None,
    content: str = "",
    size: int = 0,
) -> Tokenizer | None:
    """Build the tokenizer from the metadata of a file, None if it has none. `where` names the file in messages.

    `cache` keeps the compiled tokenizer; `content` is then a digest of the metadata and `size` its length.

    Raises CheckpointError naming a key that is missing, malformed or over a limit, UnsupportedModelError for a kind of
    tokenizer that is not implemented. If only the word expression is unknown, the tokenizer refuses texts.
    """
    metadata = _Metadata(values, where)
    kind = _kind(metadata)
    if kind is None:
        return None
    backend = kept_tokenizer(cache, content, size, lambda: _build(metadata, kind))
    unreadable = _words(metadata)[1] if KINDS[kind] is _byte_level else ""
    return Tokenizer(
        backend,
        special_tokens=_named(metadata, backend),
        chat_templates=_templates(metadata),
        unreadable=unreadable,
    )


def _build(metadata: _Metadata, kind: str) -> tokenizers.Tokenizer:
    vocabulary = _vocabulary(metadata)
    backend, add_bos = KINDS[kind](metadata, vocabulary)
    _add_tokens(backend, vocabulary)
    _post_process(backend, metadata, _named(metadata, backend), add_bos)
    return backend


def _named(metadata: _Metadata, backend: tokenizers.Tokenizer | SparseTokenizer) -> dict[str, str]:
    """Tokens with a role."""
    count = len(metadata.array("tokenizer.ggml.tokens", MAX_TOKENS))
    ids = [
        (role, metadata.token_id(f"tokenizer.ggml.{name}_token_id", count)) for name, role in _NAMED.items()
    ]
    return {
        role: token
        for role, number in ids
        if number is not None and (token := backend.id_to_token(number)) is not None
    }


def gguf_outline(values: Mapping[str, object], where: str) -> TokenizerOutline | None:
    """The outline of a file's tokenizer, made without reading its tokens; None if it has none.

    Raises like gguf_tokenizer.
    """
    metadata = _Metadata(values, where)
    kind = _kind(metadata)
    if kind is None:
        return None
    name = "BPE of SentencePiece"
    if KINDS[kind] is _byte_level:
        pre = metadata.text("tokenizer.ggml.pre", "missing")[:80]
        name = (
            f"BPE (tokenizer.ggml.pre {pre!r} is unknown: token ids only)"
            if _words(metadata)[1]
            else f"BPE {pre}"
        )
    size = len(metadata.array("tokenizer.ggml.tokens", MAX_TOKENS))
    names = dict.fromkeys(("bos_token", "eos_token"), "")  # their texts are among the tokens
    return TokenizerOutline(name, size, size - 1, _templates(metadata), names)


def _kind(metadata: _Metadata) -> str | None:
    kind = metadata.text("tokenizer.ggml.model", "none")
    if kind in {"none", "no_vocab"}:
        return None
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{metadata.where}: tokenizer.ggml.model = {kind[:80]!r} is not supported: implemented are "
            f"{', '.join(KINDS)}"
        )
    return kind


def _words(metadata: _Metadata) -> tuple[Words, str]:
    """The word expression, and the reason why texts are refused, or "". Token ids work in any case."""
    key = "tokenizer.ggml.pre"
    if key not in metadata.values:
        return Words(), f"{metadata.where}: {key} is missing, so the model takes no text prompts"
    name = metadata.text(key)
    if name not in WORDS:
        return (
            Words(),
            f"{metadata.where}: {key} = {name[:80]!r} is unknown, so the model takes no text prompts",
        )
    return WORDS[name], ""


def _vocabulary(metadata: _Metadata) -> _Vocabulary:
    key = "tokenizer.ggml.tokens"
    tokens = metadata.array(key, MAX_TOKENS).strings()
    if len(set(tokens)) != len(tokens):
        raise metadata.error(key, "contains a token twice")
    if max(map(len, tokens), default=0) > MAX_TOKEN_CHARS:
        raise metadata.error(key, f"contains a token of more than {MAX_TOKEN_CHARS} characters")
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata.values:
        key = "tokenizer.ggml.token_type"
        types = [int(kind) for kind in metadata.array(key, MAX_TOKENS).numbers()]
        if len(types) != len(tokens):
            raise metadata.error(key, f"{len(types)} types for {len(tokens)} tokens")
    return _Vocabulary(tokens, types)


def _byte_level(metadata: _Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE; also whether a text starts with the beginning-of-sequence token by default."""
    words, _ = _words(metadata)
    tokens, count = vocabulary.tokens, len(vocabulary.tokens)
    while count and vocabulary.types[count - 1] in {_CONTROL, _USER}:
        count -= 1  # the special tokens at the end are added with the next ids; BPE never sees their spelling
    vocab = {token: number for number, token in enumerate(tokens[:count])}
    merges = _merges(metadata, vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=words.ignore_merges))
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, words.add_bos


def _merges(metadata: _Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    pairs: list[tuple[str, str]] = []
    for number, merge in enumerate(metadata.array(key, MAX_MERGES).strings()):
        left, _, right = merge.partition(" ")  # byte-level pieces contain no space
        if not left or not right or left not in vocab or right not in vocab or left + right not in vocab:
            raise metadata.error(
                key, f"entry {number}, {merge[:80]!r}, does not join two tokens into a third"
            )
        pairs.append((left, right))
    return pairs


def _sentence_piece(metadata: _Metadata, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    key = "tokenizer.ggml.scores"
    scores = metadata.array(key, MAX_TOKENS).numbers().astype(np.float64)
    if len(scores) != len(vocabulary.tokens):
        raise metadata.error(key, f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    if not np.isfinite(scores).all():
        raise metadata.error(key, "contains NaN or infinity")
    if metadata.values.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise UnsupportedModelError(f"{metadata.where}: tokenizer.ggml.precompiled_charsmap is not supported")
    vocab = {token: number for number, token in enumerate(vocabulary.tokens)}
    unknown = next(iter(vocabulary.of(_UNKNOWN)), None)
    if sum(len(piece) ** 2 for piece in vocabulary.of(_NORMAL)) > MAX_PIECE_WORK:
        raise metadata.error(
            "tokenizer.ggml.tokens", "its pieces are too long: finding their merges would take too much time"
        )
    merges = _piece_merges(vocabulary, scores)
    fallback = bool(vocabulary.of(_BYTE))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _piece_merges(vocabulary: _Vocabulary, scores: npt.NDArray[np.float64]) -> list[tuple[str, str]]:
    """Pairs to merge, the best first: every split of a piece into two pieces, by the score of the piece.

    SentencePiece (Kudo & Richardson 2018) merges the neighbours whose joined piece has the highest score, which
    is BPE over these pairs.
    """
    mergeable = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in {_NORMAL, _USER, _UNUSED}
    }
    found: list[tuple[float, int, int, str, str]] = []
    for piece, number in mergeable.items():
        if vocabulary.types[number] != _NORMAL:
            continue
        score = -float(scores[number])
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in mergeable and (right := piece[cut:]) in mergeable:
                found.append((score, -cut, cut - len(piece), left, right))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add control tokens and the added tokens of the file, which are matched first in a text."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in {_CONTROL, _USER, _UNKNOWN} and token
    ]
    backend.add_tokens(added)
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in {_CONTROL, _USER} and token and backend.token_to_id(token) != number:
            raise CheckpointError(
                f"tokenizer.ggml.tokens: added token {token[:80]!r} would not get its id {number}"
            )


def _post_process(
    backend: tokenizers.Tokenizer, metadata: _Metadata, named: Mapping[str, str], add_bos: bool
) -> None:
    """Set the tokens that are added around a text."""
    around: list[str] = []
    for role, key, default in (("bos_token", "bos", add_bos), ("eos_token", "eos", False)):
        wanted = metadata.flag(f"tokenizer.ggml.add_{key}_token", default)
        around.append(named[role] if wanted and role in named else "")
    specials = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around) if token]
    if specials:
        template: Sequence[str] = [*around[:1], "$A", *around[1:]]
        backend.post_processor = processors.TemplateProcessing(
            single=[part for part in template if part], special_tokens=specials
        )


def _templates(metadata: _Metadata) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in metadata.values:
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            source = metadata.text(key)
            if len(source) > MAX_TEMPLATE_BYTES:
                raise metadata.error(
                    key, f"{len(source)} characters exceed the limit of {MAX_TEMPLATE_BYTES}"
                )
            found[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = source
    return found


KINDS = {"gpt2": _byte_level, "llama": _sentence_piece}
