"""What each server has cached of a prompt, by what the servers report; see routing.followed_cache.

A router has no tokens. It knows a prompt by digests of the pieces of its text (routing.prefix_index), servers know it
by hashes of blocks of its tokens. Once a server has computed a prompt it says which block is the prompt's last; those
before it follow from the reports. So each piece stands for the block that ends about where it ends:

    pieces     [ p1 ][ p2 ][ p3 ][ p4 ]…           of 256 bytes
    blocks     [b1][b2][b3][b4][b5][b6][b7]        p1 -> b1, p2 -> b3, p3 -> b5, p4 -> b7

Servers of one space have the same hashes for the same tokens, so what is learned from one holds for all of them. What
is learned never becomes wrong: a block that is evicted is no longer in the reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence

from quire.routing.followed_cache import FollowedCache, Hash
from quire.routing.prefix_index import PIECE_BYTES

SOURCES = ("predicted", "reported", "hybrid")
_SENT = 4096  # prompts of which servers have not said yet that they are computed, with twice `limit` pieces at most


class ReportedPrefixes:
    """The reports of all servers, and the blocks of at most `limit` pieces of each space."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._caches: dict[str, FollowedCache] = {}
        self._known: dict[
            str, OrderedDict[bytes, tuple[Hash, int]]
        ] = {}  # piece -> block, tokens up to its end
        self._sent: OrderedDict[tuple[str, str], tuple[Sequence[bytes], int]] = OrderedDict()
        self._pieces = 0  # of those
        self._coming: dict[str, Counter[bytes]] = {}  # pieces of prompts that servers are computing

    def cache(self, server: str) -> FollowedCache:
        """What a server reports."""
        return self._caches.setdefault(server, FollowedCache())

    def forget(self, server: str) -> None:
        """A server is gone."""
        self._caches.pop(server, None)
        self._coming.pop(server, None)

    def is_current(self, server: str) -> bool:
        """Whether it is known what a server has."""
        found = self._caches.get(server)
        return found is not None and found.current

    def sent(self, server: str, request: str, digests: Sequence[bytes], size: int) -> None:
        """A server gets a prompt of `size` bytes with a request."""
        if not digests or not self.is_current(server):
            return
        self._take(server, request)
        self._sent[server, request] = digests, size
        self._pieces += len(digests)
        self._coming.setdefault(server, Counter()).update(digests)
        while len(self._sent) > _SENT or self._pieces > 2 * self._limit:
            self._take(*next(iter(self._sent)))

    def computed(self, server: str, request: str, block: Hash, blocks: int, tokens: int) -> None:
        """A server has computed the prompt of a request, `tokens` long: `block` is the last of its `blocks` whole
        ones."""
        found = self._take(server, request)
        if found is None:
            return
        digests, size = found
        cache = self.cache(server)
        chain = [block]  # the last first
        while len(chain) < blocks and (before := cache.blocks.get(chain[-1], 0)):
            chain.append(before)
        if len(chain) < blocks or block not in cache.blocks:
            return
        known = self._known.setdefault(cache.space, OrderedDict())
        if len(self._known) > len(self._caches):
            used = {each.space for each in self._caches.values()}
            self._known = {space: pieces for space, pieces in self._known.items() if space in used}
        # The beginning is used last, and stays longest.
        for index in range(min(len(digests), self._limit) - 1, -1, -1):
            end = min(int(tokens * PIECE_BYTES * (index + 1) / size) // cache.block_size, blocks)
            here = (chain[blocks - end] if end else 0, end * cache.block_size)
            there = known.get(digests[index])
            # Where two prompts disagree on the end of a piece, they have the shorter beginning in common.
            known[digests[index]] = here if there is None or here[1] <= there[1] else there
            known.move_to_end(digests[index])
        while len(known) > self._limit:
            known.popitem(last=False)

    def tokens(self, server: str, digests: Sequence[bytes]) -> int:
        """The tokens at the beginning of a prompt that a server has cached, as far as it is known."""
        cache = self._caches.get(server)
        known = None if cache is None else self._known.get(cache.space)
        if cache is None or not known or not cache.current:
            return 0
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            found = known.get(digests[middle])
            if found is not None and (not found[1] or found[0] in cache.blocks):
                low = middle + 1
            else:
                high = middle
        return known[digests[low - 1]][1] if low else 0

    def coming(self, server: str, digests: Sequence[bytes]) -> int:
        """The pieces at the beginning of a prompt that a server is computing for others."""
        pieces = self._coming.get(server)
        if not pieces:
            return 0
        return bisect_left(range(len(digests)), True, key=lambda index: digests[index] not in pieces)

    def _take(self, server: str, request: str) -> tuple[Sequence[bytes], int] | None:
        """A prompt that was sent: it comes no longer."""
        found = self._sent.pop((server, request), None)
        if found is None:
            return None
        self._pieces -= len(found[0])
        pieces = self._coming.get(server, Counter())
        for digest in found[0]:
            if pieces[digest] > 1:
                pieces[digest] -= 1
            else:
                del pieces[digest]
        return found
