"""What linears add for the adapters of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.executor.torch.operands import Operands, defines
from quire.program.lowering import rank_lanes
from quire.program.ops.linear import Shrink


def shrink(x: Tensor, a: Tensor, out: Tensor) -> None:
    """out [T, R] = x [T, C] @ a [rank, C]ᵀ, and zeros in the columns behind the rank."""
    out.copy_(functional.pad(x.float() @ a.T, (0, out.shape[1] - len(a))))


@defines(Shrink)
def _shrink(on: Operands, op: Shrink) -> None:
    x, out = on.buffer(op.x), on.buffer(op.out)
    adapted = on.state.adapters.linear(op.adapted)
    lanes = rank_lanes(adapted.rank)
    for slot in on.step.adapters.unique().tolist():
        rows = on.step.adapters == slot
        for part in range(len(adapted.parts)):
            if (matrices := on.state.adapters.get(slot, op.adapted, part)) is not None:
                columns = slice(part * lanes, (part + 1) * lanes)
                found = torch.empty(int(rows.sum()), lanes, device=x.device)
                shrink(x[rows], matrices[0], found)
                out[rows, columns] = found


def expand(on: Operands, name: str, shrunk: Tensor, out: Tensor, first: int) -> None:
    """out [T, …], columns from `first` on of a linear, += b of each part @ what Shrink left of it."""
    adapted = on.state.adapters.linear(name)
    lanes = rank_lanes(adapted.rank)
    for slot in on.step.adapters.unique().tolist():
        rows, start = on.step.adapters == slot, -first
        for part, count in enumerate(adapted.rows):
            begin, end = max(start, 0), min(start + count, out.shape[1])
            if (matrices := on.state.adapters.get(slot, name, part)) is not None and begin < end:
                b = matrices[1][begin - start : end - start]
                out[rows, begin:end] += shrunk[rows, part * lanes : part * lanes + b.shape[1]] @ b.T
            start += count
