"""A layer whose linears are rounded in the order in which it computes them, each towards what the original computes.

A linear W gets inputs x from a model in which all linears before it are rounded; in the original they are x°. Of all
weights

    W* = W + C·(H + λ)⁻¹,    H = Σ xᵀx,    C = Σ lᵀx,    l = W·x° - W·x

makes up best for what its outputs lack, l; λ, GPTQ's damping, keeps it near W. It is W* that is rounded (with the
feedback of GPTQ that is GPTAQ, Li et al., arXiv 2504.02692). Where the outputs are added to the residual stream, l has
half of what the stream itself lacks there, too, and a row weighs as little as its stream is large: the next norm
divides by that. Half, because the layers that follow make up for it as well (docs/decisions/0171).

Gate, up and down are rounded at once: one after another they lose no less, and take a pass more.
Experts get other rows in the two models, so that they are rounded for x alone.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

import numpy as np

from quire.executor.base import F32
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.gram import CrossSum, GramMatrix
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.sites import RESIDUAL, Module, Site

STREAM_SHARE = np.float32(0.5)  # of what the residual stream lacks is made up for
Grams = dict[tuple[int, int], GramMatrix]


class SiteSums:
    """What is summed over the rows of a site: Gram matrices by expert (-1 outside of experts), and C."""

    def __init__(self, site: Site, pool: Executor) -> None:
        self._site, self._pool = site, pool
        self.grams: Grams = {}
        self._lacking = None if site.ids else CrossSum(_lacking_rows(site), site.cols)
        self._adding: list[Future[None]] = []

    @property
    def modules(self) -> tuple[Module, ...]:
        """The linears of the site."""
        return self._site.modules

    @staticmethod
    def nbytes(site: Site) -> int:
        """The most bytes of one."""
        grams = GramMatrix.nbytes(site.cols) * site.experts
        return grams + (0 if site.ids else CrossSum.nbytes(_lacking_rows(site), site.cols))

    def add(self, rounded: LayerForward, original: LayerForward) -> None:
        """Add the rows of the window in which both layers stand; the original may stand behind the site then."""
        site = self._site
        for layer in (rounded, original):
            layer.advance(site.op)
        x, experts = rounded.rows(site.buffer), rounded.experts(site)
        if experts is not None:
            self.settle()
            for expert in np.unique(experts):
                self._add(int(expert), x[experts == expert])
            return
        if site.added:
            stream = original.rows(RESIDUAL)
            original.advance(site.op + 1)
            outputs = original.rows(site.added)
            lacking = outputs + STREAM_SHARE * (stream - rounded.rows(RESIDUAL))
            stream += outputs
            weight = 1 / np.sqrt(np.square(stream).mean(1, keepdims=True) + np.float32(1e-20))
            x, lacking = x * weight, lacking * weight
        else:
            lacking = original.rows(site.buffer) - x
        self.settle()
        self._add(-1, x)
        assert self._lacking is not None
        self._adding.append(self._pool.submit(self._lacking.add, lacking, x))

    def _add(self, expert: int, x: F32) -> None:
        gram = self.grams.setdefault((self._site.op, expert), GramMatrix(self._site.cols, sizes=False))
        self._adding.append(self._pool.submit(gram.add, x))

    def settle(self) -> None:
        """Wait for the rows of the window before: sums get windows in order."""
        for each in self._adding:
            each.result()
        self._adding.clear()

    def finish(self) -> None:
        """Wait for all rows."""
        self.settle()
        list(self._pool.map(lambda gram: gram.h, self.grams.values()))

    def target(self, weight: F32, damping: float) -> F32:
        """W* of a weight [rows, cols] of the site."""
        gram = self.grams.get((self._site.op, -1))
        if gram is None or self._lacking is None:
            return weight
        return best_weight(weight, gram, self._lacking.sum, outputs=bool(self._site.added), damping=damping)


def take_targets(sums: list[SiteSums], weights: LayerWeights, damping: float, pool: Executor) -> None:
    """Put W* of the linears of these sites in the place of their weights."""
    items = [(each, module.tensor) for each in sums for module in each.modules]

    def target(item: tuple[SiteSums, str]) -> F32:
        return item[0].target(weights[item[1]], damping)

    for (_, tensor), found in zip(items, pool.map(target, items), strict=True):
        weights[tensor] = found


def best_weight(weight: F32, gram: GramMatrix, lacking: F32, *, outputs: bool, damping: float) -> F32:
    """W* of a weight [rows, cols]. `lacking`: Σ (x° - x)ᵀx [cols, cols]; or of `outputs` Σ yᵀx [rows, cols], where y is
    what they are to be.
    """
    missing = lacking - weight @ gram.h if outputs else weight @ lacking
    h = gram.h.astype(np.float64)
    places = np.arange(len(h))
    h[places, places] += damping * float(np.trace(h)) / len(h) or 1.0
    found: F32 = weight + np.linalg.solve(h, missing.T.astype(np.float64)).T.astype(np.float32)
    return found


def _lacking_rows(site: Site) -> int:
    """Rows of the sum of what a site lacks: its outputs, or its inputs."""
    return site.modules[0].rows if site.added else site.cols
