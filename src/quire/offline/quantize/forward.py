"""One layer of a model as a program of its own, run over the calibration text by the executor.

A layer is a pipeline stage of one layer: it takes the residual stream and leaves it. Between its ops stand the inputs
of its linears: `run` stops before each of them and hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.config.schema import ResolvedConfig
from quire.executor.base import F32, Executor, Limits, StepArrays, step_array_bytes
from quire.executor.kinds import executor_kind
from quire.loader import LoadRules, Source, load
from quire.offline.quantize.sites import RESIDUAL, Site, sites_of
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.op import param_names, reads, writes
from quire.program.ops.experts import Experts
from quire.program.ops.linear import Linear
from quire.program.program import Output, Program
from quire.program.ranks import RankPlan
from quire.program.tensors import Param
from quire.spec.model import ModelSpec

# Called with a site, its inputs [rows, cols], and for experts the number of each row's expert.
Take = Callable[[Site, F32, "npt.NDArray[np.int64] | None"], None]


def layer_program(spec: ModelSpec, formats: NumberFormats, index: int) -> Program:
    """Layer `index` from the residual stream, or from tokens for the first, to the residual stream."""
    count = len(spec.layers)
    plan = RankPlan(pipeline_parallel_size=count, pipeline_parallel_rank=index, stage_layers=(1,) * count)
    program = lower(spec, formats, plan)
    used = {name for op in program.body for name in param_names(op)}
    touched = {RESIDUAL, *(name for op in program.body for name in (*reads(op), *writes(op)))}
    return replace(
        program,
        params=tuple(param for param in program.params if param.name in used),
        buffers=tuple(buffer for buffer in program.buffers if buffer.name in touched),
        head=(),
        outputs=(Output(RESIDUAL, RESIDUAL),),
    )


class LayerForward:
    """A layer with weights, for windows of up to `longest` tokens."""

    def __init__(self, spec: ModelSpec, config: ResolvedConfig, index: int, longest: int) -> None:
        self._spec, self.index, self.longest = spec, index, longest
        weights = {"f32": "f32", "bf16": "bf16", "f16": "f16"}[config.weights]
        kv = "bf16" if config.weights == "bf16" else "f32"
        formats = NumberFormats(weights=weights, kv=kv)  # type: ignore[arg-type]
        self._whole: tuple[Param, ...] = lower(spec, formats).params
        self.program = layer_program(spec, formats, index)
        self.sites = sites_of(self.program, index)
        groups, blocks = len(self.program.cache_groups), -(-longest // 16)
        self._limits = Limits(longest, 1, 1, longest, blocks * groups)
        self._kind = executor_kind(config)
        self._groups, self._blocks = groups, blocks
        self._executor: Executor | None = None
        self._arrays: StepArrays | None = None
        self._tokens = self._at = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds with weights."""
        held = sum(self._kind.planned_bytes(self.program, self._limits).values())
        return held + step_array_bytes(self._limits, self._groups)

    @property
    def nbytes_beside(self) -> int:
        """As `nbytes`, of what is loaded beside the original."""
        held = sum(self._kind.planned_bytes(self._borrowing, self._limits).values())
        return held + step_array_bytes(self._limits, self._groups)

    @property
    def _borrowing(self) -> Program:
        """The program with the weights of its linears alone; the others are borrowed."""
        own = {
            name for op in self.program.body if isinstance(op, Linear | Experts) for name in param_names(op)
        }
        params = self.program.params
        return replace(
            self.program,
            params=tuple(param for param in params if param.name in own),
            borrowed=tuple(param for param in params if param.name not in own),
        )

    def load(self, source: Source, beside: LayerForward | None = None) -> None:
        """Take the weights of the layer from a source; again for other weights. `beside`: the original, loaded, whose
        weights outside of linears it uses, and which stays loaded longer.
        """
        self.close()
        arrays = self._arrays = StepArrays(self._limits, self._groups)
        for group, table in enumerate(arrays.block_tables):
            table[0, : self._blocks] = np.arange(group * self._blocks, (group + 1) * self._blocks)
        program = self.program if beside is None else self._borrowing
        self._executor = self._kind.make(program, None if beside is None else beside._executor)
        rules = LoadRules.of(self._spec).of_rank(self._whole)
        load(program.params, source, self._executor, rules=rules)
        self._executor.bind(self._limits, arrays)

    def run(self, window: Sequence[int], residual: F32 | None, take: Take | None) -> F32:
        """The residual stream [tokens, dim] after the layer; `residual` is that before it, None for the first layer.

        `take` gets the inputs of every linear.
        """
        self.begin(window, residual)
        for site in self.sites if take else ():
            self.advance(site.op)
            assert take is not None
            take(site, self.rows(site.buffer), self.experts(site))
        return self.end()

    def begin(self, window: Sequence[int], residual: F32 | None) -> None:
        """Stand before the first op of a window; `residual` as in `run`."""
        executor, arrays, n = self._executor, self._arrays, len(window)
        assert executor is not None
        assert arrays is not None
        arrays.token_ids[:n], arrays.positions[:n] = window, range(n)
        arrays.slots[0], arrays.query_start[:2] = 0, (0, n)
        if residual is not None:
            executor.write(RESIDUAL, residual)
        self._tokens, self._at = n, 0

    def advance(self, op: int) -> None:
        """Run the ops from where it stands up to number `op`."""
        assert self._executor is not None
        self._executor.run_range(self._tokens, 1, 0, self._at, op)
        self._at = op

    def end(self) -> F32:
        """Run the other ops: the residual stream after the layer."""
        self.advance(len(self.program.body))
        return self.rows(RESIDUAL)

    def rows(self, buffer: str) -> F32:
        """The rows of a buffer where it stands."""
        assert self._executor is not None
        return self._executor.read(buffer, self._tokens * self.program.buffer(buffer).per)

    def experts(self, site: Site) -> npt.NDArray[np.int64] | None:
        """The expert of each row of a site's inputs."""
        if not site.ids:
            return None
        assert self._executor is not None
        found = np.empty(self._tokens * self.program.buffer(site.buffer).per, np.int64)
        places, ids = (
            self._executor.read(name, self._tokens).astype(np.int64) for name in (site.places, site.ids)
        )
        found[places] = ids
        return found

    def close(self) -> None:
        """Free the executor."""
        if self._executor is not None:
            self._executor.close()
            self._executor = self._arrays = None
