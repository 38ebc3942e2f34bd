"""Linears that a checkpoint stores with zeros in the pattern 2:4, and whether they are held without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire import _native
from quire.loader.load import widened
from quire.program.formats import FOURS, WeightFormat
from quire.program.op import param_names

if TYPE_CHECKING:
    from quire.config.schema import ResolvedConfig
    from quire.engine.build.opening import Model
    from quire.loader import Source
    from quire.program.program import Program
    from quire.program.tensors import Part

FASTER_ISA = (
    "avx512"  # elsewhere the values are put in their places one by one, which takes longer than reading zeros
)
_FOUR, _KEPT = 4, 2
_SAMPLE = 64  # rows of a tensor that are looked at; all of them are checked as they are loaded


def sparse_formats(
    model: Model, program: Program, config: ResolvedConfig, source: Source
) -> dict[str, WeightFormat]:
    """Linears of bfloat16 that keep two of each four neighbouring inputs, where that makes decoding faster: name ->
    format. None of a model that does not say that it was pruned so; tensors that were filled since stay dense.
    """
    isa = config.isa or _native.supported_isas()[0]
    asked = config.asked
    if (
        model.facts.pruned not in FOURS
        or config.weights != "bf16"
        or asked.formats.quantization != "auto"
        or asked.execution.executor != "native"
        or isa != FASTER_ISA
    ):
        return {}
    there = set(source.names())
    linears = {name for op in program.ops if op.skips_zeros for name in param_names(op)}
    return {
        param.name: WeightFormat("bf16_24")
        for param in program.params
        if param.name in linears and param.kind == "linear" and param.dtype == "bf16"
        and param.name.startswith("layers.")
        and all(part.tensor in there and _sparse(part, source) for part in param.parts)
    }  # fmt: skip


def _sparse(part: Part, source: Source) -> bool:
    """Whether the first rows of a tensor have at most two of each four inputs that are not zero."""
    info = source.info(part.tensor)
    if (
        info.dtype not in {"BF16", "F16", "F32"}
        or info.stored
        or len(info.shape) != 2
        or part.first_col % _FOUR
    ):
        return False
    first = 0 if part.transposed else part.first
    rows = widened(source.read(part.tensor, first, min(first + _SAMPLE, info.shape[0])), info.dtype)
    inputs = rows.T if part.transposed else rows
    whole = inputs.shape[1] // _FOUR * _FOUR
    return bool(((inputs[:, :whole].reshape(len(inputs), -1, _FOUR) != 0).sum(2) <= _KEPT).all())
