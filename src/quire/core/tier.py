"""Where blocks are kept besides the executor's memory, and the names they have there.

A block's name is its digest, chained over its whole prefix, and its cache group. Digests are made when a block is
published, and only for a tier: nothing pays for them otherwise. Two engines give a block the same name if their
fingerprints, the tenant, the namespace and all tokens up to its end are the same.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

DIGEST_BYTES = 16


class Tier(Protocol):
    """What hears which blocks can be found, and may keep some: host memory, a disk, another engine, a router's index.

    The scheduler asks it and never touches contents: those are copied by whatever performs `SchedulerOutput.moves`.
    """

    @property
    def fingerprint(self) -> bytes:
        """What besides tokens decides a block's content: weights, formats, layout. At most 64 bytes."""

    def published(self, digest: bytes, group: int) -> None:
        """A block can be found in the executor's memory from now on."""

    def withdrawn(self, digest: bytes, group: int, *, offered: bool) -> bool:
        """A block cannot be found any more. Where it is `offered`, because room is needed, True has its content copied
        out; otherwise it is forgotten or may be damaged, and the answer must be False."""

    def holds(self, digest: bytes, group: int) -> bool:
        """True when the block could be copied in now. A move that is asked for at once may still fail."""


def root_digest(fingerprint: bytes, tenant: str, namespace: str) -> bytes:
    """What the chain of a tenant's namespace begins with."""
    names = [name.encode("utf-8", "surrogatepass") for name in (tenant, namespace)]
    whole = b"".join(len(name).to_bytes(8, "little") + name for name in names)
    return blake2b(whole, digest_size=DIGEST_BYTES, key=fingerprint).digest()


def chain(parent: bytes, key: bytes) -> bytes:
    """The digest of a block of tokens after the prefix whose digest is `parent`."""
    return blake2b(parent + key, digest_size=DIGEST_BYTES).digest()
