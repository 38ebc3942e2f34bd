"""From the attention windows of layers to cache groups whose blocks all have the same size.

A block of any group holds the KV of `layers_per_group` layers for `block_size` tokens, so one pool of equal
blocks serves full and sliding layers alike, and no memory is reserved for either. Ten layers, windows
S S S S F S S S S F (S sliding, F full), two layers per group:

    group    layers     window      block tables of a sequence of 9 blocks, window = 3 blocks
      0      4  9       full        [ 7][ 3][12][ 9][ 1][20][31][ 8][40]    every block is held
      1      0  1       sliding     [ .][ .][ .][ .][ .][ 5][22][13][ 6]    blocks behind the window are released
      2      2  3       sliding     [ .][ .][ .][ .][ .][17][ 2][33][21]
      3      5  6       sliding     [ .][ .][ .][ .][ .][ 4][18][30][11]
      4      7  8       sliding     [ .][ .][ .][ .][ .][19][26][14][28]

When the layers of a kind do not divide by the group size, its last group is short: the share of the missing layers in
each block is unused. The plan wastes as little as the limit on groups allows (with 22 sliding and 4 full layers and at
most 8 groups: 4 layers per group, 7 groups, 2 of 28 layer slots unused).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.records import dataclass
from quire.types import CacheGroup, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Groups over all layers, and the number of layers whose KV fits in a block of any group."""

    groups: tuple[CacheGroup, ...]
    layers_per_group: int

    @property
    def padded_layers(self) -> int:
        """Layer slots that no layer uses."""
        return sum(self.layers_per_group - len(group.layers) for group in self.groups)


def plan_groups(windows: Sequence[int], max_groups: int = 8) -> CachePlan:
    """Group layers by equal windows; `windows[i]` is the window of layer i in tokens, 0 for full attention.

    Picks the group size that pads the fewest layers, and among those the one with the fewest groups.
    Full layers come first, then windows from narrow to wide; layers of one kind stay in order.
    Raises UnsupportedModelError when there are more distinct windows than `max_groups`, ValueError for no layers or a
    negative window.
    """
    if not windows or min(windows) < 0 or max_groups < 1:
        raise ValueError("windows must be a non-empty list of numbers >= 0, and max_groups at least 1")
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if len(kinds) > max_groups:
        raise UnsupportedModelError(
            f"attention windows: {len(kinds)} distinct ones ({sorted(kinds)}), over the limit of {max_groups}"
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
