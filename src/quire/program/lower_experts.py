"""Lowering of a feed-forward of experts: see program/ops for its data flow."""

from __future__ import annotations

from dataclasses import replace

from quire import _native
from quire.program.formats import DType
from quire.program.lower_mlp import lower_mlp
from quire.program.lowering import Lowering, adapted_rows, rank_lanes
from quire.program.ops.collectives import AllToAll, ReturnRows, ShareTokens
from quire.program.ops.experts import Combine, Dispatch, Experts, Route, ShrinkExperts
from quire.program.ops.linear import Linear
from quire.program.ops.rows import GatedAct
from quire.program.ranks import Share
from quire.program.tensors import Adapted, AdaptedPart, Buffer, ExpertLayer, Param, Part
from quire.spec import MoE, Router
from quire.types import UnsupportedModelError


def lower_experts(to: Lowering, index: int, moe: MoE, hidden: str) -> str:
    """Append a layer's router, experts and shared expert over `hidden`, float32; returns the buffer of the branch.

    Ranks split the columns of every expert, or the experts. All know the choice of each token, and its rows.
    """
    at, k, count = f"layers.{index}", moe.router.top_k, moe.router.experts
    if to.plan.fast:
        raise UnsupportedModelError('reduce: "fast" is not for models with experts')
    mine = to.plan.experts(count, k)
    places = mine.total
    route = _route(to, index, moe.router, hidden, places - count)
    shared, gate = _shared(to, index, moe, hidden)
    columns = (
        to.columns("mlp", "moe_intermediate_size", moe.width)
        if mine.whole
        else Share(0, moe.width, moe.width)
    )
    to.axes["mlp"] = columns

    weight = _gate_up(to, index, moe, mine)
    taken = to.rounded(hidden, weight)
    adapted, shrunk = _shrink(to, weight, taken, moe, route)
    x = to.quantized(to.body, taken, weight)
    share = _share(to, x, route, count) if to.plan.shares_experts and not mine.whole else None
    x, ids, at_places = (share.out, share.out_ids, share.places) if share else (x, route.ids, route.places)
    source = to.buffers[x]
    rows = to.declare(replace(source, name="expert_rows", per=k))
    gate_up = to.declare(_pairs("expert_gate_up", 2 * columns.count, source, k))
    bias = f"{weight}.bias" if moe.bias else None
    to.body.append(Dispatch(x, at_places, rows))
    to.body.append(Experts(rows, ids, at_places, weight, bias, gate_up, places, mine.start, adapted, shrunk))

    weight = _down(to, index, moe, mine)
    name, inputs = "expert_gated" if columns.whole else "expert_gated_part", to.formats.of(weight).inputs
    gated = to.declare(_pairs(name, columns.count, source, k, inputs))
    to.body.append(GatedAct(gate_up, gated, moe.act))
    taken = to.gathered_input(gated, weight, moe.width, _native.PANEL_ROWS)
    adapted, shrunk = _shrink(to, weight, taken, moe, route)
    x = to.quantized(to.body, taken, weight)
    hidden_columns = to.axes["hidden"]
    each = to.part("expert_out", hidden_columns, per=k)
    bias = f"{at}.experts.down.bias" if moe.bias else None
    if mine.whole:
        to.body.append(Experts(x, ids, at_places, weight, bias, each, places, 0, adapted, shrunk))
    else:
        whole = to.declare(_pairs("expert_rows_out", to.spec.dim, source, k))
        to.body.append(Experts(x, ids, at_places, weight, bias, whole, places, mine.start))
        if share:
            ranks, tensor = to.plan.expert_ranks, to.plan.tensor_parallel_size
            to.body.append(ReturnRows(whole, ids, at_places, route.places, each, ranks, tensor, count))
        else:
            to.body.append(AllToAll(whole, ids, each, to.plan.tensor_parallel_size, places))

    held = tuple(name for name in to.params if name.startswith(f"{at}.experts."))
    to.expert_layers.append(ExpertLayer(index, count, places, mine.start, mine.count, held))
    out = to.part("delta", hidden_columns)
    to.body.append(Combine(each, route.places, route.weights, shared, gate, out))
    return out


def _pairs(name: str, cols: int, like: Buffer, k: int, dtype: DType = "f32") -> Buffer:
    """A buffer with a row for each pair of the tokens of another."""
    return Buffer(name, cols, dtype, per=k, replicas=like.replicas)


def _share(to: Lowering, x: str, route: Route, experts: int) -> ShareTokens:
    """Append what gathers the tokens of all replicas that share the experts."""
    replicas, ids = to.plan.data_parallel_size, to.buffers[route.ids]
    out = to.declare(replace(to.buffers[x], name=f"shared_{x}", replicas=replicas))
    out_ids, places = (
        to.declare(replace(ids, name=f"shared_{name}", replicas=replicas))
        for name in (route.ids, route.places)
    )
    ranks, tensor = to.plan.expert_ranks, to.plan.tensor_parallel_size
    op = ShareTokens(x, route.ids, out, out_ids, places, ranks, tensor, experts)
    to.body.append(op)
    return op


def _shrink(to: Lowering, weight: str, x: str, moe: MoE, route: Route) -> tuple[str | None, str | None]:
    """Append the first half of what adapters add to a weight of all experts, as Lowering.shrink does for others."""
    if not to.lora.experts:
        return None, None
    if to.plan.expert_ranks > 1:
        raise UnsupportedModelError(
            "lora_target_modules: adapters of experts are not supported with enable_expert_parallel: leave it out, and "
            "ranks split the columns of experts, or each replica holds all"
        )
    parts = tuple(
        adapted_rows(
            part.tensor.removesuffix(".weight"), Share(part.first, part.first + part.rows, part.shape[0])
        )
        for part in to.params[weight].parts
    )
    adapted = Adapted(weight, to.buffers[x].cols, to.lora.rank, parts)
    to.adapted[weight] = adapted
    experts = moe.router.experts
    cols = len(parts) // experts * rank_lanes(to.lora.rank)
    out = to.buffer("expert_shrunk", cols, "f32", per=moe.router.top_k)
    to.body.append(ShrinkExperts(x, route.ids, route.places, weight, out, experts))
    return weight, out


def _route(to: Lowering, index: int, router: Router, hidden: str, spare: int) -> Route:
    """The router's linear, always in float32: which experts are taken hangs on small differences."""
    names, at = to.spec.names, f"layers.{index}"
    name, k = names.router.format(i=index), router.top_k
    logits = to.buffer("router_logits", router.experts, "f32")
    _float_linear(to, f"{at}.router", hidden, logits, name, bias=router.bias)
    correction = None
    if router.correction:
        part = Part(names.correction.format(i=index), router.experts)
        correction = to.vector(f"{at}.correction", (part,))
    ids, places = to.buffer("expert_ids", k, "i32"), to.buffer("expert_places", k, "i32")
    route = Route(logits, correction, ids, to.buffer("expert_weights", k, "f32"), places, router, spare)
    to.body.append(route)
    return route


def _shared(to: Lowering, index: int, moe: MoE, hidden: str) -> tuple[str | None, str | None]:
    """The expert that every token goes to, and the logit of its gate."""
    if moe.shared is None:
        return None, None
    gate = None
    if moe.shared_gate:
        gate = to.buffer("shared_gate", 1, "f32")
        name = to.spec.names.shared_scale.format(i=index)
        _float_linear(to, f"layers.{index}.shared_gate", hidden, gate, name)
    x = to.rounded(hidden, f"layers.{index}.shared_gate_up")
    return lower_mlp(to, index, moe.shared, x, to.part("shared", to.axes["hidden"]), prefix="shared_"), gate


def _float_linear(to: Lowering, at: str, x: str, out: str, name: str, *, bias: bool = False) -> None:
    rows = to.buffers[out].cols
    to.params[at] = Param(at, "linear", (Part(f"{name}.weight", rows, to.spec.dim),), "f32")
    vector = to.vector(f"{at}.bias", (Part(f"{name}.bias", rows),)) if bias else None
    adapted, shrunk = to.shrink(at, x, (AdaptedPart(name, rows),))
    to.body.append(Linear(x, at, vector, out, adapted=adapted, shrunk=shrunk))


def _at_start(moe: MoE, mine: Share) -> list[int]:
    """The experts at a rank's places: place e has expert e, and those behind have the first ones once more."""
    return [place % moe.router.experts for place in range(mine.start, mine.stop)]


def _gate_up(to: Lowering, index: int, moe: MoE, mine: Share) -> str:
    names, width, count = to.spec.names, moe.width, mine.count
    tensors = [
        name.format(i=index, e=e)
        for e in _at_start(moe, mine)
        for name in (names.expert_gate, names.expert_up)
    ]
    name = f"layers.{index}.experts.gate_up"
    if moe.bias:
        to.vector(f"{name}.bias", tuple(Part(f"{t}.bias", width, 0, "mlp") for t in tensors), count)
    return to.weight(name, tuple(Part(f"{t}.weight", width, to.spec.dim, "mlp") for t in tensors), count)


def _down(to: Lowering, index: int, moe: MoE, mine: Share) -> str:
    dim, count, axis = to.spec.dim, mine.count, "hidden" if mine.whole else ""
    tensors = [to.spec.names.expert_down.format(i=index, e=e) for e in _at_start(moe, mine)]
    name = f"layers.{index}.experts.down"
    if moe.bias:
        to.vector(f"{name}.bias", tuple(Part(f"{t}.bias", dim, 0, axis) for t in tensors), count)
    return to.weight(name, tuple(Part(f"{t}.weight", dim, moe.width, axis, "mlp") for t in tensors), count)
