"""Finds the blocks that already hold the KV of a token prefix, and evicts blocks when room is needed.

One radix-tree node per block of tokens; a node holds one block id per cache group, so a block is keyed by its whole
token prefix and its namespace. Which blocks a usable prefix needs differs by group:

    tokens          0    16    32    48    64    80    96   112   128 = hit length
    full group      [ 7 ][ 3 ][12 ][ 9 ][ 1 ][20 ][31 ][ 8 ]             every block
    sliding, w=32   [ . ][ . ][ . ][ . ][ . ][ . ][19 ][26 ]             those of the last w-1 tokens
                                                                        └─ next token reads back to 97

So a hit is only as long as every group allows. Full blocks are evicted leaf first, sliding blocks at any
position. Both kinds share one order: least recently used first, or least frequently used (see core.radix). Prefixes may
be pinned for a time, and are then evicted when the tenant has nothing else; with a TTL, unused ones are forgotten.

Where a prefix ends inside of a block, the tokens up to there can be copied: the keys and values of a token depend on
what is before it alone. The copy becomes the first block of the sequence's own.

Twins. Two sequences that run at the same time may compute the same block. Block tables are append-only, so the second
keeps its own private block, a *twin* of the published one. As soon as the published block is not held any more, a twin
takes its place in the tree and that block becomes free. Hence every block that is not held is free or can be evicted at
once, `available` is exact, and a single sequence always has the whole pool.

Tenants. Each has its own cache over the common pool: no other tenant can find what it has computed, or detect it by the
time that a prompt takes. Which tenant loses a block depends on how many each has, not on age:

    to make room    the tenant with the most blocks, held and cached, that has a cached one gives up its oldest: with
                    no more than an equal share nothing is lost while another that has more can give up some
    to run          sequences take what is free, what their own tenant has cached, and of what the others have cached
                    all but their shares of the pool: one share for each tenant that runs, for what it holds and has
                    cached, and one for the caches of all that do not run. So a flood of running sequences does not
                    empty them. A sequence alone takes what it needs

Idle shares are available to any tenant, and are the first to be returned.

Floors. A tenant may have a floor of blocks: below it, it loses none to another, not even to a sequence that runs alone.
What no floor covers is shared as above. Floors reserve nothing: a free block is anybody's, and one that was lent is
taken back from what its holder has cached, or when a sequence of its holder ends.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.cache_kinds import CacheGroup, Move
from quire.core.block_pool import AuditError, BlockPool
from quire.core.cached_prefix import (
    TOKEN_BYTES,
    BlockNode,
    CacheRules,
    CacheWatch,
    Hit,
    Holder,
    PrefixCacheStats,
    usable_depth,
)
from quire.core.capacity import first_live_block
from quire.core.radix import RadixTree, TreeBranch
from quire.core.soft_tokens import NO_MARKS, Marks
from quire.core.tier import Tier, chain, root_digest
from quire.types import NO_BLOCK

LOOK_SECONDS = 0.1


class PrefixCache:
    """The blocks of one tenant, found by token prefix. Keys are int32 token ids in native byte order.

    It has `num_blocks` blocks of the pool: `num_cached` are not held, the others are held by its `num_running`
    sequences and by its `num_fetches` fetches.
    """

    def __init__(
        self, caches: PrefixCaches, tenant: str, groups: Sequence[CacheGroup], block_size: int
    ) -> None:
        self.tenant = tenant
        self.num_blocks = self.num_cached = self.num_running = self.num_fetches = self.floor = 0
        self._caches, self._pool = caches, caches.pool
        self._groups, self._no_blocks = tuple(groups), [NO_BLOCK] * len(groups)
        self._block_size = block_size
        self._sliding = tuple((g, group.window) for g, group in enumerate(groups) if group.window)
        rules = caches.rules
        self._tree: RadixTree[list[int]] = RadixTree(
            block_size * TOKEN_BYTES, rules.by_uses, rules.ttl is not None
        )
        self._tree.now = caches.now
        self._home: dict[int, tuple[BlockNode, int]] = {}  # published block -> its node and group
        self._idle: OrderedDict[int, int] = OrderedDict()  # cached sliding block -> stamp of its last use
        self._twins: dict[int, list[int]] = {}  # published block -> private blocks with the same content
        self._twin_of: dict[int, int] = {}  # the inverse

    @property
    def num_safe(self) -> int:
        """Cached blocks that no other tenant may take: without them it would be below its floor."""
        return max(0, min(self.num_cached, self.floor + self.num_cached - self.num_blocks))

    def enter(self) -> None:
        """Count a sequence that starts."""
        self.num_running += 1
        self._caches.num_running += 1
        self._caches.active.add(self)

    def exit(self) -> None:
        """Reverse `enter`."""
        self.num_running -= 1
        self._caches.num_running -= 1
        if not self.num_running:
            self._caches.active.discard(self)

    def match(self, key: bytes, max_tokens: int, namespace: str = "", marks: Marks = NO_MARKS) -> Hit:
        """The longest usable prefix of `key` of at most `max_tokens` tokens. Changes nothing."""
        size = self._block_size
        path = self._tree.match(key[: max_tokens // size * size * TOKEN_BYTES], namespace, marks)
        depth = usable_depth(path, self._sliding, self._block_size) if self._sliding else len(path)
        if not depth:
            return Hit(0, None, tuple([] for _ in self._groups))
        del path[depth:]
        blocks = []
        for g, group in enumerate(self._groups):
            first = first_live_block(depth * size, group.window, size)
            blocks.append([NO_BLOCK] * first + [node.value[g] for node in path[first:]])
        return Hit(depth * size, path[-1], tuple(blocks))

    def branches(self, most_nodes: int) -> list[TreeBranch]:
        """The shape of what is cached; see RadixTree.branches."""
        return self._tree.branches(most_nodes)

    @property
    def num_pinned(self) -> int:
        """Blocks that are kept longer than others."""
        return self._tree.num_pinned * len(self._groups)

    def nearest(self, node: BlockNode, key: bytes) -> tuple[list[int], int]:
        """The blocks after a locked `node` that begin with most of the tokens of `key`, and how many that are. They
        count as used. Valid until the next allocation, for a copy even after it: see Copies in core.sequence_blocks.
        """
        found = self._tree.nearest(node, key)
        if found is None or found[1] < TOKEN_BYTES:
            return [], 0
        child, common = found
        self._tree.touch(child)
        return child.value, common // TOKEN_BYTES

    def pin(self, node: BlockNode, seconds: float) -> None:
        """Keep the prefix that ends at `node` for so long, within what the tenant may pin."""
        most = int(self._caches.rules.pin_share * self._pool.num_blocks) // len(self._groups)
        before = self.num_pinned
        self._tree.pin(node, self._caches.now + seconds, most)
        self._caches.stats.pinned_blocks += self.num_pinned - before

    def pass_time(self) -> None:
        """End pins, and forget what was not used for too long, as of `caches.now`."""
        tree, ttl = self._tree, self._caches.rules.ttl
        tree.now = self._caches.now
        tree.unpin()
        while ttl is not None and (leaf := tree.unused(tree.now - ttl)) is not None:
            parent = leaf.parent
            self._remove(leaf)
            if parent is not None:
                self._prune(parent)

    def acquire(self, hit: Hit, namespace: str = "") -> BlockNode:
        """Hold the blocks of a hit and lock its node, which is returned: new blocks are published below it.

        The hit must come from `match` in the same namespace, with no allocation in between.
        """
        node = self._tree.root(namespace) if hit.node is None else hit.node
        if self._caches.tier is not None and hit.node is None:
            node.digest = root_digest(self._caches.tier.fingerprint, self.tenant, namespace)
        self._tree.lock(node)
        if blocks := hit.live():
            cached = self._pool.num_cached
            self._pool.hold(blocks)
            self._count(0, self._pool.num_cached - cached)
            if self._idle:
                for block in blocks:
                    self._idle.pop(block, None)
        return node

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting if necessary. Raises ValueError when fewer are available."""
        if self._pool.num_free < count:
            self._caches.evict(count, self)
        self._count(count, 0)
        return self._pool.take(count)

    def publish(self, parent: BlockNode, key: bytes, blocks: Sequence[int]) -> BlockNode:
        """Make one computed block (one held id per group, or NO_BLOCK) findable below `parent`.

        Moves the caller's lock from `parent` to the node of the block and returns that node. If the block is already
        known, the held ids replace missing or unheld ones and become twins of the others.
        """
        node = parent.children.get(key)
        if node is None:
            node = self._tree.extend(parent, key, [NO_BLOCK] * len(blocks), locked=True)
            if self._caches.tier is not None:
                node.digest = chain(parent.digest, key)
            for watch in self._caches.hearers():
                watch.published(self.tenant, parent, node)
        else:
            self._tree.lock(node)
        for group, block in enumerate(blocks):
            if block != NO_BLOCK:
                self.put(node, group, block)
        self._tree.unlock(parent)
        return node

    def put(self, node: BlockNode, group: int, block: int) -> None:
        """Make a held block findable at `node`, as `publish` does for all groups."""
        known = node.value[group]
        if known == NO_BLOCK:
            if self._caches.tier is not None:
                self._caches.tier.published((node.digest, group), block, self.tenant)
            self._settle(node, group, block)
        elif self._pool.is_cached(known):
            self._replace(known, block)
        elif known != block:
            self._twins.setdefault(known, []).append(block)
            self._twin_of[block] = known

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; published ones stay findable until evicted."""
        if self._twin_of:
            self._forget_twins(blocks)
        free = self._pool.num_free
        cached = self._pool.release(blocks)
        self._count(free - self._pool.num_free, len(cached))
        for block in cached if self._twins or self._sliding else ():
            if block in self._twins:
                self._promote_twin(block)
            elif self._sliding and self._groups[self._home[block][1]].window:
                self._idle[block] = self._tree.tick()

    def release_all(self, node: BlockNode, blocks: Sequence[int]) -> None:
        """A sequence has ended: release its lock from `acquire` or `publish`, and every block it still holds."""
        # The lock first, so that the node is older than its sliding blocks: losing those of the last window before the
        # node would leave a prefix that occupies memory and can never be hit.
        self._tree.unlock(node)
        self._prune(node)
        self.release(blocks)

    def forget(self, node: BlockNode) -> None:
        """Remove the prefix that ends at `node`, as far up as nothing else needs it: its content may be damaged."""
        at: BlockNode | None = node
        while at is not None and self._is_free_leaf(at):
            parent = at.parent
            self._remove(at)
            at = parent

    def forget_namespace(self, namespace: str) -> None:
        """Remove a namespace. Raises ValueError while a sequence runs in it."""
        for node in reversed(self._tree.remove_namespace(namespace)):
            self._unpublish_all(node)
            self._gone(node)

    def clear(self) -> None:
        """Remove everything that no sequence holds."""
        while self.num_cached:
            self.evict_oldest(offer=False)

    def path(self, key: bytes, namespace: str, marks: Marks) -> list[BlockNode]:
        """The nodes of the longest known prefix of `key`, shortest first; some may lack blocks."""
        return self._tree.match(key, namespace, marks)

    def namespaces(self, most: int) -> dict[str, BlockNode]:
        """The roots of at most so many namespaces, which hold no blocks, by name."""
        return self._tree.roots(most)

    def audit(self, tables: Iterable[Iterable[int]], tips: Iterable[BlockNode]) -> set[int]:
        """Check tree and counts against the pool. `tables` are the live blocks of the tenant's running sequences,
        `tips` the nodes that they lock. Returns the blocks that can be found. Raises AuditError. O(blocks).
        """
        try:
            self._tree.audit()
        except ValueError as error:
            raise AuditError(str(error)) from error
        found = {}
        locks: dict[int, int] = {}
        for tip in tips:
            locks[id(tip)] = locks.get(id(tip), 0) + 1
        for node in self._tree.nodes():
            if node.locks != locks.get(id(node), 0):
                raise AuditError(f"a node has {node.locks} locks, {locks.get(id(node), 0)} are expected")
            for group, block in enumerate(node.value):
                if block != NO_BLOCK:
                    if self._home.get(block) != (node, group):
                        raise AuditError(f"block {block} of group {group} is not at its recorded node")
                    found[block] = group
                elif not self._groups[group].window:
                    raise AuditError(f"a node has no block for full-attention group {group}")
        self._audit_counts(found, tables)
        if len(found) != len(self._home):
            raise AuditError(f"{len(self._home)} blocks have a recorded node, {len(found)} are in the tree")
        idle = {b for b, group in found.items() if self._groups[group].window and self._pool.is_cached(b)}
        if idle != set(self._idle):
            raise AuditError(
                f"cached sliding blocks and their eviction order differ in {idle ^ set(self._idle)}"
            )
        twins = {twin: block for block, several in self._twins.items() for twin in several}
        if twins != self._twin_of or not found.keys() >= self._twins.keys() or found.keys() & twins.keys():
            raise AuditError("twins and published blocks disagree")
        if any(self._pool.is_cached(block) for block in self._twins):
            raise AuditError("an unheld block was not replaced by its twin")
        return set(found)

    def _audit_counts(self, found: Iterable[int], tables: Iterable[Iterable[int]]) -> None:
        cached = sum(map(self._pool.is_cached, found))
        blocks = len({*found, *(block for table in tables for block in table)})
        if (blocks, cached) != (self.num_blocks, self.num_cached):
            said = f"counted as {self.num_blocks}, {self.num_cached} of them cached"
            raise AuditError(f"a tenant has {blocks} blocks, {cached} of them cached, {said}")

    def evict_oldest(self, *, offer: bool = True) -> None:
        """Evict the least recently used unheld block, or all blocks of its node.

        With `offer` the content is offered to the tier.
        """
        leaf = self._tree.oldest()
        if self._idle:
            block, since = next(iter(self._idle.items()))
            if leaf is None or since < leaf.last_use:
                node, _ = self._home[block]
                self._unpublish(block, offer=offer)
                self._prune(node)
                return
        if leaf is None:
            raise AuditError("blocks are cached but none can be evicted")
        parent = leaf.parent
        self._tree.grow_old(leaf)
        self._remove(leaf, offer=offer)
        if parent is not None:
            self._prune(parent)

    def _prune(self, node: BlockNode) -> None:
        # With sliding groups only, a leaf can lose its last block: then no hit can end there any more.
        at: BlockNode | None = node if self._sliding else None
        while at is not None and self._is_free_leaf(at) and at.value == self._no_blocks:
            parent = at.parent
            self._tree.remove(at)
            self._gone(at)
            at = parent

    def _gone(self, node: BlockNode) -> None:
        for watch in self._caches.hearers():
            watch.removed(node)

    @staticmethod
    def _is_free_leaf(node: BlockNode) -> bool:
        if node.locks or node.children or node.parent is None:
            return False
        return node.parent.parent is not None  # the root of a namespace holds no blocks

    def _remove(self, leaf: BlockNode, *, offer: bool = False) -> None:
        self._tree.remove(leaf)
        self._gone(leaf)
        self._unpublish_all(leaf, offer=offer)

    def _unpublish_all(self, node: BlockNode, *, offer: bool = False) -> None:
        for block in node.value:
            if block != NO_BLOCK:
                self._unpublish(block, offer=offer)

    def _count(self, blocks: int, cached: int) -> None:
        self.num_blocks += blocks
        self.num_cached += cached
        if self.num_cached:
            self._caches.sizes[self] = self.num_blocks
        else:
            self._caches.sizes.pop(self, None)

    def _settle(self, node: BlockNode, group: int, block: int) -> None:
        node.value[group] = block
        self._home[block] = (node, group)
        self._pool.publish(block)

    def _replace(self, block: int, other: int) -> None:
        """Have a held block of the same content be found in place of one."""
        node, group = self._remove_home(block)
        if self._caches.tier is not None:
            self._caches.tier.moved((node.digest, group), other)
        self._settle(node, group, other)

    def _unpublish(self, block: int, *, offer: bool = False) -> None:
        node, group = self._remove_home(block)
        tier = self._caches.tier
        if tier is not None and tier.withdrawn((node.digest, group), offered=offer):
            self._caches.moves.append(Move(block, node.digest, group, fill=False))

    def _remove_home(self, block: int) -> tuple[BlockNode, int]:
        """Forget where a published block is found; returns that."""
        node, group = place = self._home.pop(block)
        node.value[group] = NO_BLOCK
        if self._idle:
            self._idle.pop(block, None)
        if self._pool.unpublish(block):
            self._count(-1, -1)
        return place

    def _forget_twins(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            published = self._twin_of.pop(block, None)
            if published is not None:
                twins = self._twins[published]
                twins.remove(block)
                if not twins:
                    del self._twins[published]

    def _promote_twin(self, block: int) -> None:
        first, *rest = self._twins.pop(block)
        self._replace(block, first)
        del self._twin_of[first]
        if rest:
            self._twins[first] = rest
            for twin in rest:
                self._twin_of[twin] = first


class PrefixCaches:
    """The prefix caches of all tenants over one pool. `num_running` sequences run, in the `active` ones."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[CacheGroup],
        block_size: int,
        tier: Tier | None = None,
        rules: CacheRules | None = None,
    ) -> None:
        self.pool, self.tier, self.rules = pool, tier, rules or CacheRules()
        self.clock: Callable[[], float] = time.monotonic
        self.now = self.clock()
        self.moves: list[Move] = []  # for the next step
        self.queues: Sequence[CacheWatch] = ()  # those of the policy that rank by prefixes
        self.watches: list[CacheWatch] = []  # that stay when it changes
        self.stats = PrefixCacheStats()
        self.num_running = 0
        self.active: set[PrefixCache] = set()
        self.sizes: dict[PrefixCache, int] = {}  # the number of blocks of each one that has cached blocks
        self.floors: dict[str, int] = {}  # blocks by tenant
        self._floored = 0  # the sum of them
        self._groups, self._block_size = groups, block_size
        self._caches: dict[str, PrefixCache] = {}

    def hearers(self) -> Sequence[CacheWatch]:
        """All that hear of blocks."""
        return [*self.queues, *self.watches] if self.queues else self.watches

    @property
    def all(self) -> Iterable[PrefixCache]:
        """Those with blocks or running sequences."""
        return self._caches.values()

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: free ones and evictable ones."""
        return self.pool.num_free + self.pool.num_cached

    def of(self, tenant: str = "") -> PrefixCache:
        """The cache of a tenant, created if missing. An empty one is removed unless a sequence runs in it."""
        cache = self._caches.get(tenant)
        if cache is None:
            cache = self._caches[tenant] = PrefixCache(self, tenant, self._groups, self._block_size)
            cache.floor = self.floors.get(tenant, 0)
        return cache

    def find(self, tenant: str) -> PrefixCache | None:
        """The cache of a tenant, if it has one."""
        return self._caches.get(tenant)

    def path(self, tenant: str, key: bytes, namespace: str, marks: Marks) -> list[BlockNode]:
        """The nodes of the longest known prefix of `key` of a tenant, shortest first; some may lack blocks."""
        cache = self._caches.get(tenant)
        return [] if cache is None else cache.path(key, namespace, marks)

    def set_floors(self, floors: Mapping[str, int]) -> None:
        """Blocks by tenant below which it loses none. Raises ValueError if they are more than the pool has."""
        if (total := sum(floors.values())) > self.pool.num_blocks:
            raise ValueError(f"floors of {total} blocks are more than the {self.pool.num_blocks} of the pool")
        self.floors, self._floored = dict(floors), total
        for tenant, cache in self._caches.items():
            cache.floor = floors.get(tenant, 0)

    def room(self, cache: PrefixCache) -> int:
        """Blocks that a tenant's sequences may take now: those cached by others count except for their shares."""
        if self.pool.num_cached == cache.num_cached:
            return self.available
        share = self._share(cache)
        kept = min(self._idle(cache), share)
        if self._floored:
            kept = max(kept, sum([other.num_safe for other in self._idle_caches(cache)]))
        for other in self.active:
            if other is not cache and other.num_cached:
                most = share + other.floor
                kept += max(0, min(other.num_cached, most + other.num_cached - other.num_blocks))
        return self.available - kept

    def room_alone(self, cache: PrefixCache) -> int:
        """The same for a sequence beside which no other runs: floors of the others are all that is kept."""
        if not self._floored:
            return self.available
        return self.available - sum([other.num_safe for other in self.sizes if other is not cache])

    def evict(self, count: int, taker: PrefixCache) -> None:
        """Make `count` blocks free. Raises ValueError when fewer are available. O(tenants) a block."""
        if count > self.available:
            raise ValueError(f"{count} blocks requested, {self.available} are available")
        while self.pool.num_free < count:
            cache = self._next_to_give(taker)
            cache.evict_oldest()
            self._forget_empty(cache)

    def save(self, *, idle: bool) -> None:
        """Have the tier copy out what it wants of the blocks that can be found."""
        if self.tier is not None:
            self.moves += [Move(block, *name, fill=False) for name, block in self.tier.saves(idle=idle)]

    def pass_time(self) -> None:
        """End pins and forget what is too old; looks at most every LOOK_SECONDS. O(tenants)."""
        now = self.clock()
        if now - self.now >= LOOK_SECONDS:
            self.now = now
            for cache in list(self._caches.values()):
                cache.pass_time()
                self._forget_empty(cache)
            self.stats.pinned_blocks = sum(cache.num_pinned for cache in self._caches.values())

    def clear(self) -> None:
        """Remove everything that no sequence holds."""
        for cache in list(self._caches.values()):
            cache.clear()
            self._forget_empty(cache)

    def audit(self, running: Iterable[Holder], fetching: Iterable[Holder] = ()) -> None:
        """Check all caches, their counts and the pool against each other. `running` and `fetching` give the tenant,
        live blocks and locked node of each such sequence. Raises AuditError saying what is wrong. O(blocks).
        """
        seqs = [(tenant, list(table), tip) for tenant, table, tip in running]
        held = seqs + [(tenant, list(table), tip) for tenant, table, tip in fetching]
        found: list[int] = []
        for tenant, cache in self._caches.items():
            own = [(table, tip) for name, table, tip in held if name == tenant]
            count = sum(name == tenant for name, _, _ in seqs)
            if cache.num_running != count:
                raise AuditError(f"{count} sequences of a tenant run, {cache.num_running} are counted")
            found += cache.audit([table for table, _ in own], [tip for _, tip in own if tip is not None])
        self.pool.audit([table for _, table, _ in held], found)
        counts = [cache.num_running for cache in self._caches.values() if cache.num_running]
        active = {cache for cache in self._caches.values() if cache.num_running}
        if (sum(counts), active) != (self.num_running, self.active) or self.num_running != len(seqs):
            said = f"the books say {self.num_running} in {len(self.active)}"
            raise AuditError(f"{len(seqs)} sequences of {len(counts)} tenants run, {said}")
        blocks = sum(cache.num_blocks for cache in self._caches.values())
        if blocks != self.pool.num_blocks - self.pool.num_free:
            raise AuditError(f"the tenants have {blocks} blocks, {self.pool.num_free} are free")
        if self.sizes != {cache: cache.num_blocks for cache in self._caches.values() if cache.num_cached}:
            raise AuditError("the tenants with cached blocks are not those recorded")

    def _next_to_give(self, taker: PrefixCache) -> PrefixCache:
        """Who gives up a block: the one with the most above its floor. What `taker` has cached goes first where the
        others have no more than their shares."""
        sizes = self.sizes
        if len(sizes) == 1 and not self._floored:
            return next(iter(sizes))
        share = self._share(taker)
        if self._floored:
            sizes = {
                cache: size - cache.floor
                for cache, size in sizes.items()
                if cache is taker or size > cache.floor
            }
        if not sizes:
            raise AuditError("all cached blocks are below the floors of other tenants")
        most = max(sizes, key=sizes.__getitem__)
        if len(sizes) == 1 or sizes.get(taker) == sizes[most]:
            return taker if taker in sizes else most
        idle = self._idle(taker) > share
        over = [
            cache
            for cache, size in sizes.items()
            if cache is not taker and (size > share if cache.num_running else idle)
        ]
        return max(over, key=sizes.__getitem__) if over else taker if taker in sizes else most

    def _idle(self, cache: PrefixCache) -> int:
        """Blocks cached by the tenants, besides this one, of which no sequence runs."""
        running = sum([other.num_cached for other in self.active if other is not cache])
        return self.pool.num_cached - cache.num_cached - running

    def _idle_caches(self, cache: PrefixCache) -> list[PrefixCache]:
        """Those besides this one of which no sequence runs, and that have cached blocks."""
        return [other for other in self.sizes if other is not cache and not other.num_running]

    def _share(self, cache: PrefixCache) -> int:
        """Blocks per running tenant above its floor, and for all others together, once one of this cache runs."""
        return (self.pool.num_blocks - self._floored) // (len(self.active) + (not cache.num_running) + 1)

    def _forget_empty(self, cache: PrefixCache) -> None:
        if not (cache.num_blocks or cache.num_running or cache.num_fetches):
            del self._caches[cache.tenant]
