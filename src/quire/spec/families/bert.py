"""Encoders: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ModernBERT, Nomic BERT, GTE and Jina's, and classifiers made of
them."""

from __future__ import annotations

from dataclasses import replace

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.families.common import (
    MAX_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Biases,
    Defaults,
    read_activation,
    read_dtype,
    read_head_dim,
    windows_of_types,
)
from quire.spec.labels import classifies, label_names
from quire.spec.model import (
    MLP,
    AddedEmbedding,
    Attention,
    Dense,
    Layer,
    ModelSpec,
    NormSpec,
    PlainActivation,
    Pooling,
    PoolKind,
    Rope,
    WeightNames,
)
from quire.spec.rope_config import MAX_POSITIONS, RopeStyle, make_rope, read_rope, ropes_by_type

_LAYER_NORM = NormSpec("layer", bias=True)
_BERT = Defaults(max_positions=512, act="gelu", norm=_LAYER_NORM, eps_key="layer_norm_eps")
# Heads for pre-training, poolers that no output takes, and tables of positions that early checkpoints store.
_IGNORED = (r"cls\..*", r"lm_head\..*", r"pooler\..*", r"embeddings\.(position|token_type)_ids", r"vocab_.*",
            r"head\..*", r"decoder\..*", r"rotary_emb\..*", r"encoder\..*\.rotary_emb\..*")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes that every encoder has."""

    dim: int
    heads: int
    head_dim: int
    layers: int
    norm: NormSpec


def _sizes(
    config: ConfigReader, defaults: Defaults, *, layers: str = "num_hidden_layers", eps: float = 1e-12
) -> _Sizes:
    return _Sizes(
        dim=config.integer("hidden_size", high=MAX_DIM),
        heads=config.integer("num_attention_heads", high=MAX_HEADS),
        head_dim=read_head_dim(config, defaults),
        layers=config.integer(layers, high=MAX_LAYERS),
        norm=replace(defaults.norm, eps=config.number(defaults.eps_key, eps, low=1e-15, high=0.1)),
    )


def _attention(sizes: _Sizes, biases: Biases, rope: Rope | None = None, window: int = 0) -> Attention:
    return Attention(
        heads=sizes.heads, kv_heads=sizes.heads, head_dim=sizes.head_dim, rope=rope, scale=sizes.head_dim**-0.5,
        qkv_bias=biases.qkv, out_bias=biases.out, window=window, causal=False,
    )  # fmt: skip


def _pooling(config: ConfigReader, kind: PoolKind, *head: Dense) -> Pooling:
    """What a text becomes: labels in a classifier, else what sentence-transformers takes without a folder for it."""
    return Pooling(kind, head) if classifies(config) else Pooling("mean")


def _head(config: ConfigReader, dim: int, name: str, first: str, act: PlainActivation) -> tuple[Dense, Dense]:
    """A dense layer, and the linear for labels."""
    return Dense(first, dim, dim, act=act), Dense(name, dim, len(label_names(config)))


_BERT_NAMES = WeightNames(
    embed="embeddings.word_embeddings.weight",
    positions="embeddings.position_embeddings.weight",
    segments="embeddings.token_type_embeddings.weight",
    embed_norm="embeddings.LayerNorm",
    q="encoder.layer.{i}.attention.self.query",
    k="encoder.layer.{i}.attention.self.key",
    v="encoder.layer.{i}.attention.self.value",
    o="encoder.layer.{i}.attention.output.dense",
    attn_post_norm="encoder.layer.{i}.attention.output.LayerNorm",
    up="encoder.layer.{i}.intermediate.dense",
    down="encoder.layer.{i}.output.dense",
    mlp_post_norm="encoder.layer.{i}.output.LayerNorm",
)

# XLM-RoBERTa in the hub's code for flash attention (jinaai/xlm-roberta-flash-implementation).
_FLASH_NAMES = replace(
    _BERT_NAMES,
    embed_norm="emb_ln",
    qkv="encoder.layers.{i}.mixer.Wqkv",
    o="encoder.layers.{i}.mixer.out_proj",
    attn_post_norm="encoder.layers.{i}.norm1",
    up="encoder.layers.{i}.mlp.fc1",
    down="encoder.layers.{i}.mlp.fc2",
    mlp_post_norm="encoder.layers.{i}.norm2",
)


def bert(config: ConfigReader) -> ModelSpec:
    """BERT (1810.04805), and the many checkpoints of its shape: MiniLM, E5, BGE, GTE. With ALiBi, JinaBERT."""
    if config.string("position_embedding_type", "absolute") == "alibi":
        return _jina_bert(config)
    head = _head(config, config.integer("hidden_size", high=MAX_DIM), "classifier", "pooler.dense", "tanh")
    return _bert(config, 0, ("bert.",), _pooling(config, "first", *head), _BERT_NAMES)


def roberta(config: ConfigReader) -> ModelSpec:
    """RoBERTa (1907.11692) and XLM-RoBERTa (1911.02116): positions are counted from behind the padding token's id.

    Checkpoints of the hub's code for flash attention (jina-reranker-v2) are the same under other names.
    """
    if config.values.get("lora_adaptations"):
        raise config.unsupported(
            "lora_adaptations",
            "adapters for tasks inside a checkpoint are not implemented; the model as transformers has it, "
            "jina_embeddings_v3, is, with adapters of PEFT merged by quire convert --merge-adapter",
        )
    first = 1 + config.integer("pad_token_id", 1, low=0, high=MAX_VOCAB)
    names = _FLASH_NAMES if config.has("use_flash_attn") else _BERT_NAMES
    return _bert(config, first, ("roberta.",), _roberta_pooling(config), names)


def _roberta_pooling(config: ConfigReader) -> Pooling:
    dim = config.integer("hidden_size", high=MAX_DIM)
    head = _head(config, dim, "classifier.out_proj", "classifier.dense", "tanh")
    return _pooling(config, "first", *head)


def _bert(
    config: ConfigReader, first: int, prefixes: tuple[str, ...], pooling: Pooling, names: WeightNames
) -> ModelSpec:
    kind = config.string("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.unsupported("position_embedding_type", "positions must be absolute")
    if config.boolean("is_decoder", False):
        raise config.unsupported("is_decoder", "this family is implemented as an encoder")
    sizes, act = _sizes(config, _BERT), read_activation(config, _BERT)
    positions = config.integer("max_position_embeddings", 512, low=first + 1, high=MAX_POSITIONS)
    mlp = MLP(config.integer("intermediate_size", high=MAX_WIDTH), act, bias=True, gated=False)
    layer = Layer(_attention(sizes, Biases(qkv=True, out=True)), mlp, pre_norm=False, sum_norm=True)
    segments = config.integer("type_vocab_size", 2, low=0, high=64)
    added = AddedEmbedding(positions=positions, first=first, segments=segments)
    return _encoder(config, sizes, (layer,) * sizes.layers, names, prefixes, pooling,
                    max_positions=positions - first, added=added)  # fmt: skip


def _encoder(
    config: ConfigReader, sizes: _Sizes, layers: tuple[Layer, ...], names: WeightNames, prefixes: tuple[str, ...],
    pooling: Pooling, *, max_positions: int, added: AddedEmbedding | None = None,
) -> ModelSpec:  # fmt: skip
    used = {dense.name.split(".")[0] for dense in pooling.dense}
    return ModelSpec(
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        dim=sizes.dim,
        layers=layers,
        norm=sizes.norm,
        max_positions=max_positions,
        dtype=read_dtype(config, "float32"),
        names=names,
        ignored=tuple(pattern for pattern in _IGNORED if pattern.split("\\")[0] not in used),
        prefixes=tuple((prefix, "") for prefix in prefixes),
        added=added,
        embed_norm=True,
        pooling=pooling,
    )


def distilbert(config: ConfigReader) -> ModelSpec:
    """DistilBERT (1910.01108): BERT without segments, under other names."""
    if config.boolean("sinusoidal_pos_embds", False):
        # the table is stored, and computed as any other
        config.notices.append("config.json: sinusoidal_pos_embds: the stored table of positions is used")
    dim, heads = config.integer("dim", high=MAX_DIM), config.integer("n_heads", high=MAX_HEADS)
    values = {**config.values, "hidden_size": dim, "num_attention_heads": heads}
    renamed = ConfigReader(values, config.where, config.notices)
    defaults = replace(_BERT, act_key="activation")
    sizes = _sizes(renamed, defaults, layers="n_layers")
    width = config.integer("hidden_dim", high=MAX_WIDTH)
    mlp = MLP(width, read_activation(config, defaults), bias=True, gated=False)
    layer = Layer(_attention(sizes, Biases(qkv=True, out=True)), mlp, pre_norm=False, sum_norm=True)
    positions = config.integer("max_position_embeddings", 512, high=MAX_POSITIONS)
    names = replace(
        _BERT_NAMES,
        q="transformer.layer.{i}.attention.q_lin",
        k="transformer.layer.{i}.attention.k_lin",
        v="transformer.layer.{i}.attention.v_lin",
        o="transformer.layer.{i}.attention.out_lin",
        attn_post_norm="transformer.layer.{i}.sa_layer_norm",
        up="transformer.layer.{i}.ffn.lin1",
        down="transformer.layer.{i}.ffn.lin2",
        mlp_post_norm="transformer.layer.{i}.output_layer_norm",
    )
    pooling = _pooling(config, "first", *_head(config, dim, "classifier", "pre_classifier", "relu"))
    return _encoder(config, sizes, (layer,) * sizes.layers, names, ("distilbert.",), pooling,
                    max_positions=positions, added=AddedEmbedding(positions=positions))  # fmt: skip


_MODERN = Defaults(max_positions=8192, act="gelu", act_key="hidden_activation", eps_key="norm_eps")
_MODERN_THETAS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
_MODERN_NAMES = WeightNames(
    embed="embeddings.tok_embeddings.weight",
    embed_norm="embeddings.norm",
    attn_norm="layers.{i}.attn_norm",
    mlp_norm="layers.{i}.mlp_norm",
    qkv="layers.{i}.attn.Wqkv",
    o="layers.{i}.attn.Wo",
    gate_up="layers.{i}.mlp.Wi",
    down="layers.{i}.mlp.Wo",
    final_norm="final_norm",
)


def modernbert(config: ConfigReader) -> ModelSpec:
    """ModernBERT (2412.13663): pre-norm, gated, with a rotary embedding each for local and global layers."""
    norm = NormSpec("layer", bias=config.boolean("norm_bias", False))
    sizes = _sizes(config, replace(_MODERN, norm=norm), eps=1e-5)
    positions = config.integer("max_position_embeddings", 8192, high=MAX_POSITIONS)
    reach = config.integer("local_attention", 128, low=2, high=MAX_POSITIONS) // 2 + 1
    windows = windows_of_types(config, reach)
    if windows is None:
        every = config.integer("global_attn_every_n_layers", 3, high=MAX_LAYERS)
        windows = [reach if layer % every else 0 for layer in range(sizes.layers)]
    bias = config.boolean("attention_bias", False)
    biases = Biases(qkv=bias, out=bias)
    styles = {kind: RopeStyle(theta=default) for kind, (_, default) in _MODERN_THETAS.items()}
    ropes = ropes_by_type(config, sizes.head_dim, positions, styles)
    if ropes is None:
        ropes = {
            kind: make_rope(_with_theta(config, config.number(key, default, low=1.0, high=1e15)), None,
                            sizes.head_dim, positions, styles[kind])
            for kind, (key, default) in _MODERN_THETAS.items()
        }  # fmt: skip
    mlp = MLP(
        config.integer("intermediate_size", high=MAX_WIDTH), read_activation(config, _MODERN),
        bias=config.boolean("mlp_bias", False),
    )  # fmt: skip
    layers = []
    for number, window in enumerate(windows):
        rope = ropes["sliding_attention" if window else "full_attention"]
        layers.append(Layer(_attention(sizes, biases, rope, window), mlp, mixer_norm=number > 0))
    return _encoder(config, sizes, tuple(layers), _MODERN_NAMES, ("model.",), _modern_pooling(config, sizes),
                    max_positions=positions)  # fmt: skip


def _with_theta(config: ConfigReader, theta: float) -> ConfigReader:
    return ConfigReader({**config.values, "rope_theta": theta}, config.where, config.notices)


def _modern_pooling(config: ConfigReader, sizes: _Sizes) -> Pooling:
    kind = config.string("classifier_pooling", "cls")
    if kind not in {"cls", "mean"}:
        raise config.unsupported("classifier_pooling", "implemented are cls and mean")
    act = read_activation(config, replace(_MODERN, act_key="classifier_activation"))
    if not isinstance(act, str):
        raise config.unsupported("classifier_activation", "it has numbers of its own")
    first = Dense("head.dense", sizes.dim, sizes.dim, config.boolean("classifier_bias", False), act,
                  sizes.norm, "head.norm")  # fmt: skip
    last = Dense("classifier", sizes.dim, len(label_names(config)))
    return _pooling(config, "first" if kind == "cls" else "mean", first, last)


def nomic_bert(config: ConfigReader) -> ModelSpec:
    """Nomic Embed (2402.01613): BERT's norms and segments, a gated feed-forward, and a rotary embedding.

    Released checkpoints use names of GPT-2's config; transformers writes its own.
    """
    config = _nomic_keys(config)
    defaults = Defaults(max_positions=2048, norm=_LAYER_NORM, eps_key="layer_norm_eps", act="silu",
                        rope=RopeStyle(theta=1000.0))  # fmt: skip
    sizes = _sizes(config, defaults)
    positions = config.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)
    rope = read_rope(config, sizes.head_dim, positions, defaults.rope)
    mlp = MLP(config.integer("intermediate_size", high=MAX_WIDTH), read_activation(config, defaults))
    layer = Layer(_attention(sizes, Biases(), rope), mlp, pre_norm=False, sum_norm=True)
    names = replace(
        _BERT_NAMES,
        embed_norm="emb_ln",
        qkv="encoder.layers.{i}.attn.Wqkv",
        o="encoder.layers.{i}.attn.out_proj",
        attn_post_norm="encoder.layers.{i}.norm1",
        gate="encoder.layers.{i}.mlp.fc12",
        up="encoder.layers.{i}.mlp.fc11",
        down="encoder.layers.{i}.mlp.fc2",
        mlp_post_norm="encoder.layers.{i}.norm2",
    )
    segments = config.integer("type_vocab_size", 2, low=0, high=64)
    return _relative(config, sizes, layer, names, ("nomic_bert.", "bert."), positions, segments)


def _relative(
    config: ConfigReader, sizes: _Sizes, layer: Layer, names: WeightNames, prefixes: tuple[str, ...], positions: int,
    segments: int, pooling: Pooling | None = None,
) -> ModelSpec:  # fmt: skip
    """An encoder of equal layers whose attention has the positions, with BERT's head for labels or another pooling."""
    head = _head(config, sizes.dim, "classifier", "pooler.dense", "tanh")
    pooling = pooling or _pooling(config, "first", *head)
    return _encoder(config, sizes, (layer,) * sizes.layers, names, prefixes, pooling,
                    max_positions=positions, added=AddedEmbedding(segments=segments))  # fmt: skip


_NOMIC_KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
}  # fmt: skip
# Values with which released checkpoints say that they are what `nomic_bert` computes.
_NOMIC_MEANS: dict[str, tuple[object, ...]] = {
    "prenorm": (None, False), "qkv_proj_bias": (None, False), "mlp_fc1_bias": (None, False),
    "mlp_fc2_bias": (None, False), "activation_function": (None, "swiglu"), "use_rms_norm": (None, False),
    "rotary_emb_fraction": (None, 1, 1.0), "rotary_emb_interleaved": (None, False),
    "rotary_emb_scale_base": (None,), "parallel_block": (None, False), "causal": (None, False),
    "moe_every_n_layers": (None, -1, 0),
}  # fmt: skip


def _nomic_keys(config: ConfigReader) -> ConfigReader:
    for key, means in _NOMIC_MEANS.items():
        if config.values.get(key) not in means:
            raise config.unsupported(key, "this feature is not implemented for this model type")
    if not config.has("n_embd"):
        return config
    values = {**config.values, **{ours: config.values.get(key) for key, ours in _NOMIC_KEYS.items()}}
    values.pop("rotary_scaling_factor", None)  # for longer texts than it was trained with
    return ConfigReader(values, config.where, config.notices)


_GTE = Defaults(max_positions=8192, norm=_LAYER_NORM, eps_key="layer_norm_eps", act="gelu",
                rope=RopeStyle(theta=160_000.0))  # fmt: skip


def gte(config: ConfigReader) -> ModelSpec:
    """GTE (2407.19669), as transformers has it: BERT's norms, a gated feed-forward, and a rotary embedding."""
    positions = config.integer("max_position_embeddings", 8192, high=MAX_POSITIONS)
    rope = read_rope(config, read_head_dim(config, _GTE), positions, _GTE.rope)
    return _gte(config, rope, positions)


def _gte(config: ConfigReader, rope: Rope, positions: int) -> ModelSpec:
    sizes = _sizes(config, _GTE)
    mlp = MLP(
        config.integer("intermediate_size", high=MAX_WIDTH), read_activation(config, _GTE), down_bias=True
    )
    layer = Layer(_attention(sizes, Biases(qkv=True, out=True), rope), mlp, pre_norm=False, sum_norm=True)
    names = replace(
        _BERT_NAMES,
        qkv="encoder.layer.{i}.attention.qkv_proj",
        o="encoder.layer.{i}.attention.o_proj",
        attn_post_norm="encoder.layer.{i}.attn_ln",
        up_gate="encoder.layer.{i}.mlp.up_gate_proj",
        down="encoder.layer.{i}.mlp.down_proj",
        mlp_post_norm="encoder.layer.{i}.mlp_ln",
    )
    segments = config.integer("type_vocab_size", 0, low=0, high=64)
    return _relative(config, sizes, layer, names, ("gte.", "new."), positions, segments)


# Values with which the hub's own code for GTE (new-impl) says that it is what `gte` computes.
_NEW_MEANS: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope",), "layer_norm_type": (None, "layer_norm"), "pack_qkv": (None, True),
    "logn_attention_scale": (None, False),
}  # fmt: skip


def new_impl(config: ConfigReader) -> ModelSpec:
    """GTE as the hub's own code has it (Alibaba-NLP/new-impl), with its rotary embedding for longer texts.

    Kind `ntk` with factor s: the base times s, and all frequencies divided by s^(2/dim) (its equation 6, of
    kexue.fm/archives/9706). Its `mixed_b` is refused.
    """
    for key, means in _NEW_MEANS.items():
        if config.values.get(key) not in means:
            raise config.unsupported(key, "this feature is not implemented for this model type")
    positions = config.integer("max_position_embeddings", 2048, high=MAX_POSITIONS)
    scaling = config.child("rope_scaling")
    if scaling is None or scaling.string("type", None) != "ntk":
        return _gte(config, read_rope(config, read_head_dim(config, _GTE), positions, RopeStyle()), positions)
    if scaling.has("mixed_b"):
        raise scaling.unsupported("mixed_b", "frequencies are scaled by one factor")
    factor = scaling.number("factor", 1.0, low=1.0, high=1e6)
    theta, dim = config.number("rope_theta", 10_000.0, low=1.0, high=1e15), read_head_dim(config, _GTE)
    return _gte(config, Rope(theta * factor, dim, "linear", factor ** (2 / dim)), positions)


_JINA_GATES: dict[str, PlainActivation] = {"geglu": "gelu", "reglu": "relu"}


def _jina_bert(config: ConfigReader) -> ModelSpec:
    """JinaBERT (2310.19923; jinaai/jina-bert-implementation): BERT with ALiBi and a gated feed-forward.

    Its variant with norms of queries and keys has one more norm behind the attention, and is refused.
    """
    origin = f"{config.values.get('_name_or_path')} {config.values.get('auto_map')}"
    if "qk-post-norm" in origin:
        key = "auto_map" if config.has("auto_map") else "_name_or_path"
        raise config.unsupported(
            key, "of JinaBERT's variants the one without norms of q and k is implemented"
        )
    gate = config.string("feed_forward_type", "original")
    if gate not in _JINA_GATES:
        raise config.unsupported("feed_forward_type", f"implemented with ALiBi are {', '.join(_JINA_GATES)}")
    sizes = _sizes(config, _BERT)
    width = config.integer("intermediate_size", high=MAX_WIDTH)
    attention = replace(_attention(sizes, Biases(qkv=True, out=True)), alibi=True)
    layer = Layer(attention, MLP(width, _JINA_GATES[gate], down_bias=True), pre_norm=False, sum_norm=True)
    names = replace(
        _BERT_NAMES,
        gate_up="encoder.layer.{i}.mlp.gated_layers",
        down="encoder.layer.{i}.mlp.wo",
        mlp_post_norm="encoder.layer.{i}.mlp.layernorm",
    )
    positions = config.integer("max_position_embeddings", 512, high=MAX_POSITIONS)
    segments = config.integer("type_vocab_size", 2, low=0, high=64)
    return _relative(config, sizes, layer, names, ("bert.",), positions, segments)


def jina_embeddings_v3(config: ConfigReader) -> ModelSpec:
    """Jina Embeddings v3 (2409.10173), as transformers has it: XLM-RoBERTa with a rotary embedding."""
    sizes = _sizes(config, _BERT, eps=1e-5)
    positions = config.integer("max_position_embeddings", 8194, high=MAX_POSITIONS)
    rope = read_rope(config, sizes.head_dim, positions, RopeStyle(theta=20_000.0))
    mlp = MLP(
        config.integer("intermediate_size", high=MAX_WIDTH),
        read_activation(config, _BERT),
        bias=True,
        gated=False,
    )
    layer = Layer(_attention(sizes, Biases(qkv=True, out=True), rope), mlp, pre_norm=False, sum_norm=True)
    segments = config.integer("type_vocab_size", 1, low=0, high=64)
    return _relative(
        config, sizes, layer, _FLASH_NAMES, ("roberta.",), positions, segments, _roberta_pooling(config)
    )
