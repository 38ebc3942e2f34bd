"""Blocks that were evicted and come back from a tier hold what they held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.backends import BACKENDS, Backend

from .running import RamTier, Rig, check_same, requests


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_with_blocks_from_a_tier_every_bit_is_that_without(backend: Backend) -> None:
    """A pool for two or three sequences, so that prefixes are evicted between two runs of the same requests; with one
    step in flight, and with two."""
    first = requests(9)
    second = [replace(one, request_id=f"again {one.request_id}") for one in first]
    plain = Rig(backend, enable_prefix_caching=False, num_blocks=60)
    expected = [plain.run(first), plain.run(second)]
    for flights in (1, 2):
        tier = RamTier()
        rig = Rig(backend, tier=tier, num_blocks=14, steps_in_flight=flights)
        for asked, made in zip((first, second), expected, strict=True):
            check_same(rig.run(asked), made, backend)
        assert tier.got > 10
        assert tier.got < tier.asked


def test_a_tier_without_prefix_caching_is_refused() -> None:
    with pytest.raises(ValueError, match="tier: needs prefix caching"):
        Rig(tier=RamTier(), enable_prefix_caching=False)
