"""Factors that move difficulty between the inputs of a linear and its weights: (x / s)(s · w) = x w.

What produces x, a norm or the rows of another linear, is divided by s (see sites.Absorber), so that the model stays the
same before weights are rounded.

AWQ (Lin et al., arXiv 2306.00978): s = (mean magnitude of the input)^r, with the r in [0, 1) for which rounding to
nearest has the least error tr(ΔW·H·ΔWᵀ). SmoothQuant (Xiao et al., arXiv 2211.10438): s = max|x|^α / max|w|^(1-α).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import GridKind, find_grid
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.sites import Absorber, Site

F32 = npt.NDArray[np.float32]
RATIOS = 20
_LEAST = np.float32(1e-4)
_ROWS = 1024  # of a site's weights judge a ratio: more rows say the same


def awq_factors(weights: LayerWeights, site: Site, gram: GramMatrix, kind: GridKind) -> F32 | None:
    """The factors [cols] of least error, or None if none are better than 1."""
    if not gram.rows or site.absorber is None:
        return None
    means = (gram.magnitude / gram.rows).astype(np.float32)
    means = _tied(np.maximum(means, _LEAST), site.absorber)
    sample = [weights[module.tensor] for module in site.modules]
    total = sum(len(part) for part in sample)
    every = max(-(-total // _ROWS), 1)
    weight = np.concatenate([part[::every] for part in sample])
    best, found = np.inf, None
    for step in range(RATIOS):
        factors = means ** np.float32(step / RATIOS)
        factors /= np.sqrt(factors.max() * factors.min())
        scaled = weight * factors
        grid = find_grid(scaled, kind, shares=(1.0,))
        delta = grid.values(grid.codes(scaled)) / factors - weight
        error = float(gram.error(delta).sum(dtype=np.float64))
        if error < best:
            best, found = error, factors if step else None
    return found


def smooth_factors(weights: LayerWeights, site: Site, gram: GramMatrix, alpha: float) -> F32 | None:
    """SmoothQuant's factors [cols]; None where a linear has the inputs, which the method leaves alone."""
    if not gram.rows or site.absorber is None or not site.absorber.vectors:
        return None
    tops = np.max([np.abs(weights[module.tensor]).max(0) for module in site.modules], axis=0)
    inputs, tops = np.maximum(gram.top, _LEAST), np.maximum(tops, _LEAST)
    factors: F32 = inputs ** np.float32(alpha) / tops ** np.float32(1 - alpha)
    return np.maximum(factors, _LEAST)


def apply_factors(weights: LayerWeights, site: Site, factors: F32) -> None:
    """Multiply the columns of a site's weights, and divide what produces its inputs."""
    absorber = site.absorber
    assert absorber is not None
    for tensor in (*(module.tensor for module in site.modules), *site.followers):
        weights[tensor] = weights[tensor] * factors
    for number, tensor in enumerate(absorber.vectors):
        added = np.float32(0 if number else absorber.added)
        weights[tensor] = ((weights[tensor] + added) / factors - added).astype(np.float32)
    if absorber.rows is not None:
        rows = absorber.rows
        mine = slice(rows.first, rows.first + rows.count)
        divisors = _of_rows(factors, absorber)
        matrix = weights[rows.tensor].copy()
        matrix[mine] /= divisors[:, None]
        weights[rows.tensor] = matrix
        bias = f"{rows.tensor.removesuffix('.weight')}.bias"
        if bias in weights:
            vector = weights[bias].copy()
            vector[mine] /= divisors
            weights[bias] = vector


def scaled_gram(gram: GramMatrix, factors: F32) -> GramMatrix:
    """That of the inputs divided by the factors."""
    found = GramMatrix(len(factors), gram.h / factors / factors[:, None])
    found.rows = gram.rows
    found.top, found.magnitude = gram.top / factors, gram.magnitude / factors
    return found


def _tied(values: F32, absorber: Absorber) -> F32:
    """The same number for columns that one row of the absorber fills: the mean of query heads over one value head."""
    if absorber.repeats == 1:
        return values
    heads = values.reshape(-1, absorber.repeats, absorber.head_dim)
    return np.broadcast_to(heads.mean(1, keepdims=True), heads.shape).reshape(-1)


def _of_rows(factors: F32, absorber: Absorber) -> F32:
    """The factor of each row of the absorber."""
    if absorber.repeats == 1:
        return factors
    return np.ascontiguousarray(factors.reshape(-1, absorber.repeats, absorber.head_dim)[:, 0]).reshape(-1)
