"""Tokenizers in the cache folder, so that none is built twice: see text/compiled and text/sparse."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import tokenizers

from quire.text.compiled import FORMAT, MAX_BYTES, CompiledTokenizer, compile_tokenizer
from quire.text.sparse import SparseTokenizer
from quire.util.kept import DamagedError, KeptFiles

SMALLEST = 2**20  # bytes of a tokenizer's files; smaller ones are built as fast as they are found

Build = Callable[[], tokenizers.Tokenizer]


def kept_tokenizer(
    cache: KeptFiles | None, content: str, size: int, build: Build
) -> tokenizers.Tokenizer | SparseTokenizer:
    """The tokenizer that `build` gives, from the cache if it is there; else it is compiled for the next start.

    `content` is a digest of all that the tokenizer depends on, `size` the bytes of that. A damaged file is removed
    and made again.
    """
    if cache is None or size < SMALLEST:
        return build()
    key = hashlib.sha256(f"{FORMAT}\0{tokenizers.__version__}\0{content}".encode()).digest()
    path = cache.folder / f"{key.hex()[:40]}.tokenizer"
    with contextlib.suppress(DamagedError), cache.opened(path) as file:
        if file is not None:
            try:
                return SparseTokenizer(CompiledTokenizer(file.read(MAX_BYTES), key), build)
            except ValueError as error:
                raise DamagedError(str(error)) from None
    backend = build()
    threading.Thread(target=_keep, args=(cache, path, key, backend), name="quire-kept-tokenizer").start()
    return backend


def _keep(cache: KeptFiles, path: Path, key: bytes, backend: tokenizers.Tokenizer) -> None:
    data = compile_tokenizer(backend, key)
    if data is not None:
        with contextlib.suppress(
            OSError
        ):  # the next start builds it again, which costs time and nothing else
            cache.write(path, len(data), lambda fd: _write(fd, data))


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
