"""From the layers' attention windows to cache groups whose blocks all have the same bytes.

A block of any group holds the KV of `layers_per_group` layers for `block_size` tokens, so one pool of equal
blocks serves full and sliding layers alike and no memory is set aside for either. Ten layers, windows
S S S S F S S S S F (S sliding, F full), two layers a group:

    group    layers     window      block tables of a sequence of 9 blocks, window = 3 blocks
      0      4  9       full        [ 7][ 3][12][ 9][ 1][20][31][ 8][40]    every block is held
      1      0  1       sliding     [ .][ .][ .][ .][ .][ 5][22][13][ 6]    behind the window: given back
      2      2  3       sliding     [ .][ .][ .][ .][ .][17][ 2][33][21]
      3      5  6       sliding     [ .][ .][ .][ .][ .][ 4][18][30][11]
      4      7  8       sliding     [ .][ .][ .][ .][ .][19][26][14][28]

When a kind's layers do not divide by the group size, its last group is short: the missing layers' share of
each block is unused space. The plan wastes as little of it as the limit on groups allows (with 22 sliding
and 4 full layers and at most 8 groups: 4 layers a group, 7 groups, 2 of 28 layer places unused).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.records import dataclass
from quire.types import CacheGroup, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Groups over all layers, and how many layers' KV a block of any group has room for."""

    groups: tuple[CacheGroup, ...]
    layers_per_group: int


def plan_groups(windows: Sequence[int], max_groups: int = 8) -> CachePlan:
    """Group layers of equal window; `windows[i]` is layer i's window in tokens, 0 for full attention.

    Takes the group size that pads the fewest layers, and among those the one with the fewest groups.
    Full layers come first, then windows from narrow to wide; layers stay in order within a kind.
    Raises UnsupportedModelError when there are more distinct windows than `max_groups`, ValueError for no
    layers or a negative window.
    """
    if not windows or min(windows) < 0 or max_groups < 1:
        raise ValueError("windows must be a non-empty list of numbers not below 0, max_groups at least 1")
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if len(kinds) > max_groups:
        raise UnsupportedModelError(
            f"attention windows: {sorted(kinds)} are {len(kinds)} distinct ones, the limit is {max_groups}"
        )

    def cost(size: int) -> tuple[int, int]:
        groups = [-(-len(layers) // size) for layers in kinds.values()]
        return sum(groups) * size - len(windows), sum(groups)

    longest = max(map(len, kinds.values()))
    size = min((s for s in range(1, longest + 1) if cost(s)[1] <= max_groups), key=cost)
    groups = tuple(
        CacheGroup(tuple(layers[start : start + size]), window)
        for window, layers in sorted(kinds.items())
        for start in range(0, len(layers), size)
    )
    return CachePlan(groups, size)
