"""What adapters add to linears, and the weights that they have in place of others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from quire.executor.torch.operands import Operands, defines
from quire.program.lowering import rank_lanes
from quire.program.ops.experts import ShrinkExperts
from quire.program.ops.linear import Expand, Shrink, ShrinkIds


def slots_of(on: Operands, rows: str) -> Tensor:
    """The slot of the adapter of each row of a buffer, or -1."""
    return on.step.adapters[on.logit_rows] if on.program.buffer(rows).rows == "logits" else on.step.adapters


def with_slots(slots: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each slot of some rows, and which rows have it."""
    for slot in slots.unique().tolist():
        if slot >= 0:
            yield slot, slots == slot


def shrink(x: Tensor, a: Tensor, out: Tensor) -> None:
    """out [T, R] = x [T, C] @ a [rank, C]ᵀ, and zeros in the columns behind the rank."""
    out.copy_(functional.pad(x.float() @ a.T, (0, out.shape[1] - len(a))))


@defines(Shrink)
def _shrink(on: Operands, op: Shrink) -> None:
    x, out = on.buffer(op.x), on.buffer(op.out)
    adapted = on.state.adapters.linear(op.adapted)
    for slot, rows in with_slots(slots_of(on, op.x)):
        for part in range(len(adapted.parts)):
            first = part * adapted.cols if op.apart else 0
            _shrink_part(on, op.adapted, (slot, part, part), x[:, first : first + adapted.cols], rows, out)


@defines(ShrinkExperts)
def _shrink_experts(on: Operands, op: ShrinkExperts) -> None:
    x, out = on.buffer(op.x), on.buffer(op.out)
    tokens, experts = pairs(on.buffer(op.ids), on.buffer(op.places))
    if len(x) != len(tokens):
        x = x[tokens]
    parts = len(on.state.adapters.linear(op.adapted).parts) // op.experts
    for slot, rows in with_slots(on.step.adapters[tokens]):
        for expert in experts[rows].unique().tolist():
            for part in range(parts):
                chosen = rows & (experts == expert)
                _shrink_part(on, op.adapted, (slot, expert * parts + part, part), x, chosen, out)


def _shrink_part(
    on: Operands, name: str, where: tuple[int, int, int], x: Tensor, rows: Tensor, out: Tensor
) -> None:
    """Fill the columns of a part; `where`: slot, part of the linear, and place of its columns."""
    slot, part, place = where
    lanes = rank_lanes(on.state.adapters.linear(name).rank)
    if (matrices := on.state.adapters.get(slot, name, part)) is not None:
        found = torch.empty(int(rows.sum()), lanes, device=x.device)
        shrink(x[rows], matrices.a, found)
        out[rows, place * lanes : (place + 1) * lanes] = found


@defines(ShrinkIds)
def _shrink_ids(on: Operands, op: ShrinkIds) -> None:
    out = on.buffer(op.out)
    for slot, rows in with_slots(on.step.adapters):
        if (matrices := on.state.adapters.get(slot, op.adapted, 0)) is not None:
            columns = matrices.a[:, on.step.token_ids[rows]].T
            out[rows] = functional.pad(columns, (0, out.shape[1] - columns.shape[1]))


@defines(Expand)
def _expand(on: Operands, op: Expand) -> None:
    expand(on, op.adapted, op.shrunk, on.buffer(op.out))


def pairs(ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The token and the expert of each row, from ids and places [T, K]."""
    rows, k = places.flatten().long(), ids.shape[1]
    tokens, experts = torch.empty_like(rows), torch.empty_like(rows)
    tokens[rows] = torch.arange(len(rows), device=rows.device) // k
    experts[rows] = ids.flatten().long()
    return tokens, experts


def expand(
    on: Operands, name: str, shrunk: str, out: Tensor, *, first: int = 0, bias: Tensor | None = None
) -> None:
    """out [T, …], columns from `first` on of a linear, += p + gain · (out - bias + p), p = b @ what was shrunk."""
    for slot, rows in with_slots(slots_of(on, shrunk)):
        parts = range(len(on.state.adapters.linear(name).parts))
        _expand_parts(on, name, (slot, parts), rows, on.buffer(shrunk), out, first, bias)


def expand_experts(
    on: Operands, name: str, shrunk: str, which: tuple[Tensor, Tensor], out: Tensor, bias: Tensor | None
) -> None:
    """The same for rows of experts; which: ids and places [T, K]; bias [E, columns]."""
    tokens, experts = pairs(*which)
    count = (
        len(on.state.adapters.linear(name).parts) * out.shape[1] // sum(on.state.adapters.linear(name).rows)
    )
    for slot, rows in with_slots(on.step.adapters[tokens]):
        for expert in experts[rows].unique().tolist():
            parts = range(expert * count, (expert + 1) * count)
            chosen, of_expert = rows & (experts == expert), None if bias is None else bias[expert]
            _expand_parts(on, name, (slot, parts), chosen, on.buffer(shrunk), out, 0, of_expert)


def _expand_parts(
    on: Operands, name: str, which: tuple[int, range], rows: Tensor, shrunk: Tensor, out: Tensor, first: int,
    bias: Tensor | None,
) -> None:  # fmt: skip
    adapted, (slot, parts), start = on.state.adapters.linear(name), which, -first
    lanes = rank_lanes(adapted.rank)
    for place, part in enumerate(parts):
        count = adapted.rows[part]
        begin, end = max(start, 0), min(start + count, out.shape[1])
        matrices = on.state.adapters.get(slot, name, part)
        if matrices is not None and begin < end:
            b = matrices.b[begin - start : end - start]
            x = shrunk[rows, place * lanes : place * lanes + b.shape[1]]
            before = out[rows, begin:end]
            added = x @ b.T
            if matrices.gain is not None:
                product = before if bias is None else before - bias[begin:end]
                added = added + matrices.gain[begin - start : end - start] * (product + added)
            out[rows, begin:end] = before + added
        start += count
