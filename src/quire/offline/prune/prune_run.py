"""Taking heads, channels or layers out of a model, layer by layer: the run of `quire prune --structure`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from quire.config.schema import EngineConfig
from quire.loader.source import TensorInfo
from quire.offline.prune.structures import (
    Config,
    KeptStructures,
    axis_totals,
    choose,
    cut,
    kept_layers,
    renumbered,
    smaller_config,
    smaller_spec,
    taken_text,
    turned,
)
from quire.offline.quantize.folder_output import finish_folder
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.job import QuantizeJob, check, opened
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.layout import check_shape
from quire.offline.quantize.quantize_model import Progress, run_job
from quire.offline.quantize.quantize_output import Found, Grams, QuantizeResult
from quire.offline.quantize.recipe import Recipe
from quire.offline.quantize.sites import LayerPart
from quire.offline.quantize.unfinished import Tensors, UnfinishedRun
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.tensors import Part
from quire.types import CheckpointError, UnsupportedModelError
from quire.util.sizes import format_size

Judge = Callable[[Path], None]


def prune_structure(
    name: str, out: Path, recipe: Recipe, asked: EngineConfig, *, calibration: str = "builtin",
    progress: Progress | None = None, judge: Judge | None = None,
) -> QuantizeResult:  # fmt: skip
    """Write the model `name` without some of its structures to the new folder `out`; arguments, errors and resuming as
    in quantize.quantize_model.quantize.
    """
    if out.exists():
        raise CheckpointError(f"{out}: already exists")
    with opened(name, recipe, asked, calibration) as job:
        config, _ = _config(job), smaller_spec(job.spec, recipe)  # raises before anything is done
        if recipe.structure == "layers":
            return _drop_layers(job, config, out, progress, judge)
        smaller_config(config, job.spec, recipe)
        return run_job(job, _CutOutput(job, config), out, progress, judge)


def _config(job: QuantizeJob) -> Config:
    found: Config = json.loads((job.model.folder / "config.json").read_text())
    if "text_config" in found:
        raise UnsupportedModelError(
            "config.json: text_config: structures of a model of several parts are not taken out"
        )
    return found


class _CutOutput:
    """Heads or channels: each layer is written with its own choice; see quantize.quantize_output.QuantizeOutput."""

    def __init__(self, job: QuantizeJob, config: Config) -> None:
        self._job, self._config = job, config
        self._parts: dict[str, list[Part]] = {}
        for param in lower(job.spec, NumberFormats()).params:
            for part in param.parts:
                self._parts.setdefault(part.tensor, []).append(part)
        self._kept = KeptStructures()

    def check(self, recipe: Recipe, name: str, rows: int, cols: int) -> None:
        """See QuantizeOutput."""
        check_shape("floats", recipe, name, rows, cols)

    def round(
        self, layer: LayerForward, part: LayerPart, weights: LayerWeights, grams: Grams, work: UnfinishedRun,
        pool: Executor,
    ) -> Found:  # fmt: skip
        """See QuantizeOutput."""
        del pool
        seen = {
            module.tensor: grams[site.op, module.expert]
            for site in part.sites for module in site.modules if (site.op, module.expert) in grams
        }  # fmt: skip
        job = self._job
        self._kept, found = choose(job.recipe, job.spec, layer.program, layer.index, weights, seen)
        work.notes |= {tensor.removesuffix(".weight"): error for tensor, (_, error) in found.items()}
        return found

    def tensors(self, layer: LayerForward, weights: LayerWeights, found: Found) -> Tensors:
        """See QuantizeOutput."""
        totals, made = axis_totals(self._job.spec.layers[layer.index]), []
        for tensor, (rounded, _) in found.items():
            weights[tensor] = rounded.values()
        for tensor in self._job.layer_tensors(layer.index):
            info, array = weights.written(tensor)
            smaller = cut(array, self._parts[tensor], self._kept, totals)
            made.append((TensorInfo(info.name, info.dtype, smaller.shape), smaller))
        return made

    def finish(self, work: UnfinishedRun, judge: Judge | None) -> QuantizeResult:
        """See QuantizeOutput."""
        job = self._job
        config = smaller_config(self._config, job.spec, job.recipe)
        of_layers = {
            job.stored[name] for index in range(len(job.layers)) for name in job.layer_tensors(index)
        }
        errors = {str(name): float(error) for name, error in work.notes.items()}
        total = finish_folder(job, work, _described(job, config), of_layers, len(job.layers), judge)
        layer = smaller_spec(job.spec, job.recipe).layers[0]
        stays = ", ".join(f"{count} {_WORDS[axis]}" for axis, count in axis_totals(layer).items())
        mean = float(np.mean(list(errors.values())))
        return QuantizeResult((f"each layer keeps {stays}; relative error of its outputs {mean:.2e} on average",
                       _sizes(job, total)), errors)  # fmt: skip


_WORDS = {"heads": "query heads", "kv_heads": "heads of keys and values", "mlp": "channels"}


def _described(job: QuantizeJob, config: Config) -> Config:
    return config | {"quire_pruning": job.meta() | {"summary": taken_text(job.spec, job.recipe)}}


def _sizes(job: QuantizeJob, total: int) -> str:
    stored = sum(job.source.info(name).nbytes for name in job.source.names())
    return f"{format_size(stored)} of weights became {format_size(total)}"


def _drop_layers(
    job: QuantizeJob, config: Config, out: Path, progress: Progress | None, judge: Judge | None
) -> QuantizeResult:
    """Measure how much every layer turns the residual stream, and write all but those that turn it least."""
    text = job.calibration
    assert text is not None
    check(job, lambda *_: None)
    count, tokens = len(job.layers), sum(map(len, text.windows))
    work = UnfinishedRun(out, len(smaller_spec(job.spec, job.recipe).layers) + 1)
    with work.opened(job.digest()) as work:
        for layer in job.layers[work.done :]:
            moved = 0.0
            with work.residuals(job.spec.dim) as residuals:
                layer.load(job.source)
                for number, window in enumerate(text.windows):
                    before = residuals.read(len(window))
                    after = layer.run(window, before, None)
                    residuals.write(after)
                    moved += 0.0 if before is None else turned(before, after)
                    if progress is not None:
                        progress(layer.index * len(text.windows) + number + 1, count * len(text.windows))
                layer.close()
            if layer.index:  # what goes into the first is not known
                work.notes[str(layer.index)] = moved / tokens
            work.commit([], residuals)
        influences = {int(index): float(moved) for index, moved in work.notes.items()}
        kept = kept_layers(influences, count, job.recipe.sparsity)
        smaller = smaller_config(config, job.spec, job.recipe, kept)
        of_layers = {job.stored[name] for index in range(count) for name in job.layer_tensors(index)}
        for new, old in enumerate(kept):
            work.write_shard(new + 1, _renamed(job, old, new))
        total = finish_folder(job, work, _described(job, smaller), of_layers, len(kept), judge)
    gone = [str(index) for index in range(count) if index not in kept]
    lines = (
        f"layers {', '.join(gone)} are taken out, which turn the residual stream least",
        _sizes(job, total),
    )
    return QuantizeResult(lines, {str(index): moved for index, moved in influences.items()})


def _renamed(job: QuantizeJob, old: int, new: int) -> Tensors:
    """The tensors of layer `old` as those of layer `new`."""
    weights, made = LayerWeights(job.source, job.stored), []
    for tensor in job.layer_tensors(old):
        info, array = weights.written(tensor)
        made.append((TensorInfo(renumbered(info.name, new), info.dtype, info.shape), array))
    return made
