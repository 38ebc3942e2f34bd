"""Philox4x32-10 known answers, and what seeds promise."""

from __future__ import annotations

import numpy as np
import pytest

from quire import _native
from quire.types import SamplingParams

from .reference import new_seq, sample_one

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, (ONES, ONES), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: tuple[int, int], expected: list[int]) -> None:
    assert _native.philox4x32(counter, *key) == expected


def test_uniform_is_53_bits_of_the_block() -> None:
    seed, sample, position = 0x0123456789ABCDEF, 5, 2**33 + 7
    low, high, *_ = _native.philox4x32(
        [position % 2**32, position >> 32, sample, 0], seed % 2**32, seed >> 32
    )
    assert _native.uniform(seed, sample, position) == ((high << 32 | low) >> 11) / 2**53


def test_uniform_range_and_moments() -> None:
    u = np.array([_native.uniform(seed, 0, p) for seed in range(20) for p in range(1000)])
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(u.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


def test_seed_sample_and_position_all_matter() -> None:
    logits = np.zeros(100000, np.float32)
    params = SamplingParams()
    base = sample_one(logits, new_seq(params, seed=1, sample_index=0), 10)
    assert sample_one(logits, new_seq(params, seed=1, sample_index=0), 10) == base
    assert sample_one(logits, new_seq(params, seed=2, sample_index=0), 10) != base
    assert sample_one(logits, new_seq(params, seed=1, sample_index=1), 10) != base
    assert sample_one(logits, new_seq(params, seed=1, sample_index=0), 11) != base
    assert sample_one(logits, new_seq(params, seed=1 + 2**32, sample_index=0), 10) != base


def test_negative_seed_is_its_64_bit_pattern() -> None:
    logits = np.zeros(100000, np.float32)
    assert sample_one(logits, new_seq(SamplingParams(), seed=-1)) == sample_one(
        logits, new_seq(SamplingParams(), seed=2**64 - 1)
    )
