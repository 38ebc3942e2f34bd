"""Tokenizers that are read after the memory of an engine is planned."""

from __future__ import annotations

from dataclasses import replace

from quire.config.schema import EngineConfig
from quire.engine.build.opening import Model, folder_tokenizer, kept_files, tokenizer_memory
from quire.util.kept import KeptFiles
from quire.util.startup_spans import Startup

COMPILED_SHARE = 4  # a compiled tokenizer takes at most this part of a whole one


class LaterTokenizer:
    """A model whose tokenizer is read while its weights are being checked."""

    def __init__(self, model: Model, startup: Startup, cache: KeptFiles | None) -> None:
        self.model = model
        self._startup, self._cache = startup, cache

    def read(self) -> None:
        """Read the tokenizer at the first call, if one is pending."""
        model = self.model
        if model.tokenizer_later:
            found = folder_tokenizer(model.folder, model.facts, self._startup, self._cache)
            self.model = replace(model, tokenizer=found, tokenizer_later=False)


def coming_tokenizer(model: Model) -> int:
    """Bytes that the tokenizer of a model will take once it is read."""
    there = model.tokenizer is None or model.tokenizer.is_whole
    if there and not model.tokenizer_later:
        return 0
    return tokenizer_memory(model.folder, None if model.gguf is None else model.gguf.files)


def tokenizer_for_grammars(model: Model, asked: EngineConfig) -> int:
    """Bytes of the tokenizer that an engine process reads for its first grammar."""
    if model.tokenizer is not None or model.tokenizer_later:
        return 0
    whole = tokenizer_memory(model.folder, None if model.gguf is None else model.gguf.files)
    return whole if kept_files(asked) is None else whole // COMPILED_SHARE
