"""Where a model is sensitive: outlier channels of activations and weights, and the error that a change makes by layer.

A channel is an input feature of a linear. A few channels of the activations are often far larger than the others; AWQ
(arXiv 2306.00978) calls the weights that meet them salient, SmoothQuant (arXiv 2211.10438) moves their size into the
weights. Experts are left out: their inputs are those of their layer's router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.schema import EngineConfig
from quire.engine.build.assemble import weight_origin
from quire.engine.build.opening import Model
from quire.loader.load import load
from quire.loader.source import Array
from quire.offline.scorer import CHUNK, Passage, Progress, Scorer
from quire.program.tensors import Param
from quire.quant import GroupCodes
from quire.quant.floats import to_float32
from quire.records import dataclass

SALIENT = 0.01  # the share of channels that the AWQ paper calls salient
BINS = np.linspace(-8.0, 8.0, 65)  # of weights, in standard deviations of their tensor
_F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearChannels:
    """One linear: mean magnitudes by input channel of its inputs and its weight, both [cols]; how its weights are
    distributed over BINS, with those beyond in the outer ones; their greatest magnitude over their deviation.
    """

    name: str
    activation: _F64
    weight: _F64
    histogram: _F64
    weight_peak: float

    @property
    def salient_energy(self) -> float:
        """The share of the activations' energy (squares of the means) in the greatest SALIENT of the channels."""
        return top_share(self.activation)


def top_share(magnitudes: _F64) -> float:
    """The share of the sum of squares that the greatest SALIENT of the numbers have, at least one number."""
    squares = np.sort(np.square(magnitudes))[::-1]
    total = float(squares.sum())
    return float(squares[: max(1, round(SALIENT * len(squares)))].sum()) / total if total else 0.0


def measure_channels(model: Model, asked: EngineConfig, passages: Sequence[Passage]) -> list[LinearChannels]:
    """The linears of all layers in order, over the tokens of the passages. The weights are taken as floats."""
    floats = asked.replace(
        quantization="none", quantize_head="none", kv_cache_dtype="auto", kv_cache_scales=None
    )
    scorer = Scorer(model, floats, max(len(passage.tokens) for passage in passages))
    scorer.load(None)
    sums: dict[str, _F64] = {}
    rows = 0
    for passage in passages:
        for start in range(0, len(passage.tokens), CHUNK):
            rows += min(CHUNK, len(passage.tokens) - start)
            for name, x in scorer.linear_inputs(passage.tokens, start):
                found = np.abs(x).sum(0, dtype=np.float64)
                sums[name] = sums[name] + found if name in sums else found
    scorer.close()
    weights = _Weights(set(sums))
    origin = weight_origin(model)
    with origin.open() as source:
        load(scorer.program.params, source, weights, rules=origin.rules)
    found = []
    for name, total in sums.items():
        seen = weights.seen[name]
        deviation = math.sqrt(seen.squares / (seen.rows * len(seen.columns))) or 1.0
        found.append(LinearChannels(
            name, total / rows, seen.columns / seen.rows, seen.histogram, seen.peak / deviation
        ))  # fmt: skip
    return found


@dataclass(slots=True)
class _Seen:
    """Sums over the rows of a weight; `unit` is the deviation of the rows that came first."""

    columns: _F64
    unit: float
    rows: int = 0
    squares: float = 0.0
    peak: float = 0.0
    histogram: _F64 = field(default_factory=lambda: np.zeros(len(BINS) - 1))


class _Weights:
    """A sink that keeps sums over the weights of some linears. Implements loader.Sink."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.seen: dict[str, _Seen] = {}

    def put(self, param: Param, row_offset: int, data: Array, dtype: str) -> None:
        """Add rows; see Sink.put."""
        del row_offset
        if param.name not in self._names:
            return
        values = to_float32(data, dtype)
        if param.name not in self.seen:
            self.seen[param.name] = _Seen(np.zeros(param.cols), float(values.std()) or 1.0)
        seen, sizes = self.seen[param.name], np.abs(values)
        seen.rows += len(values)
        seen.columns += sizes.sum(0, dtype=np.float64)
        seen.squares += float(np.square(values).sum(dtype=np.float64))
        seen.peak = max(seen.peak, float(sizes.max()))
        seen.histogram += np.histogram(np.clip(values / seen.unit, BINS[0], BINS[-1]), BINS)[0]

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        """A program of floats takes none."""
        raise AssertionError(f"{param.name}: codes for rows from {row_offset}: {given}")


def layer_errors(
    original: Model, candidate: Model, asked: EngineConfig, changed: EngineConfig, passages: Sequence[Passage],
    progress: Progress | None = None,
) -> list[float]:  # fmt: skip
    """The error of the residual stream after each layer, over all tokens: |candidate - original| / |original|.

    The models have the same layers. Raises ValueError if they do not.
    """
    layers = [len(model.facts.spec.layers) for model in (original, candidate)]
    dims = [model.facts.spec.dim for model in (original, candidate)]
    if layers[0] != layers[1] or dims[0] != dims[1]:
        raise ValueError(
            f"against: {layers[0]} layers of width {dims[0]} and {layers[1]} of width {dims[1]} have no error by layer"
        )
    longest = max(len(passage.tokens) for passage in passages)
    one = Scorer(original, asked, longest, layers=True)
    two = Scorer(candidate, changed, longest, beside=one if candidate is original else None, layers=True)
    one.load(None)
    two.load(None)
    errors, sizes = np.zeros(layers[0]), np.zeros(layers[0])
    done, total = 0, sum(len(passage.tokens) for passage in passages)
    for passage in passages:
        for start in range(0, len(passage.tokens), CHUNK):
            rows = zip(
                one.residuals(passage.tokens, start), two.residuals(passage.tokens, start), strict=True
            )
            for layer, (h, changed_h) in enumerate(rows):
                errors[layer] += float(np.square(changed_h - h, dtype=np.float64).sum())
                sizes[layer] += float(np.square(h, dtype=np.float64).sum())
            done += min(CHUNK, len(passage.tokens) - start)
            if progress is not None:
                progress(done, total)
    two.close()
    one.close()
    return [math.sqrt(error / max(size, 1e-300)) for error, size in zip(errors, sizes, strict=True)]


def channel_tables(
    model: Model, asked: EngineConfig, passages: Sequence[Passage]
) -> dict[str, list[dict[str, Any]]]:
    """What `measure_channels` finds, as rows: "channels" has the linears of all layers, "channel_curves" all channels
    of those whose inputs have the largest and the smallest salient energy, "weights" a histogram over all.
    """
    found = measure_channels(model, asked, passages)
    rows = [
        {
            "layer": int(linear.name.split(".")[1]), "kind": linear.name.split(".", 2)[2],
            "activation_share": linear.salient_energy, "weight_share": top_share(linear.weight),
            "weight_peak": linear.weight_peak,
            "outliers": " ".join(map(str, np.argsort(-linear.activation)[:5].tolist())),
        }
        for linear in found
    ]  # fmt: skip
    ordered = sorted(found, key=lambda linear: -linear.salient_energy)
    curves = [row for linear in (ordered[0], ordered[-1]) for row in _curve(linear)]
    counts = np.sum([linear.histogram for linear in found], axis=0)
    weights = [
        {"from": float(low), "to": float(high), "count": float(count)}
        for low, high, count in zip(BINS[:-1], BINS[1:], counts, strict=True)
    ]
    return {"channels": rows, "channel_curves": curves, "weights": weights}


def _curve(linear: LinearChannels) -> list[dict[str, Any]]:
    """Magnitudes over their medians, from the largest down; about a hundred ranks."""
    sizes = []
    for values in (linear.activation, linear.weight):
        ordered = np.sort(values)[::-1]
        sizes.append(ordered / (float(np.median(ordered)) or 1.0))
    ranks = np.unique(np.geomspace(1, len(linear.weight), 100).astype(int))
    return [
        {"linear": linear.name, "rank": int(rank), "activation": float(sizes[0][rank - 1]),
         "weight": float(sizes[1][rank - 1])}
        for rank in ranks
    ]  # fmt: skip
