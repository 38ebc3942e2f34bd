"""Sequences waiting for blocks that are copied in from a tier.

    WAITING ── begin ──▶ FETCHING ── its moves have ended ──▶ WAITING, with the copied blocks in the prefix cache

A fetch holds blocks as a running sequence does: those of the cached prefix that it extends, which stay locked, and the
blocks being filled, which cannot be found yet. Once all its moves have ended it publishes the filled blocks and
releases everything: the sequence then finds them as a normal prefix hit. Blocks evicted or lost in between are
computed, since a sequence fetches only once before it runs. When the sequence is aborted the fetch continues, since its
blocks are still being written.

A sequence whose blocks another fetch is filling joins that: it waits for its end, if that is sooner than to compute
them, and then begins anew. So nothing is read twice, and what comes is used by all that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from quire.cache_kinds import Move
from quire.core.cached_prefix import TOKEN_BYTES, BlockNode, Hit, Holder
from quire.core.capacity import first_live_block
from quire.core.prefix_cache import PrefixCache, PrefixCaches
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, Status
from quire.core.service_estimates import TokenCosts
from quire.core.soft_tokens import block_keys
from quire.core.tier import FILL_SHARE, Name, Tier, chain, root_digest
from quire.records import dataclass
from quire.types import NO_BLOCK


@dataclass(slots=True, eq=False)
class Fetch:
    """The blocks that a sequence waits for: prefix blocks 0 … len(columns) - 1 with one held id per group, NO_BLOCK
    where none is needed. The first len(path) are known to the cache, though blocks of some of their groups may be
    missing. `joined` wait for it, too.
    """

    seq: Sequence
    cache: PrefixCache
    keys: list[bytes]
    path: list[BlockNode]
    columns: list[list[int]]
    node: BlockNode | None = None  # the last of path, or the root of the namespace: locked
    filling: dict[int, tuple[int, int]] = field(default_factory=dict)  # block -> its index and group
    ended: dict[int, bool] = field(default_factory=dict)
    names: list[Name] = field(default_factory=list)  # of the blocks being filled
    joined: list[Sequence] = field(default_factory=list)

    def held(self) -> list[int]:
        """Every block that the fetch holds."""
        return [block for column in self.columns for block in column if block != NO_BLOCK]


class Fetches:
    """The fetches of one scheduler, by the blocks that they fill."""

    def __init__(
        self,
        caches: PrefixCaches,
        config: SchedulerConfig,
        tier: Tier,
        costs: TokenCosts,
    ) -> None:
        self._costs = costs
        self._caches, self._groups, self._size, self._tier = caches, config.groups, config.block_size, tier
        self._by_block: dict[int, Fetch] = {}
        self._by_name: dict[Name, Fetch] = {}  # of the blocks being filled

    def __iter__(self) -> Iterator[Fetch]:
        return iter(dict.fromkeys(self._by_block.values()))

    def __len__(self) -> int:
        """Number of fetches in progress."""
        return len(set(self._by_block.values()))

    @property
    def num_sequences(self) -> int:
        """Number of waiting sequences, without those of aborted requests."""
        return sum(seq.status is Status.FETCHING for seq in self.sequences())

    def sequences(self) -> list[Sequence]:
        """Those that wait, or waited when they were aborted."""
        return [seq for fetch in self for seq in (fetch.seq, *fetch.joined)]

    def begin(self, seq: Sequence, hit: Hit, room: int, running: int) -> bool:
        """Start copying in the tier's part of a waiting sequence's prefix, or join who does; False if that is no longer
        than `hit`, if there is no room, or if all wait longer for it: this sequence while blocks come, and also each
        of those that are `running` while they are computed."""
        if seq.fetched or seq.state.namespace is None:
            return False
        seq.fetched = True
        fetch, digests = self._find(seq)
        if len(fetch.columns) * self._size <= hit.length:
            return False
        known = Hit(0, fetch.path[-1] if fetch.path else None, (fetch.held(),))
        missing = [
            (index, group)
            for group, window in enumerate(group.window for group in self._groups)
            for index in range(
                first_live_block(len(fetch.columns) * self._size, window, self._size), len(fetch.columns)
            )
            if fetch.columns[index][group] == NO_BLOCK
        ]
        saved = self._saved(hit.length, len(fetch.columns) * self._size) * (1 + running)
        names = [(digests[index], group) for index, group in missing]
        if self._join(seq, names, saved, running):
            return True
        if sum([self._block_seconds(name, running) for name in names]) > saved:
            return False
        if not missing or len(missing) + sum(map(self._caches.pool.is_cached, known.live())) > room:
            return False
        fetch.cache.num_fetches += 1
        fetch.node = fetch.cache.acquire(known, seq.state.namespace)
        for block, (index, group) in zip(fetch.cache.allocate(len(missing)), missing, strict=True):
            fetch.columns[index][group] = block
            fetch.filling[block] = index, group
            fetch.names.append((digests[index], group))
            self._by_block[block] = self._by_name[fetch.names[-1]] = fetch
            self._caches.moves.append(Move(block, digests[index], group, fill=True))
        seq.status = Status.FETCHING
        return True

    def _join(self, seq: Sequence, names: list[Name], saved: float, running: int) -> bool:
        """Wait for a fetch that fills one of these blocks, if it ends before they would be computed."""
        fetch = next((self._by_name[name] for name in names if name in self._by_name), None)
        if fetch is None:
            return False
        left = len(fetch.filling) - len(fetch.ended)
        if left * self._block_seconds(fetch.names[-1], running) > saved:
            return False
        fetch.joined.append(seq)
        seq.fetched, seq.status = False, Status.FETCHING
        return True

    def _block_seconds(self, name: Name, running: int) -> float:
        """Until a block has come. Beside sequences blocks have a part of each step; that may be less than one block a
        step, but to compute a prompt for that reason would hold these sequences up by far more."""
        copy = self._tier.copy_seconds(name)
        if not running:
            return copy
        return max(copy, min(self._tier.work_seconds(name) / FILL_SHARE, self._costs.token_seconds()))

    def _saved(self, start: int, end: int) -> float:
        """Seconds that it takes to compute a part of a prompt."""
        return self._costs.prompt_seconds(end) - self._costs.prompt_seconds(start)

    def check(self, filled: Mapping[int, bool]) -> None:
        """Raise ValueError for a block that no move fills."""
        for block in filled:
            if block not in self._by_block:
                raise ValueError(f"block {block} is not being filled")

    def end(self, filled: Mapping[int, bool]) -> list[Sequence]:
        """Moves have ended; returns the sequences that need not wait any longer."""
        ready = []
        for block, came in filled.items():
            fetch = self._by_block.pop(block)
            fetch.ended[block] = came
            if len(fetch.ended) == len(fetch.filling):
                self._publish(fetch)
                for name in fetch.names:
                    self._by_name.pop(name, None)
                ready += [each for each in (fetch.seq, *fetch.joined) if each.status is Status.FETCHING]
        return ready

    def holders(self) -> Iterable[Holder]:
        """The holders of blocks, for audits."""
        return [(fetch.seq.state.tenant, fetch.held(), fetch.node) for fetch in self]

    def _find(self, seq: Sequence) -> tuple[Fetch, list[bytes]]:
        """The longest prefix in cache and tier together, with the cached blocks filled in, and its digests."""
        size, step, tenant = self._size, self._size * TOKEN_BYTES, seq.state.tenant
        namespace = seq.state.namespace or ""
        cache, key = self._caches.of(tenant), seq.key(0, seq.usable_prefix())
        keys = block_keys(key, step, seq.state.marks)
        path = cache.path(key, namespace, seq.state.marks)
        digests, digest, depth = [], root_digest(self._tier.fingerprint, tenant, namespace), 0
        runs = [0] * len(self._groups)  # blocks without a gap up to here
        for index, block_key in enumerate(keys):
            node = path[index] if index < len(path) else None
            digest = chain(digest, block_key) if node is None else node.digest
            digests.append(digest)
            for group in range(len(runs)):
                there = node is not None and node.value[group] != NO_BLOCK
                runs[group] = runs[group] + 1 if there or self._tier.holds((digest, group)) else 0
            needed = [
                index + 1 - first_live_block((index + 1) * size, group.window, size) for group in self._groups
            ]
            if all(run >= need for run, need in zip(runs, needed, strict=True)):
                depth = index + 1
            elif any(not run and not group.window for run, group in zip(runs, self._groups, strict=True)):
                break
        columns = [[NO_BLOCK] * len(self._groups) for _ in range(depth)]
        for group, window in enumerate(group.window for group in self._groups):
            for index in range(first_live_block(depth * size, window, size), min(depth, len(path))):
                columns[index][group] = path[index].value[group]
        return Fetch(seq, cache, keys[:depth], path[:depth], columns), digests

    def _publish(self, fetch: Fetch) -> None:
        """Publish the filled blocks up to the first missing one, and release everything."""
        cache, node = fetch.cache, fetch.node
        assert node is not None
        lost = [fetch.filling[block][0] for block, came in fetch.ended.items() if not came]
        whole = min(lost, default=len(fetch.columns))
        for block, (index, group) in fetch.filling.items():
            if index < min(whole, len(fetch.path)):
                cache.put(fetch.path[index], group, block)
        for index in range(len(fetch.path), whole):
            node = cache.publish(node, fetch.keys[index], fetch.columns[index])
        cache.release_all(node, fetch.held())
        cache.num_fetches -= 1
