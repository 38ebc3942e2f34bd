"""Which heads, channels or layers go, and what stays of the tensors and the config.

Heads are chosen by what they add to the outputs of their layer over the text, tr(W_h·H·W_hᵀ) for the columns h of the
output projection; channels of a feed-forward by the same of their column; layers by how little they turn the residual
stream, 1 - cos(before, after) (arXiv 2403.03853). The columns that stay are fitted to the outputs of all by least
squares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.layout import Rounded
from quire.offline.quantize.recipe import Recipe
from quire.program.program import Program
from quire.program.tensors import Part
from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.facts import facts_of
from quire.spec.model import MLP, Attention, Layer, ModelSpec
from quire.types import UnsupportedModelError

F32 = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Config = dict[str, Any]
_AXES = {"heads": "heads", "channels": "mlp"}


@dataclass(frozen=True, slots=True)
class KeptStructures:
    """What stays of a layer: numbers of query heads, of heads of keys and values, and of channels, in order; all of
    those of which nothing goes are None.
    """

    heads: Indices | None = None
    kv_heads: Indices | None = None
    mlp: Indices | None = None

    def of(self, axis: str, rows: int, total: Mapping[str, int]) -> Indices | None:
        """Rows that stay of `rows` along an axis, which has `total` heads or channels; None: all."""
        kept: Indices | None = getattr(self, axis, None) if axis else None
        if kept is None:
            return None
        each = rows // total[axis]
        return (kept[:, None] * each + np.arange(each)).reshape(-1)


def smaller_spec(spec: ModelSpec, recipe: Recipe) -> ModelSpec:
    """The spec without the share of structures that goes; of layers, any as many.

    Raises UnsupportedModelError, and ValueError if none goes.
    """
    if recipe.structure == "layers":
        found = replace(spec, layers=spec.layers[: _keep(len(spec.layers), recipe.sparsity)])
    else:
        found = replace(spec, layers=tuple(_smaller(i, layer, recipe) for i, layer in enumerate(spec.layers)))
    if found == spec:
        raise ValueError(
            f"sparsity: {recipe.sparsity:g} takes out none of the {_count(spec, recipe.structure)} {recipe.structure}"
        )
    return found


def _count(spec: ModelSpec, structure: str) -> int:
    if structure == "layers":
        return len(spec.layers)
    return axis_totals(spec.layers[0])[_AXES[structure]]


def taken_text(spec: ModelSpec, recipe: Recipe) -> str:
    """What goes, in words, as near to what was asked for as it can be."""
    share = 1 - _count(smaller_spec(spec, recipe), recipe.structure) / _count(spec, recipe.structure)
    return f"{share:.0%} of the {recipe.structure} taken out"


def _smaller(index: int, layer: Layer, recipe: Recipe) -> Layer:
    if recipe.structure == "heads":
        if not isinstance(layer.mixer, Attention):
            raise UnsupportedModelError(
                f"layers.{index}: heads of {type(layer.mixer).__name__} cannot be taken out"
            )
        if layer.mixer.alibi or (layer.mixer.qk_norm is not None and layer.mixer.qk_norm.whole):
            why = "ALiBi" if layer.mixer.alibi else "a norm over all heads"
            raise UnsupportedModelError(f"layers.{index}: heads cannot be taken out of attention with {why}")
        groups, each = _head_counts(layer.mixer, recipe.sparsity)
        return replace(layer, mixer=replace(layer.mixer, heads=groups * each, kv_heads=groups))
    if not isinstance(layer.mlp, MLP):
        raise UnsupportedModelError(f"layers.{index}: channels of experts cannot be taken out")
    return replace(layer, mlp=replace(layer.mlp, width=_keep(layer.mlp.width, recipe.sparsity, 16)))


def _keep(count: int, sparsity: float, unit: int = 1) -> int:
    """How many of `count` stay, a multiple of the unit if that is possible."""
    unit = unit if count % unit == 0 else 1
    return max(round(count * (1 - sparsity) / unit), 1) * unit


def _head_counts(attention: Attention, sparsity: float) -> tuple[int, int]:
    """Groups that stay, and query heads of each: as near to the share as can be, then more heads, then fewer groups."""
    each = attention.heads // attention.kv_heads
    wanted = attention.heads * (1 - sparsity)
    choices = [(g, r) for g in range(1, attention.kv_heads + 1) for r in range(1, each + 1)]
    return min(
        choices, key=lambda choice: (abs(choice[0] * choice[1] - wanted), -choice[0] * choice[1], choice[0])
    )


def smaller_config(config: Config, spec: ModelSpec, recipe: Recipe, kept: Sequence[int] = ()) -> Config:
    """The config.json of `smaller_spec`; `kept` are the numbers of the layers that stay.

    Raises UnsupportedModelError if the family's config cannot say that.
    """
    found, layer = dict(config), spec.layers[0]
    if recipe.structure == "layers":
        count = len(spec.layers)
        wanted = replace(spec, layers=tuple(spec.layers[i] for i in kept))
        found["num_hidden_layers"] = len(kept)
        for key, value in config.items():
            if isinstance(value, list) and len(value) == count:
                found[key] = [value[i] for i in kept]
    else:
        wanted = smaller_spec(spec, recipe)
        layer = wanted.layers[0]
        if recipe.structure == "heads" and isinstance(layer.mixer, Attention):
            found |= {"num_attention_heads": layer.mixer.heads, "num_key_value_heads": layer.mixer.kv_heads,
                      "head_dim": layer.mixer.head_dim}  # fmt: skip
        elif isinstance(layer.mlp, MLP):
            found["intermediate_size"] = layer.mlp.width
    if facts_of(ConfigReader(found), None, "").spec != wanted:
        raise UnsupportedModelError(
            f"config.json: model_type = {config.get('model_type')!r}: its config cannot describe a model without some "
            f"of its {recipe.structure}"
        )
    return found


def choose(
    recipe: Recipe, spec: ModelSpec, program: Program, index: int, weights: LayerWeights,
    grams: Mapping[str, GramMatrix],
) -> tuple[KeptStructures, dict[str, tuple[Rounded, float]]]:  # fmt: skip
    """What stays of a layer, and its output projections with zeros for what goes, with the relative error of each.

    `grams`: by tensor. Raises UnsupportedModelError for tensors that are not stored as matrices of their own.
    """
    axis, layer = _AXES[recipe.structure], spec.layers[index]
    parts = [part for param in program.params if param.cols for part in param.parts if part.col_axis == axis]
    if len(parts) != 1 or parts[0].stored or parts[0].transposed:
        raise UnsupportedModelError(f"layers.{index}: the output projection is not a matrix of its own")
    (part,) = parts
    gram, weight = grams[part.tensor], weights[part.tensor]
    if recipe.structure == "heads":
        assert isinstance(layer.mixer, Attention)
        kept = _choose_heads(layer.mixer, recipe.sparsity, weight, gram)
        columns = kept.of("heads", part.cols, {"heads": layer.mixer.heads})
    else:
        assert isinstance(layer.mlp, MLP)
        scores = np.square(weight).sum(0) * gram.importance
        kept = KeptStructures(mlp=_largest(scores, _keep(layer.mlp.width, recipe.sparsity, 16)))
        columns = kept.mlp
    assert columns is not None
    fitted = np.zeros_like(weight)
    fitted[:, columns] = _least_squares(weight, gram, columns, recipe.damping)
    whole, lost = (float(gram.error(w).sum(dtype=np.float64)) for w in (weight, weight - fitted))
    return kept, {part.tensor: (Rounded(floats=fitted), lost / whole if whole else 0.0)}


def _choose_heads(attention: Attention, sparsity: float, weight: F32, gram: GramMatrix) -> KeptStructures:
    """Of each group the query heads that add most, then the groups that add most with these."""
    groups, each = _head_counts(attention, sparsity)
    dim, repeats = attention.head_dim, attention.heads // attention.kv_heads

    def energy(heads: Indices) -> float:
        columns = (heads[:, None] * dim + np.arange(dim)).reshape(-1)
        part = weight[:, columns]
        return float(np.einsum("ij,ij->", part @ gram.h[np.ix_(columns, columns)], part))

    chosen = []
    for group in range(attention.kv_heads):
        heads = np.arange(group * repeats, (group + 1) * repeats)
        alone = np.array([energy(heads[i : i + 1]) for i in range(repeats)])
        chosen.append(heads[_largest(alone, each)])
    kept = _largest(np.array([energy(heads) for heads in chosen]), groups)
    return KeptStructures(heads=np.concatenate([chosen[group] for group in kept]), kv_heads=kept)


def _largest(scores: npt.NDArray[Any], count: int) -> Indices:
    """The numbers of the largest scores, in order."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def _least_squares(weight: F32, gram: GramMatrix, columns: Indices, damping: float) -> F32:
    """The columns of a weight that stay, changed so that they give the outputs of all as well as they can."""
    h = gram.h.astype(np.float64)
    inner = h[np.ix_(columns, columns)]
    inner[np.diag_indices_from(inner)] += damping * float(np.trace(inner)) / len(inner) or 1.0
    outer = h[columns] @ weight.T.astype(np.float64)
    outer += damping * float(np.trace(h)) / len(h) * weight.T[columns]
    return np.linalg.solve(inner, outer).T.astype(np.float32)


def cut(
    tensor: npt.NDArray[Any], parts: Sequence[Part], kept: KeptStructures, total: Mapping[str, int]
) -> npt.NDArray[Any]:
    """A tensor of a layer without what goes; `parts` are its parts in the program. It may be as it was."""
    rows, cols = np.ones(len(tensor), np.bool_), np.ones(tensor.shape[-1], np.bool_)
    for part in parts:
        for mask, axis, first, count in (
            (rows, part.row_axis, part.first, part.rows), (cols, part.col_axis, part.first_col, part.cols)
        ):  # fmt: skip
            stay = kept.of(axis, count, total)
            if stay is None:
                continue
            if part.transposed or (part.stored and len(part.stored) != (2 if part.cols else 1)):
                raise UnsupportedModelError(f"{part.tensor}: a tensor in this form cannot be cut")
            mask[first : first + count] = False
            mask[first + stay] = True
    found = tensor[rows]
    return found if tensor.ndim == 1 else np.ascontiguousarray(found[:, cols])


def axis_totals(layer: Layer) -> dict[str, int]:
    """How many heads, heads of keys and values, and channels a layer has."""
    found: dict[str, int] = {}
    if isinstance(layer.mixer, Attention):
        found |= {"heads": layer.mixer.heads, "kv_heads": layer.mixer.kv_heads}
    if isinstance(layer.mlp, MLP):
        found["mlp"] = layer.mlp.width
    return found


def turned(before: F32, after: F32) -> float:
    """The sum over tokens of 1 - cos(before, after)."""
    sizes = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    return float((1 - np.einsum("ij,ij->i", before, after) / np.maximum(sizes, 1e-30)).sum(dtype=np.float64))


def kept_layers(influences: Mapping[int, float], count: int, sparsity: float) -> list[int]:
    """The layers that stay: those of greatest influence; one of which none is known stays."""
    scores = np.array([influences.get(i, np.inf) for i in range(count)])
    return [int(i) for i in _largest(scores, _keep(count, sparsity))]


def renumbered(name: str, new: int) -> str:
    """The name of a layer's tensor with another number of the layer, which is the first number in it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", str(new), name, count=1)
