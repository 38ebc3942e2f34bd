"""What each op of a program computes, in plain torch: the definition that other executors are compared with.

Arithmetic is float32 throughout. A function writes its result into `out`, which rounds it to nearest even
when `out` is bfloat16. The order of sums is left to torch, so results agree with another executor's up to
rounding; the promise of equal bits in any batch is the native executor's. Beside each function stands how its
arguments are found for an op of a step.

Shapes: T tokens of the step, N rows that want logits, S cached positions, H query heads, G key/value heads, D
dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.cache_kinds import LATE_TOKENS
from quire.executor.torch.cache import CacheRow, LatentCache, Location, Rotation, rotate
from quire.executor.torch.kv_caches import KiviCache, LayerCache, NuqCache
from quire.executor.torch.low_rank import expand, slots_of, with_slots
from quire.executor.torch.operands import Operands, defines
from quire.executor.torch.tiles import QUERY_TILE, RECENT_STRETCH, WEIGHT_TILE
from quire.executor.torch.weights import greatest, quantize_rows
from quire.program.ops.attention import (
    Attend,
    CompressKV,
    HeadShape,
    LatentAttend,
    LatentShape,
    LatentWrite,
    RopeWrite,
)
from quire.program.ops.linear import MAXIMA_COLS, HeadLinear, Linear
from quire.program.ops.rows import (
    Activate,
    Add,
    Embed,
    EmbedSum,
    GatedAct,
    GatherRows,
    Norm,
    PoolRows,
    Quantize,
    Scale,
)
from quire.spec.model import Activation, ClampedSwiGLU, NormKind, PlainActivation, PoolKind


def embed(token_ids: Tensor, table: Tensor, first: int, out: Tensor) -> None:
    """out [T, C] = table [rows, C] at token_ids [T] - first; 0 for tokens without a row."""
    rows = token_ids - first
    there = (rows >= 0) & (rows < len(table))
    out.copy_(torch.where(there[:, None], table[rows.clamp(0, len(table) - 1)], 0))


@defines(Embed)
def _embed(on: Operands, op: Embed) -> None:
    ids, out = on.step.token_ids, on.buffer(op.out)
    embed(ids, on.weights[op.table], op.first, out)
    for slot, rows in with_slots(on.step.adapters) if op.own else ():
        if (own := on.state.adapters.own(slot, op.own)) is not None:
            out[rows] = own[ids[rows] - op.first].float()


def embed_sum(
    token_ids: Tensor,
    places: Tensor,
    words: Tensor,
    positions: Tensor | None,
    segments: Tensor | None,
    out: Tensor,
) -> None:
    """out [T, C] = words [V, C] at token_ids [T] modulo V + positions at places [T] + segments at token_ids / V."""
    rows = words[token_ids % len(words)].float()
    if segments is not None:
        rows = rows + segments[token_ids // len(words)]
    out.copy_(rows if positions is None else rows + positions[places])


@defines(EmbedSum)
def _embed_sum(on: Operands, op: EmbedSum) -> None:
    tables = on.weights[op.words], on.weights.get(op.positions), on.weights.get(op.segments)
    embed_sum(on.step.token_ids, on.step.positions + op.first, *tables, on.buffer(op.out))


def norm(
    op: Norm, x: Tensor, delta: Tensor | None, weights: tuple[Tensor | None, Tensor | None], out: Tensor
) -> None:
    """x [T, C] += delta, in place; out's columns from op.first on = the normalised x * weight [C] + bias [C], or x
    itself without a weight."""
    weight, bias = weights
    if delta is not None:
        x.add_(delta)
    normed = x if weight is None else normalise(x, op.kind, op.eps) * weight
    out[:, op.first : op.first + x.shape[1]] = normed if bias is None else normed + bias


@defines(Norm)
def _norm(on: Operands, op: Norm) -> None:
    vectors = on.weights.get(op.weight), on.weights.get(op.bias)
    with on.rounding(op.out) as out:
        norm(op, on.buffer(op.x), on.optional(op.delta), vectors, out)


def add(x: Tensor, delta: Tensor, scale: float, act: PlainActivation | None) -> None:
    """x [T, C] += scale * delta, or scale * act(delta), in place."""
    x.add_((delta if act is None else activate(delta, act)) * scale)


@defines(Add)
def _add(on: Operands, op: Add) -> None:
    add(on.buffer(op.x), on.buffer(op.delta), op.scale, op.act)


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


@defines(Scale)
def _scale(on: Operands, op: Scale) -> None:
    scale_cap(on.buffer(op.x), op.scale, op.cap)
    if op.maxima:
        maxima(on.buffer(op.x), on.buffer(op.maxima))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [T, rows] = x [T, cols] @ weight [rows, cols]ᵀ (+ bias [rows])."""
    x, tile = x.float(), max(1, WEIGHT_TILE // weight.shape[1])
    for first in range(0, weight.shape[0], tile):
        rows = slice(first, first + tile)
        product = x @ weight[rows].float().T
        out[:, rows] = product if bias is None else product + bias[rows]


@defines(Linear)
def _linear(on: Operands, op: Linear) -> None:
    weight, x, out = on.weights[op.weight], on.buffer(op.x), on.buffer(op.out)
    rows = op.rows or weight.shape[0]
    weight = weight[:rows]
    to = torch.empty(len(x), rows, device=x.device) if op.act else out[:, op.first : op.first + rows]
    linear(x, weight, on.weights.get(op.bias), to)
    for slot, chosen in with_slots(slots_of(on, op.out)) if op.own else ():
        if (own := on.state.adapters.own(slot, op.own)) is not None:
            mine = torch.empty(int(chosen.sum()), rows, device=x.device)
            linear(x[chosen], own, on.weights.get(op.bias), mine)
            to[chosen] = mine
    if op.adapted and op.shrunk:
        expand(on, op.adapted, op.shrunk, to, first=op.first, bias=on.weights.get(op.bias))
    if op.act:
        gated_act(to, op.act, out)
    if op.maxima:
        maxima(out, on.buffer(op.maxima))


@defines(Quantize)
def _quantize(on: Operands, op: Quantize) -> None:
    x, form = on.buffer(op.x), on.program.buffer(op.out)
    widest = greatest(x, form.group, rotated=form.rotated)
    if op.top:
        on.buffer(op.top).copy_(widest)
    if op.tops:
        widest = on.buffer(op.tops).amax(-1, keepdim=True)
    on.buffer(op.out).copy_(quantize_rows(x, form.group, rotated=form.rotated, widest=widest))


def rope_write(
    op: RopeWrite, qkv: Tensor, norms: tuple[Tensor | None, Tensor | None], *, rotation: Rotation | None,
    cache: LayerCache, where: Location, rows: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Normalise and rotate q and k of qkv [T, (H + 2G)·D]; q stays in place, k and v go to the cache.

    norms: weights for q and for k, each [D] or one for every head, [heads·D]. rows: q_row and k_row.
    """
    q, k, v = split_heads(qkv, op.shape)
    q_weight, k_weight = norms
    q.copy_(rotate(q if q_weight is None else head_norm(op, q, q_weight, rows[0]), rotation))
    k = k if k_weight is None else head_norm(op, k, k_weight, rows[1])
    cache.write(where, k if isinstance(cache, NuqCache) else rotate(k, rotation), v)


@defines(RopeWrite)
def _rope_write(on: Operands, op: RopeWrite) -> None:
    norms = on.weights.get(op.q_norm), on.weights.get(op.k_norm)
    rope_write(
        op, on.buffer(op.qkv), norms,
        rotation=on.rotation(op.rope), cache=on.state.caches[op.layer], where=on.locations(op.layer),
        rows=(on.optional(op.q_row), on.optional(op.k_row)),
    )  # fmt: skip


def head_norm(op: RopeWrite, x: Tensor, weight: Tensor, row: Tensor | None = None) -> Tensor:
    """x [T, heads, D] normalised over each head, or over all of them together: those of `row`, if given."""
    heads = x.shape[1]
    if op.whole:
        own = x.flatten(1)
        return (normalise(own, op.kind, op.eps, own if row is None else row) * weight).unflatten(
            1, (heads, -1)
        )
    return normalise(x, op.kind, op.eps) * weight.unflatten(0, (-1, x.shape[2]))


@defines(CompressKV)
def _compress_kv(on: Operands, op: CompressKV) -> None:
    recent, cache = on.state.caches[op.recent], on.state.caches[op.layer]
    assert isinstance(cache, KiviCache)
    source, target = on.locations(op.recent), on.locations(op.layer)
    ends = (target.places % LATE_TOKENS == LATE_TOKENS - 1).nonzero()[:, 0]
    places = target.places[ends, None] - torch.arange(LATE_TOKENS - 1, -1, -1, device=ends.device)
    keys, values = recent.read(source.blocks[ends, None].expand_as(places), places)
    cache.compress(target.blocks[ends], target.places[ends] // LATE_TOKENS, keys, values)


def attend(
    op: Attend, qkv: Tensor, sinks: Tensor | None, *, positions: Tensor, cache: LayerCache, rows: Sequence[CacheRow],
    out: Tensor, recent: tuple[LayerCache, Sequence[CacheRow]] | None = None,
) -> None:  # fmt: skip
    """out [T, H·D] = softmax(scores) v over the visible positions of each token's sequence; sinks [H] as `Attend`.

    The query at position p sees positions p - window + 1 … p, or 0 … p when window is 0; those behind it too if the op
    is not causal. `recent`: the cache of recent tokens, and the rows of it.
    """
    q, _, _ = split_heads(qkv, op.shape)
    for number, row in enumerate(rows):
        for tokens in _query_tiles(row, positions, RECENT_STRETCH if recent else 0):
            at = positions[tokens]
            first = max(0, int(at.min()) - op.window + 1) if op.window else 0
            last = int(at.max() if op.causal else positions[row.stop - 1])
            seen = torch.arange(first, last + 1, device=at.device)
            ahead = at[:, None] - seen[None, :]
            visible = ahead >= 0 if op.causal else torch.ones_like(ahead, dtype=torch.bool)
            if op.window:
                visible &= ahead.abs() < op.window
            keys, values = cache.at(row.blocks, seen)
            if recent is not None:
                late = seen >= (int(at[0]) // RECENT_STRETCH - 1) * RECENT_STRETCH
                newer = recent[0].at(recent[1][number].blocks, seen[late])
                keys, values = (
                    torch.cat((old[~late], new)) for old, new in zip((keys, values), newer, strict=True)
                )
            bias = -alibi_slopes(op.shape.heads)[:, None, None] * ahead.abs() if op.alibi else None
            out[tokens] = attention(
                op, q[tokens], keys, values, visible=visible, sinks=sinks, bias=bias
            ).flatten(1)


def _query_tiles(row: CacheRow, positions: Tensor, stretch: int) -> Iterator[slice]:
    """The tokens of a row in pieces, each in one stretch of so many positions if that is not 0."""
    start = row.start
    while start < row.stop:
        stop = min(start + QUERY_TILE, row.stop)
        if stretch:
            stop = min(stop, start + stretch - int(positions[start]) % stretch)
        yield slice(start, stop)
        start = stop


@defines(Attend)
def _attend(on: Operands, op: Attend) -> None:
    with on.rounding(op.out) as out:
        attend(
            op, on.buffer(op.qkv), on.weights.get(op.sinks),
            positions=on.step.positions, cache=on.state.caches[op.layer], rows=on.rows_of(op.layer), out=out,
            recent=None if op.recent is None else (on.state.caches[op.recent], on.rows_of(op.recent)),
        )  # fmt: skip
        if op.wide:
            on.buffer(op.wide).copy_(out)


def alibi_slopes(heads: int) -> Tensor:
    """[heads] of ALiBi, as Attend says; float32."""
    n = 1 << heads.bit_length() - 1
    powers = [-8 * (h + 1) / n for h in range(n)] + [-4 * (2 * h + 1) / n for h in range(heads - n)]
    return torch.tensor(powers, dtype=torch.float64).exp2().float()


def attention(
    op: Attend, q: Tensor, keys: Tensor, values: Tensor, *, visible: Tensor, sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Grouped-query attention (2305.13245) of q [T, H, D] over keys and values [S, G, D].

    `visible` is [T, S]; `bias` [H, T, S] is added to the scores.

    Query head h reads key/value head h // (H / G). Returns [T, H, D].
    """
    grouped = q.float().unflatten(1, (keys.shape[1], -1))  # [T, G, H/G, D]
    scores = torch.einsum("tgrd,sgd->grts", grouped, keys.float()) * op.scale
    if op.softcap:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    if bias is not None:
        scores += bias.unflatten(0, (keys.shape[1], -1))
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


@defines(HeadLinear)
def _head_linear(on: Operands, op: HeadLinear) -> None:
    out = on.buffer(op.out)
    head_linear(on.buffer(op.x), on.weights.of_experts(op.weight), out)
    if op.adapted and op.shrunk:
        expand(on, op.adapted, op.shrunk, out)


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


@defines(LatentWrite)
def _latent_write(on: Operands, op: LatentWrite) -> None:
    rotation = on.rotation(op.rope)
    assert rotation is not None
    latent_write(
        op, on.buffer(op.q), on.buffer(op.kv), on.weights[op.norm],
        rotation=rotation, cache=on.state.latents[op.layer], where=on.locations(op.layer),
        q_nope=on.buffer(op.q_nope),
    )  # fmt: skip


def latent_attend(
    op: LatentAttend, q_latent: Tensor, q: Tensor, *, positions: Tensor, cache: LatentCache, rows: Sequence[CacheRow],
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


@defines(LatentAttend)
def _latent_attend(on: Operands, op: LatentAttend) -> None:
    latent_attend(
        op, on.buffer(op.q_latent), on.buffer(op.q), positions=on.step.positions,
        cache=on.state.latents[op.layer], rows=on.rows_of(op.layer), out=on.buffer(op.out),
    )  # fmt: skip


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


@defines(GatedAct)
def _gated_act(on: Operands, op: GatedAct) -> None:
    with on.rounding(op.out) as out:
        gated_act(on.buffer(op.gate_up), op.act, out)


@defines(Activate)
def _activate(on: Operands, op: Activate) -> None:
    with on.rounding(op.out) as out:
        out.copy_(activate(on.buffer(op.x).float(), op.act))


def pool_rows(x: Tensor, rows: Sequence[CacheRow], wanted: Tensor, kind: PoolKind, out: Tensor) -> None:
    """out [N, C] = the mean of x [T, C], or its first row, over the row of the step that has the token wanted[n]."""
    for n, token in enumerate(wanted.tolist()):
        row = next(row for row in rows if row.start <= token < row.stop)
        out[n] = x[row.start : row.stop].mean(0) if kind == "mean" else x[row.start]


@defines(PoolRows)
def _pool_rows(on: Operands, op: PoolRows) -> None:
    pool_rows(on.buffer(op.x), on.step.rows[0], on.logit_rows, op.kind, on.buffer(op.out))


def gather_rows(x: Tensor, delta: Tensor | None, rows: Tensor, out: Tensor) -> None:
    """out [N, C] = x [T, C] at rows [N] (+ delta at rows)."""
    out.copy_(x[rows] if delta is None else x[rows] + delta[rows])


@defines(GatherRows)
def _gather_rows(on: Operands, op: GatherRows) -> None:
    gather_rows(on.buffer(op.x), on.optional(op.delta), on.logit_rows, on.buffer(op.out))


def normalise(x: Tensor, kind: NormKind, eps: float, of: Tensor | None = None) -> Tensor:
    """x over its last axis: divided by its root mean square (1910.07467); kind layer: mean off first (1607.06450).

    Both are those of `of` where x is a part of it.
    """
    x, of = x.float(), (x if of is None else of).float()
    if kind == "layer":
        mean = of.mean(-1, keepdim=True)
        x, of = x - mean, of - mean
    return x * torch.rsqrt(of.square().mean(-1, keepdim=True) + eps)


def split_heads(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """Views [T, H, D], [T, G, D], [T, G, D] of a fused q/k/v."""
    q, k, v = qkv.split((shape.q_cols, shape.kv_cols, shape.kv_cols), dim=-1)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (x.unflatten(-1, (n, shape.head_dim)) for x, n in zip((q, k, v), heads, strict=True))
    return q, k, v


def activate(x: Tensor, act: PlainActivation) -> Tensor:
    """SiLU (1702.03118), GELU (1606.08415) exact or with the tanh approximation, ReLU or tanh."""
    match act:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
        case "tanh":
            return torch.tanh(x)
