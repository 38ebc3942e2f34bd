"""Check sums of pages: NH as its authors define it, the same on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.page_sums import KEY, PAGE, defined
from quire import _native


@pytest.mark.parametrize("isa", _native.supported_isas())
@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000, 1024, 1025, 5000, 2**16])
def test_sums_are_those_of_the_definition(size: int, isa: str) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert _native.sum_pages(data, KEY, isa=isa) == defined(data.tobytes())
    largest = np.full(size, 255, np.uint8)
    assert _native.sum_pages(largest, KEY, isa=isa) == defined(largest.tobytes())


def test_every_flipped_bit_changes_the_sums_of_its_page_alone() -> None:
    data = np.random.default_rng(2).integers(0, 256, 3 * PAGE, dtype=np.uint8)
    before = np.frombuffer(_native.sum_pages(data, KEY), np.uint64).reshape(3, 4)
    for bit in range(PAGE * 8, 2 * PAGE * 8):
        data[bit // 8] ^= 1 << bit % 8
        after = np.frombuffer(_native.sum_pages(data, KEY), np.uint64).reshape(3, 4)
        data[bit // 8] ^= 1 << bit % 8
        assert (after == before).all(axis=1).tolist() == [True, False, True], bit


def test_what_it_cannot_read_is_refused() -> None:
    data = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="key: not SUM_KEY_BYTES bytes"):
        _native.sum_pages(data, KEY[:-1])
    with pytest.raises(ValueError, match="data: not aligned to 8 bytes"):
        _native.sum_pages(data[1:], KEY)
    with pytest.raises(ValueError, match="cannot run here"):
        _native.sum_pages(data, KEY, isa="none")
