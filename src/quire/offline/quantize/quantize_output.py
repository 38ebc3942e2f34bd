"""What becomes of rounded layers: the protocol of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.layout import Rounded
from quire.offline.quantize.recipe import Recipe
from quire.offline.quantize.sites import LayerPart
from quire.offline.quantize.unfinished import Tensors, UnfinishedRun
from quire.records import dataclass

Grams = Mapping[tuple[int, int], GramMatrix]  # by op of a site, and number of an expert or -1
Found = dict[str, tuple[Rounded, float]]


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """What was made: lines for the user, and the relative error of each module's outputs."""

    lines: tuple[str, ...]
    errors: dict[str, float]


class QuantizeOutput(Protocol):
    """A form in which a quantized model is written."""

    def check(self, recipe: Recipe, name: str, rows: int, cols: int) -> None:
        """Raise ValueError for a weight that the form cannot hold."""

    def round(
        self, layer: LayerForward, part: LayerPart, weights: LayerWeights, grams: Grams, work: UnfinishedRun,
        pool: Executor,
    ) -> Found:  # fmt: skip
        """Round a part of a layer, and note what `finish` needs."""

    def tensors(self, layer: LayerForward, weights: LayerWeights, found: Found) -> Tensors:
        """What the layer's shard holds."""

    def finish(self, work: UnfinishedRun, judge: Callable[[Path], None] | None) -> QuantizeResult:
        """Write what belongs to no layer, let it be judged, and give it its name."""
