"""The ops at which ranks meet, in plain torch; see ops.py beside this file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.executor.torch.operands import Operands, defines
from quire.program.ops.collectives import AllGather, AllReduce, AllToAll
from quire.program.ranks import even_share


def exchange(on: Operands, ranks: int, mine: Tensor) -> list[Tensor]:
    """What every rank shows, in the order of ranks. RuntimeError without a group of so many."""
    group = on.group
    if group is None or group.size != ranks:
        raise RuntimeError(f"a program of {ranks} ranks runs after join, in a group of {ranks}")
    return list(group.exchange(on.program.plan.tensor_parallel_rank, mine))


@defines(AllGather)
def _all_gather(on: Operands, op: AllGather) -> None:
    x = on.buffer(op.x)[:, op.first :]
    shown = exchange(on, op.ranks, x[:, : op.cols] if op.cols else x)
    on.buffer(op.out).copy_(torch.cat(shown, dim=1))


def join_bits(shown: Sequence[Tensor]) -> Tensor:
    """Bitwise or of float32 tensors."""
    words = shown[0].view(torch.int32)
    for each in shown[1:]:
        words = words | each.view(torch.int32)
    return words.view(torch.float32)


@defines(AllReduce)
def _all_reduce(on: Operands, op: AllReduce) -> None:
    shown = exchange(on, op.ranks, on.buffer(op.x))
    if op.how == "bits":
        on.buffer(op.out).copy_(join_bits(shown))
        return
    total = shown[0].clone()
    for each in shown[1:]:
        total += each
    on.buffer(op.out).copy_(total)


def to_columns(shown: Sequence[Tensor], ids: Tensor, experts: int, columns: slice, out: Tensor) -> None:
    """out [P, C] = `columns` of each pair's row, from the rank that has its expert; pairs are sorted by expert."""
    of_row = ids.flatten().sort().values
    for rank, rows in enumerate(shown):
        share = even_share(experts, len(shown), rank)
        own = (of_row >= share.start) & (of_row < share.stop)
        out[own] = rows[own, columns]


@defines(AllToAll)
def _all_to_all(on: Operands, op: AllToAll) -> None:
    out = on.buffer(op.out)
    widths = exchange(on, op.ranks, torch.tensor([out.shape[1]]))
    first = sum(int(width) for width in widths[: on.program.plan.tensor_parallel_rank])
    shown = exchange(on, op.ranks, on.buffer(op.x))
    to_columns(shown, on.buffer(op.ids), op.experts, slice(first, first + out.shape[1]), out)
