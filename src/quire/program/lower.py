"""Lowering: ModelSpec + number formats + the part that a rank computes -> Program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.cache_kinds import FLOAT_KV, KV_DTYPES, LATE_KV, NUQ_KV, CacheGroup, StateGroup
from quire.core.cache_groups import Kept, kv_group, plan_groups
from quire.program.formats import NumberFormats
from quire.program.fuse import fuse
from quire.program.lower_mlp import lower_mlp
from quire.program.lower_pooling import lower_pooling
from quire.program.lowering import LoraRoom, Lowering, adapted_rows
from quire.program.memory import kv_token_bytes
from quire.program.mixers import Keeps, kind_of
from quire.program.op import Op
from quire.program.ops.collectives import AllReduce
from quire.program.ops.linear import MAXIMA_COLS, Linear
from quire.program.ops.rows import Add, Embed, EmbedSum, GatherRows, Norm, Scale
from quire.program.program import Entry, Input, Output, Program
from quire.program.ranks import RankPlan, Share
from quire.program.tensors import KVLayer, Part, StateLayer
from quire.spec import MLP, AddedEmbedding, Attention, LatentAttention, Layer, ModelSpec, MoE
from quire.spec.draft import Features
from quire.types import UnsupportedModelError

MAXIMA = "logit_maxima"
LOGITS = (Output("logits", "logits"), Output("maxima", MAXIMA))


def lower(
    spec: ModelSpec, formats: NumberFormats, plan: RankPlan | None = None, *, fused: bool = True,
    features: Features | None = None, lora: LoraRoom | None = None,
) -> Program:  # fmt: skip
    """Lower a spec, or the part of it that `plan` gives to a rank, to a flat op list.

    Pure: the same arguments give the same program. `fused`: with the pass of program/fuse, which changes no number.
    `features`: what a draft takes of every token; outputs "features", or "features.0" and so on for several layers.
    `lora`: what adapters may change.

    Raises UnsupportedModelError for formats that a layer's cache cannot have, and for plans that do not fit the model.
    """
    _check_cache(spec, formats)
    plan = plan or RankPlan()
    if lora and lora.rank and plan.fast:
        raise UnsupportedModelError(
            "enable_lora: adapters are not supported with tensor_parallel_reduce fast"
        )
    program = _program(Lowering(spec, formats, plan, lora), features)
    return fuse(program) if fused else program


def _check_cache(spec: ModelSpec, formats: NumberFormats) -> None:
    """Raises UnsupportedModelError for a format that a layer's cache cannot have."""
    name = next(name for name, kind in KV_DTYPES.items() if kind == formats.kv)
    if formats.kv not in FLOAT_KV and any(isinstance(layer.mixer, LatentAttention) for layer in spec.layers):
        raise UnsupportedModelError(
            f"kv_cache_dtype = {name} is not supported with latent attention (MLA): its cache is one latent a token "
            "already; use bfloat16, float16 or float32"
        )
    if formats.kv in (*LATE_KV, *NUQ_KV) and any(
        isinstance(layer.mixer, Attention) and not layer.mixer.causal for layer in spec.layers
    ):
        why = "all of its tokens are recent" if formats.kv in LATE_KV else "its layers share one cache"
        raise UnsupportedModelError(
            f"kv_cache_dtype = {name} is not supported with attention in both directions: {why}"
        )


def _program(to: Lowering, features: Features | None) -> Program:
    spec, plan = to.spec, to.plan
    to.columns("vocab", "vocab_size", spec.vocab)
    to.axes["hidden"] = Share(0, spec.dim, spec.dim)
    if not plan.fast:
        to.columns("hidden", "hidden_size", spec.dim)
    logits = spec.pooling is None
    if logits and (plan.is_last_stage or (spec.tied and plan.is_first_stage)):
        name = spec.names.embed if spec.tied else spec.names.head
        to.weight("head", (Part(name, spec.vocab, spec.dim, "vocab"),))
    residual = to.buffer("residual", spec.dim, "f32")
    groups, kept = plan_cache(to)
    taken: list[Output] = []
    entry = _embed(to, residual) if plan.is_first_stage else None
    head_ops: tuple[Op, ...] = ()
    outputs: tuple[Output, ...]
    delta: str | None = None
    for index in to.layers:
        delta = _take(to, features, index, residual, delta, taken)
        delta = lower_layer(to, index, spec.layers[index], residual, delta)
    if plan.is_last_stage:
        delta = _take(to, features, len(spec.layers), residual, delta, taken)
        if spec.pooling is None:
            head_ops, outputs = lower_head(to, residual, delta, "head"), LOGITS
        else:
            head_ops, outputs = lower_pooling(to, residual, delta, spec.pooling)
    else:
        outputs = (Output(residual, residual),)
        if delta is not None:
            to.body.append(Add(residual, delta, 1.0))
    return made_program(
        to, groups, kept,
        head=head_ops,
        outputs=(*outputs, *taken),
        entry=entry,
        inputs=() if plan.is_first_stage else (Input(residual, residual),),
        ids=spec.vocab * spec.added.segments if spec.added and spec.added.segments else 0,
        whole=spec.whole,
    )  # fmt: skip


def made_program(to: Lowering, groups: tuple[CacheGroup, ...], kept: list[Keeps], **more: Any) -> Program:
    """The program of what was lowered; `more` are its other fields."""
    params = to.params.items()
    return Program(
        params=tuple(param for name, param in params if name not in to.borrowed),
        borrowed=tuple(param for name, param in params if name in to.borrowed),
        buffers=tuple(to.buffers.values()),
        body=tuple(to.body),
        ropes=tuple(to.ropes),
        kv_layers=tuple(each for each in kept if isinstance(each, KVLayer)),
        cache_groups=groups,
        layers_per_group=max((len(group.layers) for group in groups), default=0),
        vocab=to.axes["vocab"].total,
        state_layers=tuple(each for each in kept if isinstance(each, StateLayer)),
        plan=to.plan,
        adapted=tuple(to.adapted.values()),
        owned=tuple(to.owned.values()),
        expert_layers=tuple(to.expert_layers),
        **more,
    )


def _take(
    to: Lowering, features: Features | None, index: int, residual: str, delta: str | None, taken: list[Output]
) -> str | None:
    """Append what leaves a draft's features of the residual stream before layer `index`, if it takes any there.

    Returns the buffer still to be added to the stream.
    """
    if features is None:
        return delta
    at = [number for number, layer in enumerate(features.layers) if layer == index]
    wanted = [f"features.{number}" for number in at]
    norm, weight, bias = to.spec.norm, None, None
    if not features.layers and index == len(to.spec.layers):
        wanted = ["features"]
        weight, bias = to.norm_weights("final_norm", to.spec.names.final_norm, norm)
    for name in wanted:
        out = to.buffer(name, to.spec.dim, "f32")
        to.body.append(Norm(residual, delta, weight, norm.eps, out, norm.kind, bias))
        taken.append(Output(name, out))
        delta = None
    return delta


def _embed(to: Lowering, residual: str) -> Entry | None:
    """Append the look-up of tokens; returns where embeddings that are given enter.

    Ranks hold rows of the table; all but one leave zeros for a token.
    """
    spec, share, embed = to.spec, to.axes["vocab"], "head"
    if not spec.tied or spec.pooling is not None:
        embed = to.table("embed", Part(spec.names.embed, spec.vocab, spec.dim, "vocab"))
    if spec.added is not None:
        _embed_sum(to, spec.added, embed, residual)
        return None
    out = residual if share.whole else to.buffer("embedded", spec.dim, "f32")
    module = spec.names.embed.removesuffix(".weight")
    to.body.append(Embed(embed, out, share.start, to.own("embed", module, embed)))
    if out != residual:
        to.body.append(AllReduce(out, residual, to.plan.tensor_parallel_size, "bits"))
    to.adapt_embedding(residual, module)  # on every rank, whose rows are whole again
    scale_embedding(to, residual)
    _norm_embedding(to, residual)
    return Entry(residual, len(to.body))


def _embed_sum(to: Lowering, added: AddedEmbedding, words: str, residual: str) -> None:
    """Append the sum of the embeddings of token, position and segment. Nothing can be given in their place."""
    names, dim = to.spec.names, to.spec.dim
    positions = (
        to.table("positions", Part(names.positions, added.positions, dim)) if added.positions else None
    )
    segments = to.table("segments", Part(names.segments, added.segments, dim)) if added.segments else None
    to.body.append(EmbedSum(words, positions, segments, residual, added.first))
    _norm_embedding(to, residual)


def _norm_embedding(to: Lowering, x: str) -> None:
    """Append the norm over embeddings, if there is one."""
    if to.spec.embed_norm:
        norm = to.spec.norm
        weight, bias = to.norm_weights("embed_norm", to.spec.names.embed_norm, norm)
        to.body.append(Norm(x, None, weight, norm.eps, x, norm.kind, bias))


def scale_embedding(to: Lowering, x: str) -> None:
    """Append the multiplier of embeddings, if there is one."""
    if to.spec.embed_scale != 1.0:
        to.body.append(Scale(x, to.spec.embed_scale))


def lower_layer(
    to: Lowering, index: int, layer: Layer, residual: str, delta: str | None, taken: str | None = None
) -> str | None:
    """Append one block's ops; returns the buffer still to be added to the residual stream.

    `taken`: the buffer that the mixer takes in place of the normed residual stream.
    """
    names = ("attn_norm", "mlp_norm") if layer.pre_norm else (None, None)
    if layer.mixer is None:
        if layer.mlp is None:
            raise UnsupportedModelError(f"layers.{index}: has neither a mixer nor a feed-forward")
        beside = _mlp_input(to, index, layer.mlp)
        to.norm(names[1], index, residual, delta, beside)
        return _feed_forward(to, index, layer, layer.mlp, residual, beside)
    hidden = taken or kind_of(index, layer.mixer).input(to, index, layer.mixer)
    if taken is None:
        to.norm(names[0] if layer.mixer_norm else None, index, residual, delta, hidden)
    beside = _mlp_input(to, index, layer.mlp) if layer.mlp else hidden
    if layer.parallel and beside != hidden:  # the same values, rounded for weights of another format
        to.norm(names[0], index, residual, None, beside)
    branch = kind_of(index, layer.mixer).ops(to, index, layer.mixer, hidden)
    branch = to.gathered(branch, "delta", to.spec.dim)
    if layer.post_norm:
        to.norm("attn_post_norm", index, branch, None, branch)
    if layer.sum_norm:
        to.norm("attn_post_norm", index, residual, branch, residual)
        delta = None
    else:
        delta = _join(to, residual, branch)
    if layer.mlp is None:
        return delta
    if not layer.parallel:
        to.norm(names[1], index, residual, delta, beside)
    elif delta is not None:
        to.body.append(Add(residual, delta, 1.0))
    return _feed_forward(to, index, layer, layer.mlp, residual, beside)


def _feed_forward(
    to: Lowering, index: int, layer: Layer, mlp: MLP | MoE, residual: str, beside: str
) -> str | None:
    """Append the feed-forward of a block over its normed input; returns what `_layer` does."""
    if isinstance(mlp, MoE):
        from quire.program.lower_experts import lower_experts  # dense models start faster without it

        branch = lower_experts(to, index, mlp, beside)
    else:
        branch = lower_mlp(to, index, mlp, beside, to.part("delta", to.axes["hidden"]))
    branch = to.gathered(branch, "delta", to.spec.dim)
    if layer.post_norm:
        to.norm("mlp_post_norm", index, branch, None, branch)
    if layer.sum_norm:
        to.norm("mlp_post_norm", index, residual, branch, residual)
        return None
    return _join(to, residual, branch)


def _mlp_input(to: Lowering, index: int, mlp: MLP | MoE) -> str:
    """The buffer that the norm before a feed-forward fills; a router takes float32."""
    if isinstance(mlp, MoE):
        return to.buffer("hidden", to.spec.dim, "f32")
    return to.input("hidden", to.spec.dim, f"layers.{index}.gate_up")


def _join(to: Lowering, residual: str, branch: str) -> str | None:
    """What the next norm has to add to the residual stream; a scaled branch is added at once."""
    if to.spec.residual_scale == 1.0:
        return branch
    to.body.append(Add(residual, branch, to.spec.residual_scale))
    return None


def lower_head(
    to: Lowering, residual: str, delta: str | None, weight: str, *, normed: str = "", plain: bool = False
) -> tuple[Op, ...]:
    """The ops from the residual stream to logits.

    `normed`: a buffer that takes the rows after the final norm. `plain`: there is no final norm.
    """
    spec = to.spec
    last = to.buffer("last", spec.dim, "f32", logits=True)
    last_hidden = to.input("last_hidden", spec.dim, weight, logits=True)
    share = to.axes["vocab"]
    logits = to.part("logits", share, logits=True)
    norm, bias = None, None
    if not plain:
        norm, bias = to.norm_weights("final_norm", spec.names.final_norm, spec.norm)
    ops: list[Op] = [GatherRows(residual, delta, last)]
    if normed:
        to.buffer(normed, spec.dim, "f32", logits=True)
        ops.append(Norm(last, None, norm, spec.norm.eps, normed, spec.norm.kind, bias))
        ops.append(Norm(normed, None, None, spec.norm.eps, last_hidden))
    else:
        ops.append(Norm(last, None, norm, spec.norm.eps, last_hidden, spec.norm.kind, bias))
    adapted = shrunk = None
    module = spec.names.head.removesuffix(".weight")
    if to.lora.head:
        adapted, shrunk = to.shrink("head", last_hidden, (adapted_rows(module, share),), ops)
    own = to.own("head", module, weight)
    last_hidden = to.quantized(ops, last_hidden, weight)
    spans = [-(-columns // MAXIMA_COLS) for columns in (share.start, share.stop, share.total)]
    maxima = to.part(MAXIMA, Share(*spans), logits=True)
    if spec.logits_scale != 1.0 or spec.logits_cap:
        ops.append(Linear(last_hidden, weight, None, logits, adapted=adapted, shrunk=shrunk, own=own))
        ops.append(Scale(logits, spec.logits_scale, spec.logits_cap, maxima))
    else:
        ops.append(
            Linear(last_hidden, weight, None, logits, maxima=maxima, adapted=adapted, shrunk=shrunk, own=own)
        )
    to.gathered(logits, "logits", share.total, ops)
    to.gathered(maxima, MAXIMA, spans[-1], ops)
    return tuple(ops)


def plan_cache(to: Lowering) -> tuple[tuple[CacheGroup, ...], list[Keeps]]:
    """The groups of what this stage's layers keep of earlier tokens, and each with its place in blocks of its group.

    Stages have the model's groups in one order, some of them without a layer, so that one block table serves all.
    """
    kept = [
        each
        for index, layer in enumerate(to.spec.layers)
        if layer.mixer is not None
        for each in kind_of(index, layer.mixer).keeps(to, index, layer.mixer)
    ]
    if not kept:
        raise UnsupportedModelError(
            "no layer keeps anything of earlier tokens: a model needs keys and values, or a state"
        )
    if to.spec.encoder:
        return _in_one_layer(to, kept)
    plan = plan_groups([_size_of(each, late=to.formats.kv in LATE_KV) for each in kept])
    placed: list[Keeps] = []
    members: list[list[Keeps]] = [[] for _ in plan.groups]
    for each, (group, _) in zip(kept, plan.places, strict=True):
        if each.layer in to.layers:
            placed.append(replace(each, group=group, index_in_group=len(members[group])))
            members[group].append(each)
    for number, layer in enumerate(x for x in placed if isinstance(x, KVLayer)):
        (to.recent_numbers if layer.recent else to.kv_numbers)[layer.layer] = number
    return tuple(map(_group_of, plan.groups, members)), placed


def _size_of(each: Keeps, *, late: bool) -> Kept:
    """`late`: layers have two caches whose tokens take different bytes."""
    if isinstance(each, StateLayer):
        return Kept(each.layer, state_bytes=each.bytes)
    return Kept(each.layer, each.window, size=kv_token_bytes(each) if late else 1)


def _in_one_layer(to: Lowering, kept: list[Keeps]) -> tuple[tuple[CacheGroup, ...], list[Keeps]]:
    """The same where nothing is kept from one step to the next: all layers write the same blocks, in turn."""
    placed = [replace(each, group=0, index_in_group=0) for each in kept]
    to.kv_numbers = {each.layer: number for number, each in enumerate(placed)}
    return (kv_group((0,), 0),), placed


def _group_of(group: CacheGroup, members: list[Keeps]) -> CacheGroup:
    layers = tuple(each.layer for each in members)
    if isinstance(group, StateGroup):
        return StateGroup(layers, sum(each.bytes for each in members if isinstance(each, StateLayer)))
    return kv_group(layers, group.window)
