"""Configs of released models with latent attention: their values, in old and new keys, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tools.models_table import example_config

from quire.spec import LatentAttention, ModelSpec, MoE
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.types import CheckpointError, QuireError, UnsupportedModelError

YARN = example_config("deepseek_v3")["rope_scaling"]


def read(model_type: str, **changes: Any) -> ModelSpec:
    values = {"model_type": model_type, "dtype": "bfloat16", **example_config(model_type), **changes}
    return read_spec(ConfigReader({key: value for key, value in values.items() if value is not ...}))[0]


def attention(spec: ModelSpec) -> LatentAttention:
    (found,) = {layer.mixer for layer in spec.layers}
    assert isinstance(found, LatentAttention)
    return found


def test_deepseek_v3() -> None:
    spec = read("deepseek_v3")
    att, rope = attention(spec), attention(spec).rope
    assert (att.heads, att.q_rank, att.kv_rank, att.nope_dim, att.rope_dim, att.v_dim) == (
        128,
        1536,
        512,
        128,
        64,
        128,
    )
    assert (rope.kind, rope.dim, rope.interleaved, rope.factor, rope.original_max) == (
        "yarn",
        64,
        True,
        40.0,
        4096,
    )
    assert rope.attention_factor == 1.0  # mscale equals mscale_all_dim
    assert att.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (spec.max_positions, len(spec.layers), spec.ignored[-1]) == (163_840, 61, r"model\.layers\.61\..*")
    moe = spec.layers[3].mlp
    assert not isinstance(spec.layers[2].mlp, MoE)
    assert isinstance(moe, MoE)
    router = moe.router
    assert (router.experts, router.top_k, router.groups, router.top_groups) == (256, 8, 8, 4)
    assert (router.scores, router.group_score, router.correction, router.renormalise) == (
        "sigmoid",
        "top2",
        True,
        True,
    )
    assert (router.scale, moe.width, moe.shared and moe.shared.width) == (2.5, 2048, 2048)


def test_deepseek_v2_lite() -> None:
    spec = read("deepseek_v2")
    att = attention(spec)
    assert (att.heads, att.q_rank) == (16, 0)
    assert att.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    moe = spec.layers[1].mlp
    assert isinstance(moe, MoE)
    assert (moe.router.scores, moe.router.groups, moe.router.renormalise) == ("softmax", 1, False)
    assert (moe.shared and moe.shared.width) == 2 * 1408


def test_deepseek_v2_groups() -> None:
    spec = read(
        "deepseek_v2", topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0,
        q_lora_rank=...,
    )  # fmt: skip
    moe = spec.layers[1].mlp
    assert isinstance(moe, MoE)
    assert (moe.router.groups, moe.router.top_groups, moe.router.group_score) == (8, 3, "max")
    assert attention(spec).q_rank == 1536  # the default of the class


def test_kimi_k2_is_a_deepseek_v3() -> None:
    """Another name for the same keys: one group, fewer heads, more experts."""
    spec = read("kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    assert spec == read("deepseek_v3", **example_config("kimi_k2"))
    moe = spec.layers[1].mlp
    assert isinstance(moe, MoE)
    assert (moe.router.groups, moe.router.experts, attention(spec).heads) == (1, 384, 64)
    assert spec.max_positions == 131_072


def test_new_keys_say_the_same() -> None:
    new = {"rope_type" if key == "type" else key: value for key, value in YARN.items()}
    spec = read(
        "deepseek_v3", rope_scaling=..., rope_theta=..., rope_parameters={**new, "rope_theta": 10000.0}
    )
    assert spec == read("deepseek_v3")


def test_temperatures_of_queries_and_keys() -> None:
    """mscale / mscale_all_dim multiplies cos and sin, mscale_all_dim twice the scale."""
    att = attention(read("deepseek_v3", rope_scaling={**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}))
    t = [0.1 * mscale * math.log(40) + 1 for mscale in (0.5, 1.0)]
    assert att.rope.attention_factor == pytest.approx(t[0] / t[1])
    assert att.scale == pytest.approx(192**-0.5 * t[1] ** 2)
    plain = attention(read("deepseek_v3", rope_scaling=None, max_position_embeddings=4096))
    assert plain.scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("deepseek_v3", {"num_key_value_heads": 8}, ["num_key_value_heads", "8", "128"]),
        ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        ("deepseek_v3", {"topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "group_limited_greedy"]),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, ["scoring_func", "sigmoid"]),
        ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob"]),
        ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, ["qk_rope_head_dim", "63", "even"]),
        ("deepseek_v3", {"kv_lora_rank": 511}, ["kv_lora_rank", "511"]),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, ["mscale_all_dim"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_not_implemented(model_type: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(model_type, **changes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n_group": 7}, "n_group: 7 does not divide"),
        ({"topk_group": 9}, "topk_group"),
        ({"n_group": 256, "topk_group": 4}, "topk_group: 4 groups have fewer than 8 experts"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"kv_lora_rank": 10**9}, "kv_lora_rank"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"v_head_dim": "128"}, "v_head_dim"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers"),
    ],
    ids=lambda value: "",
)
def test_malformed(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(QuireError, match=word) as caught:
        read("deepseek_v3", **changes)
    assert isinstance(caught.value, CheckpointError | UnsupportedModelError)
