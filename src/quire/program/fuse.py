"""Fusing: an op becomes the last part of the op before it, where nothing else reads what is between them.

    linear gate_up -> gate_up · gated_act -> gated       becomes    linear gate_up -> gated
    linear up -> up · activate -> gated                  becomes    linear up -> gated
    norm -> hidden · quantize -> hidden_bytes            becomes    norm -> hidden_bytes
    attend -> mixed · quantize -> mixed_bytes            becomes    attend -> mixed_bytes, by way of mixed

One pass over memory and one meeting of the threads less. The numbers are the same: an op that writes an i8 buffer
computes float32 rows and rounds them as Quantize does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from quire import _native
from quire.program.op import Op, reads, writes
from quire.program.ops.attention import Attend
from quire.program.ops.linear import Linear
from quire.program.ops.rows import Activate, GatedAct, Norm, Quantize
from quire.program.program import Program
from quire.program.tensors import Param


def fuse(program: Program) -> Program:
    """The same program with every GatedAct, Activate and Quantize in the op that fills its input, where it can be."""
    params = {param.name: param for param in program.all_params}
    kept = {output.buffer for output in program.outputs}
    body = _fused(program.body, program.head, params, kept)
    head = _fused(program.head, (), params, kept)
    touched = {name for op in (*body, *head) for name in (*reads(op), *writes(op))}
    buffers = tuple(buffer for buffer in program.buffers if buffer.name in touched)
    return replace(program, body=body, head=head, buffers=buffers)


def _fused(
    ops: Sequence[Op], after: Sequence[Op], params: Mapping[str, Param], kept: Set[str]
) -> tuple[Op, ...]:
    """`ops`, which `after` follows; the caller reads the buffers `kept`."""
    found: list[Op] = []
    for index, op in enumerate(ops):
        joined = None
        if isinstance(op, Quantize | GatedAct | Activate) and found:
            between = op.gate_up if isinstance(op, GatedAct) else op.x
            if between not in kept and not _read(between, (*ops[index + 1 :], *after)):
                joined = (
                    _rounding(found[-1], op)
                    if isinstance(op, Quantize)
                    else _activated(found[-1], op, params)
                )
        if joined is None:
            found.append(op)
        else:
            found[-1] = joined
    return tuple(found)


def _activated(op: Op, act: GatedAct | Activate, params: Mapping[str, Param]) -> Op | None:
    """Both in one when `op` is the one linear of what `act` takes, and panels of its packed weight hold gate or up."""
    up = isinstance(act, GatedAct)
    match op:
        case Linear(weight=weight, out=out, first=0, act=None, rows=0) if (
            out == reads(act)[0] != act.out
            and params[weight].rows % ((2 if up else 1) * _native.PANEL_ROWS) == 0
        ):
            return replace(op, out=act.out, act=act.act, up=up)
    return None


def _rounding(op: Op, quantize: Quantize) -> Op | None:
    """Both in one, or None when `op` is not one that rounds what it writes, or does not write that."""
    if quantize.top or quantize.tops:
        return None
    match op:
        case Norm(out=out, x=x, first=0) if out == quantize.x != x:
            return replace(op, out=quantize.out)
        case GatedAct(out=out) | Activate(out=out) if out == quantize.x != reads(op)[0]:
            return replace(op, out=quantize.out)
        case Attend(out=out) if out == quantize.x:
            return replace(op, out=quantize.out, wide=out)
    return None


def _read(name: str, ops: Sequence[Op]) -> bool:
    """Whether a buffer's content is needed by `ops`."""
    for op in ops:
        if name in reads(op):
            return True
        if name in writes(op):
            return False
    return False
