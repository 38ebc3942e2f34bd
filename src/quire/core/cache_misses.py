"""Why a prompt was not found in the prefix cache: what is nearest to it there, or what became of it.

A watch hears of every block that is published or removed. Of removed blocks it remembers the digest, of the latest
EVICTED ones; the digest of a block stands for its whole prefix, tenant and namespace. A prompt is looked up once, when
it starts, and only among the blocks of its own tenant.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from quire.core.cached_prefix import TOKEN_BYTES, BlockNode, CacheWatch
from quire.core.prefix_cache import PrefixCaches
from quire.core.radix import Node
from quire.core.soft_tokens import NO_MARKS
from quire.core.tier import chain, root_digest
from quire.records import dataclass

EVICTED = 8192  # removed blocks that are remembered: some 130 bytes each
_CHILDREN = 256  # blocks that are compared with the first one that was not found
_SPACES = 64  # namespaces that are looked at
AROUND = 24  # tokens shown before and after the first that differs

UNSEEN, DIFFERS, GONE, ELSEWHERE = "never seen", "differs", "evicted", "another namespace"


@dataclass(frozen=True, slots=True)
class Miss:
    """`lost` tokens of a prompt, after `hit` ones that were found, could have been found at most.

    kind        "differs": a cached prompt is the same up to token `differs_at`; `ours` and `theirs` are the tokens
                around it. "evicted", "another namespace", "never seen": nothing more of it is cached
    """

    kind: str
    hit: int
    lost: int
    differs_at: int = 0
    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()


class MissWatch(CacheWatch):
    """Looks at the misses of one scheduler's caches. O(1) for a block; a miss costs O(blocks of the prompt)."""

    def __init__(self, caches: PrefixCaches, block_size: int) -> None:
        self._caches, self._size = caches, block_size
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        caches.watches.append(self)

    def published(self, tenant: str, parent: BlockNode, node: BlockNode) -> None:
        """See CacheWatch. With a tier the digests are those of the tier."""
        if self._caches.tier is None:
            node.digest = chain(self._digest(tenant, parent), node.key)
        self._evicted.pop(node.digest, None)

    def removed(self, node: BlockNode) -> None:
        """See CacheWatch."""
        self._evicted[node.digest] = None
        if len(self._evicted) > EVICTED:
            self._evicted.popitem(last=False)

    def look(self, tenant: str, namespace: str, tokens: Sequence[int], hit: int, usable: int) -> Miss | None:
        """Why no more than `hit` of `usable` tokens were found; None if no whole block was missed."""
        size = self._size
        lost = usable // size * size - hit
        cache = self._caches.find(tenant)
        if lost <= 0:
            return None
        path = [] if cache is None else cache.path(array("i", tokens[:hit]).tobytes(), namespace, NO_MARKS)
        if cache is None or len(path) != hit // size:  # or a prompt with soft tokens: its keys have marks
            return Miss(UNSEEN, hit, lost)
        roots = cache.namespaces(_SPACES)
        node = path[-1] if path else roots.get(namespace)
        block = array("i", tokens[hit : hit + size])
        near = None if node is None else _nearest(node, block)
        digest = self._root(tenant, namespace) if node is None or not path else node.digest
        if near is not None and (near[1] or hit) and chain(digest, block.tobytes()) not in self._evicted:
            at = hit + near[1]
            ours = tuple(tokens[max(0, at - AROUND) : at + AROUND])
            return Miss(DIFFERS, hit, lost, at, ours, _around(near[0], hit, near[1]))
        kind = UNSEEN
        if chain(digest, block.tobytes()) in self._evicted:
            kind = GONE
        elif not hit and any(
            block.tobytes() in root.children for name, root in roots.items() if name != namespace
        ):
            kind = ELSEWHERE
        return Miss(kind, hit, lost)

    def _digest(self, tenant: str, node: BlockNode) -> bytes:
        root = node.parent is None or node.parent.parent is None
        return self._root(tenant, node.key.decode("utf-8", "surrogatepass")) if root else node.digest

    def _root(self, tenant: str, namespace: str) -> bytes:
        tier = self._caches.tier
        return root_digest(b"" if tier is None else tier.fingerprint, tenant, namespace)


def _nearest(node: Node[list[int]], block: array[int]) -> tuple[BlockNode, int] | None:
    """The child that is the same as a block for most tokens, and for how many."""
    best: tuple[BlockNode, int] | None = None
    for _, child in zip(range(_CHILDREN), node.children.values(), strict=False):
        same = _agreement(block, array("i", child.key[: len(block) * TOKEN_BYTES]))
        if best is None or same > best[1]:
            best = child, same
    return best


def _agreement(ours: array[int], theirs: array[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))


def _around(node: BlockNode, hit: int, same: int) -> tuple[int, ...]:
    """The tokens around the one at `hit + same` of a cached prefix that goes through a node behind `hit` tokens."""
    blocks: list[bytes] = []
    at: BlockNode | None = node
    size = len(node.key) - len(node.key) % TOKEN_BYTES
    while at is not None and at.parent is not None and at.parent.parent is not None:
        blocks.append(at.key[:size])
        at = at.parent
        if len(blocks) * size > (AROUND + size) * TOKEN_BYTES:
            break
    before = (len(blocks) - 1) * size // TOKEN_BYTES + same  # tokens of `blocks` before the one that differs
    text = b"".join(reversed(blocks))
    at = node
    while at.children and len(text) // TOKEN_BYTES < before + AROUND:
        at = next(iter(at.children.values()))
        text += at.key[:size]
    return tuple(array("i", text)[max(0, before - min(AROUND, hit + same)) : before + AROUND])
