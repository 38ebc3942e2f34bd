"""Encryption of KV blocks outside of memory: AES-256-GCM with a key that is given, by the package cryptography.

The tag of a block stands in place of its check sum, and covers its name and place in the order. Names are hashes with
the key, too: whoever has the file and guesses a prompt cannot see whether it was there. A nonce is 12 random bytes:
with one key, 2^32 blocks can be written before an equal pair is as likely as 2^-33.
"""

from __future__ import annotations

import os
import threading
from hashlib import blake2b
from typing import Any

from quire.types import QuireError

NONCE_BYTES, TAG_BYTES = 12, 16


class Sealing:
    """Seals and opens contents of `block_bytes` bytes. Calls may come from several threads. Raises QuireError without
    the package."""

    def __init__(self, key: bytes, fingerprint: bytes, block_bytes: int, option: str = "disk-key") -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise QuireError(
                f"kv_tiers: {option} needs the package cryptography: pip install 'quire-llm[kv-encryption]'"
            ) from None
        self._invalid: type[Exception] = InvalidTag
        whole = blake2b(key).digest()  # of any length
        self._cipher: Any = AESGCM(_derived(whole, b"content", fingerprint))
        self._names = _derived(whole, b"names", fingerprint)
        self.mark = _derived(whole, b"mark", fingerprint)[:16]  # by which what has another key is recognised
        self._size = block_bytes
        self._local = threading.local()

    def name(self, digest: bytes) -> bytes:
        """What stands for a digest."""
        return blake2b(digest, digest_size=16, key=self._names).digest()

    def seal(self, content: memoryview, further: bytes) -> tuple[bytes, memoryview, bytes]:
        """Nonce, encrypted content and tag, which covers `further`, too. The content is valid until the next call of
        this thread."""
        nonce, room = os.urandom(NONCE_BYTES), self._room()
        self._cipher.encrypt_into(nonce, content, further, room)
        return nonce, room[: self._size], bytes(room[self._size :])

    def room(self) -> memoryview:
        """Where this thread is to put an encrypted content before it is opened."""
        return self._room()[: self._size]

    def open(self, nonce: bytes, tag: bytes, further: bytes, into: memoryview) -> bool:
        """Decrypt what is in `room`; whether it is what was sealed. If not, nothing is to be read from `into`."""
        room = self._room()
        room[self._size :] = tag
        try:
            self._cipher.decrypt_into(nonce, room, further, into)
        except self._invalid:
            return False
        return True

    def _room(self) -> memoryview:
        found: memoryview | None = getattr(self._local, "room", None)
        if found is None:
            found = self._local.room = memoryview(bytearray(self._size + TAG_BYTES))
        return found


def sealing_bytes(block_bytes: int, threads: int) -> int:
    """Memory that the rooms of so many threads take."""
    return threads * (block_bytes + TAG_BYTES)


def _derived(key: bytes, use: bytes, fingerprint: bytes) -> bytes:
    return blake2b(fingerprint, digest_size=32, key=key, person=b"quire kv " + use[:7]).digest()
