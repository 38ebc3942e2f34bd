"""Code that families share: sizes and limits, layers, windows, and keys that must not be ignored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.model import (
    MLP,
    Activation,
    Attention,
    DTypeName,
    Layer,
    ModelSpec,
    NormSpec,
    QKNorm,
    Rope,
)
from quire.spec.rope_config import MAX_POSITIONS, RopeStyle, context_lengths, read_rope

# Several times the largest released models; larger values are mistakes or attacks on memory.
MAX_VOCAB = 2**22
MAX_DIM = 2**17
MAX_WIDTH = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 2048
MAX_HEAD_DIM = 512

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DTYPES: dict[str, DTypeName] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}
# Rotary tables in early checkpoints; Quire recomputes them from the config.
_IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
# Keys that change the computation of any model that has them: key -> values that mean "off".
_FOREIGN_KEYS: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "dual_chunk_attention_config": (None,),
    "attention_chunk_size": (None,),
    "per_layer_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "use_parallel_residual": (None, False),
    "no_rope_layers": (None,),
}

# Those that all of Gemma implements.
GEMMA_READS = ("query_pre_attn_scalar", "final_logit_softcapping")


def refuse_foreign_keys(config: ConfigReader, reads: Collection[str] = ()) -> None:
    """Raise UnsupportedModelError for keys of features that a family does not implement; it implements `reads`."""
    for key, off in _FOREIGN_KEYS.items():
        value = config.values.get(key)
        if key not in reads and not any(value == quiet and _same_kind(value, quiet) for quiet in off):
            raise config.unsupported(key, "this feature is not implemented for this model type")


def _same_kind(a: object, b: object) -> bool:
    """Whether types match: Python treats True as 1, a config must not."""
    return isinstance(a, bool) == isinstance(b, bool)


_RMS, _ROPE = NormSpec(), RopeStyle()


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The defaults of transformers for missing keys in one family.

    `kv_heads` None means as many as heads; `head_dim` None means hidden_size / num_attention_heads.
    """

    max_positions: int
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int = 4096
    norm: NormSpec = _RMS
    eps_key: str = "rms_norm_eps"
    act: str = "silu"
    act_key: str = "hidden_act"
    rope: RopeStyle = _ROPE
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """Which linears of a block have a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


_NO_BIASES = Biases()


def decoder(
    config: ConfigReader,
    defaults: Defaults,
    windows: Sequence[int],
    *,
    biases: Biases = _NO_BIASES,
    qk_norm: QKNorm | None = None,
    scale: float | None = None,
    ropes: Sequence[Rope | None] | None = None,
) -> ModelSpec:
    """A pre-norm decoder whose layers differ only in their window and rope; each has one entry per layer.

    `qk_norm` takes the epsilon of the model. `scale` defaults to head_dim^-0.5, `ropes` to the rope of the config in
    every layer. Families make other changes to the result with dataclasses.replace.
    """
    dim = config.integer("hidden_size", high=MAX_DIM)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = read_head_dim(config, defaults)
    max_positions = read_max_positions(config, defaults)
    if ropes is None:
        rope = read_rope(config, head_dim, max_positions, defaults.rope)
        ropes = [rope] * len(windows)
        max_positions, longest = context_lengths(rope, max_positions)
    else:
        longest = max_positions
    norm = replace(defaults.norm, eps=config.number(defaults.eps_key, defaults.norm.eps, low=1e-12, high=0.1))
    if qk_norm is not None:
        qk_norm = replace(qk_norm, norm=replace(qk_norm.norm, eps=norm.eps))
    mlp = MLP(
        config.integer("intermediate_size", high=MAX_WIDTH), read_activation(config, defaults), biases.mlp
    )
    kv_heads = _kv_heads(config, defaults, heads)

    def attention(window: int, rope: Rope | None) -> Attention:
        return Attention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope, scale=scale or head_dim**-0.5,
            qkv_bias=biases.qkv, out_bias=biases.out, qk_norm=qk_norm, window=window,
        )  # fmt: skip

    return ModelSpec(
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        dim=dim,
        layers=tuple(Layer(attention(w, r), mlp) for w, r in zip(windows, ropes, strict=True)),
        norm=norm,
        max_positions=max_positions,
        longest=longest,
        tied=config.boolean("tie_word_embeddings", defaults.tied),
        dtype=read_dtype(config),
        ignored=_IGNORED_TENSORS,
    )


def with_layers(
    spec: ModelSpec, *, pre_norm: bool = True, post_norm: bool = False, parallel: bool = False
) -> ModelSpec:
    """Return the spec with another arrangement of norms and branches in every layer; see Layer."""
    layers = (replace(x, pre_norm=pre_norm, post_norm=post_norm, parallel=parallel) for x in spec.layers)
    return replace(spec, layers=tuple(layers))


def with_mtp(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """The spec with the layers for multi-token prediction that its checkpoint has; the model computes without them."""
    count = config.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    beyond = (rf"model\.layers\.{len(spec.layers) + i}\..*" for i in range(count))
    return replace(spec, ignored=(*spec.ignored, *beyond), mtp_layers=count)


def read_max_positions(config: ConfigReader, defaults: Defaults) -> int:
    return config.integer("max_position_embeddings", defaults.max_positions, high=MAX_POSITIONS)


def layer_count(config: ConfigReader) -> int:
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def window_size(config: ConfigReader, defaults: Defaults) -> int:
    """`sliding_window`: 0 if the key is null, the family's default if it is missing."""
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return 0
    return config.integer("sliding_window", defaults.window, high=MAX_POSITIONS)


def windows_of_types(config: ConfigReader, window: int) -> list[int] | None:
    """Per-layer windows from `layer_types`, or None without such a list."""
    types = config.strings("layer_types")
    if types is None:
        return None
    layers = layer_count(config)
    if len(types) != layers:
        raise config.error("layer_types", f"{len(types)} entries for num_hidden_layers = {layers}")
    for name in types:
        if name not in _LAYER_TYPES:
            raise config.unsupported("layer_types", f"{name!r} layers are not implemented")
    if window == 0 and any(_LAYER_TYPES[name] for name in types):
        raise config.error("layer_types", "has sliding_attention layers, but no sliding_window is in use")
    return [window if _LAYER_TYPES[name] else 0 for name in types]


def windows_by_pattern(config: ConfigReader, window: int, pattern: int) -> list[int]:
    """By `layer_types`, else a full layer after every pattern - 1 sliding ones (`sliding_window_pattern`)."""
    windows = windows_of_types(config, window)
    if windows is not None:
        return windows
    pattern = config.integer("sliding_window_pattern", pattern, high=MAX_LAYERS)
    return [window if (layer + 1) % pattern else 0 for layer in range(layer_count(config))]


def read_head_dim(config: ConfigReader, defaults: Defaults) -> int:
    """`head_dim`, else hidden_size / num_attention_heads unless the family has a fixed size."""
    dim = config.integer("hidden_size", high=MAX_DIM)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = config.integer("head_dim", defaults.head_dim, high=MAX_HEAD_DIM)
    if head_dim is None:
        if dim % heads:
            raise config.error("hidden_size", f"{dim} is not a multiple of num_attention_heads = {heads}")
        head_dim = dim // heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise config.error("head_dim", f"{head_dim} is not an even number up to {MAX_HEAD_DIM}")
    return head_dim


def _kv_heads(config: ConfigReader, defaults: Defaults, heads: int) -> int:
    # An explicit null means "as many as heads" in every family; only a missing key takes the class default.
    default = heads if "num_key_value_heads" in config.values else (defaults.kv_heads or heads)
    kv_heads = config.integer("num_key_value_heads", default, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
    return kv_heads


def read_activation(config: ConfigReader, defaults: Defaults) -> Activation:
    name = config.string(defaults.act_key, defaults.act)
    if name not in _ACTIVATIONS:
        raise config.unsupported(defaults.act_key, f"implemented activations are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_dtype(config: ConfigReader, missing: DTypeName = "bfloat16") -> DTypeName:
    """The number format of the checkpoint; `missing` if the config does not say."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.string(key, None)
    if name is None:
        config.notices.append(f"{config.where}: neither dtype nor torch_dtype is set: {missing} is assumed")
        return missing
    if name not in _DTYPES:
        raise config.unsupported(key, f"weights may be {', '.join(_DTYPES)}")
    return _DTYPES[name]
