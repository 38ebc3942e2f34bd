"""Lowering of what a model gives for a text in place of logits."""

from __future__ import annotations

from quire.program.lowering import Lowering
from quire.program.op import Op
from quire.program.ops.linear import Linear
from quire.program.ops.rows import Activate, GatherRows, Norm, PoolRows
from quire.program.program import POOLED, Output
from quire.program.tensors import Part
from quire.spec import Dense, Pooling, RowNorm


def lower_pooling(
    to: Lowering, residual: str, delta: str | None, pooling: Pooling
) -> tuple[tuple[Op, ...], tuple[Output, ...]]:
    """The ops from the residual stream to one row a text, and the output that has them."""
    spec, norm = to.spec, to.spec.norm
    weights: tuple[str, str | None] | None = None
    if not spec.layers[-1].sum_norm:
        weights = to.norm_weights("final_norm", spec.names.final_norm, norm)
    out = to.buffer(POOLED, spec.dim, "f32", logits=True)
    ops: list[Op] = []
    x = out
    if pooling.kind == "last":
        ops.append(GatherRows(residual, delta, out))
    else:
        ops.append(PoolRows(residual, out, pooling.kind))
        x = residual  # its rows are normed before they are pooled
    if weights is not None:
        to_norm = ops if x == out else to.body
        to_norm.append(Norm(x, None if x == out else delta, weights[0], norm.eps, x, norm.kind, weights[1]))
    width = spec.dim
    for number, layer in enumerate(pooling.dense):
        if isinstance(layer, Dense):
            out, width = _dense(to, ops, f"dense.{number}", layer, out), layer.outputs
        else:
            _norm(to, ops, f"dense.{number}", layer, out, width)
    return tuple(ops), (Output(POOLED, out),)


def _dense(to: Lowering, ops: list[Op], name: str, dense: Dense, x: str) -> str:
    """Append a layer over pooled rows; returns the buffer that it fills."""
    if dense.tokens:
        stored = (dense.rows, dense.inputs)
        parts = tuple(Part(dense.name, 1, dense.inputs, first=token, stored=stored) for token in dense.tokens)
    else:
        parts = (Part(f"{dense.name}.weight", dense.outputs, dense.inputs),)
    weight = to.weight(name, parts)
    bias = to.vector(f"{name}.bias", (Part(f"{dense.name}.bias", dense.outputs),)) if dense.bias else None
    taken = to.input(f"{name}.in", dense.inputs, weight, logits=True)
    ops.append(Norm(x, None, None, to.spec.norm.eps, taken))
    out = to.buffer(f"{name}.out", dense.outputs, "f32", logits=True)
    ops.append(Linear(to.quantized(ops, taken, weight), weight, bias, out))
    if dense.act:
        ops.append(Activate(out, out, dense.act))
    if dense.norm is not None:
        _norm(to, ops, name, RowNorm(dense.norm_name, dense.norm), out, dense.outputs)
    return out


def _norm(to: Lowering, ops: list[Op], name: str, layer: RowNorm, x: str, width: int) -> None:
    """Append a norm of pooled rows, in place."""
    weight, bias = to.norm_weights(f"{name}.norm", layer.name, layer.norm, width)
    ops.append(Norm(x, None, weight, layer.norm.eps, x, layer.norm.kind, bias))
