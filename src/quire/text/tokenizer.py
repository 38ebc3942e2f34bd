"""A checkpoint's tokenizer: text to ids and back, equal to transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from quire.text.detokenizer import ByteLevelDetokenizer, Detokenizer, PieceDetokenizer, WindowedDetokenizer
from quire.text.files import LoadBudget
from quire.text.folder import TokenizerFolder, read_folder
from quire.text.growth import Growth, check_added
from quire.text.guarded import GuardedEncoder
from quire.text.kept import kept_tokenizer
from quire.text.sparse import Ids, SparseTokenizer
from quire.text.vocabulary import (
    ByteLevelDecoder,
    PieceDecoder,
    TokenTable,
    byte_level_bytes,
    hide,
    recognise_decoder,
)
from quire.types import CheckpointError, RequestError, check_window
from quire.util.kept import KeptFiles

# From here on the library is called in a way that lets other threads run; for less it would only cost time.
_LONG_TEXT = 4096  # characters, about 2 ms
_LONG_IDS = 4096


class Tokenizer:
    """Text to token ids and back for one checkpoint. Immutable once built; safe to use from several threads.

    `special_tokens` maps role names ("bos_token", "eos_token", …) to token text, as chat templates see them;
    `chat_templates` maps names to Jinja sources ("default" is the usual one). `unreadable` says why texts are
    refused; ids are decoded all the same.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | SparseTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        unreadable: str = "",
    ) -> None:
        self._backend = backend
        self._unreadable = unreadable
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self._growth = _growth(backend)
        added = backend.get_added_tokens_decoder()
        self._special_text = frozenset(token.content for token in added.values() if token.special)
        self.special_ids = frozenset(
            token_id for token_id, token in added.items() if token.content in self._special_text
        )
        self._decoder = recognise_decoder(_state(backend.decoder))
        # A twin without added tokens: the same model (shared, not copied) that reads control tokens as
        # plain text.
        self._plain = _twin(backend)
        self._plain_inner = _without_prefix(_twin(backend))

    @classmethod
    def from_dir(
        cls, path: str | Path, budget: LoadBudget | None = None, cache: KeptFiles | None = None
    ) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder.

        Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat
        template files. As in transformers 5, tokenizer.json alone decides which tokens are added around a
        text: `add_bos_token` in the config is ignored when tokenizer.json exists. `cache` keeps what building gives.

        Raises CheckpointError naming the file when one is missing, malformed or over the load budget.
        """
        folder = read_folder(Path(path), budget or LoadBudget())
        size = len(folder.tokenizer_json)
        backend = kept_tokenizer(cache, _content(folder), size, lambda: _build(folder))
        return cls(backend, special_tokens=folder.special_tokens, chat_templates=folder.chat_templates)

    # -- sizes, ids and names ----------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in memory, not the part that the texts so far needed."""
        return not isinstance(self._backend, SparseTokenizer) or self._backend.is_whole

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def highest_id(self) -> int:
        """The largest token id; -1 for an empty vocabulary. The model's embedding must have more rows.

        Looks at every token the first time (some 0.1 s for 128k).
        """
        if isinstance(self._backend, SparseTokenizer):
            return self._backend.highest_id
        size = self.vocab_size
        if None not in map(self._backend.id_to_token, range(size)):
            return size - 1  # as many ids as tokens and all of them below: there is no room for a higher one
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
        """The id of a token as the vocabulary spells it, None when there is none."""
        return self._backend.token_to_id(token)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it ("Ġthe", "▁the"); "" for an id that names no token."""
        return [self._token(token_id) or "" for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text (b"" for no token); a special token's are its own spelling.

        For SentencePiece-style vocabularies this is the token inside a text: the space that is dropped at
        the very start is there.
        """
        return self._bytes_table[_checked(token_id)]

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

        `add_special_tokens` adds what the checkpoint puts around a text (a beginning-of-sequence token).
        `parse_special` false reads every added token's spelling as plain text: for content that is not
        trusted. Raises RequestError when the text holds a lone surrogate, which no UTF-8 text can, when the
        tokenizer could make it too long (text.growth), or when there are more than `max_tokens`.
        """
        self._check_readable()
        backend = self._backend if parse_special else self._plain
        if isinstance(text, str):
            self._growth.check(text)
        return list(_encode(backend, text, add_special_tokens, max_tokens).ids)

    def encode_guarded(
        self, text: str, own: Sequence[tuple[int, int]], *, max_tokens: int | None = None
    ) -> list[int]:
        """Ids of a rendered chat of which a template wrote the spans `own` (character ranges, sorted).

        A control token is read where all of its spelling is the template's; its spelling elsewhere, or in part
        elsewhere, gives ordinary tokens. Everything else is encoded as `encode(text, add_special_tokens=False)`
        does: text between two real control tokens is tokenized in one piece. RequestError when there are more
        than `max_tokens`.
        """
        self._check_readable()
        self._growth.check(text)
        return self._guarded.encode(text, own, max_tokens)

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids that `encode_guarded` gives to a template's own text only: special tokens and their like."""
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
            raise RequestError("text", f"{self._unreadable}; give token ids")

    # -- ids to text -------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once, as the library decodes them: what streaming must add up to.

        Bytes that are not UTF-8 become U+FFFD (one for each maximal invalid part in byte-level
        vocabularies, one a byte in a run that is not wholly valid in SentencePiece-style ones). Ids that
        name no token are skipped. Raises RequestError for an id below 0 or over 2^32 - 1.
        """
        ids = list(token_ids)
        try:
            if len(ids) < _LONG_IDS:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            # only the batch call gives up the interpreter lock
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError):
            raise RequestError("token_ids", "every token id must be an integer in [0, 2^32 - 1]") from None
        except BaseException as error:
            raise _readable(error) from None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
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

    # -- tables, filled as ids turn up -------------------------------------------------------------

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
    """A digest of all that a folder's pipeline depends on."""
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
    """A failure of the library as a CheckpointError; what is not its own (an interrupt) unchanged.

    It raises plain Exception for what it refuses and panics, a BaseException, on what it trusted.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return CheckpointError(f"tokenizer.json: the tokenizers library cannot use it: {error}")
    return error


def _add_tokens(backend: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
    """Add what the side files declare and tokenizer.json lacks, in transformers' order (ids depend on it)."""
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
    # The library skips what was special once, whatever is added over it.
    special = {token.content for token in present if token.special} | set(folder.special_tokens.values())
    for token in missing:
        token.special = token.special or token.content in special
    check_added([token.content for token in [*missing, *folder.named_tokens]], _growth(backend).normalizer)
    if missing:
        backend.add_tokens(missing)
    # As in transformers, every token with a role is special in the end, whatever the files say of it.
    flags = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    for token in folder.named_tokens:
        token.special = True
    named = [token for token in folder.named_tokens if repr(token) != flags.get(token.content)]
    if named:
        backend.add_special_tokens(named)


def _adopt_llama_pipeline(backend: tokenizers.Tokenizer, prefix: str) -> None:
    """Give a Llama-family BPE the pipeline transformers 5 builds for it, whatever tokenizer.json says.

    The difference shows after control tokens: tokenizer.json written years ago prepends a space to every
    stretch of text, the model saw one only at the very start (`legacy: false`).
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
    """For text that follows a control token: a Metaspace that marks only the start of a text marks nothing
    there.
    """
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
        else:  # only the batch call gives up the interpreter lock
            encoding = backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:
        if not isinstance(text, str):
            raise RequestError("text", f"must be a string, not {type(text).__name__}") from None
        raise RequestError("text", "holds a lone surrogate, which is not valid Unicode text") from None
    except BaseException as error:
        raise _readable(error) from None
    if max_tokens is not None:  # counted before any list is made
        check_window(len(encoding), None, max_tokens + 1, "text")
    return encoding


def _growth(backend: tokenizers.Tokenizer | SparseTokenizer) -> Growth:
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    return Growth(*map(_state, parts))


def _state(component: object | None) -> bytes | None:
    """A library component as the JSON it is saved as."""
    return None if component is None else component.__getstate__()  # type: ignore[return-value]


def _piece_bytes(piece: str | int) -> bytes:
    return bytes([piece]) if isinstance(piece, int) else piece.encode("utf-8")


def _checked(token_id: int) -> int:
    if not 0 <= token_id < 2**32:
        raise RequestError("token_id", f"{token_id} is not a token id")
    return token_id
