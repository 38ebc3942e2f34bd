"""Mixed precision in one checkpoint: how many bits the linears of each site get.

Linears that take the same inputs (queries, keys and values; gate and up) get the same width, because other programs
compute them as one matrix. `dynamic` of GPTQ checkpoints says so by patterns of names (GPTQModel); the name of the
matrix that vLLM makes of them is among those that a pattern matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import find_grid
from quire.offline.quantize.job import QuantizeJob
from quire.offline.quantize.knapsack import Choice, choose
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.layout import check_shape
from quire.offline.quantize.methods import kind_of
from quire.offline.quantize.quantize_output import Found, Grams, QuantizeResult
from quire.offline.quantize.recipe import BITS, Recipe
from quire.offline.quantize.sites import LayerPart, Module, unseen_modules
from quire.offline.quantize.unfinished import Tensors, UnfinishedRun

_ROWS = 256  # of a weight judge a width
_COMMON = (4, 8)  # vLLM computes these alone
_FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}


class MeasureWidths:
    """Measures what each width costs each site, and chooses; see QuantizeOutput. `widths`: the bits of each tensor."""

    def __init__(self, job: QuantizeJob) -> None:
        self._job = job
        self.widths: dict[str, int] = {}

    def check(self, recipe: Recipe, name: str, rows: int, cols: int) -> None:
        """See QuantizeOutput."""
        check_shape("gptq", replace(recipe, bits=8), name, rows, cols)

    def round(
        self, layer: LayerForward, part: LayerPart, weights: LayerWeights, grams: Grams, work: UnfinishedRun,
        pool: Executor,
    ) -> Found:  # fmt: skip
        """Note the error of each width, that of rounding to nearest."""
        del layer
        groups = [
            [(module, grams.get((site.op, module.expert))) for module in site.modules] for site in part.sites
        ]
        groups += [[(module, None)] for module in part.unseen]

        def measured(item: tuple[Module, GramMatrix | None]) -> dict[int, float]:
            return _errors(self._job.recipe, item[0], weights[item[0].tensor], item[1] or GramMatrix(0))

        for group in groups:
            errors = list(pool.map(measured, group))
            shared = [bits for bits in BITS if all(bits in each for each in errors)]
            choices = [(bits, _stored_bits(self._job.recipe, group[0][0], bits), sum(each[bits] for each in errors))
                       for bits in shared]  # fmt: skip
            numbers = sum(module.rows * module.cols for module, _ in group)
            work.notes[group[0][0].tensor] = [numbers, choices, [module.tensor for module, _ in group]]
        return {}

    def tensors(self, layer: LayerForward, weights: LayerWeights, found: Found) -> Tensors:
        """See QuantizeOutput: none."""
        del layer, weights, found
        return []

    def finish(self, work: UnfinishedRun, judge: Callable[[Path], None] | None) -> QuantizeResult:
        """Choose; the folder stays, so that a run that is interrupted later need not measure again."""
        del judge
        items = {
            first: (numbers, [Choice(str(bits), cost, error) for bits, cost, error in choices])
            for first, (numbers, choices, _) in work.notes.items()
        }
        common = {first: (numbers, [c for c in choices if int(c.name) in _COMMON])
                  for first, (numbers, choices) in items.items()}  # fmt: skip
        try:
            chosen = choose(common, self._job.recipe.target_bits)
        except ValueError:  # the target is below them
            chosen = choose(items, self._job.recipe.target_bits)
        self.widths = {tensor: int(bits) for first, bits in chosen.items() for tensor in work.notes[first][2]}
        return QuantizeResult((), {})


def _errors(recipe: Recipe, module: Module, weight: Any, gram: GramMatrix) -> dict[int, float]:
    """The relative error of each width that the format has for such a weight."""
    sample = np.ascontiguousarray(weight[:: max(len(weight) // _ROWS, 1)])
    whole = max(float(gram.error(sample).sum(dtype=np.float64)), 1e-30)
    found = {}
    for bits in BITS:
        mine = replace(recipe, bits=bits)
        try:
            check_shape("gptq", mine, module.name, module.rows, module.cols)
        except ValueError:
            continue
        grid = find_grid(sample, kind_of(mine), gram.h if gram.rows else None)
        found[bits] = (
            float(gram.error(sample - grid.values(grid.codes(sample))).sum(dtype=np.float64)) / whole
        )
    return found


def _stored_bits(recipe: Recipe, module: Module, bits: int) -> float:
    """Bits of a number with its share of a scale and a zero point."""
    return bits + (16 + bits) / (recipe.group_size or module.cols)


def with_widths(job: QuantizeJob, widths: Mapping[str, int]) -> QuantizeJob:
    """The job with these widths: the one that most numbers have is the recipe's."""
    numbers = dict.fromkeys(BITS, 0)
    for layer in job.layers:
        for module in (
            *(m for site in layer.sites for m in site.modules),
            *unseen_modules(layer.program, layer.index),
        ):
            numbers[widths[module.tensor]] += module.rows * module.cols
    most = max(BITS, key=lambda bits: numbers[bits])
    others = {tensor: bits for tensor, bits in widths.items() if bits != most}
    return replace(job, recipe=replace(job.recipe, bits=most), widths=others)


def module_patterns(job: QuantizeJob) -> dict[str, int]:
    """Patterns of the names of modules that do not have the recipe's bits, in the order of layers."""
    found = {}
    for layer in job.layers:
        groups = [[module.tensor for module in site.modules] for site in layer.sites]
        groups += [[module.tensor] for module in unseen_modules(layer.program, layer.index)]
        for group in groups:
            if group[0] in job.widths:
                for pattern in _patterns(job.stored[tensor].removesuffix(".weight") for tensor in group):
                    found[pattern] = job.widths[group[0]]
    return found


def _patterns(names: Iterable[str]) -> list[str]:
    """One pattern for the modules of each parent."""
    parents: dict[str, list[str]] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        parents.setdefault(parent, []).append(own)
    patterns = []
    for parent, names_of in parents.items():
        fused = _FUSED.get(tuple(names_of))
        every = [re.escape(name) for name in (*names_of, *([fused] if fused else []))]
        end = every[0] if len(every) == 1 else f"(?:{'|'.join(every)})"
        patterns.append(f"{re.escape(parent)}\\.{end}$")
    return patterns
