from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.radix import Node, RadixTree

BLOCK = 2
keys = st.binary(max_size=12).map(lambda raw: bytes(byte % 2 for byte in raw))
namespaces = st.sampled_from(["", "a", "\ud800"])


def path_of(node: Node[int]) -> bytes:
    parts = []
    while node.parent is not None and node.parent.parent is not None:
        parts.append(node.key)
        node = node.parent
    return b"".join(reversed(parts))


def whole(key: bytes) -> bytes:
    return key[: len(key) // BLOCK * BLOCK]


@settings(max_examples=200)
@given(known=st.lists(st.tuples(keys, namespaces), max_size=12), asked=st.lists(st.tuples(keys, namespaces)))
def test_match_is_the_longest_known_prefix(
    known: list[tuple[bytes, str]], asked: list[tuple[bytes, str]]
) -> None:
    tree: RadixTree[int] = RadixTree(BLOCK)
    first_value: dict[tuple[str, bytes], int] = {}
    for count, (key, namespace) in enumerate(known):
        if len(key) < BLOCK:
            continue
        deepest = tree.insert(key, [count] * (len(key) // BLOCK), namespace)
        assert path_of(deepest) == whole(key)
        for end in range(BLOCK, len(key) + 1, BLOCK):
            first_value.setdefault((namespace, key[:end]), count)
        tree.audit()
    assert len(tree) == len(first_value)
    for key, namespace in [*asked, *known]:
        ends = range(BLOCK, len(key) + 1, BLOCK)
        longest = max((end for end in ends if (namespace, key[:end]) in first_value), default=0)
        path = tree.match(key, namespace)
        assert [path_of(node) for node in path] == [key[:end] for end in ends if end <= longest]
        assert [node.value for node in path] == [
            first_value[namespace, key[:end]] for end in ends if end <= longest
        ]


class BruteForce:
    """The same tree as a dictionary: every use stamps the whole path, eviction scans everything."""

    def __init__(self) -> None:
        self.stamp: dict[bytes, int] = {}
        self.locks: dict[bytes, int] = {}
        self.clock = 0

    def use(self, key: bytes) -> None:
        self.clock += 1
        for end in range(BLOCK, len(key) + 1, BLOCK):
            self.stamp[key[:end]] = self.clock

    def evict(self) -> bytes | None:
        leaves = [
            key
            for key in self.stamp
            if not self.locks.get(key)
            and not any(other[: len(key)] == key for other in self.stamp if other != key)
        ]
        if not leaves:
            return None
        oldest = min(leaves, key=lambda key: self.stamp[key])
        del self.stamp[oldest]
        return oldest


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "insert", "touch", "lock", "unlock", "evict", "remove"]), keys)
    )
)
def test_eviction_is_exactly_least_recently_used(moves: list[tuple[str, bytes]]) -> None:
    tree, model = RadixTree[int](BLOCK), BruteForce()
    for move, key in moves:
        path = tree.match(key)
        if move == "insert" and len(key) >= BLOCK:
            tree.insert(key, [0] * (len(key) // BLOCK))
            model.use(whole(key))
        elif move == "evict":
            node = tree.oldest()
            expected = path_of(node) if node else None
            assert tree.evict() is node
            assert model.evict() == expected
        elif path:
            found = path_of(path[-1])
            if move == "touch":
                tree.touch(path[-1])
                model.use(found)
            elif move == "lock":
                tree.lock(path[-1])
                model.locks[found] = model.locks.get(found, 0) + 1
            elif move == "remove" and not path[-1].children and not path[-1].locks:
                tree.remove(path[-1])
                del model.stamp[found]
            elif move == "unlock" and model.locks.get(found):
                tree.unlock(path[-1])
                model.locks[found] -= 1
                model.use(found)
        tree.audit()
        assert {path_of(node) for node in tree.nodes()} == model.stamp.keys()


def test_a_lock_keeps_its_ancestors() -> None:
    tree: RadixTree[int] = RadixTree(1)
    deep = tree.insert(b"abc", [1, 2, 3])
    tree.insert(b"axy", [1, 4, 5])
    tree.lock(deep)
    evicted = []
    while node := tree.evict():
        evicted.append(node.value)
    assert evicted == [5, 4]
    tree.unlock(deep)
    assert [node.value for node in iter(tree.evict, None)] == [3, 2, 1]
    assert len(tree) == 0


def test_a_parent_was_used_when_its_removed_child_was() -> None:
    tree: RadixTree[int] = RadixTree(1)
    child = tree.insert(b"ab", [1, 2])
    other = tree.insert(b"c", [3])
    tree.touch(child)
    tree.remove(child)
    assert tree.evict() is other


def test_an_empty_namespace_leaves_nothing_behind() -> None:
    tree: RadixTree[int] = RadixTree(1)
    root = tree.root("a")
    tree.lock(root)
    tree.remove(tree.extend(root, b"x", 1))
    assert tree.root("a") is root
    tree.unlock(root)
    tree.audit()
    assert tree.root("a") is not root


def test_dropping_a_namespace() -> None:
    tree: RadixTree[int] = RadixTree(1)
    for index in range(200):
        node = tree.insert(bytes([1, index]), [1, 2], "gone")
    kept = tree.insert(b"\x01\x02", [3, 4], "kept")
    tree.lock(node)
    with pytest.raises(ValueError, match="in use"):
        tree.remove_namespace("gone")
    tree.unlock(node)
    assert len(tree.remove_namespace("gone")) == 201
    assert tree.remove_namespace("gone") == tree.remove_namespace("never") == []
    tree.audit()
    assert len(tree._heap) < 70  # dropped nodes do not stay in the queue
    assert tree.match(b"\x01\x02", "gone") == []
    assert tree.evict() is kept


def test_locks_and_touches_do_not_grow_the_heap() -> None:
    tree: RadixTree[int] = RadixTree(1)
    node = tree.insert(b"ab", [1, 2])
    for _ in range(1000):
        tree.lock(node)
        tree.unlock(node)
        tree.touch(node)
    assert len(tree._heap) <= 2


@pytest.mark.parametrize(
    "misuse",
    [
        lambda tree, node: tree.insert(b"ab", [1]),
        lambda tree, node: tree.insert(b"", []),
        lambda tree, node: tree.extend(node, b"", 1),
        lambda tree, node: tree.extend(node.parent, node.key, 1),
        lambda tree, node: tree.unlock(node),
        lambda tree, node: tree.remove(node.parent),
        lambda tree, node: tree.remove(node.parent.parent),
        lambda tree, node: (tree.lock(node), tree.remove(node)),
        lambda tree, node: RadixTree(0),
    ],
)
def test_misuse_is_refused(misuse: Callable[[RadixTree[int], Node[int]], object]) -> None:
    tree: RadixTree[int] = RadixTree(1)
    node = tree.insert(b"xy", [1, 2])
    with pytest.raises(ValueError):
        misuse(tree, node)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda tree, node: setattr(tree, "_size", 5),
        lambda tree, node: setattr(node, "queued", False),
        lambda tree, node: setattr(node, "locks", -1),
        lambda tree, node: setattr(node, "key", b"q"),
        lambda tree, node: (
            tree._heap.clear() or setattr(node, "queued", False) or setattr(node.parent, "queued", False)
        ),
        lambda tree, node: tree._heap.append(tree._heap[0]),
        lambda tree, node: tree.root("empty"),
    ],
)
def test_the_audit_sees_corruption(corrupt: Callable[[RadixTree[int], Node[int]], object]) -> None:
    tree: RadixTree[int] = RadixTree(1)
    node = tree.insert(b"xy", [1, 2])
    tree.audit()
    corrupt(tree, node)
    with pytest.raises(ValueError):
        tree.audit()


def test_deep_trees_need_no_recursion() -> None:
    tree: RadixTree[int] = RadixTree(1)
    tree.insert(bytes(50_000), [0] * 50_000)
    assert len(tree.match(bytes(50_000))) == 50_000
    tree.audit()
    assert len(tree.remove_namespace("")) == 50_000


def test_branches_show_the_shape_without_keys() -> None:
    tree: RadixTree[int] = RadixTree(2)
    tree.insert(b"aabbcc", [1, 2, 3])
    tree.lock(tree.insert(b"aabbdd", [1, 2, 4]))
    tree.insert(b"xx", [5], "other")
    assert tree.branches(99) == [(-1, 2, 0), (-1, 1, 0), (0, 1, 0), (0, 1, 1)]
    assert sum(one.nodes for one in tree.branches(99)) == len(tree)
    assert tree.branches(2) == [(-1, 2, 0)]
    assert tree.branches(1) == [(-1, 1, 0)]
