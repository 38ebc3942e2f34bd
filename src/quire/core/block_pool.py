"""The accounts of the KV cache: which blocks are free, held or cached.

A block is `block_size` tokens of KV for the layers of one cache group. The pool knows only ids and reference counts; it
never sees tokens, tensors or windows. Every block is in exactly one state:

    free    ── take ──▶  held  ── release to zero ──▶  free      (cannot be found again)
                          │  ▲
                          │  └── hold (prefix hit) ──┐
                          └── release to zero ──▶  cached         (published: a prefix cache can find it)
                                                     │
    free  ◀── unpublish (evicted) ───────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, compress

from quire.types import QuireError

FREE, CACHED = 0, -1  # of `BlockPool.states`


class AuditError(QuireError):
    """The accounts contradict each other, the block tables or the cache."""


class BlockPool:
    """Block ids 0..num_blocks-1 with reference counts. Every operation is O(1) per block.

    Blocks from `top` on were never taken: those that were are taken again first. `reach`, if there is one, is called
    with the new `top` before it rises.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: {num_blocks} is below the minimum of 1")
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.top = 0
        self.reach: Callable[[int], None] | None = None
        # Last in, first out: the block freed last is most likely still in the machine's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._published = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    def take(self, count: int) -> list[int]:
        """Move `count` free blocks to held, with one reference each. Raises ValueError when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks requested, {len(self._free)} of {self.num_blocks} are free")
        if count <= 0:
            return []
        taken = self._free[-count:]
        if self.reach is not None and (top := max(taken) + 1) > self.top:
            self.reach(top)
            self.top = top
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each held or cached block. Raises ValueError for a free block."""
        references, published = self._references, self._published
        for block in blocks:
            if references[block] == 0:
                if not published[block]:
                    raise ValueError(f"block {block} is free and cannot be shared")
                self.num_cached -= 1
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Drop a reference of each held block; at zero it becomes cached if published, else free.

        Returns the ids that became cached, in order. Raises ValueError for a block that is not held.
        """
        references, published, free = self._references, self._published, self._free
        cached = []
        for block in blocks:
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} is released but not held")
            references[block] = left
            if left == 0:
                if published[block]:
                    cached.append(block)
                else:
                    free.append(block)
        self.num_cached += len(cached)
        return cached

    def publish(self, block: int) -> None:
        """Mark a held block as findable by a prefix cache. Raises ValueError if it is free or already published."""
        if not self._references[block] or self._published[block]:
            raise ValueError(f"block {block} is not held or is already published")
        self._published[block] = 1

    def unpublish(self, block: int) -> bool:
        """Mark a block as no longer findable by a prefix cache; a cached one becomes free, and then it is true."""
        if not self._published[block]:
            raise ValueError(f"block {block} is not published")
        self._published[block] = 0
        if self._references[block]:
            return False
        self.num_cached -= 1
        self._free.append(block)
        return True

    def forget_top(self) -> None:
        """As if no block had been taken yet, once all are free; else nothing changes."""
        if len(self._free) == self.num_blocks:
            self._free.sort(reverse=True)
            self.top = 0

    def is_cached(self, block: int) -> bool:
        """Whether the block is published and not held."""
        return self._references[block] == 0 and self._published[block] == 1

    @property
    def num_touched(self) -> int:
        """Blocks from the first on, up to the last one that was ever taken, as far as that is known."""
        return self.num_blocks if self.reach is None else self.top

    def states(self, stride: int) -> list[int]:
        """Every `stride`-th touched block from the first on: FREE, CACHED, or the number of its references."""
        end = self.num_touched
        pairs = zip(self._references[:end:stride], self._published[:end:stride], strict=True)
        return [references or (CACHED if known else FREE) for references, known in pairs]

    def audit(
        self, tables: Iterable[Iterable[int]] | None = None, published: Iterable[int] | None = None
    ) -> None:
        """Check the accounts in O(num_blocks); raises AuditError naming the first wrong block.

        `tables` are the live entries of every running block table; the reference counts must match them.
        `published` are the blocks that a prefix cache can find; the flags must match them.
        """
        every, free = range(self.num_blocks), set(self._free)
        if self.reach is not None and not free.issuperset(range(self.top, self.num_blocks)):
            raise AuditError(f"a block from {self.top} on is in use, where none was taken yet")
        if len(free) != len(self._free):
            raise AuditError(f"blocks {_repeated(self._free)} are on the free list twice")
        if (fewest := min(self._references)) < 0:
            raise AuditError(f"block {self._references.index(fewest)} has {fewest} references")
        held, known = set(compress(every, self._references)), set(compress(every, self._published))
        if wrong := free.symmetric_difference(held | known).symmetric_difference(every):
            block = min(wrong)
            state = f"free {block in free}, held {block in held}, published {block in known}"
            raise AuditError(f"block {block} is not in exactly one state: {state}")
        cached = len(known - held)
        if cached != self.num_cached:
            raise AuditError(f"{cached} blocks are cached but the count says {self.num_cached}")
        if tables is not None:
            self._audit_tables(tables)
        if published is not None:
            self._audit_published(list(published))

    def _audit_tables(self, tables: Iterable[Iterable[int]]) -> None:
        held = Counter(chain.from_iterable(tables))
        strange = [block for block in held if not 0 <= block < self.num_blocks]
        if strange:
            raise AuditError(f"block tables name {strange}, which do not exist")
        expected = [0] * self.num_blocks
        for block, count in held.items():
            expected[block] = count
        if expected != self._references:
            pairs = enumerate(zip(expected, self._references, strict=True))
            block, (count, references) = next(each for each in pairs if each[1][0] != each[1][1])
            raise AuditError(f"block {block} has {references} references, in {count} block tables")

    def _audit_published(self, published: list[int]) -> None:
        if len(set(published)) != len(published):
            raise AuditError(f"blocks {_repeated(published)} are in the cache twice")
        said = set(compress(range(self.num_blocks), self._published))
        if said != set(published):
            raise AuditError(f"published flags and cache differ on {sorted(said ^ set(published))}")


def _repeated(blocks: list[int]) -> list[int]:
    return [block for block, count in Counter(blocks).items() if count > 1]
