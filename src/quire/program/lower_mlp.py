"""Lowering of a gated feed-forward."""

from __future__ import annotations

from quire import _native
from quire.program.lowering import Lowering
from quire.program.ops.rows import GatedAct
from quire.spec import MLP


def lower_mlp(to: Lowering, index: int, mlp: MLP, hidden: str, out: str, *, prefix: str = "") -> str:
    """A gated feed-forward; fills and returns `out`, this rank's columns.

    `prefix`: of its names in WeightNames and params.
    """
    names, at = to.spec.names, f"layers.{index}.{prefix}"
    share = to.columns("mlp", "intermediate_size", mlp.width)
    gate_up = to.buffer("gate_up", 2 * share.count, "f32")
    gated = to.part("gated", share, to.formats.of(f"{at}down").inputs)
    gate, up, down = (getattr(names, f"{prefix}{name}").format(i=index) for name in ("gate", "up", "down"))
    fused = "" if prefix else names.gate_up.format(i=index)
    to.linear(
        f"{at}gate_up", hidden, gate_up, (gate, up), (mlp.width, mlp.width), axes=("mlp", "mlp"),
        bias=mlp.bias, fused=fused,
    )  # fmt: skip
    to.body.append(GatedAct(gate_up, gated, mlp.act))
    to.branch(
        f"{at}down", gated, out, down, axis="mlp", cols=mlp.width, unit=_native.PANEL_ROWS, bias=mlp.bias
    )
    return out
