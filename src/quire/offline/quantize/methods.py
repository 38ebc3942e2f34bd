"""What each method does with one layer: factors first, then every weight is rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.offline.prune import masks
from quire.offline.quantize.error_feedback import Factor, gptq_codes
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import GridKind, find_grid
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.layout import Rounded
from quire.offline.quantize.recipe import SCALED, Recipe, parse_pattern
from quire.offline.quantize.refinement import SWEEPS, refined
from quire.offline.quantize.scaling import apply_factors, awq_factors, scaled_gram, smooth_factors
from quire.offline.quantize.sites import Module, Site
from quire.quant.floats import to_e4m3

F32 = npt.NDArray[np.float32]
Round = Callable[[F32], Rounded]
E4M3_TOP = np.float32(448)
_IN_PIECES = ("gptq", "awq-gptq")  # each output is rounded for itself, and takes long
_PIECE = 512  # outputs


def round_weights(
    recipe: Recipe, weights: LayerWeights, sites: tuple[Site, ...], unseen: tuple[Module, ...],
    grams: Mapping[tuple[int, int], GramMatrix], widths: Mapping[str, int], pool: Executor,
) -> dict[str, tuple[Rounded, float]]:  # fmt: skip
    """Round the weights of a layer: tensor -> what it became, and its relative error.

    `grams`: those of each site, by its op and the number of the expert (-1 outside of experts). `widths`: the bits of
    tensors that do not have the recipe's. Weights whose inputs were never seen are rounded to nearest. The relative
    error is tr(ΔW·H·ΔWᵀ) / tr(W·H·Wᵀ). Threads of the pool take whole weights, or pieces of a fixed size: their number
    changes no bit.
    """
    mine = dict(grams)
    if recipe.method in {*SCALED, "smoothquant"}:
        mine |= _scaled(recipe, weights, sites, grams, widths, pool)
    modules = {module: mine.get((site.op, module.expert)) for site in sites for module in site.modules}
    modules |= dict.fromkeys(unseen)
    recipes = {module: _of_width(recipe, widths.get(module.tensor)) for module in modules}
    kinds = {(id(gram), recipes[module].bits): (recipes[module], gram) for module, gram in modules.items()}

    def prepared(item: tuple[Recipe, GramMatrix | None]) -> Round:
        return _PREPARE[recipe.method](item[0], item[1] or GramMatrix(0))

    made = dict(zip(kinds, pool.map(prepared, kinds.values()), strict=True))

    def rounded(item: tuple[Module, slice]) -> tuple[Rounded, float, float]:
        module, rows = item
        gram = modules[module]
        weight, seen = weights[module.tensor][rows], gram or GramMatrix(0)
        result = made[id(gram), recipes[module].bits](weight)
        lost, whole = (seen.error(each).sum(dtype=np.float64) for each in (weight - result.values(), weight))
        return result, float(lost), float(whole)

    order = sorted(modules, key=lambda module: -module.rows * module.cols)
    step = _PIECE if recipe.method in _IN_PIECES else None
    items = [(module, rows) for module in order for rows in _pieces(module.rows, step)]
    found: dict[str, list[tuple[Rounded, float, float]]] = {module.tensor: [] for module in order}
    for (module, _), piece in zip(items, pool.map(rounded, items), strict=True):
        found[module.tensor].append(piece)
    return {tensor: _joined(pieces) for tensor, pieces in found.items()}


def _pieces(rows: int, step: int | None) -> list[slice]:
    """Rows that a thread takes at once; which ones are taken together may change bits, so threads do not decide it."""
    return [slice(at, at + step) for at in range(0, rows, step)] if step else [slice(None)]


def _joined(pieces: list[tuple[Rounded, float, float]]) -> tuple[Rounded, float]:
    """A weight of its pieces, and its relative error."""
    lost, whole = (sum(part) for part in list(zip(*pieces, strict=True))[1:])
    return Rounded.joined([piece for piece, _, _ in pieces]), lost / whole if whole else 0.0


def _scaled(
    recipe: Recipe, weights: LayerWeights, sites: tuple[Site, ...], grams: Mapping[tuple[int, int], GramMatrix],
    widths: Mapping[str, int], pool: Executor,
) -> dict[tuple[int, int], GramMatrix]:  # fmt: skip
    """Apply the factors of a layer; the Gram matrices that they change."""
    found = {}
    seen = [(site, grams[site.op, -1]) for site in sites if (site.op, -1) in grams]

    def factors_of(item: tuple[Site, GramMatrix]) -> F32 | None:
        if recipe.method in SCALED:
            of_site = _of_width(recipe, widths.get(item[0].modules[0].tensor))
            return awq_factors(weights, *item, kind_of(of_site))
        return smooth_factors(weights, *item, recipe.alpha)

    for (site, gram), factors in zip(seen, pool.map(factors_of, seen), strict=True):
        if factors is not None:
            apply_factors(weights, site, factors)
            found[site.op, -1] = scaled_gram(gram, factors)
    return found


def _of_width(recipe: Recipe, bits: int | None) -> Recipe:
    return recipe if bits is None else replace(recipe, bits=bits)


def kind_of(recipe: Recipe) -> GridKind:
    """The grid of a recipe whose choices are made."""
    assert recipe.group_size is not None  # recipe.fitted
    assert recipe.symmetric is not None
    return GridKind(recipe.bits, recipe.group_size, recipe.symmetric)


def _nearest(recipe: Recipe, gram: GramMatrix) -> Round:
    del gram

    def make(weight: F32) -> Rounded:
        grid = find_grid(weight, kind_of(recipe))
        return Rounded(grid.codes(weight), grid)

    return make


def _gptq(recipe: Recipe, gram: GramMatrix, sweeps: int = SWEEPS) -> Round:
    if not gram.rows:
        return _nearest(recipe, gram)
    factor = Factor.of(gram, damping=recipe.damping, desc_act=recipe.desc_act)

    def make(weight: F32) -> Rounded:
        grid = find_grid(weight, kind_of(recipe), gram.h)
        codes = gptq_codes(weight, grid, gram, factor)
        if sweeps:
            grid, codes = refined(weight, grid, codes, gram, added=factor.added, sweeps=sweeps)
        return Rounded(codes, grid)

    return make


def _awq_gptq(recipe: Recipe, gram: GramMatrix) -> Round:
    return _gptq(recipe, gram, sweeps=0)  # after awq's factors sweeps lose no less


def _awq(recipe: Recipe, gram: GramMatrix) -> Round:
    def make(weight: F32) -> Rounded:
        grid = find_grid(weight, kind_of(recipe), gram.h if gram.rows else None)
        return Rounded(grid.codes(weight), grid)

    return make


def _smoothquant(recipe: Recipe, gram: GramMatrix) -> Round:
    del recipe, gram

    def make(weight: F32) -> Rounded:
        scales = _scales(weight, np.float32(127))
        numbers = np.clip(np.rint(weight / scales), -127, 127).astype(np.int8)
        return Rounded(numbers=numbers, scales=scales)

    return make


def _fp8(recipe: Recipe, gram: GramMatrix) -> Round:
    top = 0.0
    if recipe.activations == "static":  # inputs that were never seen are taken as they are
        top = (float(gram.top.max()) if gram.rows else 0.0) or float(E4M3_TOP)

    def make(weight: F32) -> Rounded:
        scales = _scales(weight, E4M3_TOP)
        return Rounded(numbers=to_e4m3(weight / scales), scales=scales, input_scale=top / float(E4M3_TOP))

    return make


def _scales(weight: F32, top: np.float32) -> F32:
    """One scale per output [rows, 1], by its greatest magnitude."""
    tops = np.abs(weight).max(1, keepdims=True)
    return np.where(tops > 0, tops / top, np.float32(1)).astype(np.float32)


def _magnitude(recipe: Recipe, gram: GramMatrix) -> Round:
    del gram
    return lambda weight: Rounded(
        floats=masks.magnitude(weight, recipe.sparsity, parse_pattern(recipe.pattern))
    )


def _wanda(recipe: Recipe, gram: GramMatrix) -> Round:
    if not gram.rows:
        return _magnitude(recipe, gram)
    pattern = parse_pattern(recipe.pattern)
    return lambda weight: Rounded(floats=masks.wanda(weight, gram, recipe.sparsity, pattern))


def _sparsegpt(recipe: Recipe, gram: GramMatrix) -> Round:
    if not gram.rows:
        return _magnitude(recipe, gram)
    factor, pattern = Factor.of(gram, damping=recipe.damping, desc_act=False), parse_pattern(recipe.pattern)
    return lambda weight: Rounded(floats=masks.sparsegpt(weight, factor, recipe.sparsity, pattern))


_PREPARE: dict[str, Callable[[Recipe, GramMatrix], Round]] = {
    "rtn": _nearest, "gptq": _gptq, "awq": _awq, "awq-gptq": _awq_gptq, "smoothquant": _smoothquant, "fp8": _fp8,
    "magnitude": _magnitude, "wanda": _wanda, "sparsegpt": _sparsegpt,
}  # fmt: skip
