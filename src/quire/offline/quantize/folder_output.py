"""A folder of safetensors: shards of layers, the rest of the weights, config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.loader.safetensors import SafetensorsFile
from quire.loader.source import TensorInfo
from quire.offline.convert import COPIED
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.job import QuantizeJob
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.layout import arrays_of, check_shape, layout_of, quantization_config, tensors_of
from quire.offline.quantize.methods import round_weights
from quire.offline.quantize.quantize_output import Found, Grams, QuantizeResult
from quire.offline.quantize.recipe import Recipe
from quire.offline.quantize.sites import LayerPart
from quire.offline.quantize.unfinished import Tensors, UnfinishedRun
from quire.offline.quantize.widths import module_patterns
from quire.spec.gguf_keys import Config
from quire.util.sizes import format_size


class FolderOutput:
    """See QuantizeOutput."""

    def __init__(self, job: QuantizeJob) -> None:
        self._job, self._layout = job, layout_of(job.recipe)

    def check(self, recipe: Recipe, name: str, rows: int, cols: int) -> None:
        """See QuantizeOutput."""
        recipe = (
            replace(recipe, bits=8) if recipe.target_bits else recipe
        )  # others are left out where they don't fit
        check_shape(self._layout, recipe, name, rows, cols)

    def round(
        self, layer: LayerForward, part: LayerPart, weights: LayerWeights, grams: Grams, work: UnfinishedRun,
        pool: Executor,
    ) -> Found:  # fmt: skip
        """See QuantizeOutput."""
        del layer
        job = self._job
        found = round_weights(job.recipe, weights, part.sites, part.unseen, grams, job.widths, pool)
        work.notes |= {tensor.removesuffix(".weight"): error for tensor, (_, error) in found.items()}
        if job.calibration is not None:
            blind = [
                module
                for site in part.sites
                for module in site.modules
                if (site.op, module.expert) not in grams
            ]
            work.notes["unseen"] = int(work.notes.get("unseen", 0)) + len(blind) + len(part.unseen)
        return found

    def tensors(self, layer: LayerForward, weights: LayerWeights, found: Found) -> Tensors:
        """See QuantizeOutput."""
        tensors: list[tuple[TensorInfo, Any]] = []
        for tensor in self._job.layer_tensors(layer.index):
            if tensor in found and self._layout == "floats":
                weights[tensor] = found[tensor][0].values()
                tensors.append(weights.written(tensor))
            elif tensor in found:
                name = self._job.stored[tensor].removesuffix(".weight")
                tensors += tensors_of(name, arrays_of(self._layout, found[tensor][0]))
            else:
                tensors.append(weights.written(tensor))
        return tensors

    def finish(self, work: UnfinishedRun, judge: Callable[[Path], None] | None) -> QuantizeResult:
        """See QuantizeOutput."""
        job = self._job
        indices = range(len(job.layers))
        of_layers = {job.stored[name] for index in indices for name in job.layer_tensors(index)}
        floats = [tensor for layer in job.layers for site in layer.sites for tensor in site.followers]
        kept = [job.stored[tensor].removesuffix(".weight") for tensor in floats]
        config = json.loads((job.model.folder / "config.json").read_text())
        if self._layout == "floats":
            config["quire_pruning"] = job.meta() | {"summary": job.recipe.pruned_text}
        else:
            dynamic = module_patterns(job)
            config["quantization_config"] = quantization_config(
                self._layout, job.recipe, kept, job.meta(), dynamic
            )
        total = finish_folder(job, work, config, of_layers, len(job.layers), judge)
        return self._result(work, total)

    def _result(self, work: UnfinishedRun, total: int) -> QuantizeResult:
        unseen = int(work.notes.pop("unseen", 0))
        errors = {str(name): float(error) for name, error in work.notes.items()}
        stored = sum(self._job.source.info(name).nbytes for name in self._job.source.names())
        mean = float(np.mean(list(errors.values())))
        lines = [
            f"{len(errors)} linears, relative error of their outputs {mean:.2e} on average",
            f"{format_size(stored)} of weights became {format_size(total)}",
        ]
        if unseen:
            lines.append(
                f"{unseen} linears were rounded to nearest: the calibration text shows none of their inputs"
            )
        return QuantizeResult(tuple(lines), errors)


def finish_folder(
    job: QuantizeJob, work: UnfinishedRun, config: Config, of_layers: Collection[str], layers: int,
    judge: Callable[[Path], None] | None,
) -> int:  # fmt: skip
    """Write the tensors that are not `of_layers` (names in the checkpoint) behind the shards of so many layers, the
    index, the config and the tokenizer; let the folder be judged, and give it its name. Returns the bytes of weights.
    """
    rest = [job.source.info(name) for name in job.source.names() if name not in of_layers]
    last = layers + 1
    work.write_shard(last, [(TensorInfo(i.name, i.dtype, i.shape), job.source.read(i.name)) for i in rest])
    weight_map, total = _contents(work, last)
    work.write_index(weight_map, total)
    for name in COPIED:
        if (job.model.folder / name).exists():
            (work.folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(job.model.folder / name, work.folder / name)
    (work.folder / "config.json").write_text(json.dumps(config, indent=1))
    if judge is not None:
        judge(work.folder)
    work.complete()
    return total


def _contents(work: UnfinishedRun, shards: int) -> tuple[dict[str, str], int]:
    """Which file has which tensor, and the bytes of all."""
    found: dict[str, str] = {}
    total = 0
    for number in range(1, shards + 1):
        file = SafetensorsFile(work.folder / work.shard_name(number))
        for name in file.names():
            found[name] = work.shard_name(number)
            total += file.info(name).nbytes
        file.close()
    return found, total
