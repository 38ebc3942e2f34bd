"""Which blocks can be found and which cannot any more, in order: for those who follow a cache from outside."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.cached_prefix import TOKEN_BYTES, BlockNode, CacheWatch
from quire.core.prefix_cache import PrefixCaches


class CacheChange(NamedTuple):
    """A block that can be found from now on, or with an empty `tokens` one that cannot any more.

    digest     of the block, chained over its whole prefix; see core.tier
    parent     that of the block before it; empty for the first of a prompt
    tokens     int32 ids in native byte order
    namespace  of the prefix, known for the first block alone
    """

    digest: bytes
    parent: bytes = b""
    tokens: bytes = b""
    namespace: str = ""


class CacheChanges(CacheWatch):
    """Collects the changes of one scheduler's caches until they are taken. O(1) for a block.

    A block counts as found while the prefix cache knows it. Of one with sliding windows, groups may have lost theirs.
    Digests must be there already: a tier or a MissWatch, which hears of blocks before this, has computed them.
    """

    def __init__(self, caches: PrefixCaches, block_size: int) -> None:
        self._bytes = block_size * TOKEN_BYTES
        self._found: list[CacheChange] = []
        caches.watches.append(self)

    def published(self, tenant: str, parent: BlockNode, node: BlockNode) -> None:  # noqa: ARG002
        """See CacheWatch."""
        tokens = node.key[: self._bytes]
        if parent.parent is None or parent.parent.parent is None:  # the root of a namespace
            space = parent.key.decode("utf-8", "surrogatepass")
            self._found.append(CacheChange(node.digest, b"", tokens, space))
        else:
            self._found.append(CacheChange(node.digest, parent.digest, tokens))

    def removed(self, node: BlockNode) -> None:
        """See CacheWatch."""
        self._found.append(CacheChange(node.digest))

    def take(self) -> list[CacheChange]:
        """The changes since the last call, the oldest first."""
        found, self._found = self._found, []
        return found
