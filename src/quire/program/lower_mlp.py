"""Lowering of a feed-forward."""

from __future__ import annotations

from quire import _native
from quire.program.lowering import Lowering
from quire.program.ops.rows import Activate, GatedAct
from quire.spec import MLP
from quire.spec.model import ClampedSwiGLU


def lower_mlp(to: Lowering, index: int, mlp: MLP, hidden: str, out: str, *, prefix: str = "") -> str:
    """A feed-forward; fills and returns `out`, this rank's columns.

    `prefix`: of its names in WeightNames and params.
    """
    names, at = to.spec.names, f"layers.{index}.{prefix}"
    share = to.columns("mlp", "intermediate_size", mlp.width)
    gated = to.part("gated", share, to.formats.of(f"{at}down").inputs)
    gate, up, down = (getattr(names, f"{prefix}{name}").format(i=index) for name in ("gate", "up", "down"))
    down_bias = mlp.bias or mlp.down_bias
    if not mlp.gated:
        assert not isinstance(mlp.act, ClampedSwiGLU)
        wide = to.part("up", share)
        to.linear(f"{at}up", hidden, wide, (up,), (mlp.width,), axes=("mlp",), bias=mlp.bias)
        to.body.append(Activate(wide, gated, mlp.act))
        to.branch(
            f"{at}down", gated, out, down, axis="mlp", cols=mlp.width, unit=_native.PANEL_ROWS, bias=down_bias
        )
        return out
    fused = "" if prefix else (names.gate_up or names.up_gate).format(i=index)
    gate_up = to.buffer("gate_up", 2 * share.count, "f32")
    to.linear(
        f"{at}gate_up", hidden, gate_up, (gate, up), (mlp.width, mlp.width), axes=("mlp", "mlp"),
        bias=mlp.bias, fused=fused, starts=(mlp.width, 0) if names.up_gate else (),
    )  # fmt: skip
    to.body.append(GatedAct(gate_up, gated, mlp.act))
    to.branch(
        f"{at}down", gated, out, down, axis="mlp", cols=mlp.width, unit=_native.PANEL_ROWS, bias=down_bias
    )
    return out
