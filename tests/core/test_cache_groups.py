from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache_kinds import FullGroup, SlidingGroup, StateGroup
from quire.core.cache_groups import CachePlan, Kept, kv_group, plan_groups
from quire.core.capacity import blocks_for, first_live_block, most_tokens, peak_blocks, window_blocks
from quire.types import UnsupportedModelError


def padded_layers(plan: CachePlan) -> int:
    """Layer slots that no layer uses."""
    return sum(plan.layers_per_group - len(group.layers) for group in plan.groups)


def test_equal_layers_make_one_group() -> None:
    plan = plan_groups([0] * 32)
    assert plan.groups == (FullGroup(tuple(range(32))),)
    assert (plan.layers_per_group, padded_layers(plan)) == (32, 0)
    assert plan_groups([4096] * 3).groups == (SlidingGroup((0, 1, 2), 4096),)


def test_the_drawing() -> None:
    plan = plan_groups([48, 48, 48, 48, 0] * 2)
    assert plan.layers_per_group == 2
    assert [(group.layers, group.window) for group in plan.groups] == [
        ((4, 9), 0),
        ((0, 1), 48),
        ((2, 3), 48),
        ((5, 6), 48),
        ((7, 8), 48),
    ]


@pytest.mark.parametrize(
    ("windows", "size", "groups", "padded"),
    [
        ([512] * 22 + [0] * 4, 4, 7, 2),  # 2 would pad nothing but takes 13 groups
        ([128, 0] * 12, 12, 2, 0),  # every size pads nothing: the fewest groups
        ([512] * 5 + [0], 1, 6, 0),
        ([512] * 29 + [0] * 7, 10, 4, 4),
        ([0, 8, 16, 32], 1, 4, 0),
    ],
)
def test_the_least_padding_within_the_limit(windows: list[int], size: int, groups: int, padded: int) -> None:
    plan = plan_groups(windows)
    assert (plan.layers_per_group, len(plan.groups), padded_layers(plan)) == (size, groups, padded)


@settings(max_examples=200)
@given(
    windows=st.lists(st.sampled_from([0, 8, 64]), min_size=1, max_size=40),
    max_groups=st.integers(3, 9),
)
def test_every_layer_is_in_one_group_of_its_window(windows: list[int], max_groups: int) -> None:
    plan = plan_groups(windows, max_groups)
    assert sorted(layer for group in plan.groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in plan.groups for layer in group.layers)
    assert all(0 < len(group.layers) <= plan.layers_per_group for group in plan.groups)
    assert len(plan.groups) <= max_groups
    kinds = [windows.count(window) for window in set(windows)]
    for size in range(1, len(windows) + 1):
        groups = sum(blocks_for(count, size) for count in kinds)
        assert groups > max_groups or groups * size - len(windows) >= padded_layers(plan)


def test_states_are_a_kind_of_their_own() -> None:
    """Layer 2 keeps keys and values and a state, layer 1 nothing."""
    kept = [Kept(0, 8), Kept(2), Kept(2, state_bytes=100), Kept(3, state_bytes=30), Kept(4), Kept(5, 8)]
    plan = plan_groups(kept)
    assert plan.groups == (FullGroup((2, 4)), SlidingGroup((0, 5), 8), StateGroup((2, 3), 130))
    assert plan.places == ((1, 0), (0, 0), (2, 0), (2, 1), (0, 1), (1, 1))
    assert [group.window for group in plan.groups] == [0, 8, 2]
    assert plan_groups([Kept(0, state_bytes=8)]).groups == (StateGroup((0,), 8),)
    with pytest.raises(UnsupportedModelError, match=r"8 distinct ones .* over the limit of 7"):
        plan_groups([*range(8), Kept(8, state_bytes=1)])


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"9 distinct ones .* over the limit of 8"):
        plan_groups(range(9))
    for windows in ([], [-1]):
        with pytest.raises(ValueError, match="windows"):
            plan_groups(windows)


def read_by(position: int, window: int) -> range:
    return range(max(0, position - window + 1) if window else 0, position + 1)


@settings(max_examples=200)
@given(
    window=st.integers(0, 20), size=st.integers(1, 6), computed=st.integers(0, 60), chunk=st.integers(1, 20)
)
def test_block_arithmetic_equals_counting(window: int, size: int, computed: int, chunk: int) -> None:
    first = first_live_block(computed, window, size)
    assert first == read_by(computed, window)[0] // size
    touched = {p // size for q in range(computed, computed + chunk) for p in read_by(q, window)}
    assert min(touched) == first
    if window:
        assert len(touched) <= window_blocks(window, chunk, size)


@settings(max_examples=100)
@given(
    windows=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    size=st.integers(1, 5),
    tokens=st.integers(1, 50),
    chunk=st.integers(1, 60),
)
def test_peak_is_never_passed_on_the_way(windows: list[int], size: int, tokens: int, chunk: int) -> None:
    groups = [kv_group((i,), window) for i, window in enumerate(windows)]
    peak = peak_blocks(groups, tokens, chunk, size)
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        held = sum(blocks_for(end, size) - first_live_block(start, window, size) for window in windows)
        assert held <= peak
    holds = most_tokens(groups, peak, size, 1000)
    assert peak_blocks(groups, holds, 1, size) <= peak
    assert holds == 1000 or peak_blocks(groups, holds + 1, 1, size) > peak
    assert peak_blocks(groups, tokens, 1, size) <= peak
    assert holds >= tokens


@pytest.mark.parametrize(
    ("count", "size", "recent", "groups"),
    [
        (28, 160, 512, [28, 8, 8, 8, 4]),  # room for 28 · 160 = 4,480 bytes: 8 recent layers take 4,096
        (28, 96, 512, [28, 5, 5, 5, 5, 5, 3]),
        (1, 160, 512, [1, 1]),
        (2, 96, 512, [2, 1, 1]),
    ],
)
def test_layers_of_several_sizes_share_blocks(count: int, size: int, recent: int, groups: list[int]) -> None:
    """A layer has rounded tokens, and recent ones in more bytes: no group has more than the largest room."""
    kept = [entry for i in range(count) for entry in (Kept(i, size=size), Kept(i, 128, size=recent))]
    plan = plan_groups(kept)
    assert [len(group.layers) for group in plan.groups] == groups
    room = max(len(group.layers) * (recent if group.window else size) for group in plan.groups)
    ends = [(place + 1) * entry.size for entry, (_, place) in zip(kept, plan.places, strict=True)]
    assert max(ends) == room
    assert [group.window for group in plan.groups] == [0] + [128] * (len(groups) - 1)
