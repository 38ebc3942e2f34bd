"""The tokenizer of a checkpoint: text to ids and back, equal to transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from quire.context_window import check_window
from quire.text.detokenizer import ByteLevelDetokenizer, Detokenizer, PieceDetokenizer, WindowedDetokenizer
from quire.text.folder import TokenizerFolder, read_folder
from quire.text.growth import Growth, check_added
from quire.text.guarded import GuardedEncoder
from quire.text.kept_tokenizers import kept_tokenizer
from quire.text.sparse import Ids, SparseTokenizer
from quire.text.token_bytes import MAX_MEAN_BYTES, TokenBytes
from quire.text.tokenizer_files import LoadBudget
from quire.text.vocabulary import (
    ByteLevelDecoder,
    PieceDecoder,
    TokenTable,
    byte_level_bytes,
    hide,
    recognise_decoder,
)
from quire.types import CheckpointError, RequestError
from quire.util.kept import KeptFiles

# From this length on, the library is called so that other threads can run; below, this would only cost time.
_LONG_TEXT = 4096  # characters, about 2 ms
_LONG_IDS = 4096


class Tokenizer:
    """Text to token ids and back for one checkpoint. Immutable once built; safe to use from several threads.

    `special_tokens` maps role names ("bos_token", "eos_token", …) to token text, as in chat templates; `chat_templates`
    maps names to Jinja sources ("default" is the usual one). `unreadable` says why texts are refused; ids can be
    decoded in any case. `response_template` is the checkpoint's description of its answers, as in transformers.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | SparseTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        unreadable: str = "",
        response_template: Mapping[str, object] | None = None,
    ) -> None:
        self._backend = backend
        self._unreadable = unreadable
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.response_template = response_template
        self._growth = _growth(backend)
        added = backend.get_added_tokens_decoder()
        self._special_text = frozenset(token.content for token in added.values() if token.special)
        self.special_ids = frozenset(
            token_id for token_id, token in added.items() if token.content in self._special_text
        )
        self._decoder = recognise_decoder(_state(backend.decoder))
        # A twin without added tokens: the same model (shared, not copied), which reads control tokens as plain text.
        self._plain = _twin(backend)
        self._plain_inner = _without_prefix(_twin(backend))

    @classmethod
    def from_dir(
        cls, path: str | Path, budget: LoadBudget | None = None, cache: KeptFiles | None = None
    ) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder.

        Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat
        template files. As in transformers 5, tokenizer.json alone determines the tokens that are added around a text:
        `add_bos_token` in the config is ignored if tokenizer.json exists. `cache` keeps the compiled tokenizer.

        Raises CheckpointError naming a file that is missing, malformed or over the load budget.
        """
        folder = read_folder(Path(path), budget or LoadBudget())
        size = len(folder.tokenizer_json)
        backend = kept_tokenizer(cache, _content(folder), size, lambda: _build(folder))
        return cls(
            backend,
            special_tokens=folder.special_tokens,
            chat_templates=folder.chat_templates,
            response_template=folder.response_template,
        )

    # -- sizes, ids and names ----------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether the whole tokenizer is in memory, not only the parts needed so far."""
        return not isinstance(self._backend, SparseTokenizer) or self._backend.is_whole

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's embedding may have more rows (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def highest_id(self) -> int:
        """The largest token id; -1 for an empty vocabulary. The model's embedding must have more rows than this.

        Visits every token the first time (about 0.1 s for 128k).
        """
        if isinstance(self._backend, SparseTokenizer):
            return self._backend.highest_id
        size = self.vocab_size
        if None not in map(self._backend.id_to_token, range(size)):
            return size - 1  # there are as many ids as tokens, all below: there cannot be a higher one
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    def to_json(self) -> str:
        """The vocabulary and pipeline as the text of a tokenizer.json."""
        return str(self._backend.to_str(pretty=False))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, None if it does not exist."""
        return self._backend.token_to_id(token)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token in the vocabulary's spelling ("Ġthe", "▁the"); "" for an unknown id."""
        return [self._token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text (b"" for an unknown id); for a special token, its spelling.

        For SentencePiece-style vocabularies this is the token inside a text, with the space that is dropped at the
        start of a text.
        """
        return self._bytes_table[_checked(token_id)]

    def all_bytes(self, size: int) -> TokenBytes:
        """`token_bytes` of the tokens below `size`; none for control tokens, which are not part of a text.

        Raises RequestError if the memory plan has no room for them.
        """
        control, table = self.control_ids, self._bytes_table
        pieces = [b"" if token_id in control else table.once(token_id) for token_id in range(size)]
        if (total := sum(map(len, pieces))) > MAX_MEAN_BYTES * size:
            raise RequestError(
                "vocabulary",
                f"{size} tokens have {total} bytes, over the limit of {MAX_MEAN_BYTES} per token",
            )
        return TokenBytes.of(pieces)

    # -- text to ids -------------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of `text`. A long text is encoded without holding the interpreter lock.

        `add_special_tokens` adds the checkpoint's tokens around a text (a beginning-of-sequence token). `parse_special`
        false reads the spelling of added tokens as plain text, for untrusted content. Raises RequestError if the text
        contains a lone surrogate, which UTF-8 cannot, if the tokenizer could make it too long (text.growth), or if
        there are more than `max_tokens`.
        """
        self._check_readable()
        backend = self._backend if parse_special else self._plain
        if isinstance(text, str):
            self._growth.check(text)
        return list(_encode(backend, text, add_special_tokens, max_tokens).ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Token ids of two texts with the checkpoint's tokens between and around them, and the segment of each token.

        Raises as `encode`.
        """
        self._check_readable()
        for text in (first, second):
            self._growth.check(text)
        try:
            encoding = self._backend.encode(first, second)
        except TypeError:
            raise RequestError("text", "contains a lone surrogate, which is not valid Unicode text") from None
        except BaseException as error:
            raise _readable(error) from None
        assert not isinstance(encoding, Ids)  # a pair is for the whole tokenizer
        return list(encoding.ids), list(encoding.type_ids)

    def encode_guarded(
        self, text: str, own: Sequence[tuple[int, int]], *, max_tokens: int | None = None
    ) -> list[int]:
        """Ids of a rendered chat in which a template wrote the spans `own` (character ranges, sorted).

        A control token is recognised if its whole spelling is the template's; otherwise its spelling gives ordinary
        tokens. Everything else is encoded as by `encode(text, add_special_tokens=False)`: text between two real control
        tokens is tokenized in one piece. RequestError if there are more than `max_tokens`.
        """
        self._check_readable()
        self._growth.check(text)
        return self._guarded.encode(text, own, max_tokens)

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that continues another one: no space is put before it, and control tokens are plain text.

        Raises as `encode`.
        """
        self._check_readable()
        self._growth.check(text)
        return self._guarded.encode_inside(text)

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids that `encode_guarded` produces only from a template's own text: special tokens and similar ones."""
        return self._guarded.control_ids

    @cached_property
    def _guarded(self) -> GuardedEncoder:
        return GuardedEncoder(
            self._backend,
            self._plain,
            self._plain_inner,
            lambda backend, text, max_tokens: _encode(backend, text, False, max_tokens),
        )

    def _check_readable(self) -> None:
        if self._unreadable:
            raise RequestError("text", f"{self._unreadable}; send token ids instead")

    # -- ids to text -------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode all ids at once, as the library does; the deltas of a stream add up to this text.

        Bytes that are not UTF-8 become U+FFFD (one per maximal invalid part in byte-level vocabularies, one per byte of
        a run that is not entirely valid in SentencePiece-style ones). Unknown ids are skipped. Raises RequestError for
        an id below 0 or above 2^32 - 1.
        """
        ids = list(token_ids)
        try:
            if len(ids) < _LONG_IDS:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            # only the batch call releases the interpreter lock
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError):
            raise RequestError("token_ids", "every token id must be an integer in [0, 2^32 - 1]") from None
        except BaseException as error:
            raise _readable(error) from None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Make an incremental detokenizer for one sequence."""
        if isinstance(self._decoder, ByteLevelDecoder):
            return ByteLevelDetokenizer(self._visible_bytes if skip_special_tokens else self._bytes_table)
        if isinstance(self._decoder, PieceDecoder):
            table = self._visible_pieces if skip_special_tokens else self._piece_table
            return PieceDetokenizer(table, self._decoder.strip, self._decoder.strip_count)
        hidden = self._special_text if skip_special_tokens else frozenset()
        return WindowedDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            keep=lambda token_id: (token := self._token(token_id)) is not None and token not in hidden,
            is_open=lambda token_id: (self._token(token_id) or "").startswith("<0x"),
        )

    # -- tables, filled as ids occur ---------------------------------------------------------------

    @cached_property
    def _bytes_table(self) -> TokenTable[bytes]:
        decoder = self._decoder
        if isinstance(decoder, ByteLevelDecoder):
            return TokenTable(self._token, byte_level_bytes, b"")
        if isinstance(decoder, PieceDecoder):
            return TokenTable(self._token, lambda token: _piece_bytes(decoder.piece(token)), b"")
        return TokenTable(self._token, self._decode_alone, b"")

    @cached_property
    def _visible_bytes(self) -> TokenTable[bytes]:
        return TokenTable(self._token, hide(byte_level_bytes, self._special_text, b""), b"")

    @cached_property
    def _piece_table(self) -> TokenTable[str | int | None]:
        assert isinstance(self._decoder, PieceDecoder)
        return TokenTable(self._token, self._decoder.piece, None)

    @cached_property
    def _visible_pieces(self) -> TokenTable[str | int | None]:
        assert isinstance(self._decoder, PieceDecoder)
        return TokenTable(self._token, hide(self._decoder.piece, self._special_text, None), None)

    def _decode_alone(self, token: str) -> bytes:
        decoder = self._backend.decoder
        return (decoder.decode([token]) if decoder is not None else token).encode("utf-8")

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


def _content(folder: TokenizerFolder) -> str:
    """A digest of everything that determines a folder's pipeline."""
    digest = hashlib.sha256(folder.tokenizer_json)
    digest.update(repr((folder.added_tokens, folder.named_tokens, folder.llama_prefix)).encode())
    return digest.hexdigest()


def _build(folder: TokenizerFolder) -> tokenizers.Tokenizer:
    backend = _load(folder.tokenizer_json)
    if folder.llama_prefix is not None:
        _adopt_llama_pipeline(backend, folder.llama_prefix)
    _add_tokens(backend, folder)
    return backend


def _load(data: bytes) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:
        raise _readable(error) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _readable(error: BaseException) -> BaseException:
    """Convert a failure of the library to a CheckpointError; other exceptions (an interrupt) are unchanged.

    The library raises a plain Exception for errors that it detects, and panics with a BaseException on others.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return CheckpointError(f"tokenizer.json: the tokenizers library cannot load it: {error}")
    return error


def _add_tokens(backend: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
    """Add tokens of other files that tokenizer.json lacks, in transformers' order (ids depend on it)."""
    present = list(backend.get_added_tokens_decoder().values())
    known = {repr(token) for token in present}
    contents = {token.content for token in present}
    missing = []
    for _, token in sorted(folder.added_tokens.items()):
        if repr(token) not in known:
            missing.append(token)
            contents.add(token.content)
    for token in folder.named_tokens:
        if token.content not in contents:
            missing.append(token)
            contents.add(token.content)
    # The library skips tokens that were special once, whatever is added over them.
    special = {token.content for token in present if token.special} | set(folder.special_tokens.values())
    for token in missing:
        token.special = token.special or token.content in special
    check_added([token.content for token in [*missing, *folder.named_tokens]], _growth(backend).normalizer)
    if missing:
        backend.add_tokens(missing)
    # As in transformers, every token with a role is special in the end, whatever the files declare.
    flags = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    for token in folder.named_tokens:
        token.special = True
    named = [token for token in folder.named_tokens if repr(token) != flags.get(token.content)]
    if named:
        backend.add_special_tokens(named)


def _adopt_llama_pipeline(backend: tokenizers.Tokenizer, prefix: str) -> None:
    """Give a Llama-family BPE the pipeline of transformers 5, instead of that of tokenizer.json.

    They differ after control tokens: an old tokenizer.json prepends a space to every piece of text, but the model saw
    one only at the start (`legacy: false`).
    """
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return
    model.fuse_unk = True
    model.byte_fallback = True
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prefix, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix != "never":
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)


def _twin(backend: tokenizers.Tokenizer | SparseTokenizer) -> tokenizers.Tokenizer | SparseTokenizer:
    if isinstance(backend, SparseTokenizer):
        return backend.twin()
    twin = tokenizers.Tokenizer(backend.model)
    twin.normalizer = backend.normalizer
    twin.pre_tokenizer = backend.pre_tokenizer
    twin.post_processor = backend.post_processor
    return twin


def _without_prefix(
    twin: tokenizers.Tokenizer | SparseTokenizer,
) -> tokenizers.Tokenizer | SparseTokenizer:
    """The Metaspace for text after a control token: one that marks only the start of a text marks nothing there."""
    metaspace = twin.pre_tokenizer
    if isinstance(metaspace, pre_tokenizers.Metaspace) and metaspace.prepend_scheme == "first":
        twin.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=metaspace.replacement, prepend_scheme="never", split=metaspace.split
        )
    return twin


def _encode(
    backend: tokenizers.Tokenizer | SparseTokenizer,
    text: str,
    add_special_tokens: bool,
    max_tokens: int | None = None,
) -> tokenizers.Encoding | Ids:
    try:
        if len(text) < _LONG_TEXT:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # only the batch call releases the interpreter lock
            encoding = backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:
        if not isinstance(text, str):
            raise RequestError("text", f"must be a string, not {type(text).__name__}") from None
        raise RequestError("text", "contains a lone surrogate, which is not valid Unicode text") from None
    except BaseException as error:
        raise _readable(error) from None
    if max_tokens is not None:  # counted before any list is made
        check_window(len(encoding), None, max_tokens + 1, "text")
    return encoding


def _growth(backend: tokenizers.Tokenizer | SparseTokenizer) -> Growth:
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    return Growth(*map(_state, parts))


def _state(component: object | None) -> bytes | None:
    """The JSON form of a library component."""
    return None if component is None else component.__getstate__()  # type: ignore[return-value]


def _piece_bytes(piece: str | int) -> bytes:
    return bytes([piece]) if isinstance(piece, int) else piece.encode("utf-8")


def _checked(token_id: int) -> int:
    if not 0 <= token_id < 2**32:
        raise RequestError("token_id", f"{token_id} is not a token id")
    return token_id
