"""Check sums of the contents of KV blocks by a key: fast enough to check everything that comes and goes.

A content goes through NH (RFC 4418; csrc/kernels/sum_pages.cpp), four sums of 64 bits for every 1024 bytes, and these
go through NH again with another key: 1 KiB is left of a MiB. Keyed BLAKE2b makes the check sum of that, of the length
and of the name. Two contents that differ have equal sums with a probability of 2^-127 over keys.

With a secret key nobody else can make a check sum, or find another content for one: what is shown is the output of a
pseudorandom function, from which no sum of NH, and so no key of it, can be computed.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b, shake_256

import numpy as np

from quire import _native

SUM_BYTES = 16


class ContentSums:
    """Check sums by a key of at most 64 bytes, for any number of threads."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        made = shake_256(b"sums of pages" + key).digest(2 * _native.SUM_KEY_BYTES)
        self._pages, self._above = made[: _native.SUM_KEY_BYTES], made[_native.SUM_KEY_BYTES :]

    def of(self, name: bytes, content: bytes | bytearray | memoryview) -> bytes:
        """What stands for a content, which is not empty and begins at a multiple of 8 bytes in memory, and its name."""
        sums = _native.sum_pages(np.frombuffer(content, np.uint8), self._pages, self._above)
        found = blake2b(name, digest_size=SUM_BYTES, key=self._key)
        found.update(len(content).to_bytes(8, "little"))
        found.update(sums)
        return found.digest()

    def fits(self, name: bytes, content: bytes | bytearray | memoryview, check: bytes) -> bool:
        """Whether a check sum is that of a content and its name."""
        return hmac.compare_digest(self.of(name, content), check)
