"""The typed ops that every model is lowered to, and what they read and write.

A Program is a flat list of ops over named buffers and parameters. `T` below is the number of tokens of a
step, `N` the number of rows whose logits are wanted. Rows of a buffer are tokens (body) or logit rows (head).

    body   embed · (norm · linear · rope_write · attend · linear · norm · linear · gated_act · linear)*
    head   gather_rows · norm · linear

with add and scale where a model multiplies embeddings, branches or logits or runs two branches side by side. A
feed-forward of experts is

    linear · route · dispatch · experts · gated_act · experts · combine

over rows of (token, expert) pairs, sorted by expert, so that an expert's rows are neighbours. Latent attention is

    linear q · linear kv · latent_write · head_linear · latent_attend · head_linear

The torch executor defines what each op computes; the native executor is compared with it op by op.
"""

from __future__ import annotations

from typing import Literal

from quire.program.formats import DType, Groups, WeightFormat
from quire.records import dataclass
from quire.spec import Rope, Router
from quire.spec.model import Activation, NormKind
from quire.types import CacheGroup

MAXIMA_COLS = 64  # neighbouring columns that share a maximum

RowKind = Literal["tokens", "logits"]
ParamKind = Literal["linear", "table", "vector"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation of [rows, cols]; its rows are tokens or logit rows of the step, or `per` rows for each of them.

    An i8 buffer holds whole numbers in [-127, 127] and a float32 scale for each row, with `group` also a power of two
    for each `group` neighbouring columns of a row: see Quantize, which says how an op rounds what it writes to one.
    `rotated` as in formats.Groups.
    """

    name: str
    cols: int
    dtype: DType
    rows: RowKind = "tokens"
    group: int = 0
    per: int = 1
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor [rows, cols] (or [rows] for vectors) that fills rows of a parameter.

    `stored` is the tensor's own shape where it is another: rows `first` … first + rows - 1 of a larger tensor,
    or a vector that is stored as a matrix. `plus` is added to every stored element of a vector. `transposed`: rows
    `first` … first + cols - 1 of the tensor are the columns here.

    `row_axis` and `col_axis` are logical axes ("heads", "kv_heads", "mlp", "vocab"): what tensor parallelism
    splits, LoRA targets and quantization read. An empty axis is never split.
    """

    tensor: str
    rows: int
    cols: int = 0
    row_axis: str = ""
    col_axis: str = ""
    first: int = 0
    stored: tuple[int, ...] = ()
    plus: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return self.stored or ((self.rows, self.cols) if self.cols else (self.rows,))


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter as the executor holds it: checkpoint parts stacked along rows.

    kind linear: weight [rows = out features, cols = in features], packed for the machine; see WeightFormat. A float
    source is rounded to nearest: i8 with the scale max|w| / 127 of a row, groups as quant.groups defines.
    kind table: embedding rows [rows = vocabulary, cols], gathered by row.
    kind vector: float32 [rows] (norm weights, biases).

    `experts` above 0: that many matrices (or vectors) of equal rows, one after the other; no part spans two. They
    belong to experts, or to heads: see HeadLinear.
    """

    name: str
    kind: ParamKind
    parts: tuple[Part, ...]
    dtype: DType
    groups: Groups | None = None
    experts: int = 0

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(self.dtype, self.groups)

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def matrix_rows(self) -> int:
        """Rows of one expert's matrix, or of the only one."""
        return self.rows // max(self.experts, 1)

    @property
    def cols(self) -> int:
        return self.parts[0].cols


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = table[token_ids[t]]; the table may be a tied, packed linear weight."""

    table: str
    out: str


@dataclass(frozen=True, slots=True)
class Norm:
    """x += delta (when given), then out = norm(x) * weight (+ bias), rounded to out's dtype.

    Kind rms: x / sqrt(mean(x²) + eps), arXiv 1910.07467; layer: the mean is subtracted first, 1607.06450. Without
    a weight out is x itself. x is float32 and is changed only by a delta; out may be x.
    """

    x: str
    delta: str | None
    weight: str | None
    eps: float
    out: str
    kind: NormKind = "rms"
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """x += scale * delta: a branch joins the residual stream."""

    x: str
    delta: str
    scale: float


@dataclass(frozen=True, slots=True)
class Scale:
    """x = scale * x, then cap * tanh(x / cap) unless cap is 0; in place (Gemma 2, arXiv 2408.00118, section 2).

    `maxima` as in Linear.
    """

    x: str
    scale: float
    cap: float = 0.0
    maxima: str | None = None


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weightᵀ (+ bias), accumulated in float32 in ascending order of the input feature.

    A weight in groups: each group's products of whole numbers are summed exactly, and scaled by the weight's scale when
    they are added to the float32 sum, group after group; the input's scale is multiplied at the end.

    It fills the columns of out from `first` on; those before are kept when they are another weight's.

    With `act` the weight is [gate | up], and out what GatedAct makes of the product.

    `maxima` is for who looks for the greatest numbers of a row (the sampler): column i is the maximum of out's columns
    64 i … 64 i + 63, or NaN when one of them is NaN or +inf.
    """

    x: str
    weight: str
    bias: str | None
    out: str
    first: int = 0
    act: Activation | None = None
    maxima: str | None = None


@dataclass(frozen=True, slots=True)
class Quantize:
    """out = round(x / scale) with scale = max|x| / 127 for each row. When `out` has groups, a group's scale is the
    row's, halved as often as its own maximum allows, up to GROUP_BITS times; rotated groups are rotated before that.

    The input of a quantized linear (dynamic, per token). Norm, GatedAct and Attend round their float32 rows so when
    their out is i8. Ties round to even; zeros have scale 0. The products of an i8
    linear are summed exactly in int32 and multiplied by both scales once.
    """

    x: str
    out: str


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
class RopeWrite:
    """Normalise q and k (when given weights), rotate both, keep q in place, cache k and v.

    The norm is over each head, or with `whole` over all heads of q, and all of k, together. Its weight is
    [head_dim] for all heads, or [heads * head_dim]. `rope` indexes Program.ropes, which says how dimensions are
    paired; None rotates nothing. `layer` indexes Program.kv_layers. Keys and values are rounded to the cache's
    dtype.

    In an i8 cache each key and each value of a head is round(x / scale) in [-127, 127], ties to even, with a scale
    of its own: max|x| / 127 rounded up to bfloat16, 0 below 1e-30, NaN when x is not finite. What is stored of a
    token depends on that token alone.
    """

    qkv: str
    shape: HeadShape
    layer: int
    rope: int | None
    q_norm: str | None
    k_norm: str | None
    eps: float
    kind: NormKind = "rms"
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Attend:
    """Causal attention of the rotated queries in `qkv` over the paged cache of `layer`.

    out[t, h] = Σ softmax(s) v over positions max(0, p-window+1) … p, with s = scale · q·k. `softcap` c above 0
    bounds the scores: s becomes c · tanh(s / c) (Gemma 2, arXiv 2408.00118). `sinks` names a vector [heads] of
    logits: exp(sinks[h]) is added to the denominator of head h's softmax, and to nothing else (gpt-oss, arXiv
    2508.10925). The KV axis is cut at fixed absolute positions, so a query's bits depend on neither batch nor
    chunk. Scores and sums are float32; an executor may round queries and probabilities to the cache's dtype
    before it multiplies, as the native one does.

    `wide` is where the float32 rows of an i8 `out` are put together: heads of one row may be several threads'.
    """

    qkv: str
    out: str
    shape: HeadShape
    layer: int
    scale: float
    window: int
    softcap: float = 0.0
    sinks: str | None = None
    wide: str | None = None


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """out[t, h] = weight[h] @ x[t, h] for the columns of each head h, as `Linear` sums; a matrix for each head."""

    x: str
    weight: str
    out: str


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
class LatentWrite:
    """Cache a token's latent and shared key; rotate the queries.

    The first `rank` columns of `kv` are RMS-normalised and multiplied by `norm`, the others rotated; both go to the
    cache of `layer`, rounded to its dtype, and `kv` holds nothing afterwards. The rotated numbers of each head stay
    in their place in `q`; the others are copied to `q_nope`.
    """

    q: str
    kv: str
    q_nope: str
    shape: LatentShape
    layer: int
    rope: int
    norm: str
    eps: float


@dataclass(frozen=True, slots=True)
class LatentAttend:
    """Causal attention in the latent space (absorbed MLA): one key for all heads, whose first part is its value.

    out[t, h] = Σ softmax(s) latent over positions 0 … p, with s = scale · (q_latent[t, h] · latent + q_rope[t, h] ·
    key); `q_rope` are the rotated columns of `q`, which LatentWrite left there. Cuts, sums and rounding are
    Attend's.
    """

    q_latent: str
    q: str
    out: str
    shape: LatentShape
    layer: int
    scale: float


@dataclass(frozen=True, slots=True)
class GatedAct:
    """out = act(gate) * up for gate_up = [gate | up], each of out's width."""

    gate_up: str
    out: str
    act: Activation


@dataclass(frozen=True, slots=True)
class GatherRows:
    """out[n] = x[rows[n]] (+ delta[rows[n]]): from tokens to the rows whose logits are wanted."""

    x: str
    delta: str | None
    out: str


@dataclass(frozen=True, slots=True)
class Route:
    """The experts of each token, best first, and their weights, from `logits` [T, experts] (see spec Router).

        s = softmax(logits) or sigmoid(logits)          c = s + correction
        ids[t] = the top_k highest c, highest first, those of groups that are left out being -∞
        weights[t] = s[ids[t]] (/ their sum + 1e-20) · scale

    Equal numbers: the lower expert or group first. All is float32. places[t, j] is the row of pair (t, j) when all
    pairs are sorted by expert, and by token inside an expert. A token whose logits are not all finite goes to the
    first top_k experts with weights NaN.
    """

    logits: str
    correction: str | None
    ids: str
    weights: str
    places: str
    router: Router


@dataclass(frozen=True, slots=True)
class Dispatch:
    """out[places[t, j]] = x[t]: each token's row once for each of its experts, an expert's rows together."""

    x: str
    places: str
    out: str


@dataclass(frozen=True, slots=True)
class Experts:
    """out[r] = x[r] @ weight[e]ᵀ (+ bias[e]) for every row r = places[t, j] of x, e = ids[t, j].

    A Linear for each expert that has rows (grouped matrix product); weights of the others are not read. An output row
    has the bits that Linear gives it alone.
    """

    x: str
    ids: str
    places: str
    weight: str
    bias: str | None
    out: str


@dataclass(frozen=True, slots=True)
class Combine:
    """out[t] = Σ_j weights[t, j] · x[places[t, j]] in the order of j, then + shared[t].

    With `gate` [T, 1] the last is + sigmoid(gate[t]) · shared[t].
    """

    x: str
    places: str
    weights: str
    shared: str | None
    gate: str | None
    out: str


Op = (
    Embed
    | Norm
    | Add
    | Scale
    | Linear
    | Quantize
    | RopeWrite
    | Attend
    | HeadLinear
    | LatentWrite
    | LatentAttend
    | GatedAct
    | GatherRows
    | Route
    | Dispatch
    | Experts
    | Combine
)


@dataclass(frozen=True, slots=True)
class KVLayer:
    """Cache of one layer: which group's block table it follows and its place inside a block of that group.

    `latent`: one row of head_dim numbers a token is key and value at once; else a key and a value for each head.
    """

    layer: int
    kv_heads: int
    head_dim: int
    window: int
    group: int
    index_in_group: int
    latent: bool = False

    @property
    def vectors(self) -> int:
        """Vectors of head_dim numbers that the cache holds of one token."""
        return 1 if self.latent else 2 * self.kv_heads


@dataclass(frozen=True, slots=True)
class Program:
    """A model lowered to ops. `body` runs over all tokens of a step, `head` over rows that want logits.

    `logits` and `maxima` (of the logits; see Linear) are the buffers that the caller reads.
    """

    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    body: tuple[Op, ...]
    head: tuple[Op, ...]
    ropes: tuple[Rope, ...]
    kv_layers: tuple[KVLayer, ...]
    cache_groups: tuple[CacheGroup, ...]
    layers_per_group: int
    kv_dtype: DType
    vocab: int
    logits: str = "logits"
    maxima: str | None = None

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)

    def param(self, name: str) -> Param:
        return next(p for p in self.params if p.name == name)

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.body + self.head


def reads(op: Op) -> tuple[str, ...]:
    """Buffers whose content an op needs."""
    match op:
        case Embed():
            names: tuple[str | None, ...] = ()
        case Norm() | GatherRows() | Add():
            names = (op.x, op.delta)
        case Linear():
            names = (op.x, op.out if op.first else None)
        case HeadLinear() | Quantize() | Scale():
            names = (op.x,)
        case RopeWrite() | Attend():
            names = (op.qkv,)
        case LatentWrite():
            names = (op.q, op.kv)
        case LatentAttend():
            names = (op.q_latent, op.q)
        case GatedAct():
            names = (op.gate_up,)
        case Route():
            names = (op.logits,)
        case Dispatch():
            names = (op.x, op.places)
        case Experts():
            names = (op.x, op.ids, op.places)
        case Combine():
            names = (op.x, op.places, op.weights, op.shared, op.gate)
    return tuple(name for name in names if name)


def writes(op: Op) -> tuple[str, ...]:
    """Buffers an op fills or changes."""
    match op:
        case Norm():
            names: tuple[str | None, ...] = (op.x if op.delta else None, op.out)
        case Add():
            names = (op.x,)
        case Scale():
            names = (op.x, op.maxima)
        case Linear():
            names = (op.out, op.maxima)
        case RopeWrite():
            names = (op.qkv,)
        case Attend():
            names = (op.out, op.wide)
        case Route():
            names = (op.ids, op.weights, op.places)
        case LatentWrite():
            names = (op.q, op.q_nope)
        case _:
            names = (op.out,)
    return tuple(name for name in names if name)


def param_names(op: Op) -> tuple[str, ...]:
    """Parameters an op reads."""
    match op:
        case Embed():
            names: tuple[str | None, ...] = (op.table,)
        case Norm():
            names = (op.weight, op.bias)
        case Linear() | Experts():
            names = (op.weight, op.bias)
        case Route():
            names = (op.correction,)
        case HeadLinear():
            names = (op.weight,)
        case RopeWrite():
            names = (op.q_norm, op.k_norm)
        case LatentWrite():
            names = (op.norm,)
        case Attend():
            names = (op.sinks,)
        case _:
            names = ()
    return tuple(name for name in names if name)
