"""Compiled tokenizers in the cache folder: see text/compiled and text/sparse."""

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

SMALLEST = 2**20  # bytes of a tokenizer's files; smaller ones build as fast as they are found

Build = Callable[[], tokenizers.Tokenizer]


def kept_tokenizer(
    cache: KeptFiles | None, content: str, size: int, build: Build
) -> tokenizers.Tokenizer | SparseTokenizer:
    """Return the tokenizer of `build`, from the cache if possible; else compile it for the next start.

    `content` is a digest of everything that determines the tokenizer, `size` its bytes. A damaged file is removed and
    written again.
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
        with contextlib.suppress(OSError):  # the next start builds it again, which only costs time
            cache.write(path, len(data), lambda fd: _write(fd, data))


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
