"""Lowering of attention with keys and values by head (MHA, GQA, MQA)."""

from __future__ import annotations

from dataclasses import replace

from quire.cache_kinds import FP8_KV, LATE_KV, NUQ_KV, RECENT_TOKENS
from quire.program.formats import HeadCodes
from quire.program.lowering import Lowering
from quire.program.ops.attention import Attend, CompressKV, HeadShape, RopeWrite
from quire.program.ops.collectives import AllGather
from quire.program.ranks import Share
from quire.program.tensors import KVLayer, Part
from quire.spec import Attention
from quire.types import UnsupportedModelError


def attention_input(to: Lowering, index: int, att: Attention) -> str:
    """The buffer that the norm before a layer's attention fills."""
    del att
    return to.input("hidden", to.spec.dim, f"layers.{index}.qkv")


def kept_heads(to: Lowering, index: int, att: Attention) -> tuple[KVLayer, ...]:
    """Keys and values by head, of this rank's heads; recent ones apart where they are not rounded yet."""
    share, kind = to.plan.heads(att.heads, att.kv_heads)[1], to.formats.kv
    kept = KVLayer(index, share.count, att.head_dim, att.window, type=kind)
    if kind in LATE_KV:
        return kept, replace(kept, window=RECENT_TOKENS, type="bf16", recent=True)
    if kind in FP8_KV and (found := to.formats.kv_scales.get(index)):
        keys, values = (
            (each * att.kv_heads if len(each) == 1 else each)[share.start : share.stop]
            for each in (found.keys, found.values)
        )
        return (replace(kept, k_scales=keys, v_scales=values),)
    if kind in NUQ_KV:
        codes = to.formats.kv_codes.get(index) or HeadCodes.even(att.kv_heads, att.head_dim)
        rope = None if att.rope is None else to.rope(att.rope)
        return (replace(kept, codes=codes.of_heads(share.start, share.stop), rope=rope),)
    return (kept,)


def lower_attention(to: Lowering, index: int, att: Attention, hidden: str) -> str:
    """The token mixer of a layer; returns the buffer of its branch."""
    names, at, layer = to.spec.names, f"layers.{index}", to.kv_numbers[index]
    q, kv = to.axes["heads"], to.axes["kv_heads"] = to.plan.heads(att.heads, att.kv_heads)
    shape = HeadShape(q.count, kv.count, att.head_dim)
    columns = Share(*(heads * att.head_dim for heads in (q.start, q.stop, q.total)))
    qkv = to.buffer("qkv", shape.q_cols + 2 * shape.kv_cols, "f32")
    mixed = to.part("mixed", columns, to.formats.of(f"{at}.o").inputs)
    out = to.part("delta", to.axes["hidden"])
    sources = tuple(name.format(i=index) for name in (names.q, names.k, names.v))
    of_kv = att.kv_heads * att.head_dim
    rows, axes = (columns.total, of_kv, of_kv), ("heads", "kv_heads", "kv_heads")
    to.linear(
        f"{at}.qkv", hidden, qkv, sources, rows, axes=axes, bias=att.qkv_bias, fused=names.qkv.format(i=index)
    )  # fmt: skip
    to.body.append(_rope_write(to, index, att, shape, qkv))
    recent = to.recent_numbers.get(index)
    if recent is not None:
        to.body.append(CompressKV(recent, layer))
    if att.alibi and to.plan.tensor_parallel_size > 1:
        raise UnsupportedModelError("tensor_parallel_size above 1 is not supported with ALiBi")
    sinks = None
    if att.sinks:
        sinks = to.vector(f"{at}.sinks", (Part(names.sinks.format(i=index), att.heads, row_axis="heads"),))
    to.body.append(
        Attend(
            qkv,
            mixed,
            shape,
            layer,
            att.scale,
            att.window,
            att.softcap,
            sinks,
            causal=att.causal,
            alibi=att.alibi,
            recent=recent,
        )
    )
    source = names.o.format(i=index)
    to.branch(
        f"{at}.o", mixed, out, source, axis="heads", cols=columns.total, unit=att.head_dim, bias=att.out_bias
    )
    return out


def _rope_write(to: Lowering, index: int, att: Attention, shape: HeadShape, qkv: str) -> RopeWrite:
    """Norms of q and k, rotation and cache write of a layer."""
    names, rope = to.spec.names, None if att.rope is None else to.rope(att.rope)
    layer = to.recent_numbers.get(index, to.kv_numbers[index])
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
            mine = to.axes[axis]
            tensors = (f"{source}.weight".format(h=h) for h in range(mine.start, mine.stop))
            parts = [Part(tensor, att.head_dim) for tensor in tensors]
        else:
            stored = (heads, att.head_dim)
            parts = [Part(f"{source}.weight", heads * att.head_dim, row_axis=axis, stored=stored)]
        parts = [replace(part, added=norm.added) for part in parts]
        weights.append(to.vector(f"layers.{index}.{letter}_norm", tuple(parts)))
    q_row, k_row = _whole_rows(to, att, shape, qkv) if att.qk_norm.whole else (None, None)
    return RopeWrite(
        qkv, shape, layer, rope, weights[0], weights[1], norm.eps, norm.kind, att.qk_norm.whole, q_row, k_row
    )  # fmt: skip


def _whole_rows(to: Lowering, att: Attention, shape: HeadShape, qkv: str) -> tuple[str | None, str | None]:
    """Queries and keys of all ranks, for a norm over all heads; nothing when this rank has them."""
    ranks = to.plan.tensor_parallel_size
    if ranks == 1:
        return None, None
    if ranks > att.kv_heads:
        raise UnsupportedModelError(
            f"tensor_parallel_size: {ranks} ranks cannot share num_key_value_heads {att.kv_heads} of a model with a "
            f"norm over all heads; up to {att.kv_heads} can"
        )
    found = []
    for name, first, cols, heads in (
        ("q_row", 0, shape.q_cols, att.heads),
        ("k_row", shape.q_cols, shape.kv_cols, att.kv_heads),
    ):
        found.append(to.buffer(name, heads * att.head_dim, "f32"))
        to.body.append(AllGather(qkv, found[-1], ranks, first, cols))
    return found[0], found[1]
