"""ModelSpec: one description of a model that loader, executors, memory plan and cost all read.

Add a field only if two families need it and it is a number or a switch in the same data flow. A block with its own
state or data flow is a new dataclass and a new op, never a flag.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from quire.records import dataclass
from quire.types import UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
NormKind = Literal["rms", "layer"]
ScoreKind = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
PoolKind = Literal["mean", "first", "last"]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864).

    `dim` is the number of rotated dimensions of a head (the first ones). Pair k is dimensions (k, k + dim/2), or
    (2k, 2k + 1) when interleaved. Scaled kinds: linear (position interpolation, 2306.15595), dynamic
    (NTK-aware), llama3 (frequency bands of Llama 3.1), yarn (2309.00071), longrope (2402.13753).
    `original_max` is the context length that the unscaled base was trained for.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: frequency divisors per pair, up to original_max
    long_factors: tuple[float, ...] = ()  # longrope: the same beyond it
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class NormSpec:
    """x / sqrt(mean(x²) + eps) · w for kind rms (1910.07467); kind layer (1607.06450) subtracts the mean first.

    w is the stored weight plus `added`: 1 if checkpoints store the difference from one.
    """

    kind: NormKind = "rms"
    eps: float = 1e-6
    added: float = 0.0
    bias: bool = False


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norm of queries and keys before rotation.

    Per head, or with `whole` over all heads of the projection together. `shared`: one weight of head_dim elements for
    all heads; else one per head.
    """

    norm: NormSpec
    whole: bool = False
    shared: bool = True


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention (2305.13245): MHA if kv_heads = heads, MQA if kv_heads = 1.

    `window` 0 is full attention; else position p attends to positions p-window+1 … p. `rope` None means no rotation.
    `softcap` above 0 bounds the scores to ±softcap by tanh. `sinks`: each head has a learned logit in the softmax
    without a value. Not `causal`, a position attends to those behind it too, up to p+window-1 with a window: an encoder
    (1810.04805), whose texts are computed whole. `alibi`: scores lose with the distance of the key (2108.12409). See
    program/ops.Attend.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True
    alibi: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1). No layer has a window.

    Per token, the cache has a normed latent of `kv_rank` numbers and a rotated key of `rope_dim` that all heads share;
    keys and values of a head are linear in the latent. A query has `nope_dim` unrotated and `rope_dim` rotated numbers;
    with `q_rank` above 0, queries come from a separate normed latent. Values of a head have `v_dim` numbers. `norm` is
    that of the latents. `bias`: of the projections into latents and of the output.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    scale: float
    norm: NormSpec = NormSpec()
    bias: bool = False

    @property
    def window(self) -> int:
        return 0

    @property
    def q_dim(self) -> int:
        """Numbers of a head's projected query."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Cached numbers per token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(up + 1) · gate · sigmoid(alpha · gate), gate at most `limit` and up in ±limit (gpt-oss, arXiv 2508.10925)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __str__(self) -> str:
        return f"swiglu clamped to {self.limit:g}"


# act(gate) * up with a plain activation; a gate with parameters is a dataclass.
PlainActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "tanh"]
Activation = PlainActivation | ClampedSwiGLU


@dataclass(frozen=True, slots=True)
class MLP:
    """Feed-forward: down(act(gate(x)) * up(x)) (2002.05202), or down(act(up(x))) if it is not `gated`.

    `down_bias`: the last linear has a bias, whether or not the others have.
    """

    width: int
    act: Activation = "silu"
    bias: bool = False
    gated: bool = True
    down_bias: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """The choice of `top_k` of `experts` for a token, and their weights; see program/ops.Route.

    `bias`: the linear for the logits has one. `correction`: a learned number per expert affects the choice, not the
    weights (2408.15664). With `groups` above 1, only experts of the `top_groups` groups of neighbours with the highest
    `group_score` can be chosen: their best expert (2405.04434, section 2.1.3) or the sum of their best two
    (2412.19437). `renormalise`: the chosen weights are divided by their sum; then all are
    multiplied by `scale`.
    """

    experts: int
    top_k: int
    scores: ScoreKind = "softmax"
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    renormalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture of experts: Σ weight · expert(x) over the experts of a token (1701.06538), each a gated MLP of `width`.

    `shared` runs for every token and is added (2401.06066), with `shared_gate` times sigmoid of a linear of x.
    """

    router: Router
    width: int
    act: Activation = "silu"
    bias: bool = False
    shared: MLP | None = None
    shared_gate: bool = False


# What takes numbers from one token to another. A mixer of another data flow (a state-space model, linear attention, a
# short convolution) is a further class here, lowered by an entry of program/mixers.
Mixer = Attention | LatentAttention


@dataclass(frozen=True, slots=True)
class Layer:
    """A residual block: a mixer of tokens, then a feed-forward. A layer may lack one of the two.

    A branch is post(f(pre(x))), and x += branch for each of the two. `pre_norm` and `post_norm` turn the norms on:
    pre-norm, post-norm or both (sandwich). `parallel`: both branches take the same pre-norm of the same x.
    `sum_norm`: x = norm(x + f(x)) (1706.03762), with the names of post-norms. `mixer_norm` off: the mixer of a pre-norm
    layer takes x itself.
    """

    mixer: Mixer | None
    mlp: MLP | MoE | None
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    sum_norm: bool = False
    mixer_norm: bool = True

    @property
    def attention(self) -> Attention | LatentAttention:
        """The mixer, for code that implements only attention; else UnsupportedModelError."""
        if not isinstance(self.mixer, Attention | LatentAttention):
            found = "no mixer" if self.mixer is None else f"a mixer of kind {type(self.mixer).__name__}"
            raise UnsupportedModelError(f"a layer with {found} is not implemented here")
        return self.mixer

    @property
    def grouped(self) -> Attention:
        """The mixer, for code that implements only keys and values per head; else UnsupportedModelError."""
        if not isinstance(self.attention, Attention):
            raise UnsupportedModelError("latent attention (MLA) is not implemented here")
        return self.attention


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Tensors of a checkpoint that stack all experts of a layer.

    `gate_up` is [experts, 2·width, dim], gate rows first, or alternating if `interleaved`; `down` is [experts, dim,
    width]. `transposed`: the last two axes of both are swapped. Biases are `gate_up`_bias [experts, 2·width] and
    `down`_bias [experts, dim]. Each may be stored as MXFP4 instead: _blocks and _scales, never transposed. `router`, if
    not empty, is the name of the router in checkpoints with stacks.
    """

    gate_up: str = "model.layers.{i}.mlp.experts.gate_up_proj"
    down: str = "model.layers.{i}.mlp.experts.down_proj"
    transposed: bool = False
    interleaved: bool = False
    router: str = ""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Checkpoint tensor names; `{i}` is the layer number. A family can rename them.

    Linears and norms are named without `.weight` and `.bias`. `qkv` (and `gate_up`), if not empty, is one tensor with
    the rows of q, k and v (of gate and up) in that order; `up_gate` has those of up first. A q or k norm with `{h}` in
    its name is one tensor per head.

    Experts have one tensor each, `{e}` being the number of the expert; see also ModelSpec.stacks. The names from `q_a`
    on are those of latent attention; `q` is its query projection if queries have no latent.
    """

    embed: str = "model.embed_tokens.weight"
    positions: str = ""
    segments: str = ""
    embed_norm: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"
    attn_norm: str = "model.layers.{i}.input_layernorm"
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm"
    attn_post_norm: str = "model.layers.{i}.post_attention_layernorm"
    mlp_post_norm: str = "model.layers.{i}.post_feedforward_layernorm"
    q: str = "model.layers.{i}.self_attn.q_proj"
    k: str = "model.layers.{i}.self_attn.k_proj"
    v: str = "model.layers.{i}.self_attn.v_proj"
    qkv: str = ""
    o: str = "model.layers.{i}.self_attn.o_proj"
    q_norm: str = "model.layers.{i}.self_attn.q_norm"
    k_norm: str = "model.layers.{i}.self_attn.k_norm"
    sinks: str = "model.layers.{i}.self_attn.sinks"
    q_a: str = "model.layers.{i}.self_attn.q_a_proj"
    q_a_norm: str = "model.layers.{i}.self_attn.q_a_layernorm"
    q_b: str = "model.layers.{i}.self_attn.q_b_proj"
    kv_a: str = "model.layers.{i}.self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "model.layers.{i}.self_attn.kv_a_layernorm"
    kv_b: str = "model.layers.{i}.self_attn.kv_b_proj"
    gate: str = "model.layers.{i}.mlp.gate_proj"
    up: str = "model.layers.{i}.mlp.up_proj"
    gate_up: str = ""
    up_gate: str = ""
    down: str = "model.layers.{i}.mlp.down_proj"
    router: str = "model.layers.{i}.mlp.gate"
    correction: str = "model.layers.{i}.mlp.gate.e_score_correction_bias"
    expert_gate: str = "model.layers.{i}.mlp.experts.{e}.gate_proj"
    expert_up: str = "model.layers.{i}.mlp.experts.{e}.up_proj"
    expert_down: str = "model.layers.{i}.mlp.experts.{e}.down_proj"
    shared_gate: str = "model.layers.{i}.mlp.shared_expert.gate_proj"
    shared_up: str = "model.layers.{i}.mlp.shared_expert.up_proj"
    shared_down: str = "model.layers.{i}.mlp.shared_expert.down_proj"
    shared_scale: str = "model.layers.{i}.mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class AddedEmbedding:
    """Learned tables that are added to the embedding of a token (1810.04805): of `positions` rows, the first being that
    of position -`first`, and of `segments` rows; 0 for none. A token of segment s has the id s · vocab + id.
    """

    positions: int = 0
    first: int = 0
    segments: int = 0


@dataclass(frozen=True, slots=True)
class Dense:
    """act(x @ weightᵀ + bias), then a norm: a layer over a pooled row. `name` is that of its tensors.

    `tokens`: the weight is these rows of the tensor `name`, which has `rows`.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    act: PlainActivation | None = None
    norm: NormSpec | None = None
    norm_name: str = ""
    tokens: tuple[int, ...] = ()
    rows: int = 0


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A norm of a pooled row. `name` is that of its tensors."""

    name: str
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a text becomes in place of logits: the mean of its last hidden states, or that of its first or last token,
    and then what the layers of `dense` make of it, in order."""

    kind: PoolKind
    dense: tuple[Dense | RowNorm, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders in the checkpoint's with tensors of these layers: what is before the slash in their names."""
        found = (layer.name.rpartition("/")[0] for layer in self.dense)
        return tuple(dict.fromkeys(folder for folder in found if folder))

    @property
    def outputs(self) -> int:
        """Numbers of a row; 0 for as many as a hidden state has."""
        return next((layer.outputs for layer in reversed(self.dense) if isinstance(layer, Dense)), 0)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A language model: a decoder, or an encoder, whose attention is not causal.

    `max_positions` is the default context in tokens, `longest` the longest that can be requested (0: the same). They
    differ if a longer context changes the answers to short texts (docs/decisions/0002). `norm` is that of the residual
    stream. `embed_scale` multiplies embeddings,
    `residual_scale` each branch before it is added, `logits_scale` the logits; `logits_cap` c then bounds them:
    c·tanh(logit / c), 0 is off. `mtp_layers`: layers for multi-token prediction that the checkpoint has behind the
    others. `pooling`: a model with one gives a row of numbers for a text, and no logits. `embed_norm`: a norm over
    embeddings.
    """

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    norm: NormSpec
    max_positions: int
    longest: int = 0
    tied: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    dtype: DTypeName = "bfloat16"  # format in the checkpoint
    names: WeightNames = field(default_factory=WeightNames)
    stacks: ExpertStacks = field(default_factory=ExpertStacks)  # for checkpoints with experts in one tensor
    # Tensors in released checkpoints that the computation does not need (regular expressions).
    ignored: tuple[str, ...] = ()
    # Prefixes of tensor names in a checkpoint -> prefixes in `names`; the first match applies.
    prefixes: tuple[tuple[str, str], ...] = ()
    mtp_layers: int = 0
    added: AddedEmbedding | None = None
    embed_norm: bool = False
    pooling: Pooling | None = None

    @property
    def encoder(self) -> bool:
        """Whether a token attends to those behind it, so that a text can only be computed whole."""
        return any(isinstance(x.mixer, Attention) and not x.mixer.causal for x in self.layers)

    @property
    def whole(self) -> bool:
        """Whether all tokens of a text must be in one step."""
        return self.encoder or (self.pooling is not None and self.pooling.kind != "last")
