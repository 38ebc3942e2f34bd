"""The blocks of running sequences: prefix hits, growth, publishing, and releasing blocks that left the window.

The scheduler asks whether something fits and requests it; block ids, windows and the prefix cache stay in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from quire.core.block_pool import AuditError, BlockPool
from quire.core.cached_prefix import TOKEN_BYTES, CacheRules, Hit, Holder
from quire.core.capacity import blocks_for, first_live_block, window_blocks
from quire.core.prefix_cache import PrefixCache, PrefixCaches
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import NEVER, BlockTable, RequestState, Sequence
from quire.core.soft_tokens import block_keys
from quire.core.tier import Tier
from quire.types import NO_BLOCK

LEAST_COPIED = 4  # tokens: fewer are computed as fast as a block is copied


class SequenceBlocks:
    """The block tables of the sequences of one scheduler, over one pool and the prefix caches of its tenants."""

    def __init__(self, config: SchedulerConfig, tier: Tier | None = None) -> None:
        self.pool = BlockPool(config.num_blocks)
        rules = CacheRules(config.cache_by_uses, config.cache_ttl, config.cache_pin_share)
        self.caches = PrefixCaches(self.pool, config.groups, config.block_size, tier, rules)
        # Source and target of blocks to copy before the next step. A source may be taken by a row of the same step: it
        # is read before any row runs. So each copy is made after those before it.
        self.copies: list[tuple[int, int]] = []
        self._partial = config.copy_partial and config.enable_prefix_caching
        self.num_groups = len(config.groups)
        self._size = config.block_size
        self._key = Struct(f"{config.block_size}i").pack  # of a block, see Sequence.key
        self._keep = config.enable_prefix_caching
        self._budget = config.max_num_batched_tokens
        self._sliding = tuple((g, group.window) for g, group in enumerate(config.groups) if group.window)
        self._num_full = self.num_groups - len(self._sliding)
        self._no_hit = Hit(0, None, tuple([] for _ in config.groups))

    def find(self, seq: Sequence) -> Hit:
        """The prefix of a waiting sequence that need not be computed. Changes nothing."""
        usable, namespace = seq.usable_prefix(), seq.state.namespace
        if namespace is None or usable < self._size:
            return self._no_hit
        return self.caches.of(seq.state.tenant).match(seq.key(0, usable), usable, namespace, seq.state.marks)

    def start(self, seq: Sequence, hit: Hit) -> None:
        """Give a waiting sequence a table that begins with the hit; `computed` becomes the length of the hit."""
        namespace = seq.state.namespace
        cache = seq.cache = self.caches.of(seq.state.tenant)
        cache.enter()
        if namespace is not None:
            seq.node = cache.acquire(hit, namespace)
        table = seq.table = BlockTable(self.num_groups)
        for g, blocks in enumerate(hit.blocks):
            table.blocks[g].extend(blocks)
        for g, window in self._sliding:
            table.first_live[g] = first_live_block(hit.length, window, self._size)
        table.capacity = seq.computed = hit.length
        seq.published = hit.length // self._size
        self._set_wake(seq)

    def needs(self, seq: Sequence, hit: Hit) -> int:
        """Blocks that a waiting sequence takes for its known tokens."""
        return self.outstanding(seq, hit.length, hit) + self.unheld(hit)

    def growth(self, seq: Sequence) -> int:
        """Blocks that each running sequence may take before a waiting one has got further than it was: one preempted is
        computed again over many steps."""
        steps = len(seq.tokens) // self._budget if seq.preemptions else 0
        return self.num_groups * (1 + steps // self._size)

    def part(self, seq: Sequence, end: int) -> tuple[list[int], int]:
        """Blocks that begin with the tokens after the hit of a sequence that just started and runs up to `end`, and how
        many tokens of them it may use; none where copying gains too little."""
        if not self._partial or seq.node is None or seq.state.marks or seq.partner is not None:
            return [], 0
        start = seq.computed
        blocks, count = _cache(seq).nearest(
            seq.node, seq.key(start, min(start + self._size, len(seq.tokens)))
        )
        count = min(count, seq.usable_prefix() - start)
        return (list(blocks), count) if LEAST_COPIED <= count < end - start else ([], 0)

    def copy_part(self, seq: Sequence, blocks: list[int], count: int) -> None:
        """Have the first `count` tokens after the hit copied into the sequence's own block, which it must have."""
        index = seq.computed // self._size
        for table, source in zip(seq.table.blocks, blocks, strict=True):
            if table[index] != source:  # else it was evicted for this very place
                self.copies.append((source, table[index]))
        seq.computed += count

    def keep(self, seq: Sequence) -> None:
        """Pin what a running sequence has published, if its request asks for it."""
        seconds = seq.state.request.terms.cache_seconds
        if seconds and seq.node is not None and self._keep:
            _cache(seq).pin(seq.node, seconds)

    def missing(self, seq: Sequence, end: int) -> int:
        """Blocks to take before the sequence can compute up to position `end`, past its capacity, over all groups."""
        return blocks_for(end - seq.table.capacity, self._size) * self.num_groups

    def room(self, seq: Sequence) -> int:
        """Blocks that a sequence may take now: all available ones if no other runs but that of its pair."""
        caches = self.caches
        other = seq.partner
        if caches.num_running <= (seq.cache is not None) + (other is not None and other.cache is not None):
            return caches.room_alone(seq.cache or caches.of(seq.state.tenant))
        return caches.room(seq.cache or caches.of(seq.state.tenant))

    def unheld(self, hit: Hit) -> int:
        """Number of unheld blocks in a hit: taking the hit reduces the available blocks by that many."""
        is_cached = self.pool.is_cached
        return sum(is_cached(block) for block in hit.live())

    def reachable_end(self, seq: Sequence, room: int) -> int:
        """The position up to which a running sequence could compute if it took `room` more blocks."""
        return seq.table.capacity + room // self.num_groups * self._size

    def grow(self, seq: Sequence, end: int) -> tuple[list[int], ...]:
        """Take the missing blocks up to position `end`; returns the new ids per group."""
        table = seq.table
        count = blocks_for(end - table.capacity, self._size)
        taken = _cache(seq).allocate(count * self.num_groups)
        new = []
        for g, known in enumerate(table.blocks):
            ids = taken[g * count : (g + 1) * count]
            known.extend(ids)
            new.append(ids)
        table.capacity += count * self._size
        return tuple(new)

    def outstanding(self, seq: Sequence, computed: int, hit: Hit | None = None) -> int:
        """Blocks still needed to compute every known token of `seq` from `computed` on.

        For a waiting sequence `hit` is where it would start. A sliding group releases blocks as it goes, so it never
        needs more than its window and the chunk of one step.
        """
        held = seq.table.blocks[0] if hit is None else hit.blocks[0]
        ahead = blocks_for(len(seq.tokens), self._size) - len(held)
        if ahead <= 0:
            return 0
        total = ahead * self._num_full
        chunk = min(self._budget, len(seq.tokens) - computed)
        for _, window in self._sliding:
            live = len(held) - first_live_block(computed, window, self._size)
            total += max(0, min(ahead, window_blocks(window, chunk, self._size) - live))
        return total

    def publish_and_release(self, seq: Sequence) -> None:
        """After `computed` moved: publish blocks that are now full, and release those behind every window."""
        table, size, state = seq.table, self._size, seq.state
        cache = _cache(seq)
        if (node := seq.node) is not None:
            first, end = seq.published, min(seq.computed // size, state.share_limit)
            for index in range(first, end):
                key = self._key(*seq.tokens[index * size : (index + 1) * size])
                if state.marks:
                    key += state.marks.get(index, b"")
                node = cache.publish(node, key, [blocks[index] for blocks in table.blocks])
            seq.node, seq.published = node, max(first, end)
        for g, window in self._sliding:
            first, live = first_live_block(seq.computed, window, size), table.first_live[g]
            if first > live:
                cache.release(table.blocks[g][live:first])
                table.first_live[g] = first
        self._set_wake(seq)

    def give_back(self, seq: Sequence) -> None:
        """Release everything that a running sequence holds. Its published blocks stay findable."""
        cache = _cache(seq)
        if seq.node is None:
            cache.release(seq.table.live())
        else:
            cache.release_all(seq.node, seq.table.live())
            seq.node = None
        cache.exit()
        seq.cache = None
        seq.table = BlockTable(self.num_groups)
        seq.computed = seq.published = 0
        seq.wake = NEVER

    def end_request(self, state: RequestState) -> None:
        """All samples of a request have ended: without prefix caching its blocks are no longer findable."""
        if state.namespace is not None and not self._keep:
            self.caches.of(state.tenant).forget_namespace(state.namespace)

    def audit(self, running: Iterable[Sequence], fetching: Iterable[Holder]) -> None:
        """Check the table of every running sequence, then pool and caches; raises AuditError."""
        seqs = list(running)
        for seq in seqs:
            self._audit_table(seq)
        self.caches.audit(((seq.state.tenant, seq.table.live(), seq.node) for seq in seqs), fetching)

    def _audit_table(self, seq: Sequence) -> None:
        table = seq.table
        if any(len(blocks) * self._size != table.capacity for blocks in table.blocks):
            raise AuditError(f"sequence {seq.seq_id}: groups differ in length from {table.capacity} tokens")
        if seq.computed > table.capacity:
            raise AuditError(f"sequence {seq.seq_id}: {seq.computed} computed, room for {table.capacity}")
        windows = dict(self._sliding)
        for g, first in enumerate(table.first_live):
            if first != first_live_block(seq.computed, windows.get(g, 0), self._size):
                raise AuditError(f"sequence {seq.seq_id}: group {g} is live from block {first}")
            if NO_BLOCK in table.blocks[g][first:]:
                raise AuditError(f"sequence {seq.seq_id}: group {g} lacks a block it reads")
        path: list[bytes] = []
        node = seq.node
        while node is not None and len(path) < seq.published:
            path.append(node.key)
            node = node.parent
        key = seq.key(0, seq.published * self._size)
        if seq.node is not None and path[::-1] != block_keys(key, self._size * TOKEN_BYTES, seq.state.marks):
            raise AuditError(f"sequence {seq.seq_id}: its node in the cache does not match its tokens")

    def _set_wake(self, seq: Sequence) -> None:
        wake = NEVER
        if seq.node is not None and seq.published < seq.state.share_limit:
            wake = (seq.published + 1) * self._size
        for g, window in self._sliding:
            wake = min(wake, (seq.table.first_live[g] + 1) * self._size + window - 1)
        if seq.state.held_back and seq.computed < seq.prompt_len:
            wake = min(wake, seq.prompt_len)
        seq.wake = wake


def _cache(seq: Sequence) -> PrefixCache:
    """The cache of a running sequence."""
    assert seq.cache is not None
    return seq.cache
