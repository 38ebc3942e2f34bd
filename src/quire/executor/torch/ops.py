"""What each op of a program computes, in plain torch: the definition that other executors are compared with.

Arithmetic is float32 throughout. A function writes its result into `out`, which rounds it to nearest even
when `out` is bfloat16. The order of sums is left to torch, so results agree with another executor's up to
rounding; the promise of equal bits in any batch is the native executor's.

Shapes: T tokens of the step, N rows that want logits, S cached positions, H query heads, G key/value heads, D
dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from quire.program.ops import (
    MAXIMA_COLS,
    Attend,
    HeadShape,
    LatentAttend,
    LatentShape,
    LatentWrite,
    Norm,
    RopeWrite,
)
from quire.spec.model import Activation, ClampedSwiGLU, NormKind

QUERY_TILE = 256  # queries scored at once, so that scores stay small beside the cache
WEIGHT_TILE = 1 << 22  # weight elements widened to float32 at once, some megabytes

# Where each token's key and value live: block ids [T] and places inside the blocks [T].
Location = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Paged keys and values of one layer, each [blocks, block size, G, D]; int8 ones with scales.

    scales: bfloat16 [2, blocks, block size, G], of keys and of values, or None.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None = None

    def at(self, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, G, D] of a sequence whose block table is `blocks`, at positions [S]."""
        size = self.keys.shape[1]
        where = blocks[positions // size], positions % size
        keys, values = self.keys[where], self.values[where]
        if self.scales is None:
            return keys, values
        k_scale, v_scale = (scales[where].float()[..., None] for scales in self.scales)
        return keys * k_scale, values * v_scale

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, G, D] rounded to the cache's dtype."""
        if self.scales is not None:
            keys, self.scales[0][where] = quantize_heads(keys)
            values, self.scales[1][where] = quantize_heads(values)
        self.keys[where] = keys.to(self.keys.dtype)
        self.values[where] = values.to(self.values.dtype)


@dataclass(frozen=True, slots=True)
class LatentCache:
    """Paged latents of one layer with the key that all heads share: [blocks, block size, rank + rope]."""

    latents: Tensor

    def at(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Rows [S, rank + rope] of a sequence whose block table is `blocks`, at positions [S]."""
        size = self.latents.shape[1]
        return self.latents[blocks[positions // size], positions % size].float()

    def write(self, where: Location, rows: Tensor) -> None:
        """Store rows [T, rank + rope] rounded to the cache's dtype."""
        self.latents[where] = rows.to(self.latents.dtype)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of rotation angles, each [positions or tokens, rotated dimensions / 2]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def at(self, positions: Tensor) -> Rotation:
        return Rotation(self.cos[positions], self.sin[positions], self.interleaved)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a step: it owns tokens start … stop-1; `blocks` is its line of the block table."""

    start: int
    stop: int
    blocks: Tensor


def embed(token_ids: Tensor, table: Tensor, out: Tensor) -> None:
    """out [T, C] = table [vocabulary, C] at token_ids [T]."""
    out.copy_(table[token_ids])


def norm(
    op: Norm, x: Tensor, delta: Tensor | None, weights: tuple[Tensor | None, Tensor | None], out: Tensor
) -> None:
    """x [T, C] += delta, in place; out = the normalised x * weight [C] + bias [C], or x itself without a weight."""
    weight, bias = weights
    if delta is not None:
        x.add_(delta)
    normed = x if weight is None else normalise(x, op.kind, op.eps) * weight
    out.copy_(normed if bias is None else normed + bias)


def add(x: Tensor, delta: Tensor, scale: float) -> None:
    """x [T, C] += scale * delta, in place."""
    x.add_(delta * scale)


def scale_cap(x: Tensor, scale: float, cap: float) -> None:
    """x [T, C] = scale * x, and then cap * tanh(x / cap) unless cap is 0."""
    x.mul_(scale)
    if cap:
        x.copy_(torch.tanh(x / cap) * cap)


def maxima(x: Tensor, out: Tensor) -> None:
    """out [T, ceil(C / 64)] = the maximum of each 64 columns of x [T, C], NaN when one is NaN or +inf."""
    padded = functional.pad(x, (0, -x.shape[1] % MAXIMA_COLS), value=-torch.inf)
    spans = padded.unflatten(1, (-1, MAXIMA_COLS))
    out.copy_(spans.amax(-1).masked_fill(~(spans < torch.inf).all(-1), torch.nan))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [T, rows] = x [T, cols] @ weight [rows, cols]ᵀ (+ bias [rows])."""
    x, tile = x.float(), max(1, WEIGHT_TILE // weight.shape[1])
    for first in range(0, weight.shape[0], tile):
        rows = slice(first, first + tile)
        product = x @ weight[rows].float().T
        out[:, rows] = product if bias is None else product + bias[rows]


def rope_write(
    op: RopeWrite, qkv: Tensor, norms: tuple[Tensor | None, Tensor | None], *, rotation: Rotation | None,
    cache: LayerCache, where: Location,
) -> None:  # fmt: skip
    """Normalise and rotate q and k of qkv [T, (H + 2G)·D]; q stays in place, k and v go to the cache.

    norms: weights for q and for k, each [D] or one for every head, [heads·D].
    """
    q, k, v = split_heads(qkv, op.shape)
    q_weight, k_weight = norms
    q.copy_(rotate(q if q_weight is None else head_norm(op, q, q_weight), rotation))
    k = rotate(k if k_weight is None else head_norm(op, k, k_weight), rotation)
    cache.write(where, k, v)


def head_norm(op: RopeWrite, x: Tensor, weight: Tensor) -> Tensor:
    """x [T, heads, D] normalised over each head, or over all of them together."""
    heads = x.shape[1]
    if op.whole:
        return (normalise(x.flatten(1), op.kind, op.eps) * weight).unflatten(1, (heads, -1))
    return normalise(x, op.kind, op.eps) * weight.unflatten(0, (-1, x.shape[2]))


def attend(
    op: Attend, qkv: Tensor, sinks: Tensor | None, *, positions: Tensor, cache: LayerCache, rows: Sequence[Row],
    out: Tensor,
) -> None:  # fmt: skip
    """out [T, H·D] = softmax(scores) v over the visible positions of each token's sequence; sinks [H] as `Attend`.

    The query at position p sees positions p - window + 1 … p, or 0 … p when window is 0.
    """
    q, _, _ = split_heads(qkv, op.shape)
    for row in rows:
        for start in range(row.start, row.stop, QUERY_TILE):
            tokens = slice(start, min(start + QUERY_TILE, row.stop))
            at = positions[tokens]
            first = max(0, int(at.min()) - op.window + 1) if op.window else 0
            seen = torch.arange(first, int(at.max()) + 1, device=at.device)
            ahead = at[:, None] - seen[None, :]
            visible = (ahead >= 0) & (ahead < op.window) if op.window else ahead >= 0
            keys, values = cache.at(row.blocks, seen)
            out[tokens] = attention(op, q[tokens], keys, values, visible=visible, sinks=sinks).flatten(1)


def attention(
    op: Attend, q: Tensor, keys: Tensor, values: Tensor, *, visible: Tensor, sinks: Tensor | None
) -> Tensor:
    """Grouped-query attention (2305.13245) of q [T, H, D] over keys and values [S, G, D]; visible [T, S].

    Query head h reads key/value head h // (H / G). Returns [T, H, D].
    """
    grouped = q.float().unflatten(1, (keys.shape[1], -1))  # [T, G, H/G, D]
    scores = torch.einsum("tgrd,sgd->grts", grouped, keys.float()) * op.scale
    if op.softcap:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:  # one more key for each head, whose value is nothing
        sink = sinks.float().unflatten(0, (keys.shape[1], -1))[..., None, None]  # [G, H/G, 1, 1]
        scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("grts,sgd->tgrd", weights, values.float()).flatten(1, 2)


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, H·O] = weight [H, O, I] @ x [T, H·I], head by head."""
    heads = x.float().unflatten(1, (weight.shape[0], -1))
    out.copy_(torch.einsum("thi,hoi->tho", heads, weight.float()).flatten(1))


def latent_write(
    op: LatentWrite, q: Tensor, kv: Tensor, norm: Tensor, *, rotation: Rotation, cache: LatentCache,
    where: Location, q_nope: Tensor,
) -> None:  # fmt: skip
    """Rotate a part of q [T, H·(nope + rope)] and copy the other; cache kv [T, rank + rope], normed and rotated."""
    rank = op.shape.rank
    plain, rotated = split_queries(q, op.shape)
    q_nope.copy_(plain.flatten(1))
    rotated.copy_(rotate(rotated, rotation))
    latent = normalise(kv[:, :rank], "rms", op.eps) * norm
    key = rotate(kv[:, None, rank:], rotation)[:, 0]
    cache.write(where, torch.cat((latent, key), dim=-1))


def latent_attend(
    op: LatentAttend, q_latent: Tensor, q: Tensor, *, positions: Tensor, cache: LatentCache, rows: Sequence[Row],
    out: Tensor,
) -> None:  # fmt: skip
    """out [T, H·rank] = softmax(scores) latents over positions 0 … p of each token's sequence; see LatentAttend."""
    rank = op.shape.rank
    queries = torch.cat((q_latent.unflatten(1, (op.shape.heads, -1)), split_queries(q, op.shape)[1]), dim=-1)
    for row in rows:
        for start in range(row.start, row.stop, QUERY_TILE):
            tokens = slice(start, min(start + QUERY_TILE, row.stop))
            at = positions[tokens]
            seen = torch.arange(int(at.max()) + 1, device=at.device)
            cached = cache.at(row.blocks, seen)
            scores = torch.einsum("thd,sd->hts", queries[tokens], cached) * op.scale
            weights = scores.masked_fill(seen[None, :] > at[:, None], -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("hts,sd->thd", weights, cached[:, :rank]).flatten(1)


def split_queries(q: Tensor, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """Views [T, H, nope] and [T, H, rope] of q [T, H·(nope + rope)]."""
    plain, rotated = q.unflatten(1, (shape.heads, -1)).split((shape.nope, shape.rope), dim=-1)
    return plain, rotated


def gated_act(gate_up: Tensor, act: Activation, out: Tensor) -> None:
    """out [T, C] = act(gate) * up for gate_up [T, 2C] = [gate | up]; see also ClampedSwiGLU."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if isinstance(act, ClampedSwiGLU):
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        out.copy_((up + 1) * (gate * torch.sigmoid(act.alpha * gate)))
    else:
        out.copy_(activate(gate, act) * up)


def gather_rows(x: Tensor, delta: Tensor | None, rows: Tensor, out: Tensor) -> None:
    """out [N, C] = x [T, C] at rows [N] (+ delta at rows)."""
    out.copy_(x[rows] if delta is None else x[rows] + delta[rows])


def normalise(x: Tensor, kind: NormKind, eps: float) -> Tensor:
    """x over its last axis: divided by its root mean square (1910.07467); kind layer: mean off first (1607.06450)."""
    x = x.float()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn the first 2·P dimensions of x [T, heads, D] (arXiv 2104.09864).

    Pair k is dimensions (k, k + P), or (2k, 2k + 1) when interleaved.
    """
    if rotation is None:
        return x
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    pairs = cos.shape[-1]
    turned, rest = x.float().split((2 * pairs, x.shape[-1] - 2 * pairs), dim=-1)
    a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1) if rotation.interleaved else turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if rotation.interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def split_heads(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views [T, H, D], [T, G, D], [T, G, D] of a fused q/k/v."""
    q, k, v = qkv.split((shape.q_cols, shape.kv_cols, shape.kv_cols), dim=-1)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (x.unflatten(-1, (n, shape.head_dim)) for x, n in zip((q, k, v), heads, strict=True))
    return q, k, v


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as whole numbers in [-127, 127], float32, and their bfloat16 scales [...]; see RopeWrite."""
    exact = x.float().abs().amax(-1) / 127.0
    bits = (exact.view(torch.int32) + 0xFFFF) >> 16 << 16  # the next bfloat16, away from zero
    scale = bits.view(torch.float32).where(exact >= 1e-30, 0.0).where(exact.isfinite(), torch.nan)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    whole = (x.float() * inverse[..., None]).round().clamp(-127, 127).nan_to_num(127.0)
    return whole, scale.to(torch.bfloat16)


def activate(x: Tensor, act: Literal["silu", "gelu", "gelu_tanh"]) -> Tensor:
    """SiLU (1702.03118), or GELU (1606.08415) exact or with the tanh approximation."""
    match act:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
