"""Random co-batches give one hash of logits (benchmarks/results/same_bits.md), and what cuts sums by shape does not."""

from __future__ import annotations

import pytest
from benchmarks.same_bits import CASES, Counts, compare

SOME = ["windows, int4, cache int8", "experts and windows, bf16"]


def hashes(found: dict[str, Counts]) -> set[int]:
    return {len(counts.hashes) for counts in found.values()}


def test_random_co_batches_have_one_hash() -> None:
    found = compare(SOME, 10, first=45)
    assert hashes(found) == {1}
    for what in ("prompt tokens hit", "preemptions", "drafts accepted", "blocks from a tier"):
        assert sum(counts.numbers[what] for counts in found.values()) > 0, what


def test_a_library_that_cuts_sums_by_shape_has_more() -> None:
    (counts,) = compare(["windows, f32"], 5, control="torch").values()
    assert len(counts.hashes) > 1


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_ten_thousand_co_batches_have_one_hash(case: str) -> None:
    assert hashes(compare([case], 500, first=100_000)) == {1}
