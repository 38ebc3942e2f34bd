"""From what layers keep of earlier tokens to cache groups whose blocks all have the same bytes.

A block of any group holds the KV of `layers_per_group` layers for `block_size` tokens, or the states of as many after
them. So one pool of equal blocks serves all groups and no memory is set aside for any. Eleven layers that keep
S S S S F S S S S F R (S sliding, F full, R a state), two layers a group:

    group    layers     kind        block tables of a sequence of 9 blocks, window = 3 blocks
      0      4  9       full        [ 7][ 3][12][ 9][ 1][20][31][ 8][40]    every block is held
      1      0  1       sliding     [ .][ .][ .][ .][ .][ 5][22][13][ 6]    blocks behind the window are released
      2      2  3       sliding     [ .][ .][ .][ .][ .][17][ 2][33][21]
      3      5  6       sliding     [ .][ .][ .][ .][ .][ 4][18][30][11]
      4      7  8       sliding     [ .][ .][ .][ .][ .][19][26][14][28]
      5      10         state       [ .][ .][ .][ .][ .][ .][ .][ .][15]    the states after the last token

Where the layers of a kind do not divide by the group size, its last group is short: the missing layers' share of
each block is unused space. The plan wastes as little of it as the limit on groups allows (with 22 sliding
and 4 full layers and at most 8 groups: 4 layers a group, 7 groups, 2 of 28 layer places unused).
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache_kinds import CacheGroup, FullGroup, SlidingGroup, StateGroup
from quire.records import dataclass
from quire.types import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Groups over all layers, and how many layers' KV or states a block of any group has room for.

    `places[i]` is the group of the i-th thing kept, and its place in a block of that group.
    """

    groups: tuple[CacheGroup, ...]
    layers_per_group: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a layer keeps of earlier tokens: keys and values in a window, 0 for full attention, or a state of some
    bytes for each sequence. `layer` is the number of the model's layer, which may keep several things. `size` is the
    place that it takes in a block, beside those of other layers; a state takes the largest."""

    layer: int
    window: int = 0
    state_bytes: int = 0
    size: int = 1


# Where layers take several sizes: room that smaller ones leave unused would cost more than groups do.
MANY_GROUPS = 40


def kv_group(layers: tuple[int, ...], window: int = 0) -> CacheGroup:
    """The group of layers that keep keys and values in one window, 0 for full attention."""
    return SlidingGroup(layers, window) if window else FullGroup(layers)


def plan_groups(kept: Sequence[int | Kept], max_groups: int = 8) -> CachePlan:
    """Group what layers keep by kind; a number is the window of layer i, 0 for full attention.

    Takes the group size that pads the fewest layers, and among those the one with the fewest groups.
    Full layers come first, then windows from narrow to wide, then states; layers stay in order within a kind.
    Raises UnsupportedModelError when there are more kinds than `max_groups`, ValueError for no layers or a
    negative window.
    """
    entries = [Kept(i, entry) if isinstance(entry, int) else entry for i, entry in enumerate(kept)]
    if not entries or min(entry.window for entry in entries) < 0 or max_groups < 1:
        raise ValueError("windows must be a non-empty list of numbers >= 0, and max_groups at least 1")
    most = max(entry.size for entry in entries)
    if min(entry.size for entry in entries) < most:
        max_groups = max(max_groups, MANY_GROUPS)
    kinds: dict[tuple[bool, int, int], list[int]] = {}
    for i, entry in enumerate(entries):
        state = entry.state_bytes > 0
        kinds.setdefault((state, entry.window, most if state else entry.size), []).append(i)
    if len(kinds) > max_groups:
        windows = sorted(window for state, window, _ in kinds if not state)
        limit = max_groups - (len(kinds) - len(windows))
        raise UnsupportedModelError(
            f"attention windows: {len(windows)} distinct ones ({windows}), over the limit of {limit}"
        )

    def cost(room: int) -> tuple[int, int]:
        groups = {kind: -(-len(of_kind) // (room // kind[2])) for kind, of_kind in kinds.items()}
        # recent tokens are few: what counts is the room that others leave unused
        counted = [kind for kind in groups if kind[2] < most] or list(groups)
        padded = sum(groups[kind] * room - len(kinds[kind]) * kind[2] for kind in counted)
        return padded, sum(groups.values())

    rooms = {size * count for (_, _, size), of_kind in kinds.items() for count in range(1, len(of_kind) + 1)}
    room = min((r for r in sorted(rooms) if r >= most and cost(r)[1] <= max_groups), key=cost)
    runs = [
        of_kind[start : start + room // size]
        for (_, _, size), of_kind in sorted(kinds.items())
        for start in range(0, len(of_kind), room // size)
    ]
    places = {i: (group, place) for group, run in enumerate(runs) for place, i in enumerate(run)}
    groups = tuple(_group([entries[i] for i in run]) for run in runs)
    return CachePlan(groups, max(map(len, runs)), tuple(places[i] for i in range(len(entries))))


def _group(kept: list[Kept]) -> CacheGroup:
    layers = tuple(entry.layer for entry in kept)
    if kept[0].state_bytes:
        return StateGroup(layers, sum(entry.state_bytes for entry in kept))
    return kv_group(layers, kept[0].window)
