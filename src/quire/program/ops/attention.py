"""Attention over the paged cache, and what fills the cache: of keys and values by head, and of latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from quire.cache_kinds import RECENT_TOKENS
from quire.program.formats import DTYPE_BYTES
from quire.program.op import AttentionScratch, Change, Op, Read, Scratch, Weight, Write
from quire.program.tensors import Buffer
from quire.program.work import ID_BYTES, NORM_FLOPS, Cost, Work
from quire.records import dataclass
from quire.spec.model import NormKind


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a fused q/k/v row is laid out: heads·head_dim of q, then kv_heads·head_dim of k, then of v."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_cols(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_cols(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class RopeWrite(Op):
    """Normalise q and k (when given weights), rotate both, keep q in place, cache k and v.

    The norm is over each head, or with `whole` over all heads of q, and all of k, together. Its weight is
    [head_dim] for all heads, or [heads * head_dim]. `q_row` and `k_row` are all heads of q and k where `qkv` has those
    of one rank: the norm with `whole` is over them. `rope` indexes Program.ropes, which says how dimensions are
    paired; None rotates nothing. `layer` indexes Program.kv_layers. Keys and values are rounded to the cache's
    dtype.

    In an i8 cache each key and each value of a head is round(x / scale) in [-127, 127], ties to even, with a scale
    of its own: max|x| / 127 rounded up to bfloat16, 0 below 1e-30, NaN when x is not finite. What is stored of a
    token depends on that token alone.

    In an e4m3 or e5m2 cache a number is x / scale, with the scale of the head (KVLayer), rounded to the nearest number
    of the format, ties to even, or to its largest; NaN when x is not finite.

    In an i4 cache 32 neighbouring numbers of a head (the last ones may be fewer) are
    round(x / scale) in [-8, 7], ties to even. scale: their number of the largest magnitude (the greatest one if there
    are two) / -8 in bfloat16, 0 when that magnitude is not above 1e-30, NaN when one is not finite.

    A kvquant3 cache (arXiv 2401.18079) holds keys as they are before the rotation, and whoever reads them rotates them
    (KVLayer.rope). A number x of dimension d of a head is the code of the nearest of the head's eight levels
    (HeadCodes), the lower of two, to y = (x - middle_d) / scale_d. Values have other levels, and a middle and a scale
    of each token and head: (greatest + least) / 2 and (greatest - least) / 2 in bfloat16 of the numbers that are no
    outliers, y is 0 where the scale is not above 1e-30. Outliers of a key are the n numbers with the largest |y|, of a
    value those with the largest |x|, in both cases the first of equal ones: they are kept in bfloat16 instead. n is a
    hundredth of the head's dimensions (those of the cache, whole vectors of sixteen), rounded up. Where a number is not
    finite all outliers are NaN, at dimension 0, and so are middle and scale of a value.
    """

    qkv: Change
    shape: HeadShape
    layer: int
    rope: int | None
    q_norm: Weight | None
    k_norm: Weight | None
    eps: float
    kind: NormKind = "rms"
    whole: bool = False
    q_row: Read | None = None
    k_row: Read | None = None

    def cost(self, work: Work, n: int) -> Cost:
        shape, dim = self.shape, 0 if self.rope is None else work.ropes[self.rope].dim
        flops = 3 * dim * (shape.heads + shape.kv_heads)  # four products and two sums for each pair
        flops += NORM_FLOPS[self.kind] * (shape.q_cols if self.q_norm else 0)
        flops += NORM_FLOPS[self.kind] * (shape.kv_cols if self.k_norm else 0)
        table = dim * DTYPE_BYTES["f32"] + ID_BYTES
        moved = work.row_bytes(self.qkv) + work.row_bytes(self.qkv, shape.q_cols) + table
        written, weights = n * work.token_kv_bytes[self.layer], work.vector_bytes(self.q_norm, self.k_norm)
        return Cost(n * flops, weights, n * moved, kv_written_bytes=written)


@dataclass(frozen=True, slots=True)
class CompressKV(Op):
    """Bring tokens from the cache `recent` to the cache `layer`, which is kivi4 or kivi2 (arXiv 2402.02750).

    32 tokens at a time, positions 32 g … 32 g + 31, in the step that computes the last of them: of keys the 32 numbers
    of one dimension are a group, of values 32 neighbouring dimensions of one token (the last ones may be 16; dimensions
    are those of the cache, whole vectors of sixteen). Numbers of a group are round((x - least) / scale) in
    [0, 2^bits - 1], ties to even: least is the least of them in bfloat16, scale is (greatest - least) / (2^bits - 1) in
    bfloat16. A scale up to 1e-30 counts as zero. Both are NaN when a number is not finite. What is stored depends on
    the 32 tokens alone.
    """

    recent: int
    layer: int

    def cost(self, work: Work, n: int) -> Cost:
        read, written = work.token_kv_bytes[self.recent], work.token_kv_bytes[self.layer]
        return Cost(kv_read_bytes=n * read, kv_written_bytes=n * written)


@dataclass(frozen=True, slots=True)
class Attend(Op):
    """Attention of the rotated queries in `qkv` over the paged cache of `layer`.

    out[t, h] = Σ softmax(s) v over positions max(0, p-window+1) … p, with s = scale · q·k. Not `causal`, the positions
    go on to min(p+window-1, the last) of a row that has its whole text in the step. Window 0 bounds neither side.

    `softcap` c above 0 bounds the scores: s becomes c · tanh(s / c) (Gemma 2, arXiv 2408.00118). `sinks` names a vector
    [heads] of logits: exp(sinks[h]) is added to the denominator of head h's softmax, and to nothing else (gpt-oss,
    arXiv 2508.10925). The KV axis is cut at fixed absolute positions, so a query's bits depend on neither batch nor
    chunk. Scores and sums are float32; an executor may round queries and probabilities to the cache's dtype before it
    multiplies, as the native one does.

    `alibi`: s loses slope · |p - position of the key|, with a slope for each head (arXiv 2108.12409):
    2^(-8 (h + 1) / n) for n heads, or for the power of two below, and the others have every other slope of 2n heads.

    `recent` is the layer's cache of recent tokens: a query at position p takes keys and values of positions from
    64 · (p // 64 - 1) on from there, and those before from `layer`. What a query sees depends on positions alone.

    What an executor multiplies of formats that are neither floats nor i8 may be rounded to bfloat16.

    `wide` is where the float32 rows of an i8 `out` are put together: heads of one row may be several threads'.
    """

    qkv: Read
    out: Write
    shape: HeadShape
    layer: int
    scale: float
    window: int
    softcap: float = 0.0
    sinks: Weight | None = None
    wide: Write | None = None
    causal: bool = True
    alibi: bool = False
    recent: int | None = None
    reads_cache: ClassVar[bool] = True

    def cost(self, work: Work, n: int) -> Cost:
        q_cols = self.shape.q_cols
        read = work.kv_read_bytes(self.layer, self.window)
        if self.recent is not None:  # at most
            read += work.kv_read_bytes(self.recent, RECENT_TOKENS)
        return Cost(
            flops=(4 * q_cols + (3 * self.shape.heads if self.alibi else 0))
            * work.pairs(self.window, causal=self.causal)
            + n * work.rounding_flops(self.out),
            activation_bytes=n * (work.row_bytes(self.qkv, q_cols) + work.row_bytes(self.out)),
            kv_read_bytes=read,
        )

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        del buffer
        return (AttentionScratch(self.shape.head_dim, self.shape.heads, self.shape.kv_heads, self.layer),)


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Widths of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); see spec.LatentAttention.

    A query row holds for each head `nope` numbers without a position and `rope` that are rotated. A row of the cache
    is `rank` numbers of the latent, then `rope` of the key that all heads share.
    """

    heads: int
    rank: int
    nope: int
    rope: int

    @property
    def q_cols(self) -> int:
        return self.heads * (self.nope + self.rope)

    @property
    def cached(self) -> int:
        return self.rank + self.rope


@dataclass(frozen=True, slots=True)
class LatentWrite(Op):
    """Cache a token's latent and shared key; rotate the queries.

    The first `rank` columns of `kv` are RMS-normalised and multiplied by `norm`, the others rotated; both go to the
    cache of `layer`, rounded to its dtype, and `kv` holds nothing afterwards. The rotated numbers of each head stay
    in their place in `q`; the others are copied to `q_nope`.
    """

    q: Change
    kv: Read
    q_nope: Write
    shape: LatentShape
    layer: int
    rope: int
    norm: Weight
    eps: float

    def cost(self, work: Work, n: int) -> Cost:
        shape = self.shape
        flops = 3 * shape.rope * (shape.heads + 1) + NORM_FLOPS["rms"] * shape.rank
        table = shape.rope * DTYPE_BYTES["f32"] + ID_BYTES
        rotated = work.row_bytes(self.q, shape.heads * shape.rope)
        moved = work.rows_bytes(self.q, self.q_nope, self.kv) + rotated + table
        written = n * work.token_kv_bytes[self.layer]
        return Cost(n * flops, work.vector_bytes(self.norm), n * moved, kv_written_bytes=written)


@dataclass(frozen=True, slots=True)
class LatentAttend(Op):
    """Causal attention in the latent space (absorbed MLA): one key for all heads, whose first part is its value.

    out[t, h] = Σ softmax(s) latent over positions 0 … p, with s = scale · (q_latent[t, h] · latent + q_rope[t, h] ·
    key); `q_rope` are the rotated columns of `q`, which LatentWrite left there. Cuts, sums and rounding are
    Attend's.
    """

    q_latent: Read
    q: Read
    out: Write
    shape: LatentShape
    layer: int
    scale: float
    reads_cache: ClassVar[bool] = True

    def cost(self, work: Work, n: int) -> Cost:
        """Scores over latent and key, values over the latent; each cached number is read once for both."""
        shape = self.shape
        q = work.row_bytes(self.q_latent) + work.row_bytes(self.q, shape.heads * shape.rope)
        return Cost(
            flops=2 * shape.heads * (shape.cached + shape.rank) * work.pairs(0),
            activation_bytes=n * (q + work.row_bytes(self.out)),
            kv_read_bytes=work.kv_read_bytes(self.layer, 0),
        )

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        del buffer
        return (AttentionScratch(self.shape.cached, self.shape.heads, 1, self.layer, self.shape.rank),)
