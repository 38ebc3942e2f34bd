"""Waiting sequences, those with the longest cached prefix first.

The prompts of waiting sequences are a trie of blocks. A node knows whether the prefix cache has its block, and has the
sequences below it by arrival. The longest hit of a sequence is the deepest cached node on its path. So the next
sequence is the first one of some cached node:

    system ─┬─ tools ──┬─ q1        cached: system, tools       rank of q1, q2: arrival - lead(2 blocks)
            │          └─ q2                                    rank of q3:     arrival - lead(1 block)
            └─ q3

When a block is published or evicted, one node changes, and with it one entry of a heap, however many sequences wait
behind it; the queue is never scanned. Arrival and departure cost O(blocks of the prompt), like the lookup of a prompt.
With windows the tree may have blocks of which a hit cannot make use; they count all the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.core.cached_prefix import TOKEN_BYTES, BlockNode
from quire.core.policy import Policy
from quire.core.prefix_cache import PrefixCaches
from quire.core.sequence import Rank, Sequence, Status
from quire.core.soft_tokens import block_keys

_Entry = tuple[Rank, int, Sequence]  # arrival and number of the sequence, number of the entry


class _Node:
    """A block of prompts that wait. `best` is the rank of its valid entry in the heap of nodes."""

    __slots__ = ("best", "cached", "children", "depth", "heap", "key", "live", "parent")

    def __init__(self, key: bytes, parent: _Node | None) -> None:
        self.key, self.parent = key, parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[bytes, _Node] = {}
        self.heap: list[_Entry] = []
        self.live = 0  # sequences that wait below it
        self.cached: BlockNode | None = None
        self.best: Rank | None = None

    def first(self) -> Sequence | None:
        """The one that arrived first of those that still wait."""
        heap = self.heap
        while heap and heap[0][2].status is not Status.WAITING:
            heapq.heappop(heap)
        return heap[0][2] if heap else None


class PrefixQueue:
    """See core.waiting_queues.Queue. Pairs, and what has no prefix to share, rank by arrival. It gets no followers."""

    def __init__(self, policy: Policy, caches: PrefixCaches, block_size: int) -> None:
        self._policy, self._caches, self._size = policy, caches, block_size
        self._roots: dict[tuple[str, bytes], _Node] = {}
        self._known: dict[BlockNode, _Node] = {}  # blocks of the cache that waiting prompts begin with
        self._leaf: dict[Sequence, _Node] = {}
        self._heap: list[tuple[Rank, int, _Node]] = []
        self._entries = 0
        self._alone = _Node(b"", None)  # sequences without a prefix to share

    def __len__(self) -> int:
        return len(self._leaf)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._leaf)

    def push(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        node, state = self._alone, seq.state
        path = [node]
        if state.namespace is not None and seq.partner is None:
            where = state.tenant, state.namespace.encode("utf-8", "surrogatepass")
            node = self._roots.get(where) or self._roots.setdefault(where, _Node(where[1], None))
            key = seq.key(0, seq.usable_prefix())
            cached = self._caches.path(state.tenant, key, state.namespace, state.marks)
            path = [node]
            for index, block in enumerate(block_keys(key, self._size * TOKEN_BYTES, state.marks)):
                child = node.children.get(block)
                if child is None:
                    child = node.children[block] = _Node(block, node)
                if index < len(cached) and child.cached is None:
                    child.cached, self._known[cached[index]] = cached[index], child
                path.append(node := child)
        self._leaf[seq] = node
        self._entries += 1
        entry = (seq.rank[2:], self._entries, seq)
        deepest = path[0]
        for node in path:
            node.live += 1
            heapq.heappush(node.heap, entry)
            if node.cached is not None:
                deepest = node
        self._enter(deepest)

    def peek(self) -> Sequence | None:
        node = self._top()
        return None if node is None else node.first()

    def pop(self) -> Sequence:
        node = self._top()
        seq = None if node is None else node.first()
        if node is None or seq is None:
            raise IndexError("the waiting queue is empty")
        seq.rank = self._rank(node, seq)
        self._leave(seq, Status.RUNNING)
        return seq

    def discard(self, seq: Sequence) -> None:
        self._leave(seq, Status.ENDED)

    def published(self, tenant: str, parent: BlockNode, node: BlockNode) -> None:
        """The cache has a block more. `parent` may be the root of its namespace."""
        above = self._known.get(parent)
        if above is None and parent.parent is not None and parent.parent.parent is None:
            above = self._roots.get((tenant, parent.key))
        child = None if above is None else above.children.get(node.key)
        if child is not None:
            child.cached, self._known[node] = node, child
            self._enter(child)

    def removed(self, node: BlockNode) -> None:
        """A block, with none below it, has left the cache."""
        found = self._known.pop(node, None)
        if found is not None:
            found.cached = found.best = None
            if found.parent is not None:
                self._enter(found.parent)

    def _rank(self, node: _Node, seq: Sequence) -> Rank:
        arrival = seq.state.request.arrival
        return (seq.rank[0], arrival - self._policy.lead(node.depth * self._size), arrival, seq.seq_id)

    def _enter(self, node: _Node) -> None:
        """Put a node in its place among those from which the next sequence is taken."""
        first = node.first()
        if first is None:
            return
        rank = self._rank(node, first)
        if node.best is None or rank < node.best:
            node.best = rank
            self._entries += 1
            heapq.heappush(self._heap, (rank, self._entries, node))

    def _top(self) -> _Node | None:
        """The node whose first sequence is next."""
        heap = self._heap
        while heap:
            rank, number, node = heap[0]
            first = node.first() if node.best == rank else None
            if first is None or (node.cached is None and node.parent is not None):
                heapq.heappop(heap)
                if node.best == rank:
                    node.best = None
            elif (now := self._rank(node, first)) > rank:
                node.best = now
                heapq.heapreplace(heap, (now, number, node))
            else:
                return node
        return None

    def _leave(self, seq: Sequence, status: Status) -> None:
        at: _Node | None = self._leaf.pop(seq)
        seq.status = status
        while at is not None:
            at.live -= 1
            above = at.parent
            if not at.live:
                at.heap = []
                if at.cached is not None:
                    del self._known[at.cached]
                    at.cached = None
                if above is not None:
                    del above.children[at.key]
            elif len(at.heap) > 2 * at.live + 64:
                # One that waits again has an entry of the first time, too.
                waiting = {entry[2]: entry for entry in at.heap if entry[2].status is Status.WAITING}
                at.heap = list(waiting.values())
                heapq.heapify(at.heap)
            at = above
        if len(self._heap) > 4 * len(self._known) + 4 * len(self._roots) + 64:
            self._heap = [entry for entry in self._heap if entry[2].best == entry[0] and entry[2].live]
            heapq.heapify(self._heap)
        if len(self._roots) > 2 * len(self._leaf) + 64:
            self._roots = {where: root for where, root in self._roots.items() if root.live}
