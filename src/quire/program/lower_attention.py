"""Lowering of attention with keys and values by head (MHA, GQA, MQA)."""

from __future__ import annotations

from dataclasses import replace

from quire.program.lowering import Lowering
from quire.program.ops.attention import Attend, HeadShape, RopeWrite
from quire.program.tensors import KVLayer, Part
from quire.spec import Attention


def attention_input(to: Lowering, index: int, att: Attention) -> str:
    """The buffer that the norm before a layer's attention fills."""
    del att
    return to.input("hidden", to.spec.dim, f"layers.{index}.qkv")


def kept_heads(to: Lowering, index: int, att: Attention) -> tuple[KVLayer, ...]:
    """Keys and values by head."""
    del to
    return (KVLayer(index, att.kv_heads, att.head_dim, att.window),)


def lower_attention(to: Lowering, index: int, att: Attention, hidden: str) -> str:
    """The token mixer of a layer; returns the buffer of its branch."""
    names, at = to.spec.names, f"layers.{index}"
    shape = HeadShape(att.heads, att.kv_heads, att.head_dim)
    qkv = to.buffer("qkv", shape.q_cols + 2 * shape.kv_cols, "f32")
    mixed = to.input("mixed", shape.q_cols, f"{at}.o")
    out = to.buffer("delta", to.spec.dim, "f32")
    sources = tuple(name.format(i=index) for name in (names.q, names.k, names.v))
    rows, axes = (shape.q_cols, shape.kv_cols, shape.kv_cols), ("heads", "kv_heads", "kv_heads")
    to.linear(
        f"{at}.qkv", hidden, qkv, sources, rows, axes=axes, bias=att.qkv_bias, fused=names.qkv.format(i=index)
    )  # fmt: skip
    to.body.append(_rope_write(to, index, att, shape, qkv))
    sinks = None
    if att.sinks:
        sinks = to.vector(f"{at}.sinks", (Part(names.sinks.format(i=index), att.heads, row_axis="heads"),))
    to.body.append(Attend(qkv, mixed, shape, to.kv_numbers[index], att.scale, att.window, att.softcap, sinks))
    to.linear(
        f"{at}.o", mixed, out, (names.o.format(i=index),), (to.spec.dim,), axes=("",),
        bias=att.out_bias, col_axis="heads",
    )  # fmt: skip
    return out


def _rope_write(to: Lowering, index: int, att: Attention, shape: HeadShape, qkv: str) -> RopeWrite:
    """Norms of q and k, rotation and cache write of a layer."""
    names, rope = to.spec.names, None if att.rope is None else to.rope(att.rope)
    layer = to.kv_numbers[index]
    if att.qk_norm is None:
        return RopeWrite(qkv, shape, layer, rope, None, None, to.spec.norm.eps)
    norm, weights = att.qk_norm.norm, []
    for letter, name, heads in (("q", names.q_norm, att.heads), ("k", names.k_norm, att.kv_heads)):
        source, axis = name.format(i=index, h="{h}"), "heads" if letter == "q" else "kv_heads"
        if att.qk_norm.whole:
            parts = [Part(f"{source}.weight", heads * att.head_dim, row_axis=axis)]
        elif att.qk_norm.shared:
            parts = [Part(f"{source}.weight", att.head_dim)]
        elif "{h}" in source:
            tensors = (f"{source}.weight".format(h=h) for h in range(heads))
            parts = [Part(tensor, att.head_dim, row_axis=axis) for tensor in tensors]
        else:
            stored = (heads, att.head_dim)
            parts = [Part(f"{source}.weight", heads * att.head_dim, row_axis=axis, stored=stored)]
        parts = [replace(part, plus=norm.plus) for part in parts]
        weights.append(to.vector(f"layers.{index}.{letter}_norm", tuple(parts)))
    return RopeWrite(
        qkv, shape, layer, rope, weights[0], weights[1], norm.eps, norm.kind, att.qk_norm.whole
    )  # fmt: skip
