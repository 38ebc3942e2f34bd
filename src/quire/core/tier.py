"""Storage for blocks outside of the executor's memory, and the names of blocks there.

The name of a block is its digest, chained over its whole prefix, and its cache group. Digests are computed when a block
is published, and only if there is a tier. Two engines give a block the same name if their fingerprints, the tenant, the
namespace and all tokens up to its end are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

DIGEST_BYTES = 16
FILL_SHARE = 0.02  # of steps with sequences, for contents that come in: reading, checking and copying
SHORT_STEP = 0.01  # seconds: a step below that takes one content, whatever its share
Name = tuple[bytes, int]  # of a block: its digest and its cache group


class Tier(Protocol):
    """Is notified which blocks can be found, and may keep some: host memory, a disk, another engine, a router's index.

    The scheduler asks it and never touches contents: the executor of `SchedulerOutput.moves` copies those.
    """

    @property
    def fingerprint(self) -> bytes:
        """All that determines the content of a block besides tokens: weights, formats, layout. At most 64 bytes."""

    def published(self, name: Name, block: int, tenant: str) -> None:
        """A block of a tenant can be found in the executor's memory from now on."""

    def moved(self, name: Name, block: int) -> None:
        """It is in this block now, with the same content."""

    def saves(self, *, idle: bool) -> Iterable[tuple[Name, int]]:
        """Blocks that can be found there and are to be copied out before the next step, which has no rows if `idle`."""

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        """A block cannot be found any more. If it is `offered`, because room is needed, returning True has its content
        copied out. Otherwise it is being forgotten or may be damaged, and the result must be False.
        """

    def holds(self, name: Name) -> bool:
        """Whether the block could be copied in now. A move requested right away may still fail."""

    def copy_seconds(self, name: Name) -> float:
        """What it takes to copy a block in that it holds, as far as known; 0 for nothing."""

    def work_seconds(self, name: Name) -> float:
        """What of that a step lasts longer where it happens beside one."""


def root_digest(fingerprint: bytes, tenant: str, namespace: str) -> bytes:
    """The start of the digest chain of a tenant's namespace."""
    names = [name.encode("utf-8", "surrogatepass") for name in (tenant, namespace)]
    whole = b"".join(len(name).to_bytes(8, "little") + name for name in names)
    return blake2b(whole, digest_size=DIGEST_BYTES, key=fingerprint).digest()


def space_of(adapter: str, salt: str) -> str:
    """The namespace of a request's prefixes, within its tenant."""
    return f"adapter:{adapter}:{salt}" if adapter else f"shared:{salt}"


def chain(parent: bytes, key: bytes) -> bytes:
    """The digest of a block of tokens after the prefix with the digest `parent`."""
    return blake2b(parent + key, digest_size=DIGEST_BYTES).digest()
