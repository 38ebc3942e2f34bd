"""Quantizing a model, layer by layer: `quantize` writes a checkpoint."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
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
from quire.offline.quantize.job import QuantizeJob, check, opened
from quire.offline.quantize.layer import LayerWeights, Replaced
from quire.offline.quantize.layout import Rounded
from quire.offline.quantize.quantize_output import QuantizeOutput, QuantizeResult
from quire.offline.quantize.recipe import Recipe
from quire.offline.quantize.sites import Site
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
    total = once * (1 + job.recipe.passes)

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
    count = 1 if job.calibration is None else len(job.calibration.windows)
    passes = job.recipe.passes
    steps = _Steps(progress, work.done * count * passes, count * passes * len(job.layers))
    for layer in job.layers[work.done :]:
        weights = LayerWeights(job.source, job.stored)
        if job.calibration is None:
            found = output.round(layer, weights, {}, work, pool)
            steps.one()
            work.commit(output.tensors(layer, weights, found), None)
            continue
        with work.residuals(job.spec.dim) as residuals:
            grams = _observe(job, layer, residuals, steps, pool, keep=passes == 1)
            layer.close()
            found = output.round(layer, weights, grams, work, pool)
            tensors = output.tensors(layer, weights, found)
            if passes == 2:
                grams.clear()
                _pass_on(job, layer, found, residuals, steps)
                layer.close()
        work.commit(tensors, residuals.after)


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


def _pass_on(
    job: QuantizeJob,
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
