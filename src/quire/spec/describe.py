"""What a spec's attention and cache are, in the field's words: for inspect and the table of families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.spec.model import Attention, ModelSpec, Rope


def attention_kind(heads: int, kv_heads: int) -> str:
    """MHA, GQA (2305.13245) or MQA (1911.02150) by how many query heads share a key and value head."""
    if heads == kv_heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def kv_elements(spec: ModelSpec, counted: Callable[[Attention], bool] = lambda _: True) -> int:
    """Numbers that one token adds to the cache: 2 · Σ kv_heads · head_dim over the layers that `counted` takes."""
    layers = (layer.attention for layer in spec.layers)
    return sum(2 * att.kv_heads * att.head_dim for att in layers if counted(att))


def mha_elements(spec: ModelSpec) -> int:
    """What kv_elements would be if every query head had keys and values of its own."""
    return sum(2 * layer.attention.heads * layer.attention.head_dim for layer in spec.layers)


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as text: 0-4, 6-10, 12."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def rope_text(rope: Rope | None, head_dim: int) -> str:
    """A rope in a few words, such as "rope 10000, 96 of 128, longrope x32"."""
    if rope is None:
        return "no rope"
    part = "" if rope.dim == head_dim else f", {rope.dim} of {head_dim}"
    scaling = "" if rope.kind == "default" else f", {rope.kind} x{rope.factor:g}"
    return f"rope {rope.theta:g}{part}{', interleaved' if rope.interleaved else ''}{scaling}"
