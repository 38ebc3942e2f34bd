"""Opening a model to quantize, and everything that is checked before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire import __version__
from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights, weight_origin
from quire.engine.build.opening import Model, open_model
from quire.loader import LoadRules, Source, fingerprint
from quire.loader.load import check_tensors
from quire.offline.quantize.calibration import Calibration, read_text, windows_of
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.in_order import SiteSums
from quire.offline.quantize.layer import stored_names
from quire.offline.quantize.recipe import Recipe, digest
from quire.offline.quantize.sites import Module, together, unseen_modules
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.records import dataclass
from quire.spec.model import ModelSpec
from quire.types import CheckpointError, MemoryBudgetError, UnsupportedModelError
from quire.util.platform import resident_exactly
from quire.util.sizes import format_size


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Everything that a run knows before it begins.

    `stored`: the program's name of a tensor -> the checkpoint's. `widths`: the bits of tensors that do not have the
    recipe's.
    """

    model: Model
    spec: ModelSpec
    recipe: Recipe
    config: ResolvedConfig
    source: Source
    stored: dict[str, str]
    calibration: Calibration | None
    layers: list[LayerForward]
    widths: Mapping[str, int]

    def digest(self) -> str:
        """What a run must have in common with one that it continues."""
        files = weight_origin(self.model).files()
        text = None if self.calibration is None else self.calibration.digest
        machine = [self.config.weights, self.config.isa, self.recipe.in_order]
        config = self.model.facts.config_sha256
        recipe = self.recipe.described()
        return digest(__version__, recipe, dict(self.widths), text, fingerprint(files), config, machine)

    def meta(self) -> dict[str, Any]:
        """How the checkpoint was made, for its files."""
        found = {"quantizer": f"quire:{__version__}", **self.recipe.described()}
        text = self.calibration
        if text is not None:
            found |= {
                "calibration": text.name, "calibration_sha256": text.digest, "calibration_windows": len(text.windows)
            }  # fmt: skip
        return found

    def original(self, layer: LayerForward) -> LayerForward:
        """The same layer once more, for the original's weights beside others."""
        return LayerForward(self.spec, self.config, layer.index, layer.longest)

    def layer_tensors(self, index: int) -> list[str]:
        """The program's names of a layer's tensors."""
        params = lower(self.spec, NumberFormats()).params
        mine = (param for param in params if param.name.startswith(f"layers.{index}."))
        names = {part.tensor for param in mine for part in param.parts}
        return sorted(name for name in names if name in self.stored)


@contextmanager
def opened(name: str, recipe: Recipe, asked: EngineConfig, calibration: str) -> Iterator[QuantizeJob]:
    """Open a model and its calibration text. Raises as `quantize`."""
    model = open_model(name)
    spec = model.facts.spec
    _check_model(model)
    config, _ = choose(model, asked, machine_facts())
    text = _calibration(model, recipe, calibration) if recipe.needs_text else None
    longest = 1 if text is None else text.longest
    layers = [LayerForward(spec, config, index, longest) for index in range(len(spec.layers))]
    recipe = recipe.fitted(module.cols for layer in layers for module in modules_of(layer))
    with open_weights(model) as source:
        rules = LoadRules.of(spec)
        check_tensors(lower(spec, NumberFormats()).params, source, rules)
        stored = stored_names(spec, source, rules.twins)
        yield QuantizeJob(model, spec, recipe, config, source, stored, text, layers, {})


def _check_model(model: Model) -> None:
    if model.facts.quantization is not None:
        raise CheckpointError(f"{model.folder}: is already quantized ({model.facts.quantization.method})")
    if model.gguf is not None:
        raise CheckpointError(
            f"{model.folder}: is a GGUF file: make a folder of it first, with quire convert MODEL FOLDER"
        )
    if model.facts.spec.pooling is not None:
        raise UnsupportedModelError(f"{model.facts.architecture}: models without logits are not quantized")


def _calibration(model: Model, recipe: Recipe, name: str) -> Calibration:
    if model.tokenizer is None:
        raise CheckpointError(f"{model.folder}: has no tokenizer, which {recipe.method} needs for its text")
    length = min(recipe.length, model.facts.longest)
    tokens = model.tokenizer.encode(read_text(name))
    return windows_of(name, tokens, recipe.samples, length, recipe.seed)


def check(job: QuantizeJob, fits: Callable[[Recipe, str, int, int], None]) -> None:
    """Raise before anything is written for weights that cannot be quantized so, and for too little memory.

    `fits` raises ValueError for the name, outputs and input features of a weight that the format cannot hold.
    """
    need = 0
    for layer in job.layers:
        for module in modules_of(layer):
            if module.tensor not in job.stored:
                raise UnsupportedModelError(
                    f"{module.tensor}: experts that are stored in one tensor are not quantized; the checkpoint must "
                    "have a tensor for each"
                )
            fits(job.recipe, module.name, module.rows, module.cols)
        need = max(need, _layer_bytes(job, layer))
    held = resident_exactly()
    if held + need > job.config.memory:
        raise MemoryBudgetError(
            f"memory: a layer with its inputs and their Gram matrices needs {format_size(need)} beside "
            f"{format_size(held)} that the process holds, but the bound is {format_size(job.config.memory)}"
        )


def modules_of(layer: LayerForward) -> tuple[Module, ...]:
    """The linears of a layer that are quantized."""
    seen = tuple(module for site in layer.sites for module in site.modules)
    return (*seen, *unseen_modules(layer.program, layer.index))


def _layer_bytes(job: QuantizeJob, layer: LayerForward) -> int:
    """The most that a layer holds while it is calibrated, and then while it is rounded."""
    modules = modules_of(layer)
    rounded = (
        sum(module.rows * module.cols for module in modules) * 7
    )  # float32 values, codes and packed codes
    largest = max(module.rows * module.cols for module in modules)
    solving = 6 * 4 * largest + 2**24
    if job.calibration is None:
        return rounded + solving
    widest = max(site.cols for site in layer.sites) ** 2
    factor = 28 * widest  # in float64, its transpose and copies
    if job.recipe.in_order:
        groups = together(layer.program, layer.sites)
        sums = max((sum(map(SiteSums.nbytes, sites)) for sites in groups), default=0)
        targets = 4 * sum(module.rows * module.cols for module in modules)
        both = layer.nbytes + layer.nbytes_beside
        solve = job.config.threads * max(
            16 * module.cols**2 + 24 * module.rows * module.cols for module in modules
        )
        return both + sums + targets + rounded + max(factor + solving, solve, 2**24)
    grams = sum(GramMatrix.nbytes(site.cols) * site.experts for site in layer.sites)
    products = 4 * widest * job.config.threads
    return layer.nbytes + grams + max(products, rounded + max(factor + solving, 2**24))
