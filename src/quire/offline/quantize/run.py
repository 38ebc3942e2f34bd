"""Quantizing a model, layer by layer: `quantize` writes a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire import __version__
from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights, weight_origin
from quire.engine.build.opening import Model, open_model
from quire.loader import LoadRules, Source, TensorInfo, fingerprint
from quire.loader.load import check_tensors
from quire.offline.quantize.calibration import Calibration, read_text, windows_of
from quire.offline.quantize.folder import write_folder_files
from quire.offline.quantize.forward import F32, LayerForward
from quire.offline.quantize.gram import Gram
from quire.offline.quantize.layer import LayerWeights, Replaced, stored_names
from quire.offline.quantize.layout import (
    Rounded,
    arrays_of,
    check_shape,
    layout_of,
    quantization_config,
    tensors_of,
)
from quire.offline.quantize.methods import round_weights
from quire.offline.quantize.recipe import Recipe, digest
from quire.offline.quantize.sites import Module, Site, unseen_modules
from quire.offline.quantize.work import Residuals, Tensors, Work
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.records import dataclass
from quire.spec.model import ModelSpec
from quire.types import CheckpointError, MemoryBudgetError, UnsupportedModelError
from quire.util.platform import resident_exactly
from quire.util.sizes import format_size

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Result:
    """What was made: lines for the user, the relative error of each module, and the digest of the calibration text."""

    lines: tuple[str, ...]
    errors: dict[str, float]
    calibration: str


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that a run knows before it begins."""

    model: Model
    spec: ModelSpec
    recipe: Recipe
    config: ResolvedConfig
    source: Source
    stored: dict[str, str]
    calibration: Calibration | None
    layers: list[LayerForward]


def quantize(
    name: str, out: Path, recipe: Recipe, asked: EngineConfig, *, calibration: str = "builtin",
    progress: Progress | None = None, judge: Callable[[Path], None] | None = None,
) -> Result:  # fmt: skip
    """Quantize the model `name` to the new folder `out`; `progress` is called with (passes of windows, all of them).

    `judge` gets the folder before it has its name, and may raise to refuse it.

    Raises CheckpointError for an invalid model, a model that is quantized already, an existing `out` or a full disk,
    UnsupportedModelError for models that have no such form, ValueError for options that do not fit the model,
    MemoryBudgetError if a layer does not fit `memory`. Then there is nothing at `out`; finished layers stay beside it,
    in `out`.unfinished, where the same call continues.
    """
    if out.exists():
        raise CheckpointError(f"{out}: already exists")
    with _job(name, recipe, asked, calibration) as job:
        layout = layout_of(job.recipe)
        _check(job, layout)
        work = Work(out, len(job.layers) + 1)
        with work.opened(_digest(job)) as work, ThreadPoolExecutor(job.config.threads) as pool:
            _run_layers(job, work, layout, progress, pool)
            return _finish(job, work, layout, judge)


@contextmanager
def _job(name: str, recipe: Recipe, asked: EngineConfig, calibration: str) -> Iterator[_Job]:
    model = open_model(name)
    spec = model.facts.spec
    _check_model(model)
    config, _ = choose(model, asked, machine_facts())
    text = _calibration(model, recipe, calibration) if recipe.needs_text else None
    longest = 1 if text is None else text.longest
    layers = [LayerForward(spec, config, index, longest) for index in range(len(spec.layers))]
    recipe = recipe.fitted(module.cols for layer in layers for module in _modules(layer))
    with open_weights(model) as source:
        rules = LoadRules.of(spec)
        check_tensors(lower(spec, NumberFormats()).params, source, rules)
        stored = stored_names(spec, source, rules.twins)
        yield _Job(model, spec, recipe, config, source, stored, text, layers)


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


def _check(job: _Job, layout: str) -> None:
    """Raise before anything is written for weights that cannot be quantized so, and for too little memory."""
    need = 0
    for layer in job.layers:
        for module in _modules(layer):
            if module.tensor not in job.stored:
                raise UnsupportedModelError(
                    f"{module.tensor}: experts that are stored in one tensor are not quantized; the checkpoint must "
                    "have a tensor for each"
                )
            check_shape(layout, job.recipe, module.name, module.rows, module.cols)
        need = max(need, _layer_bytes(job, layer))
    held = resident_exactly()
    if held + need > job.config.memory:
        raise MemoryBudgetError(
            f"memory: a layer with its inputs and their Gram matrices needs {format_size(need)} beside "
            f"{format_size(held)} that the process holds, but the bound is {format_size(job.config.memory)}"
        )


def _modules(layer: LayerForward) -> tuple[Module, ...]:
    seen = tuple(module for site in layer.sites for module in site.modules)
    return (*seen, *unseen_modules(layer.program, layer.index))


def _layer_bytes(job: _Job, layer: LayerForward) -> int:
    """The most that a layer holds while it is calibrated, and then while it is rounded."""
    modules = _modules(layer)
    rounded = (
        sum(module.rows * module.cols for module in modules) * 7
    )  # float32 values, codes and packed codes
    largest = max(module.rows * module.cols for module in modules)
    solving = 6 * 4 * largest + 2**24
    if job.calibration is None:
        return rounded + solving
    grams = sum(
        Gram.nbytes(site.cols) * max(len({module.expert for module in site.modules}), 1)
        for site in layer.sites
    )
    factor = max(28 * site.cols**2 for site in layer.sites)  # in float64, its transpose and copies
    return layer.nbytes + grams + rounded + max(factor + solving, 2**24)


def _digest(job: _Job) -> str:
    files = weight_origin(job.model).files()
    text = None if job.calibration is None else job.calibration.digest
    machine = [job.config.weights, job.config.threads, job.config.isa]
    return digest(
        __version__, job.recipe.described(), text, fingerprint(files), job.model.facts.config_sha256, machine
    )


def _run_layers(
    job: _Job, work: Work, layout: str, progress: Progress | None, pool: ThreadPoolExecutor
) -> None:
    count = 1 if job.calibration is None else len(job.calibration.windows)
    passes = job.recipe.passes
    steps = _Steps(progress, work.done * count * passes, count * passes * len(job.layers))
    for layer in job.layers[work.done :]:
        weights = LayerWeights(job.source, job.stored)
        unseen = unseen_modules(layer.program, layer.index)
        if job.calibration is None:
            found = round_weights(job.recipe, weights, layer.sites, unseen, {}, pool)
            steps.one()
            after = None
        else:
            with work.residuals(job.spec.dim) as residuals:
                grams = _observe(job, layer, residuals, steps, pool, keep=passes == 1)
                found = round_weights(job.recipe, weights, layer.sites, unseen, grams, pool)
                if passes == 2:
                    grams.clear()
                    _pass_on(job, layer, found, residuals, steps)
                layer.close()
            after = residuals.after
        work.notes |= {tensor.removesuffix(".weight"): error for tensor, (_, error) in found.items()}
        work.commit(_tensors(job, layer, weights, found, layout), after)


class _Steps:
    """Counts passes of windows."""

    def __init__(self, progress: Progress | None, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total

    def one(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _observe(
    job: _Job,
    layer: LayerForward,
    residuals: Residuals,
    steps: _Steps,
    pool: ThreadPoolExecutor,
    *,
    keep: bool,
) -> dict[tuple[int, int], Gram]:
    """Run a layer as the checkpoint has it; what its linears get. `keep`: what it leaves is the next one's input."""
    assert job.calibration is not None
    grams: dict[tuple[int, int], Gram] = {}
    adding: list[Future[None]] = []

    def take(site: Site, rows: F32, experts: npt.NDArray[np.int64] | None) -> None:
        for expert in (-1,) if experts is None else np.unique(experts):
            gram = grams.setdefault((site.op, int(expert)), Gram(site.cols))
            adding.append(pool.submit(gram.add, rows if experts is None else rows[experts == expert]))

    layer.load(job.source)
    for window in job.calibration.windows:
        after = layer.run(window, residuals.read(len(window)), take)
        for each in adding:  # a Gram matrix gets its windows in order
            each.result()
        adding.clear()
        if keep:
            residuals.write(after)
        steps.one()
    return grams


def _pass_on(
    job: _Job,
    layer: LayerForward,
    found: dict[str, tuple[Rounded, float]],
    residuals: Residuals,
    steps: _Steps,
) -> None:
    """Run a layer with its rounded weights: later layers make up for what it lost."""
    assert job.calibration is not None
    values = {job.stored[tensor]: rounded.values() for tensor, (rounded, _) in found.items()}
    layer.load(Replaced(job.source, values))
    residuals.rewind()
    for window in job.calibration.windows:
        residuals.write(layer.run(window, residuals.read(len(window)), None))
        steps.one()


def _tensors(
    job: _Job,
    layer: LayerForward,
    weights: LayerWeights,
    found: dict[str, tuple[Rounded, float]],
    layout: str,
) -> Tensors:
    """All tensors of a layer as they are written."""
    tensors: list[tuple[TensorInfo, Any]] = []
    for tensor in _layer_tensors(job, layer.index):
        if tensor in found and layout == "floats":
            weights[tensor] = found[tensor][0].values()
            tensors.append(weights.written(tensor))
        elif tensor in found:
            name = job.stored[tensor].removesuffix(".weight")
            tensors += tensors_of(name, arrays_of(layout, found[tensor][0]))
        else:
            tensors.append(weights.written(tensor))
    return tensors


def _layer_tensors(job: _Job, index: int) -> list[str]:
    """The program's names of a layer's tensors."""
    params = lower(job.spec, NumberFormats()).params
    names = {
        part.tensor for param in params if param.name.startswith(f"layers.{index}.") for part in param.parts
    }
    return sorted(name for name in names if name in job.stored)


def _finish(job: _Job, work: Work, layout: str, judge: Callable[[Path], None] | None) -> Result:
    """Write what belongs to no layer, the index, the config and the tokenizer."""
    of_layers = {job.stored[name] for index in range(len(job.layers)) for name in _layer_tensors(job, index)}
    rest = [name for name in job.source.names() if name not in of_layers]
    last = len(job.layers) + 1
    work.write_shard(last, [(_info(job, name), job.source.read(name)) for name in rest])
    from quire.loader.safetensors import SafetensorsFile

    weight_map: dict[str, str] = {}
    total = 0
    for number in range(1, last + 1):
        file = SafetensorsFile(work.folder / work.shard_name(number))
        for name in file.names():
            weight_map[name] = work.shard_name(number)
            total += file.info(name).nbytes
        file.close()
    kept = [job.stored[tensor].removesuffix(".weight") for tensor in _float_linears(job)]
    meta = {
        "quantizer": f"quire:{__version__}", **job.recipe.described(),
        **({} if job.calibration is None else {
            "calibration": job.calibration.name, "calibration_sha256": job.calibration.digest,
            "calibration_windows": len(job.calibration.windows),
        }),
    }  # fmt: skip
    config = json.loads((job.model.folder / "config.json").read_text())
    if layout == "floats":
        config["quire_pruning"] = meta | {"summary": job.recipe.sparse_text}
    else:
        config["quantization_config"] = quantization_config(layout, job.recipe, kept, meta)
    write_folder_files(job.model, config, work.folder)
    work.write_index(weight_map, total)
    if judge is not None:
        judge(work.folder)
    work.complete()
    errors = {str(name): float(error) for name, error in work.notes.items()}
    mean = float(np.mean(list(errors.values())))
    stored = sum(job.source.info(name).nbytes for name in job.source.names())
    lines = [
        f"{len(errors)} linears, relative error of their outputs {mean:.2e} on average",
        f"{format_size(stored)} of weights became {format_size(total)}",
    ]
    return Result(tuple(lines), errors, "" if job.calibration is None else job.calibration.digest)


def _info(job: _Job, name: str) -> TensorInfo:
    info = job.source.info(name)
    return TensorInfo(name, info.dtype, info.shape)


def _float_linears(job: _Job) -> list[str]:
    """Linears of layers that stay floats."""
    return [tensor for layer in job.layers for site in layer.sites for tensor in site.followers]
