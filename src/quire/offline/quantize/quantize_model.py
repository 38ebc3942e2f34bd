"""Quantizing a model, layer by layer: `quantize` writes a checkpoint."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.config.schema import EngineConfig
from quire.executor.base import F32
from quire.offline.quantize.folder_output import FolderOutput
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.gguf import GGUFOutput
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.in_order import SiteSums, take_targets
from quire.offline.quantize.job import QuantizeJob, check, opened
from quire.offline.quantize.layer import LayerWeights, Replaced
from quire.offline.quantize.quantize_output import Found, QuantizeOutput, QuantizeResult
from quire.offline.quantize.recipe import Recipe
from quire.offline.quantize.sites import LayerPart, Site, together, unseen_modules
from quire.offline.quantize.unfinished import Residuals, UnfinishedRun
from quire.offline.quantize.widths import MeasureWidths, with_widths
from quire.types import CheckpointError

Progress = Callable[[int, int], None]


def quantize(
    name: str, out: Path, recipe: Recipe, asked: EngineConfig, *, calibration: str = "builtin",
    progress: Progress | None = None, judge: Callable[[Path], None] | None = None,
) -> QuantizeResult:  # fmt: skip
    """Quantize the model `name` to `out`, a new folder, or a GGUF file by the method "gguf".

    `progress` is called with (passes of windows, all of them). `judge` gets what was written before it has its name,
    and may raise to refuse it.

    Raises CheckpointError for an invalid model, a model that is quantized already, an existing `out` or a full disk,
    UnsupportedModelError for models that have no such form, ValueError for options that do not fit the model,
    MemoryBudgetError if a layer does not fit `memory`. Then there is nothing at `out`; finished layers stay beside it,
    in `out`.unfinished, where the same call continues.
    """
    if out.exists():
        raise CheckpointError(f"{out}: already exists")
    with opened(name, recipe, asked, calibration) as job:
        if recipe.method == "gguf":
            return run_job(job, GGUFOutput(job, out), out, progress, judge)
        if not recipe.target_bits:
            return run_job(job, FolderOutput(job), out, progress, judge)
        return _run_mixed(job, out, progress, judge)


def _run_mixed(
    job: QuantizeJob, out: Path, progress: Progress | None, judge: Callable[[Path], None] | None
) -> QuantizeResult:
    """Run the text through the model once to choose the width of each linear, then quantize."""
    assert job.calibration is not None
    once = len(job.calibration.windows) * len(job.layers)
    total = once + _passes(job, job.layers)

    def part(begin: int) -> Progress | None:
        return None if progress is None else lambda done, _: progress(begin + done, total)

    measuring = replace(job, recipe=replace(job.recipe, method="rtn"))
    measured, place = MeasureWidths(measuring), out.with_name(f"{out.name}.widths")
    run_job(measuring, measured, place, part(0), None)
    mixed = with_widths(job, measured.widths)
    result = run_job(mixed, FolderOutput(mixed), out, part(once), judge)
    shutil.rmtree(UnfinishedRun(place, 0).folder)
    counts = Counter(measured.widths.values())
    widths = ", ".join(f"{counts[bits]} of {bits} bits" for bits in sorted(counts))
    return QuantizeResult((f"linears: {widths}", *result.lines), result.errors)


def run_job(
    job: QuantizeJob,
    output: QuantizeOutput,
    out: Path,
    progress: Progress | None,
    judge: Callable[[Path], None] | None,
) -> QuantizeResult:
    """Change layer after layer, and write what becomes of them; see `quantize`."""
    check(job, output.check)
    work = UnfinishedRun(out, len(job.layers) + 1)
    with work.opened(job.digest()) as work, ThreadPoolExecutor(job.config.threads) as pool:
        _run_layers(job, output, work, progress, pool)
        return output.finish(work, judge)


def _run_layers(
    job: QuantizeJob,
    output: QuantizeOutput,
    work: UnfinishedRun,
    progress: Progress | None,
    pool: ThreadPoolExecutor,
) -> None:
    steps = _Steps(progress, _passes(job, job.layers[: work.done]), _passes(job, job.layers))
    passes = job.recipe.passes
    for layer in job.layers[work.done :]:
        weights = LayerWeights(job.source, job.stored)
        whole = LayerPart(layer.sites, unseen_modules(layer.program, layer.index))
        if job.calibration is None:
            found = output.round(layer, whole, weights, {}, work, pool)
            steps.one()
            work.commit(output.tensors(layer, weights, found))
            continue
        if job.recipe.in_order:
            _run_in_order(job, layer, whole, output, work, steps, pool)
            continue
        with work.residuals(job.spec.dim) as residuals:
            grams = _observe(job, layer, residuals, steps, pool, keep=passes == 1)
            layer.close()
            found = output.round(layer, whole, weights, grams, work, pool)
            tensors = output.tensors(layer, weights, found)
            if passes == 2:
                grams.clear()
                _pass_on(job, layer, found, residuals, steps)
                layer.close()
        work.commit(tensors, residuals)


def _passes(job: QuantizeJob, layers: Sequence[LayerForward]) -> int:
    """How many windows run through these layers; without a text, layers."""
    if job.calibration is None:
        return len(layers)
    in_order, passes = job.recipe.in_order, job.recipe.passes
    each = (len(together(layer.program, layer.sites)) + 1 if in_order else passes for layer in layers)
    return len(job.calibration.windows) * sum(each)


def _run_in_order(
    job: QuantizeJob, layer: LayerForward, whole: LayerPart, output: QuantizeOutput, work: UnfinishedRun,
    steps: _Steps, pool: ThreadPoolExecutor,
) -> None:  # fmt: skip
    """Round the linears of a layer one after another, see in_order."""
    weights, original = LayerWeights(job.source, job.stored), job.original(layer)
    with work.residuals(job.spec.dim) as residuals, work.residuals(job.spec.dim, "original") as originals:
        found = output.round(layer, LayerPart(unseen=whole.unseen), weights, {}, work, pool)
        original.load(job.source)
        groups = together(layer.program, whole.sites)
        for sites in groups:
            layer.load(_rounded_source(job, found), original)
            last = sites is groups[-1]
            sums = _sum_sites(job, (layer, residuals), (original, originals), sites, last, steps, pool)
            layer.close()
            if last:
                original.close()
            take_targets(sums, weights, job.recipe.damping, pool)
            grams = {key: gram for each in sums for key, gram in each.grams.items()}
            found |= output.round(layer, LayerPart(sites), weights, grams, work, pool)
            del sums, grams
        tensors = output.tensors(layer, weights, found)
        _pass_on(job, layer, found, residuals, steps)
        layer.close()
    work.commit(tensors, residuals, originals)


def _sum_sites(
    job: QuantizeJob, rounded: tuple[LayerForward, Residuals], original: tuple[LayerForward, Residuals],
    sites: tuple[Site, ...], last: bool, steps: _Steps, pool: ThreadPoolExecutor,
) -> list[SiteSums]:  # fmt: skip
    """Run a layer up to sites twice: as rounded so far, and as the original, the `last` time to its end."""
    assert job.calibration is not None
    sums = [SiteSums(site, pool) for site in sites]
    for _, stream in (rounded, original):
        stream.rewind()
    for window in job.calibration.windows:
        for layer, stream in (rounded, original):
            layer.begin(window, stream.read(len(window)))
        for each in sums:
            each.add(rounded[0], original[0])
        if last:
            original[1].write(original[0].end())
        steps.one()
    for each in sums:
        each.finish()
    return sums


class _Steps:
    """Counts passes of windows."""

    def __init__(self, progress: Progress | None, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total

    def one(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _observe(
    job: QuantizeJob,
    layer: LayerForward,
    residuals: Residuals,
    steps: _Steps,
    pool: ThreadPoolExecutor,
    *,
    keep: bool,
) -> dict[tuple[int, int], GramMatrix]:
    """Run a layer as the checkpoint has it; what its linears get. `keep`: what it leaves is the next one's input."""
    assert job.calibration is not None
    grams: dict[tuple[int, int], GramMatrix] = {}
    adding: list[Future[None]] = []

    def take(site: Site, rows: F32, experts: npt.NDArray[np.int64] | None) -> None:
        for expert in (-1,) if experts is None else np.unique(experts):
            gram = grams.setdefault((site.op, int(expert)), GramMatrix(site.cols))
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
    list(pool.map(lambda gram: gram.h, grams.values()))  # of rows that wait
    return grams


def _rounded_source(job: QuantizeJob, found: Found) -> Replaced:
    """The source with what was rounded in its place."""
    values = {job.stored[tensor]: rounded.values() for tensor, (rounded, _) in found.items()}
    return Replaced(job.source, values)


def _pass_on(
    job: QuantizeJob,
    layer: LayerForward,
    found: Found,
    residuals: Residuals,
    steps: _Steps,
) -> None:
    """Run a layer with its rounded weights: later layers make up for what it lost."""
    assert job.calibration is not None
    layer.load(_rounded_source(job, found))
    residuals.rewind()
    for window in job.calibration.windows:
        residuals.write(layer.run(window, residuals.read(len(window)), None))
        steps.one()
