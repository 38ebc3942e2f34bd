"""Observed frequencies against exact probabilities, by Pearson's chi-square with fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.executor.sampler import HostSampler
from quire.types import SamplingParams

from .reference import as_rows, kept, new_seq

DRAWS = 20000


def frequencies(logits: np.ndarray, params: SamplingParams, *, by: str) -> np.ndarray:
    """Counts of DRAWS tokens whose uniforms differ by seed, by position or by sample index."""
    rows = 500
    sampler = HostSampler(len(logits), rows)
    tiled = np.tile(as_rows(logits), (rows, 1))
    slots = np.arange(rows, dtype=np.int32)
    counts = np.zeros(len(logits), np.int64)
    for batch in range(DRAWS // rows):
        for slot in range(rows):
            at = batch * rows + slot
            seq = new_seq(params, seed=at if by == "seed" else 7, sample_index=at if by == "sample" else 0)
            sampler.add(slot, seq)
        positions = slots + batch * rows if by == "position" else np.full(rows, 11, np.int32)
        tokens = sampler.sample({"logits": tiled}, slots, positions.astype(np.int32)).token_ids
        counts += np.bincount(tokens, minlength=len(logits))
        for slot in range(rows):
            sampler.drop(slot)
    return counts


def p_value(counts: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Upper tail of chi-square; cells expected below 8 are pooled. Counts outside `ids` make it 0."""
    if counts.sum() != counts[ids].sum():
        return 0.0
    expected = probabilities * counts.sum()
    rare = expected < 8
    observed = np.append(counts[ids][~rare], counts[ids][rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


LOGITS = np.random.default_rng(3).normal(0, 1.5, 300).astype(np.float32)
MODES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=20),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.5, top_k=60, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("by", ["seed", "position", "sample"])
@pytest.mark.parametrize("mode", MODES)
def test_frequencies(mode: str, by: str) -> None:
    counts = frequencies(LOGITS, MODES[mode], by=by)
    assert p_value(counts, *kept(LOGITS, MODES[mode])) > 1e-3


def test_chi_square_sees_a_wrong_distribution() -> None:
    """Negative control: a slightly wrong temperature, k or p is detected."""
    counts = frequencies(LOGITS, SamplingParams(temperature=0.9, top_k=40), by="seed")
    assert p_value(counts, *kept(LOGITS, SamplingParams(temperature=0.9, top_k=40))) > 1e-3
    for wrong in (
        SamplingParams(temperature=1.0, top_k=40),
        SamplingParams(temperature=0.9, top_k=39),
        SamplingParams(temperature=0.9, top_k=44),
        SamplingParams(temperature=0.9, top_k=40, top_p=0.9),
    ):
        assert p_value(counts, *kept(LOGITS, wrong)) < 1e-6


def test_successive_positions_are_independent() -> None:
    """Pairs of tokens at neighbouring positions of one sequence fill the product distribution."""
    logits = np.zeros(8, np.float32)
    sampler = HostSampler(8, 1)
    sampler.add(0, new_seq(SamplingParams(), seed=99))
    slot = np.zeros(1, np.int32)
    tokens = np.array(
        [
            sampler.sample({"logits": logits[None]}, slot, np.array([p], np.int32)).token_ids[0]
            for p in range(8000)
        ]
    )
    pairs = np.bincount(tokens[:-1:2] * 8 + tokens[1::2], minlength=64)
    assert p_value(pairs, np.arange(64), np.full(64, 1 / 64)) > 1e-3
