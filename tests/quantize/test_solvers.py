"""What the methods promise, on random weights: errors, identities, packing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.offline.quantize.error_feedback import Factor, gptq_codes
from quire.offline.quantize.gram import CrossSum, GramMatrix
from quire.offline.quantize.grid import Grid, GridKind, find_grid
from quire.offline.quantize.in_order import best_weight
from quire.offline.quantize.knapsack import Choice, choose
from quire.offline.quantize.layout import Rounded, arrays_of
from quire.offline.quantize.refinement import refined
from quire.quant.compressed import E4M3
from quire.quant.floats import to_e4m3
from quire.quant.gptq import awq, bits_of, gptq
from quire.quant.linear_codes import Stored

F32 = npt.NDArray[np.float32]
KINDS = [
    GridKind(bits, group, symmetric)
    for bits in (2, 3, 4, 8)
    for group in (0, 32)
    for symmetric in (True, False)
]


def weight_and_gram(seed: int, rows: int = 32, cols: int = 64, tokens: int = 200) -> tuple[F32, GramMatrix]:
    """A weight, and inputs with correlations and outlier columns."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(tokens, cols)) @ rng.normal(size=(cols, cols)) * np.exp(rng.normal(size=cols))
    gram = GramMatrix(cols)
    for part in np.array_split(mixed.astype(np.float32), 3):
        gram.add(part)
    return rng.normal(scale=0.05, size=(rows, cols)).astype(np.float32), gram


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.booleans(), st.sampled_from([3, 40, 300]))
def test_gptq_is_never_worse_than_rounding_to_nearest(
    seed: int, kind: GridKind, desc_act: bool, tokens: int
) -> None:
    weight, gram = weight_and_gram(seed, tokens=tokens)
    grid = find_grid(weight, kind, gram.h)
    nearest = gram.error(weight - grid.values(grid.codes(weight)))
    codes = gptq_codes(weight, grid, gram, Factor.of(gram, desc_act=desc_act))
    assert (gram.error(weight - grid.values(codes)) <= nearest).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_is_much_better_where_inputs_correlate(bits: int) -> None:
    weight, gram = weight_and_gram(bits)
    grid = find_grid(weight, GridKind(bits, 32, True), gram.h)
    nearest = gram.error(weight - grid.values(grid.codes(weight))).sum()
    codes = gptq_codes(weight, grid, gram, Factor.of(gram))
    assert gram.error(weight - grid.values(codes)).sum() < 0.6 * nearest


def test_gptq_is_the_papers_update() -> None:
    """The update by the inverse of H, column by column in float64, gives the same codes."""
    weight, gram = weight_and_gram(5)
    kind = GridKind(4, 32, True)
    grid = find_grid(weight, kind)
    h = gram.h.astype(np.float64) + 0.01 * np.trace(gram.h) / 64 * np.eye(64)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    w, expected = weight.astype(np.float64), np.zeros(weight.shape, np.uint8)
    scales = np.repeat(grid.scales.astype(np.float64), 32, axis=1)
    for j in range(64):
        expected[:, j] = np.clip(np.rint(w[:, j] / scales[:, j]) + kind.middle, 0, kind.top)
        error = (w[:, j] - scales[:, j] * (expected[:, j].astype(float) - kind.middle)) / upper[j, j]
        w[:, j:] -= error[:, None] * upper[j, j:]
    codes = gptq_codes(weight, grid, gram, Factor.of(gram, desc_act=False))
    kept = gram.error(weight - grid.values(codes)) != gram.error(weight - grid.values(grid.codes(weight)))
    assert kept.sum() > 20
    assert (codes[kept] == expected[kept]).mean() > 0.995  # float32 sums may turn a tie


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([3, 40, 300]))
def test_refining_makes_no_output_worse(seed: int, kind: GridKind, tokens: int) -> None:
    weight, gram = weight_and_gram(seed, tokens=tokens)
    grid = find_grid(weight, kind, gram.h)
    factor = Factor.of(gram)
    codes = gptq_codes(weight, grid, gram, factor)
    better, found = refined(weight, grid, codes, gram, added=factor.added)
    assert found.max() <= kind.top
    np.testing.assert_array_equal(better.zeros, grid.zeros)
    assert not kind.symmetric or (better.scales == grid.scales).all()
    error = gram.error(weight - better.values(found))
    assert (error <= gram.error(weight - grid.values(codes))).all()
    assert (error <= gram.error(weight - better.values(better.codes(weight)))).all()


@pytest.mark.parametrize(
    "kind", [GridKind(bits, group, False) for bits in (2, 3, 4) for group in (0, 32)], ids=str
)
def test_refined_codes_have_no_better_neighbours(kind: GridKind) -> None:
    """After enough sweeps, one step of one code makes the error no smaller, and gptq's is above it."""
    weight, gram = weight_and_gram(kind.bits)
    grid = find_grid(weight, kind, gram.h)
    factor = Factor.of(gram)
    codes = gptq_codes(weight, grid, gram, factor)
    better, found = refined(weight, grid, codes, gram, added=factor.added, sweeps=30)
    h = gram.h.astype(np.float64) + factor.added * np.eye(64)

    def error(of: Grid, numbers: npt.NDArray[np.uint8]) -> float:
        delta = (weight - of.values(numbers)).astype(np.float64)
        return float(np.einsum("ij,jk,ik->", delta, h, delta))

    least = error(better, found)
    assert least < 0.97 * error(grid, codes)
    for row, column in [(0, 0), (3, 17), (31, 63), (12, 40)]:
        for step in (-1, 1):
            if 0 <= int(found[row, column]) + step <= better.kind.top:
                other = found.copy()
                other[row, column] = int(found[row, column]) + step
                assert error(better, other) > least * (1 - 1e-6)


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("live", [0, 40])
def test_inputs_that_are_always_zero_are_refined_too(live: int, damping: float) -> None:
    """No division by zero; codes of columns that nothing reaches stay on the grid."""
    weight, _ = weight_and_gram(1)
    gram = GramMatrix(64)
    gram.add(
        np.pad(np.random.default_rng(1).normal(size=(50, live)), ((0, 0), (0, 64 - live))).astype(np.float32)
    )
    grid, factor = find_grid(weight, GridKind(4, 32, True), gram.h), Factor.of(gram, damping=damping)
    codes = gptq_codes(weight, grid, gram, factor)
    with np.errstate(all="raise"):
        better, found = refined(weight, grid, codes, gram, added=factor.added)
    assert np.isfinite(better.scales).all()
    assert (gram.error(weight - better.values(found)) <= gram.error(weight - grid.values(codes))).all()
    if not live:
        assert np.abs(weight - better.values(found)).max() < np.abs(weight).max() / 4


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([3, 300, 3000]))
def test_the_best_weight_is_that_of_least_squares(seed: int, outputs: bool, tokens: int) -> None:
    """Against numpy's least squares in float64, with rows of λ for the ridge; what is lacking never grows."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(scale=0.1, size=(8, 24)).astype(np.float32)
    x = rng.normal(size=(tokens, 24)) @ rng.normal(size=(24, 24))
    original = x + rng.normal(scale=0.3, size=x.shape)
    wanted = (original @ weight.T).astype(np.float32)
    gram, lacking = GramMatrix(24), CrossSum(8 if outputs else 24, 24)
    gram.add(x.astype(np.float32))
    lacking.add(wanted if outputs else (original - x).astype(np.float32), x.astype(np.float32))
    found = best_weight(weight, gram, lacking.sum, outputs=outputs, damping=0.01)
    ridge = np.sqrt(0.01 * np.square(x).sum() / 24) * np.eye(24)
    rows, goals = np.concatenate([x, ridge]), np.concatenate([wanted, ridge @ weight.T.astype(np.float64)])
    least = np.linalg.lstsq(rows, goals)[0].T
    np.testing.assert_allclose(found, least, atol=2e-4)
    assert np.square(x @ found.T - wanted).sum() <= np.square(x @ weight.T - wanted).sum() * (1 + 1e-5)


def test_the_error_of_a_gram_matrix_is_that_of_the_outputs() -> None:
    rng = np.random.default_rng(0)
    x, delta = rng.normal(size=(50, 16)).astype(np.float32), rng.normal(size=(8, 16)).astype(np.float32)
    gram = GramMatrix(16)
    gram.add(x)
    np.testing.assert_allclose(gram.error(delta), np.square(x @ delta.T).sum(0), rtol=1e-4)
    np.testing.assert_allclose(gram.importance, np.square(x).mean(0), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layouts_give_the_values_back(kind: GridKind) -> None:
    weight, _ = weight_and_gram(1)
    grid = find_grid(weight, kind)
    rounded = Rounded(grid.codes(weight), grid)
    arrays = arrays_of("gptq", rounded)
    infos = {
        name: Stored({"int32": "I32", "float16": "F16"}[a.dtype.name], a.shape) for name, a in arrays.items()
    }
    assert bits_of(infos, "m") == kind.bits
    read = gptq(
        infos, "m", bits=kind.bits, zero_offset=int(kind.symmetric), ordered=False, symmetric=kind.symmetric
    )
    np.testing.assert_array_equal(read.dequantize(arrays, 0, 32), rounded.values())
    if kind.bits == 4 and not kind.symmetric:
        arrays = arrays_of("awq", rounded)
        infos.pop("g_idx")
        infos = {
            name: Stored({"int32": "I32", "float16": "F16"}[a.dtype.name], a.shape)
            for name, a in arrays.items()
        }
        np.testing.assert_array_equal(awq(infos, "m").dequantize(arrays, 0, 32), rounded.values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.bits < 8], ids=str)
def test_a_cut_range_has_less_error_than_the_widest(kind: GridKind) -> None:
    weight, _ = weight_and_gram(2)

    def error(grid: Grid) -> float:
        return float(np.square(weight - grid.values(grid.codes(weight))).sum())

    assert error(find_grid(weight, kind)) <= error(find_grid(weight, kind, shares=(1.0,)))


def test_e4m3_is_rounded_to_nearest_even() -> None:
    finite = np.flatnonzero(np.isfinite(E4M3))
    np.testing.assert_array_equal(to_e4m3(E4M3[finite]), finite)
    low, high = E4M3[:126], E4M3[1:127]
    codes = to_e4m3(((low + high) / 2).astype(np.float32))
    assert (codes % 2 == 0).all()
    np.testing.assert_array_equal(to_e4m3(np.nextafter((low + high) / 2, high)), np.arange(1, 127))
    np.testing.assert_array_equal(to_e4m3(np.array([1e9, -1e9, np.nan], np.float32)), [0x7E, 0xFE, 0x7F])


def test_a_knapsack_spends_bits_where_they_save_most() -> None:
    steep = [Choice("a", 2, 1.0), Choice("b", 4, 0.1), Choice("c", 8, 0.09)]
    flat = [Choice("a", 2, 0.2), Choice("b", 4, 0.15), Choice("c", 8, 0.0)]
    assert choose({"x": (10, steep), "y": (10, flat)}, 3) == {"x": "b", "y": "a"}
    assert choose({"x": (10, steep), "y": (10, flat)}, 6) == {"x": "b", "y": "c"}
    assert choose({"x": (10, steep), "y": (10, flat)}, 8) == {"x": "c", "y": "c"}
    with pytest.raises(ValueError, match="target_bits: 1 is less than the 2"):
        choose({"x": (10, steep)}, 1)
