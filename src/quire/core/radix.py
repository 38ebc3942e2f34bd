"""A radix tree over byte strings in whole blocks, with locks and eviction of leaves.

Shape: one node per block. A compressed tree (one node per run of blocks, split where two keys part) has fewer nodes to
visit, but every owner of this tree acts on single blocks: it drops one, locks up to one, moves one to another tier.
With one node per block nothing is ever split, a node never changes identity, and a match costs 0.1 to 0.2 microseconds
per block (`benchmarks/scheduler.py`), far below the cost of computing one.

Cost: match and insert O(blocks of the key); lock, unlock, touch O(1); eviction O(log leaves).

* A lock on a node protects its ancestors for free, since only leaves are evicted.
* A use is stamped on the deepest node only. The last use of an ancestor is the latest stamp below it, and an ancestor
  becomes a leaf only after everything below it has gone, so the stamp is passed to the parent when a leaf is removed:
  exact LRU without walking the path at each use.
* Least frequently used first (LFU): uses are counted likewise, those of an ancestor are the sum of those below. To them
  is added, at each use, the count of the leaf that was evicted last, so that what was used much and long ago goes
  (dynamic aging; Arlitt et al., "Evaluating content management techniques for Web proxy caches", 1999).
* Pinned nodes go when no other is left. A pin ends by itself.
* Candidates wait in a heap, each node at most once; entries that became stale by a lock, a child or a newer stamp are
  corrected when they reach the top.

Radix trees for prefix reuse: SGLang, RadixAttention (arXiv 2312.07104).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from quire.core.soft_tokens import NO_MARKS, Marks, block_keys

V = TypeVar("V")
_MANY = 16  # children that are kept in order to find the nearest


class Node(Generic[V]):
    """One block of a key. `value` and `digest` belong to the owner of the tree; everything else only to the tree."""

    __slots__ = (
        "age", "children", "digest", "key", "last_use", "locks", "order", "parent", "pinned", "queued", "used", "uses",
        "value",
    )  # fmt: skip
    value: V  # not set on the root of a namespace
    digest: bytes  # of the whole prefix, if there is a tier

    def __init__(self, key: bytes, parent: Node[V] | None, last_use: int) -> None:
        self.key = key
        self.parent = parent  # None once the node has left the tree
        self.children: dict[bytes, Node[V]] = {}
        self.locks = 0
        self.last_use = last_use
        self.used = 0.0  # the time of the last use
        self.uses = 0
        self.age = 0  # that of the tree at the last use
        self.pinned = 0.0  # until this time
        self.order: list[bytes] | None = None  # keys of children without a mark, once they are many
        self.queued = False


# The place of a leaf in the order of eviction (pinned, count, last use), tie-break, leaf.
_Entry = tuple[bool, int, int, int, Node[V]]


class TreeBranch(NamedTuple):
    """Nodes that follow each other without a fork: the index of the branch above, -1 for none; their number; and how
    often they are locked."""

    parent: int
    nodes: int
    locks: int


class RadixTree(Generic[V]):
    """Maps keys (bytes, in blocks of `block_bytes`) to one value per block, separately in each namespace.

    A trailing part of a key shorter than a block is ignored. Not thread-safe.
    """

    def __init__(self, block_bytes: int, by_uses: bool = False, ages: bool = False) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes: {block_bytes} is below the minimum of 1")
        self.now = 0.0  # set by the owner, if it goes by time
        self.num_pinned = 0
        self._by_uses, self._age = by_uses, 0
        self._pins: list[tuple[float, int, Node[V]]] = []
        self._ages: list[tuple[float, int, Node[V]]] | None = (
            [] if ages else None
        )  # last uses of leaves, or before
        self.block_bytes = block_bytes
        self._top: Node[V] = Node(b"", None, 0)  # its children are the roots of the namespaces
        self._size = 0
        self._clock = 0
        self._heap: list[_Entry[V]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return self._size

    def tick(self) -> int:
        """A stamp later than all stamps so far."""
        self._clock += 1
        return self._clock

    def root(self, namespace: str = "") -> Node[V]:
        """The root of a namespace, created if missing. It is removed when childless, unless locked."""
        name = _encode(namespace)
        root = self._top.children.get(name)
        if root is None:
            root = self._top.children[name] = Node(name, self._top, self._clock)
        return root

    def match(self, key: bytes, namespace: str = "", marks: Marks = NO_MARKS) -> list[Node[V]]:
        """The nodes of the longest known prefix of `key`, shortest first. Changes nothing.

        marks: what is appended to the keys of some blocks.
        """
        path: list[Node[V]] = []
        node = self._top.children.get(_encode(namespace))
        if node is None:
            return path
        step = self.block_bytes
        if marks:
            return _follow(node, block_keys(key, step, marks))
        for start in range(0, len(key) - step + 1, step):
            node = node.children.get(key[start : start + step])
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, key: bytes, values: Sequence[V], namespace: str = "") -> Node[V]:
        """Make `key` known with one value per block; returns its deepest node, freshly used.

        Known blocks keep their values. Raises ValueError when the counts differ or there is no whole
        block.
        """
        step = self.block_bytes
        if len(values) != len(key) // step or not values:
            raise ValueError(f"{len(values)} values for {len(key) // step} whole blocks")
        node = self.root(namespace)
        for index, value in enumerate(values):
            block = key[index * step : (index + 1) * step]
            child = node.children.get(block)
            node = self.extend(node, block, value) if child is None else child
        self.touch(node)
        return node

    def extend(self, parent: Node[V], block: bytes, value: V, *, locked: bool = False) -> Node[V]:
        """Add one block below `parent`, perhaps locked once; its key may end with a mark. Raises ValueError when it is
        there already or is not a block."""
        if len(block) < self.block_bytes or block in parent.children:
            raise ValueError("the block has the wrong length or is already known")
        self._clock += 1
        node: Node[V] = Node(block, parent, self._clock)
        node.value = value
        node.used, node.age = self.now, self._age
        parent.children[block] = node
        if parent.order is not None and len(block) == self.block_bytes:
            insort(parent.order, block)
        self._size += 1
        if locked:
            node.locks = 1  # it becomes a candidate when it is unlocked
        else:
            self._offer(node)
        return node

    def lock(self, node: Node[V]) -> None:
        """Protect `node`, and so every ancestor, from eviction until unlock was called as often."""
        node.locks += 1

    def unlock(self, node: Node[V]) -> None:
        """Reverse one lock; the node counts as used now. Raises ValueError when it is not locked."""
        if not node.locks:
            raise ValueError("the node is not locked")
        node.locks -= 1
        self.touch(node)

    def touch(self, node: Node[V]) -> None:
        """Count `node`, and so every ancestor, as used now."""
        self._clock = node.last_use = self._clock + 1
        node.used, node.age = self.now, self._age
        node.uses += 1
        if not node.locks and not node.children:
            self._offer(node)

    def pin(self, node: Node[V], until: float, most: int) -> None:
        """Keep `node` and its ancestors longer than others up to a time, but at most `most` nodes of the tree: those
        nearest to the root first. O(depth)."""
        path = []
        at: Node[V] | None = node
        while at is not None and at.parent is not None and at.parent is not self._top:
            path.append(at)
            at = at.parent
        for each in reversed(path):
            if not each.pinned:
                if self.num_pinned >= most:
                    return
                self.num_pinned += 1
            if until > each.pinned:
                each.pinned = until
                self._pushes += 1
                heapq.heappush(self._pins, (until, self._pushes, each))
        if len(self._pins) > 2 * self.num_pinned + 64:
            self._pins = [entry for entry in self._pins if entry[2].pinned == entry[0]]
            heapq.heapify(self._pins)

    def unpin(self) -> None:
        """End the pins whose time has come."""
        ended = set()
        while self._pins and self._pins[0][0] <= self.now:
            until, _, node = heapq.heappop(self._pins)
            if node.pinned == until:
                self._unpin(node)
                ended.add(node)
        if any(node.queued for node in ended):  # their places are before those of their entries
            self._heap = [self._entry(entry[-1]) if entry[-1] in ended else entry for entry in self._heap]
            heapq.heapify(self._heap)

    def unused(self, since: float) -> Node[V] | None:
        """An unlocked leaf without a pin that was last used at `since` or before; None without one. For a tree that
        keeps ages."""
        ages = self._ages
        while ages and ages[0][0] <= since:
            _, _, node = heapq.heappop(ages)
            if node.parent is None or node.locks or node.children or node.used > since:
                continue
            if not node.pinned:
                return node
            self._pushes += 1
            heapq.heappush(ages, (node.pinned, self._pushes, node))
        return None

    def _unpin(self, node: Node[V]) -> None:
        if node.pinned:
            node.pinned = 0.0
            self.num_pinned -= 1

    def nearest(self, node: Node[V], key: bytes) -> tuple[Node[V], int] | None:
        """The child without a mark whose key has the longest beginning in common with `key`, and its length in bytes.
        O(log children), after the first time.

        What a marked key has in common with another may be placeholders alone.
        """
        children = node.children
        if len(children) < _MANY:
            near = self._plain(node)
        else:
            if node.order is None:
                node.order = sorted(self._plain(node))
            # Of keys in order, one of the two next to a text has the most in common with it.
            at = bisect_left(node.order, key)
            near = node.order[max(0, at - 1) : at + 1]
        found = ((children[each], _common(key, each)) for each in near)
        return max(found, key=itemgetter(1), default=None)

    def _plain(self, node: Node[V]) -> list[bytes]:
        """The keys of its children that end without a mark."""
        return [key for key in node.children if len(key) == self.block_bytes]

    def oldest(self) -> Node[V] | None:
        """The unlocked leaf to be evicted next; None when there is none."""
        heap = self._heap
        while heap:
            pinned, count, last_use, _, node = heap[0]
            if node.parent is None or node.locks or node.children:
                heapq.heappop(heap)
                node.queued = False
            elif (
                last_use == node.last_use
                and pinned == (node.pinned > 0)
                and (not self._by_uses or count == node.age + node.uses)
            ):
                return node
            else:
                heapq.heapreplace(heap, self._entry(node))
        return None

    def remove(self, node: Node[V]) -> None:
        """Remove an unlocked leaf from the tree. Raises ValueError for any other node."""
        parent = node.parent
        if parent is None or parent is self._top or node.locks or node.children:
            raise ValueError("only an unlocked leaf can be removed")
        del parent.children[node.key]
        if parent.order is not None and len(node.key) == self.block_bytes:
            del parent.order[bisect_left(parent.order, node.key)]
        node.parent = None
        self._size -= 1
        if node.pinned:
            self._unpin(node)
        if node.last_use > parent.last_use:  # and with it the others, which only rise
            parent.last_use, parent.used, parent.age = node.last_use, node.used, node.age
        parent.uses += node.uses
        if not parent.children and not parent.locks:
            self._offer(parent)
        if len(self._heap) > 2 * self._size + 64:
            self._forget_removed()

    def evict(self) -> Node[V] | None:
        """Remove and return the unlocked leaf that is next; None when every leaf is locked."""
        node = self.oldest()
        if node is not None:
            self.grow_old(node)
            self.remove(node)
        return node

    def grow_old(self, node: Node[V]) -> None:
        """A leaf is about to be evicted to make room: uses before that count less from now on."""
        if self._by_uses:
            self._age = max(self._age, node.age + node.uses)

    def remove_namespace(self, namespace: str) -> list[Node[V]]:
        """Remove a namespace and return its nodes. Raises ValueError when one of them is locked."""
        root = self._top.children.get(_encode(namespace))
        if root is None:
            return []
        nodes = list(_below(root))
        if root.locks or any(node.locks for node in nodes):
            raise ValueError(f"namespace {namespace!r} is in use")
        del self._top.children[root.key]
        for node in (root, *nodes):
            self._unpin(node)
            node.parent = None
            node.children, node.order = {}, None
        self._size -= len(nodes)
        if len(self._heap) > 2 * self._size + 64:
            self._forget_removed()
        return nodes

    def nodes(self) -> Iterator[Node[V]]:
        """Every node that has a value, parents first."""
        for root in self._top.children.values():
            yield from _below(root)

    def roots(self, most: int) -> dict[str, Node[V]]:
        """The roots of at most so many namespaces, by name."""
        names = islice(self._top.children.items(), most)
        return {name.decode("utf-8", "surrogatepass"): root for name, root in names}

    def branches(self, most_nodes: int) -> list[TreeBranch]:
        """The tree without its keys: runs of nodes that have one child each, parents first. It looks at `most_nodes`
        nodes and leaves the rest out.
        """
        found: list[TreeBranch] = []
        todo = deque((root, -1) for root in self._top.children.values())
        while todo and most_nodes > 0:
            start, parent = todo.popleft()
            for first in start.children.values():
                end, length, locks = first, 1, first.locks
                while len(end.children) == 1 and length < most_nodes:
                    (end,) = end.children.values()
                    length, locks = length + 1, locks + end.locks
                most_nodes -= length
                found.append(TreeBranch(parent, length, locks))
                todo.append((end, len(found) - 1))
        return found

    def audit(self) -> None:
        """Check the tree's own accounts in O(nodes). Raises ValueError saying what is wrong."""
        queued = {id(entry[-1]) for entry in self._heap}
        if len(queued) != len(self._heap):
            raise ValueError("a node waits twice for eviction")
        nodes = list(self.nodes())
        for node in nodes:
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node or node.locks < 0:
                raise ValueError("a node is missing from its parent, or has negative locks")
            if node.queued != (id(node) in queued):
                raise ValueError("a node's queued flag disagrees with the heap")
            if node.order is not None and node.order != sorted(self._plain(node)):
                raise ValueError("the ordered keys of a node are not those of its children")
            if not node.children and not node.locks and not node.queued:
                raise ValueError("an unlocked leaf can never be evicted")
        pinned = sum(node.pinned > 0 for node in nodes)
        if pinned != self.num_pinned:
            raise ValueError(f"{pinned} nodes are pinned but the count says {self.num_pinned}")
        if len(nodes) != self._size:
            raise ValueError(f"{len(nodes)} nodes are in the tree but the count says {self._size}")
        if any(not (root.children or root.locks) for root in self._top.children.values()):
            raise ValueError("an empty namespace was left behind")

    def _offer(self, node: Node[V]) -> None:
        if node.parent is self._top:
            del self._top.children[node.key]
            node.parent = None
            return
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, self._entry(node))
        if self._ages is not None:
            self._pushes += 1
            heapq.heappush(self._ages, (node.used, self._pushes, node))
            if len(self._ages) > 4 * self._size + 64:
                leaves = [each for each in self.nodes() if not each.children]
                self._ages = [(each.used, i, each) for i, each in enumerate(leaves, self._pushes)]
                self._pushes += len(leaves)
                heapq.heapify(self._ages)

    def _entry(self, node: Node[V]) -> _Entry[V]:
        self._pushes += 1
        count = node.age + node.uses if self._by_uses else 0
        return node.pinned > 0, count, node.last_use, self._pushes, node

    def _forget_removed(self) -> None:
        # Nodes removed by name stay in the heap until they reach the top; keep them from outnumbering the rest.
        self._heap = [entry for entry in self._heap if entry[-1].parent is not None]
        heapq.heapify(self._heap)


def _follow(node: Node[V], keys: Sequence[bytes]) -> list[Node[V]]:
    """The nodes below `node` that have these keys, one below the other, as far as there are any."""
    path: list[Node[V]] = []
    for key in keys:
        child = node.children.get(key)
        if child is None:
            break
        path.append(node := child)
    return path


def _common(first: bytes, second: bytes) -> int:
    """Bytes that two keys have in common at their beginnings."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _encode(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")


def _below(root: Node[V]) -> Iterator[Node[V]]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
