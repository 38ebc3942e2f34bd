"""Describe the attention and the cache of a spec in words, for inspect and the table of families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.spec.model import Attention, LatentAttention, Mixer, ModelSpec, MoE, Rope


def attention_kind(att: Mixer) -> str:
    """MHA, GQA (2305.13245) or MQA (1911.02150), by the sharing of keys and values; or MLA (2405.04434)."""
    if isinstance(att, LatentAttention):
        return "MLA"
    if att.heads == att.kv_heads:
        return "MHA"
    return "MQA" if att.kv_heads == 1 else "GQA"


def attention_text(att: Mixer) -> str:
    """Kind and sizes, such as "GQA 32/8 of 128" or "MLA 128 of 128+64, latent 512+64"."""
    if isinstance(att, LatentAttention):
        queries = f", queries of {att.q_rank}" if att.q_rank else ""
        return (
            f"MLA {att.heads} of {att.nope_dim}+{att.rope_dim}, values {att.v_dim},"
            f" latent {att.kv_rank}+{att.rope_dim}{queries}"
        )
    return f"{attention_kind(att)} {att.heads}/{att.kv_heads} of {att.head_dim}"


def kv_elements(spec: ModelSpec, counted: Callable[[Mixer], bool] = lambda _: True) -> int:
    """Numbers that one token adds to the cache, over the layers that `counted` accepts.

    2 · kv_heads · head_dim for keys and values of a layer; kv_rank + rope_dim for MLA's one latent.
    """
    mixers = (layer.mixer for layer in spec.layers if layer.mixer)
    return sum(
        att.cached if isinstance(att, LatentAttention) else 2 * att.kv_heads * att.head_dim
        for att in mixers
        if counted(att)
    )


def mha_elements(spec: ModelSpec) -> int:
    """The value of kv_elements if every query head had its own keys and values."""
    mixers = (layer.mixer for layer in spec.layers if layer.mixer)
    return sum(
        att.heads * (att.q_dim + att.v_dim if isinstance(att, LatentAttention) else 2 * att.head_dim)
        for att in mixers
    )


def experts_text(moe: MoE) -> str:
    """A mixture of experts in a few words, such as "8 of 128 experts of 768, softmax renormalised, shared 5632"."""
    router, shared = moe.router, moe.shared
    text = f"{router.top_k} of {router.experts} experts of {moe.width}, {router.scores}"
    text += f" in {router.top_groups} of {router.groups} groups" if router.groups > 1 else ""
    text += " corrected" if router.correction else ""
    text += " renormalised" if router.renormalise else ""
    text += f" x{router.scale:g}" if router.scale != 1.0 else ""
    text += f", shared {shared.width}{' gated' if moe.shared_gate else ''}" if shared else ""
    return text + (", biases" if moe.bias else "")


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers: 0-4, 6-10, 12."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def rope_text(att: Mixer) -> str:
    """Describe the rope of a layer, such as "rope 10000, 96 of 128, longrope x32", or what it has in its place."""
    rope: Rope | None = att.rope
    head_dim = att.q_dim if isinstance(att, LatentAttention) else att.head_dim
    if rope is None:
        return "ALiBi" if isinstance(att, Attention) and att.alibi else "no rope"
    part = "" if rope.dim == head_dim else f", {rope.dim} of {head_dim}"
    scaling = "" if rope.kind == "default" else f", {rope.kind} x{rope.factor:g}"
    return f"rope {rope.theta:g}{part}{', interleaved' if rope.interleaved else ''}{scaling}"
