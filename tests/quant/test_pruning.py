"""Masks of pruning: how many weights go, which, and what is lost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from quire.offline.prune.masks import magnitude, smallest, sparsegpt, wanda
from quire.offline.quantize.error_feedback import Factor
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.recipe import Recipe, parse_pattern

F32 = npt.NDArray[np.float32]
PATTERNS = [None, (2, 4), (4, 8), (1, 4)]


def _case(seed: int, rows: int = 24, cols: int = 256) -> tuple[F32, GramMatrix, F32]:
    """A weight, inputs with correlated columns of very different sizes, and these inputs' Gram matrix."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((400, cols // 2)) @ random.standard_normal((cols // 2, cols))
    x = (mixed + random.standard_normal((400, cols))) * np.exp(random.standard_normal(cols))
    gram = GramMatrix(cols)
    gram.add(x.astype(np.float32))
    return random.standard_normal((rows, cols)).astype(np.float32), gram, x.astype(np.float32)


def _lost(x: F32, weight: F32, pruned: F32) -> float:
    return float(np.square(x.astype(np.float64) @ (weight - pruned).T.astype(np.float64)).sum())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_each_method_loses_less_than_the_simpler_one(pattern: tuple[int, int] | None, seed: int) -> None:
    weight, gram, x = _case(seed)
    sparsity = 0.5 if pattern is None else 1 - pattern[0] / pattern[1]
    found = [
        magnitude(weight, sparsity, pattern),
        wanda(weight, gram, sparsity, pattern),
        sparsegpt(weight, Factor.of(gram, desc_act=False), sparsity, pattern),
    ]
    for pruned in found:
        assert (pruned == 0).mean() == pytest.approx(sparsity, abs=1e-3)
        if pattern is not None:
            kept, size = pattern
            assert ((pruned.reshape(-1, size) != 0).sum(1) == kept).all()
    by_size, by_output, fitted = (_lost(x, weight, pruned) for pruned in found)
    assert fitted < by_output < by_size


def test_sparsegpt_equals_its_definition() -> None:
    """The paper's loop with the inverse of the Hessian: w[j:] -= w_j / [H⁻¹]_jj · H⁻¹_j, of the columns from j on."""
    weight, gram, _ = _case(7, rows=5, cols=64)
    h = gram.h.astype(np.float64)
    h[np.diag_indices_from(h)] += 0.01 * np.trace(h) / len(h)
    w = weight.astype(np.float64)
    inverse = np.linalg.inv(h)
    mask = np.zeros(w.shape, bool)
    costs = np.empty_like(w)
    rest = h.copy()
    for j in range(64):
        costs[:, j] = w[:, j] ** 2 / np.linalg.inv(h[j:, j:])[0, 0]
    order = np.argsort(costs.reshape(-1), kind="stable")[: round(0.5 * w.size)]
    mask.reshape(-1)[order] = True
    for j in range(64):
        inverse = np.linalg.inv(rest[j:, j:])
        step = np.where(mask[:, j], w[:, j] / inverse[0, 0], 0.0)
        w[:, j:] -= step[:, None] * inverse[0]
        w[mask[:, j], j] = 0.0
    found = sparsegpt(weight, Factor.of(gram, damping=0.01, desc_act=False), 0.5, None)
    assert ((found == 0) == mask).all()
    np.testing.assert_allclose(found, w, rtol=2e-3, atol=2e-3)


def test_nothing_and_the_least_go() -> None:
    scores = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert not smallest(scores, 1e-3, None).any()
    assert smallest(scores, 0.25, None).sum() == 4
    assert smallest(scores, 0.5, (2, 4)).tolist() == [[True, True, False, False] * 2] * 2


def test_patterns_and_shares_that_are_refused() -> None:
    assert parse_pattern("2:4") == (2, 4)
    for text in ("4:2", "0:4", "2:4:8", "2", "a:b", "2:3", "128:256"):
        with pytest.raises(ValueError, match="pattern: "):
            parse_pattern(text)
    for sparsity in (0.0, 1.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"sparsity: .* is not between 0 and 1"):
            Recipe(method="wanda", sparsity=sparsity)
    with pytest.raises(ValueError, match=r"the pattern 2:4 has 0\.5, not 0\.25"):
        Recipe(method="wanda", sparsity=0.25, pattern="2:4")
