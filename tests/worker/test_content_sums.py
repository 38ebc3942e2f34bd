"""Check sums of contents: what they cover, and that they show nothing of the key."""

from __future__ import annotations

import numpy as np
import pytest

from quire import _native
from quire.worker.content_sums import SUM_BYTES, ContentSums
from quire.worker.kv_wire import sums_with

NAME, KEY = b"n" * 24, b"k" * 32
CONTENT = np.random.default_rng(1).integers(0, 256, 3 * 32_768 + 5, np.uint8).tobytes()


def test_a_sum_is_of_all_bits_the_length_the_name_and_the_key() -> None:
    sums = ContentSums(KEY)
    whole = sums.of(NAME, CONTENT)
    assert len(whole) == SUM_BYTES
    assert sums.fits(NAME, CONTENT, whole)
    changed = bytearray(CONTENT)
    found = {whole}
    for bit in [*range(0, 8 * len(CONTENT), 9973), 8 * len(CONTENT) - 1]:
        changed[bit // 8] ^= 1 << bit % 8
        found.add(sums.of(NAME, changed))
        assert not sums.fits(NAME, changed, whole)
        changed[bit // 8] ^= 1 << bit % 8
    exchanged = CONTENT[1024:2048] + CONTENT[:1024] + CONTENT[2048:]  # pages
    others = [exchanged, CONTENT[32_768:65_536] + CONTENT[:32_768] + CONTENT[65_536:]]
    others += [
        CONTENT + bytes(1),
        CONTENT + bytes(1000),
        CONTENT[:-1],
        bytes(1024),
        bytes(1025),
        bytes(32_768),
    ]
    made = [*found, *(sums.of(NAME, each) for each in others)]
    made += [sums.of(b"m" * 24, CONTENT), ContentSums(b"l" * 32).of(NAME, CONTENT)]
    assert len(set(made)) == len(made)


def test_keys_of_the_wire_are_of_the_shared_key_and_the_layout() -> None:
    made = [
        sums_with(key, mark).of(NAME, CONTENT)
        for key in (b"a" * 16, b"b" * 16)
        for mark in (b"m" * 64, b"n" * 64)
    ]
    assert len(set(made)) == 4
    assert sums_with(b"a" * 16, b"m" * 64).of(NAME, CONTENT) == made[0]


def test_what_is_shown_does_not_add_up() -> None:
    """NH is a sum of products, so that contents which differ in one place show its key by their difference, if they are
    sums of NH that are shown. A check sum is not one: differences of equal changes are unlike each other."""
    sums, base = ContentSums(KEY), bytes(2048)
    key = bytes(range(256)) * 4 + bytes(_native.SUM_KEY_BYTES - 1024)

    def shown(place: int, value: int, *, plain: bool) -> int:
        content = bytearray(base)
        content[place] = value
        if plain:
            found = _native.sum_pages(np.frombuffer(content, np.uint8), key)
        else:
            found = sums.of(NAME, content)
        return int.from_bytes(found[:8], "little")

    for plain in (True, False):
        steps = {(shown(8, n + 1, plain=plain) - shown(8, n, plain=plain)) % 2**64 for n in range(1, 100)}
        assert len(steps) == (1 if plain else 99)


@pytest.mark.parametrize("size", [1, 1024, 1025, 32_768, 32_769, 100_000])
def test_the_sums_of_sums_are_those_of_two_calls(size: int) -> None:
    rng = np.random.default_rng(size)
    data = rng.integers(0, 256, size, np.uint8)
    key, above = (rng.integers(0, 256, _native.SUM_KEY_BYTES, np.uint8).tobytes() for _ in range(2))
    for isa in _native.supported_isas():
        below = np.frombuffer(_native.sum_pages(data, key, isa=isa), np.uint8)
        assert _native.sum_pages(data, key, above, isa) == _native.sum_pages(below, above, isa=isa)
    with pytest.raises(ValueError, match="above: not SUM_KEY_BYTES bytes"):
        _native.sum_pages(data, key, b"short")
