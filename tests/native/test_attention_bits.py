"""Attention gives the same bits in any batch, chunk, block size and on any number of threads, split or not."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.attention import Shape
from helpers.long_context import (
    assert_nan_stays_with_its_sequence,
    assert_same_bits_however_cut,
    assert_unwritten_positions_are_seen,
    last_logits,
)
from quire import _native
from quire.cache_kinds import KVType

ISAS = _native.supported_isas()
KV = get_args(KVType)
SHAPES = [
    Shape(8, 1, 24, softcap=3.0),
    Shape(2, 2, 40, window=1500, sinks=True),
    Shape(16, 1, 16, window=60),
]
# Every shape and format on this machine's best instruction set; on the others each format with one of the shapes.
CASES = [
    (isa, shape, kv)
    for i, isa in enumerate(ISAS)
    for j, kv in enumerate(KV)
    for k, shape in enumerate(SHAPES)
    if i == 0 or (i + j) % len(SHAPES) == k
]


@pytest.mark.parametrize(("isa", "shape", "kv"), CASES, ids=str)
def test_long_context_on_many_threads(shape: Shape, kv: KVType, isa: str) -> None:
    assert_same_bits_however_cut(shape, kv, isa)


def test_another_order_of_partitions_would_be_seen() -> None:
    """Negative control: float32 sums folded in another order have other bits, in this very comparison."""
    wide = last_logits(SHAPES[0], "f32", threads=1, chunks=[4], isa="baseline")
    other = last_logits(SHAPES[0], "f32", threads=1, chunks=[4], isa=ISAS[0])
    if len(ISAS) > 1:
        assert not np.array_equal(wide.view(np.uint32), other.view(np.uint32))
        assert np.abs(wide - other).max() < 1e-3


def test_a_position_that_was_never_written_is_seen() -> None:
    for kv in KV:
        assert_unwritten_positions_are_seen(SHAPES[0], kv)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_numbers_that_are_not_finite_stay_with_their_sequence(kv: KVType, isa: str) -> None:
    assert_nan_stays_with_its_sequence(Shape(4, 2, 24), kv, isa)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40_000)), min_size=1, max_size=6),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 4, 16, 60]),
    window=st.sampled_from([0, 100, 5000]),
    threads=st.integers(1, 9),
)
def test_every_visible_partition_is_worked_on_once(
    rows: list[tuple[int, int]], kv_heads: int, group: int, window: int, threads: int
) -> None:
    starts = np.cumsum([0] + [count for count, _ in rows]).tolist()
    positions = [context + i for count, context in rows for i in range(count)]
    parts = _native.attention_parts(
        (64, group * kv_heads, kv_heads, window), threads, 41_000, starts, positions
    )
    seen: dict[tuple[int, int, int], list[int]] = {}
    for row, begin, end, first, last, split, head, last_head in parts:
        assert starts[row] <= begin < end <= starts[row + 1]
        assert first < last
        assert 0 <= head < last_head <= kv_heads
        assert (last_head - head) * (end - begin) * group <= max(48, group)
        assert (split >= 0) <= (threads > 1)
        for token in range(begin, end):
            for h in range(head, last_head):
                seen.setdefault((row, token, h), []).extend(range(first, last))
    assert len(seen) == len(positions) * kv_heads
    for (_, token, _), found in seen.items():
        lowest = max(0, positions[token] - window + 1) if window else 0
        needed = range(lowest // 1024, positions[token] // 1024 + 1)
        assert len(found) == len(set(found))
        assert set(needed) <= set(found)


def test_one_long_row_keeps_every_thread_busy() -> None:
    """Decode of a long and a short sequence: no part takes more than half of its thread's share, cut in partitions or
    heads.
    """
    for threads, kv_heads in ((2, 1), (3, 2), (8, 1), (8, 4)):
        shape = (128, 8 * kv_heads, kv_heads, 0)
        for position in (32_767, 1_023):
            parts = _native.attention_parts(shape, threads, 40_000, [0, 1, 2], [position, 9])
            partitions = position // 1024 + 1
            longest = max((part[4] - part[3]) * (part[7] - part[6]) for part in parts if part[0] == 0)
            assert longest <= max(1, partitions * kv_heads / threads / 2)
    (whole,) = _native.attention_parts((128, 16, 2, 0), 1, 40_000, [0, 1], [32_767])
    assert whole == [0, 0, 1, 0, 32, -1, 0, 2]


def test_a_window_skips_positions_outside() -> None:
    (part,) = _native.attention_parts((64, 8, 8, 512), 1, 40_000, [0, 1], [32_000])
    assert part == [0, 0, 1, 30, 32, -1, 0, 8]
