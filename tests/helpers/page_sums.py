"""Check sums of pages by their definition."""

from __future__ import annotations

import numpy as np

from quire import _native

PAGE = 1024
KEY = np.random.default_rng(1).integers(0, 256, _native.SUM_KEY_BYTES, dtype=np.uint8).tobytes()


def defined(data: bytes) -> bytes:
    """NH with 32-bit words and four keys, each four words behind the one before (RFC 4418, section 5.2)."""
    words = np.frombuffer(data + bytes(-len(data) % PAGE), np.uint32).reshape(-1, PAGE // 4)
    key = np.frombuffer(KEY, np.uint32)
    out = np.empty((len(words), 4), np.uint64)
    for j in range(4):
        both = (words + key[4 * j : 4 * j + PAGE // 4]).astype(np.uint64)
        out[:, j] = (both[:, ::2] * both[:, 1::2]).sum(axis=1, dtype=np.uint64)
    return out.tobytes()
