"""What a prefix cache finds, counts and goes by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.core.capacity import first_live_block
from quire.core.radix import Node
from quire.records import dataclass
from quire.types import NO_BLOCK

TOKEN_BYTES = 4
BlockNode = Node[list[int]]
Holder = tuple[str, Iterable[int], BlockNode | None]


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that every group can provide. `blocks[group]` are table entries, NO_BLOCK behind a window."""

    length: int  # tokens, a whole number of blocks
    node: BlockNode | None  # the deepest node, None for no hit
    blocks: tuple[list[int], ...]

    def live(self) -> list[int]:
        """The blocks that a sequence with this hit will hold."""
        return [block for group in self.blocks for block in group if block != NO_BLOCK]


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up, how many of them were found, and how many of these in parts of blocks; blocks that
    requests asked to keep, as of the last look."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    pinned_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What is kept. `by_uses`: by how often it is used, too; `ttl`: seconds without use after which it is forgotten;
    `pin_share`: the part of the pool of which each tenant may pin blocks."""

    by_uses: bool = False
    ttl: float | None = None
    pin_share: float = 0.5


class CacheWatch(Protocol):
    """Hears which blocks can be found: a queue that ranks by cached prefixes."""

    def published(self, tenant: str, parent: BlockNode, node: BlockNode) -> None:
        """A block became known below another one, or below the root of its namespace."""

    def removed(self, node: BlockNode) -> None:
        """A block, with none below it, is not known any more."""


def usable_depth(path: Sequence[BlockNode], sliding: Sequence[tuple[int, int]], size: int) -> int:
    """How many blocks of a path make a hit that the groups with windows allow: those have blocks up to its end.

    `sliding` has numbers and windows of these groups, `size` is that of a block, both in tokens.
    """
    runs = [0] * len(sliding)  # blocks present without a gap up to here
    best = 0
    for depth, node in enumerate(path, 1):
        usable = True
        for s, (group, window) in enumerate(sliding):
            runs[s] = runs[s] + 1 if node.value[group] != NO_BLOCK else 0
            first = first_live_block(depth * size, window, size)
            usable = usable and runs[s] >= depth - first
        if usable:
            best = depth
    return best
