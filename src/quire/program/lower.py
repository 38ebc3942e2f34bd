"""Lowering: ModelSpec + number formats -> Program."""

from __future__ import annotations

from quire.core.cache_groups import plan_groups
from quire.program.formats import NumberFormats
from quire.program.fuse import fuse
from quire.program.lower_attention import attention_input, lower_attention
from quire.program.lower_experts import lower_experts
from quire.program.lower_latent import latent_input, lower_latent
from quire.program.lower_mlp import lower_mlp
from quire.program.lowering import Lowering
from quire.program.op import Op
from quire.program.ops.linear import MAXIMA_COLS, Linear
from quire.program.ops.rows import Add, Embed, GatherRows, Norm, Scale
from quire.program.program import Output, Program
from quire.program.tensors import KVLayer, Param, Part
from quire.spec import LatentAttention, Layer, ModelSpec, MoE
from quire.types import CacheGroup, UnsupportedModelError

MAXIMA = "logit_maxima"


def lower(spec: ModelSpec, formats: NumberFormats, *, fused: bool = True) -> Program:
    """Lower a spec to a flat op list. Pure: the same arguments give the same program.

    `fused`: with the pass of program/fuse, which changes no number.

    Raises UnsupportedModelError for formats that a layer's cache cannot have.
    """
    if formats.kv == "i8" and any(isinstance(layer.mixer, LatentAttention) for layer in spec.layers):
        raise UnsupportedModelError(
            "kv_cache_dtype = int8 is not supported with latent attention (MLA): its cache is one latent a token "
            "already; use bfloat16 or float32"
        )
    program = _program(Lowering(spec, formats))
    return fuse(program) if fused else program


def _program(to: Lowering) -> Program:
    spec = to.spec
    head_name = spec.names.embed if spec.tied else spec.names.head
    head = to.weight("head", (Part(head_name, spec.vocab, spec.dim, "vocab"),))
    embed = head
    if not spec.tied:
        embed = "embed"
        parts = (Part(spec.names.embed, spec.vocab, spec.dim, "vocab"),)
        to.params[embed] = Param(embed, "table", parts, to.formats.weights)
    residual = to.buffer("residual", spec.dim, "f32")
    to.body.append(Embed(embed, residual))
    if spec.embed_scale != 1.0:
        to.body.append(Scale(residual, spec.embed_scale))
    delta: str | None = None
    for index, layer in enumerate(spec.layers):
        delta = _layer(to, index, layer, residual, delta)
    head_ops = _head(to, residual, delta, head)
    cache = plan_groups([layer.mixer.window for layer in spec.layers])
    return Program(
        params=tuple(to.params.values()),
        buffers=tuple(to.buffers.values()),
        body=tuple(to.body),
        head=head_ops,
        ropes=tuple(to.ropes),
        kv_layers=_kv_layers(to, cache.groups),
        cache_groups=cache.groups,
        layers_per_group=cache.layers_per_group,
        kv_dtype=to.formats.kv,
        vocab=spec.vocab,
        outputs=(Output("logits", "logits"), Output("maxima", MAXIMA)),
    )


def _layer(to: Lowering, index: int, layer: Layer, residual: str, delta: str | None) -> str | None:
    """Append one block's ops; returns the buffer still to be added to the residual stream."""
    dim, names = to.spec.dim, ("attn_norm", "mlp_norm") if layer.pre_norm else (None, None)
    hidden = _mixer_input(to, index, layer)
    to.norm(names[0], index, residual, delta, hidden)
    beside = _mlp_input(to, index, layer)
    if layer.parallel and beside != hidden:  # the same values, rounded for weights of another format
        to.norm(names[0], index, residual, None, beside)
    if isinstance(layer.mixer, LatentAttention):
        branch = lower_latent(to, index, layer.mixer, hidden)
    else:
        branch = lower_attention(to, index, layer.mixer, hidden)
    if layer.post_norm:
        to.norm("attn_post_norm", index, branch, None, branch)
    delta = _join(to, residual, branch)
    if not layer.parallel:
        to.norm(names[1], index, residual, delta, beside)
    elif delta is not None:
        to.body.append(Add(residual, delta, 1.0))
    if isinstance(layer.mlp, MoE):
        branch = lower_experts(to, index, layer.mlp, beside)
    else:
        branch = lower_mlp(to, index, layer.mlp, beside, to.buffer("delta", dim, "f32"))
    if layer.post_norm:
        to.norm("mlp_post_norm", index, branch, None, branch)
    return _join(to, residual, branch)


def _mixer_input(to: Lowering, index: int, layer: Layer) -> str:
    """The buffer that the norm before a mixer fills."""
    if isinstance(layer.mixer, LatentAttention):
        return latent_input(to, index, layer.mixer)
    return attention_input(to, index)


def _mlp_input(to: Lowering, index: int, layer: Layer) -> str:
    """The buffer that the norm before a feed-forward fills; a router takes float32."""
    if isinstance(layer.mlp, MoE):
        return to.buffer("hidden", to.spec.dim, "f32")
    return to.input("hidden", to.spec.dim, f"layers.{index}.gate_up")


def _join(to: Lowering, residual: str, branch: str) -> str | None:
    """What the next norm has to add to the residual stream; a scaled branch is added at once."""
    if to.spec.residual_scale == 1.0:
        return branch
    to.body.append(Add(residual, branch, to.spec.residual_scale))
    return None


def _head(to: Lowering, residual: str, delta: str | None, weight: str) -> tuple[Op, ...]:
    spec = to.spec
    last = to.buffer("last", spec.dim, "f32", logits=True)
    last_hidden = to.input("last_hidden", spec.dim, weight, logits=True)
    logits = to.buffer("logits", spec.vocab, "f32", logits=True)
    norm, bias = to.norm_weights("final_norm", spec.names.final_norm, spec.norm)
    ops: list[Op] = [
        GatherRows(residual, delta, last),
        Norm(last, None, norm, spec.norm.eps, last_hidden, spec.norm.kind, bias),
    ]
    last_hidden = to.quantized(ops, last_hidden, weight)
    maxima = to.buffer(MAXIMA, -(-spec.vocab // MAXIMA_COLS), "f32", logits=True)
    if spec.logits_scale != 1.0 or spec.logits_cap:
        ops.append(Linear(last_hidden, weight, None, logits))
        ops.append(Scale(logits, spec.logits_scale, spec.logits_cap, maxima))
    else:
        ops.append(Linear(last_hidden, weight, None, logits, maxima=maxima))
    return tuple(ops)


def _kv_layers(to: Lowering, groups: tuple[CacheGroup, ...]) -> tuple[KVLayer, ...]:
    place = {layer: (g, k) for g, group in enumerate(groups) for k, layer in enumerate(group.layers)}
    return tuple(
        KVLayer(i, 1, a.cached, a.window, *place[i], latent=True)
        if isinstance(a, LatentAttention)
        else KVLayer(i, a.kv_heads, a.head_dim, a.window, *place[i])
        for i, a in enumerate(layer.mixer for layer in to.spec.layers)
    )
