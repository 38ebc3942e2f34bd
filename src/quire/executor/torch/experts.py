"""The ops of a feed-forward of experts, in plain torch; see ops.py beside this file.

Shapes: T tokens of the step, E experts, K of them for each token, P = T·K pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.executor.torch.low_rank import expand_experts
from quire.executor.torch.operands import Operands, defines
from quire.executor.torch.ops import linear
from quire.program.ops.experts import Combine, Dispatch, Experts, Route
from quire.spec import Router


def route(
    router: Router, logits: Tensor, correction: Tensor | None, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fill ids, weights and places, each [T, K], from logits [T, E] and correction [E]; see program/ops.Route."""
    logits = logits.float()
    scores = logits.sigmoid() if router.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = choice.masked_fill(~in_top_groups(router, choice), -torch.inf)
    broken = ~logits.isfinite().all(-1, keepdim=True)
    choice = choice.masked_fill(broken, 0.0)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.masked_fill(broken, torch.nan).gather(1, ids)
    if router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    out[0].copy_(ids)
    out[1].copy_(weights * router.scale)
    order = ids.flatten().sort(stable=True).indices  # pairs by expert, then by token
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    out[2].copy_(places.view_as(ids))


@defines(Route)
def _route(on: Operands, op: Route) -> None:
    out = on.buffer(op.ids), on.buffer(op.weights), on.buffer(op.places)
    route(op.router, on.buffer(op.logits), on.weights.get(op.correction), out)


def in_top_groups(router: Router, choice: Tensor) -> Tensor:
    """Which of choice [T, E] belong to a group that may be chosen from; groups are equal runs of experts."""
    grouped = choice.unflatten(-1, (router.groups, -1))
    best = grouped.amax(-1) if router.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    return allowed[..., None].expand_as(grouped).flatten(-2)


def dispatch(x: Tensor, places: Tensor, out: Tensor) -> None:
    """out [P, C] at places [T, K] = x [T, C]."""
    out[places.long()] = x[:, None].expand(-1, places.shape[1], -1)


@defines(Dispatch)
def _dispatch(on: Operands, op: Dispatch) -> None:
    dispatch(on.buffer(op.x), on.buffer(op.places), on.buffer(op.out))


def experts(
    x: Tensor,
    which: tuple[Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    first_expert: int = 0,
) -> None:
    """out [P, rows] = x [P, cols] @ weight [E, rows, cols]ᵀ (+ bias [E, rows]) of each row's expert.

    which: ids and places [T, K]; the rows of an expert are neighbours. The weight is that of experts from number
    `first_expert` on; rows of others are left as they are.
    """
    ids, places = which
    of_row = torch.empty(len(x), dtype=torch.long, device=x.device)
    of_row[places.flatten().long()] = ids.flatten().long()
    first = 0
    for number, count in enumerate(torch.bincount(of_row).tolist()):
        e = number - first_expert
        if count and 0 <= e < len(weight):
            rows = slice(first, first + count)
            linear(x[rows], weight[e], None if bias is None else bias[e], out[rows])
        first += count


@defines(Experts)
def _experts(on: Operands, op: Experts) -> None:
    which = on.buffer(op.ids), on.buffer(op.places)
    bias = None if op.bias is None else on.weights.of_experts(op.bias)
    out = on.buffer(op.out)
    experts(on.buffer(op.x), which, on.weights.of_experts(op.weight), bias, out, op.first)
    if op.adapted and op.shrunk:
        expand_experts(on, op.adapted, op.shrunk, which, out, bias)


def combine(
    x: Tensor, places: Tensor, weights: Tensor, shared: tuple[Tensor | None, Tensor | None], out: Tensor
) -> None:
    """out [T, C] = Σ weights [T, K] · x [P, C] at places [T, K], one after the other (+ shared [T, C]).

    shared: its output, and the logit [T, 1] of the gate that multiplies it.
    """
    total = torch.zeros_like(out)
    for place, weight in zip(places.long().unbind(1), weights.unbind(1), strict=True):
        total += weight[:, None] * x[place]
    always, gate = shared
    if always is not None:
        total += always if gate is None else gate.sigmoid() * always
    out.copy_(total)


@defines(Combine)
def _combine(on: Operands, op: Combine) -> None:
    shared = on.optional(op.shared), on.optional(op.gate)
    combine(on.buffer(op.x), on.buffer(op.places), on.buffer(op.weights), shared, on.buffer(op.out))
