"""The architectures of GGUF files: the model_type of each, and its specific keys.

Keys, tensors and changes by converters follow llama.cpp's files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from quire.records import dataclass
from quire.spec.families.common import MAX_DIM, MAX_LAYERS, MAX_WIDTH
from quire.spec.families.experts import MAX_EXPERTS, MAX_TOP_K
from quire.spec.gguf_keys import Config, Keys
from quire.spec.rope_config import MAX_POSITIONS

_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_V3_EXPERTS = 256
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def _nothing_more(keys: Keys, config: Config) -> None:
    """No specific keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `general.architecture`: its model_type, and the changes of its converter.

    `also`: other model types that are written as this one. `permuted`: the rows of q and k are permuted for a rotation
    of neighbouring dimensions. `whole_norms`: norm weights include the 1 that the checkpoint omits. `epsilon`: the key
    of the epsilon of norms. `partial`: the family rotates a part of each head by default. `patterned`: a key gives the
    layers with a window. `latent`: latent attention, with its own keys for the sizes of heads. `names`: fields of
    WeightNames whose tensors are laid out differently from a checkpoint; `stems`: names that differ from STEMS.
    `translate` adds what the common keys do not express; it may change the model_type.
    """

    model_type: str
    also: tuple[str, ...] = ()
    permuted: bool = False
    whole_norms: bool = False
    epsilon: str = RMS_EPSILON
    partial: bool = False
    patterned: bool = False
    latent: bool = False
    names: dict[str, Any] = field(default_factory=dict)
    stems: dict[str, str] = field(default_factory=dict)
    translate: Callable[[Keys, Config], None] = _nothing_more


def _projections_have_biases(keys: Keys) -> bool:
    """Whether queries have a bias, in a separate tensor or in one with keys and values."""
    return any(keys.has_tensor(f"blk.0.{name}.bias") for name in ("attn_q", "attn_qkv"))


def _plain_biases(keys: Keys, config: Config) -> None:
    config["attention_bias"] = _projections_have_biases(keys)
    config["mlp_bias"] = keys.has_tensor("blk.0.ffn_gate.bias")


def _dense(keys: Keys, config: Config) -> None:
    _plain_biases(keys, config)
    if keys.integer_or("expert_count", 0, MAX_EXPERTS):
        raise keys.unsupported("expert_count", "mixtures of experts of this architecture are not implemented")


def _llama(keys: Keys, config: Config) -> None:
    """With experts it is Mixtral, which divides the weights of experts by their sum."""
    if not keys.integer_or("expert_count", 0, MAX_EXPERTS):
        _dense(keys, config)
        return
    config["model_type"] = "mixtral"
    _experts(keys, config)
    width = config.pop("moe_intermediate_size")
    if keys.has("expert_feed_forward_length"):
        config["intermediate_size"] = width


def _experts(keys: Keys, config: Config) -> None:
    """Counts and width of experts; without a key, their width is a share of the whole."""
    used = keys.integer("expert_used_count", MAX_TOP_K)
    whole = config["intermediate_size"]
    assert isinstance(whole, int)
    config |= {
        "num_experts": keys.integer("expert_count", MAX_EXPERTS),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer_or("expert_feed_forward_length", 0, MAX_WIDTH) or whole // used,
    }
    for key, plain in (
        ("expert_weights_scale", 1.0),
        ("expert_gating_func", 1.0),
        ("expert_group_count", 1.0),
    ):
        if keys.number(key, plain) != plain:
            raise keys.unsupported(key, "the router of this architecture is a plain softmax over all experts")
    keys.has("expert_group_used_count")


def _dense_layers(keys: Keys, config: Config) -> None:
    count = config["num_hidden_layers"]
    assert isinstance(count, int)
    found = [i for i in range(count) if not keys.has_tensor(f"blk.{i}.ffn_gate_inp.weight")]
    config |= {"mlp_only_layers": found, "decoder_sparse_step": 1}


def _qwen2_moe(keys: Keys, config: Config) -> None:
    _experts(keys, config)
    _dense_layers(keys, config)
    shared = keys.integer_or("expert_shared_feed_forward_length", 0, MAX_WIDTH)
    config["shared_expert_intermediate_size"] = shared or config["intermediate_size"]
    config["qkv_bias"] = _projections_have_biases(keys)
    config["norm_topk_prob"] = keys.boolean("expert_weights_norm", False)


def _qwen3_moe(keys: Keys, config: Config) -> None:
    _plain_biases(keys, config)
    _experts(keys, config)
    _dense_layers(keys, config)
    config["norm_topk_prob"] = keys.boolean("expert_weights_norm", True)


def _gpt_oss(keys: Keys, config: Config) -> None:
    """Its YaRN does not round its range of dimensions to integers, which no key expresses."""
    _experts(keys, config)
    config["intermediate_size"] = config.pop("moe_intermediate_size")
    config["attention_bias"] = _projections_have_biases(keys)
    keys.boolean("expert_weights_norm", True)
    _sliding(keys, config, window=128, pattern=2)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False


def _gemma(_keys: Keys, config: Config) -> None:
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"


def _gemma2(keys: Keys, config: Config) -> None:
    _gemma(keys, config)
    _scalar(config, _GEMMA2_27B_LAYERS)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.has(key):  # missing: the family's default; 0: none
            config[key] = keys.number(key) or None
    _sliding(keys, config, window=4096, pattern=2)


def _gemma3(keys: Keys, config: Config) -> None:
    _gemma(keys, config)
    _scalar(config, _GEMMA3_27B_LAYERS)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping") or None
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    _sliding(keys, config, window=0, pattern=6)


def _scalar(config: Config, largest: int) -> None:
    """The divisor of attention scores has no key; the largest release differs from the others."""
    dim, heads, head_dim = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))
    assert isinstance(dim, int)
    assert isinstance(heads, int)
    config["query_pre_attn_scalar"] = dim // heads if config["num_hidden_layers"] == largest else head_dim


def _sliding(keys: Keys, config: Config, *, window: int, pattern: int) -> None:
    """Layers with a window: a list, or all but the last of every `pattern`. `window`: the size without a key."""
    count = config["num_hidden_layers"]
    assert isinstance(count, int)
    window = keys.integer_or("attention.sliding_window", window, MAX_POSITIONS)
    local = keys.number("rope.freq_base_swa")
    if local not in {None, config.get("rope_theta")} and "rope_local_base_freq" not in config:
        raise keys.unsupported(
            "rope.freq_base_swa", "different rotation for layers with a window is not implemented"
        )
    key = "attention.sliding_window_pattern"
    slides = keys.flags(key, count)
    if slides is None:
        pattern = keys.integer_or(key, pattern, MAX_LAYERS)
        slides = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(count)]
    kinds = ("full_attention", "sliding_attention")
    config["sliding_window"] = window or None
    config["layer_types"] = [kinds[slide and window > 0] for slide in slides]


def _phi3(keys: Keys, config: Config) -> None:
    window = keys.integer_or("attention.sliding_window", 0, MAX_POSITIONS)
    config["sliding_window"] = window or None
    original = keys.integer_or("rope.scaling.original_context_length", 0, MAX_POSITIONS)
    if original:
        config["original_max_position_embeddings"] = original


def _olmo2(keys: Keys, config: Config) -> None:
    """OLMo 3 is OLMo 2 with windows."""
    _plain_biases(keys, config)
    if keys.integer_or("attention.sliding_window", 0, MAX_POSITIONS):
        config["model_type"] = "olmo3"
        _sliding(keys, config, window=0, pattern=4)


def _granite(keys: Keys, config: Config) -> None:
    _dense(keys, config)
    for key, name in (
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("logit_scale", "logits_scaling"),
    ):
        value = keys.number(key)
        if value:
            config[name] = value
        elif name == "attention_multiplier":
            raise keys.error(key, "is missing")
    if not keys.boolean("rope.scaling.finetuned", True):
        raise keys.unsupported("rope.scaling.finetuned", "a Granite without rotation is not implemented")


def _smollm3(keys: Keys, config: Config) -> None:
    _plain_biases(keys, config)
    config["use_sliding_window"] = False


def _deepseek2(keys: Keys, config: Config) -> None:
    """Version 3 has sigmoid scores; old files without group keys omit that its 256 experts are in 8 groups."""
    rope_dim = config.pop("head_dim")
    assert isinstance(rope_dim, int)
    single = keys.has(
        "attention.key_length_mla"
    )  # else an old file without absorption: heads have their own lengths
    key_length, value_length = (f"attention.{what}_length{'_mla' * single}" for what in ("key", "value"))
    sigmoid = keys.integer_or("expert_gating_func", SOFTMAX, 2**8) == SIGMOID
    used, count = keys.integer("expert_used_count", MAX_TOP_K), keys.integer("expert_count", MAX_EXPERTS)
    usual = (8, 4) if sigmoid and count == _V3_EXPERTS else (1, 1)
    groups, top_groups = (
        keys.integer_or(key, default, MAX_EXPERTS)
        for key, default in zip(("expert_group_count", "expert_group_used_count"), usual, strict=True)
    )
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": keys.integer_or("attention.q_lora_rank", 0, MAX_DIM) or None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank", MAX_DIM),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.integer(key_length, MAX_DIM, low=rope_dim + 1) - rope_dim,
        "v_head_dim": keys.integer(value_length, MAX_DIM),
        "attention_bias": keys.has_tensor("blk.0.attn_kv_a_mqa.bias"),
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", MAX_WIDTH),
        "n_shared_experts": keys.integer_or("expert_shared_count", 0, MAX_EXPERTS),
        "first_k_dense_replace": keys.integer_or("leading_dense_block_count", 0, MAX_LAYERS),
        "routed_scaling_factor": keys.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": top_groups,
    }
    if sigmoid:
        config["model_type"] = "deepseek_v3"
    else:
        config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    scaling = config.get("rope_scaling")
    if (
        isinstance(scaling, dict) and "mscale_all_dim" in scaling
    ):  # the key of this architecture is a tenth of it
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * scaling["mscale_all_dim"], 6)


def _glm(keys: Keys, config: Config) -> None:
    config["attention_bias"] = _projections_have_biases(keys)


def _stablelm(keys: Keys, config: Config) -> None:
    config["use_qkv_bias"] = _projections_have_biases(keys)
    config["qk_layernorm"] = keys.has_tensor("blk.0.attn_q_norm.weight")
    keys.boolean(
        "use_parallel_residual", False
    )  # converters write true if a config omits it; the norms decide
    config["use_parallel_residual"] = not keys.has_tensor("blk.0.ffn_norm.weight")


def _cohere(keys: Keys, config: Config) -> None:
    config["attention_bias"] = _projections_have_biases(keys)
    config["use_qk_norm"] = keys.has_tensor("blk.0.attn_q_norm.weight")
    scale = keys.number("logit_scale")
    if not scale:
        raise keys.error("logit_scale", "is missing")
    config["logit_scale"] = scale


def _cohere2(keys: Keys, config: Config) -> None:
    _cohere(keys, config)
    del config["use_qk_norm"]
    keys.integer("attention.sliding_window", MAX_POSITIONS)
    _sliding(keys, config, window=0, pattern=4)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        model_type="llama", also=("mistral", "ministral", "mixtral"), permuted=True, translate=_llama
    ),
    "mistral3": Architecture(model_type="llama", permuted=True, translate=_dense),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3", translate=_plain_biases),
    "qwen2moe": Architecture(model_type="qwen2_moe", translate=_qwen2_moe),
    "qwen3moe": Architecture(model_type="qwen3_moe", translate=_qwen3_moe),
    "gpt-oss": Architecture(
        model_type="gpt_oss", patterned=True, translate=_gpt_oss, stems={"mlp_norm": "blk.{i}.post_attention_norm"}
    ),
    "gemma": Architecture(model_type="gemma", whole_norms=True, translate=_gemma),
    "gemma2": Architecture(model_type="gemma2", whole_norms=True, patterned=True, translate=_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", whole_norms=True, patterned=True, translate=_gemma3),
    "phi3": Architecture(model_type="phi3", partial=True, translate=_phi3),
    "olmo2": Architecture(model_type="olmo2", also=("olmo3",), patterned=True, translate=_olmo2),
    "granite": Architecture(model_type="granite", permuted=True, translate=_granite),
    "smollm3": Architecture(model_type="smollm3", permuted=True, translate=_smollm3),
    "chatglm": Architecture(model_type="glm", partial=True, translate=_glm),
    "glm4": Architecture(model_type="glm4", partial=True, translate=_glm),
    "deepseek2": Architecture(
        model_type="deepseek_v2", also=("deepseek_v3", "kimi_k2"), latent=True, translate=_deepseek2
    ),
    "stablelm": Architecture(
        model_type="stablelm", epsilon=LAYER_EPSILON, partial=True, translate=_stablelm,
        names={
            "q_norm": "model.layers.{i}.self_attn.q_layernorm", "k_norm": "model.layers.{i}.self_attn.k_layernorm",
        },
    ),
    "command-r": Architecture(model_type="cohere", epsilon=LAYER_EPSILON, translate=_cohere),
    "cohere2": Architecture(model_type="cohere2", epsilon=LAYER_EPSILON, patterned=True, translate=_cohere2),
}  # fmt: skip

# WeightNames field -> name in the file, without ".weight" or ".bias".
STEMS = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{i}.attn_norm",
    "mlp_norm": "blk.{i}.ffn_norm",
    "attn_post_norm": "blk.{i}.post_attention_norm",
    "mlp_post_norm": "blk.{i}.post_ffw_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "qkv": "blk.{i}.attn_qkv",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "gate_up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "sinks": "blk.{i}.attn_sinks",
    "q_a": "blk.{i}.attn_q_a",
    "q_a_norm": "blk.{i}.attn_q_a_norm",
    "q_b": "blk.{i}.attn_q_b",
    "kv_a": "blk.{i}.attn_kv_a_mqa",
    "kv_a_norm": "blk.{i}.attn_kv_a_norm",
    "kv_b": "blk.{i}.attn_kv_b",
    "router": "blk.{i}.ffn_gate_inp",
    "correction": "blk.{i}.exp_probs_b",
    "expert_gate": "blk.{i}.ffn_gate_exps",
    "expert_up": "blk.{i}.ffn_up_exps",
    "expert_down": "blk.{i}.ffn_down_exps",
    "shared_gate": "blk.{i}.ffn_gate_shexp",
    "shared_up": "blk.{i}.ffn_up_shexp",
    "shared_down": "blk.{i}.ffn_down_shexp",
    "shared_scale": "blk.{i}.ffn_gate_inp_shexp",
}
# Files before April 2024 have one tensor per expert: blk.3.ffn_gate.7
SINGLE_EXPERTS = {"ffn_gate": "expert_gate", "ffn_up": "expert_up", "ffn_down": "expert_down"}
# Vectors in a file that are matrices of one row in a checkpoint.
ROWS = {"shared_scale"}
# Names without a suffix in a checkpoint -> their suffix in a file.
BARE = {"sinks": "weight", "correction": "bias"}
