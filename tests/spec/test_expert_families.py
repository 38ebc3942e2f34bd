"""Keys of the families with experts: old and new style, defaults of transformers, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.spec import Attention, ModelSpec, MoE
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.spec.model import ClampedSwiGLU
from quire.types import CheckpointError, UnsupportedModelError

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
CLASSES = {
    "mixtral": "MixtralConfig", "qwen2_moe": "Qwen2MoeConfig", "qwen3_moe": "Qwen3MoeConfig", "gpt_oss": "GptOssConfig",
}  # fmt: skip


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    """A config written by hand; a value of ... leaves the key out."""
    values = {**TINY, "model_type": model_type, "torch_dtype": "float32", **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    return read_spec(ConfigReader(json.loads(json.dumps(values))))[0]


def saved(model_type: str, **changes: Any) -> ModelSpec:
    """The same through transformers' config class, as it writes it today."""
    config = getattr(transformers, CLASSES[model_type])(**{**TINY, "dtype": "float32", **changes})
    return read_spec(ConfigReader(json.loads(config.to_json_string())))[0]


def experts(spec: ModelSpec) -> list[MoE | None]:
    return [layer.mlp if isinstance(layer.mlp, MoE) else None for layer in spec.layers]


@pytest.mark.parametrize("model_type", CLASSES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    assert spec_of(model_type) == saved(model_type)


@pytest.mark.parametrize("model_type", CLASSES)
def test_every_tensor_of_a_transformers_model_is_accounted_for(model_type: str) -> None:
    """Elements: stacked experts have other names and shapes in memory."""
    config = getattr(transformers, CLASSES[model_type])(**TINY, mlp_only_layers=[1], num_experts_per_tok=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = read_spec(ConfigReader(json.loads(config.to_json_string())))[0]
    params = lower(spec, NumberFormats("f32", "f32")).params
    assert sum(p.rows * max(p.cols, 1) for p in params) == sum(p.numel() for p in model.parameters())


def test_number_of_experts_under_both_names() -> None:
    """Released configs say num_experts, transformers 5 writes num_local_experts."""
    old, new = spec_of("qwen3_moe", num_experts=16), spec_of("qwen3_moe", num_local_experts=16)
    assert old == new == saved("qwen3_moe", num_experts=16)
    with pytest.raises(CheckpointError, match=r"num_experts: 16 contradicts num_local_experts = 8"):
        spec_of("qwen3_moe", num_experts=16, num_local_experts=8)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, []),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"mlp_only_layers": [1, 3]}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [0, 2, 3]),
        ({"num_experts": 0}, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_dense_layers(model_type: str, changes: dict[str, Any], dense: list[int]) -> None:
    found = experts(spec_of(model_type, **changes))
    assert [i for i, moe in enumerate(found) if moe is None] == dense


def test_shared_expert_of_qwen2() -> None:
    moe = experts(spec_of("qwen2_moe", shared_expert_intermediate_size=48, moe_intermediate_size=24))[0]
    assert moe is not None
    assert moe.shared is not None
    assert (moe.width, moe.shared.width, moe.shared_gate, moe.router.renormalise) == (24, 48, True, False)
    assert experts(spec_of("qwen3_moe", norm_topk_prob=True))[0].router.renormalise  # type: ignore[union-attr]


def test_gpt_oss_as_released() -> None:
    """Every other layer has a window, all have sinks; YaRN over fractional dimensions; a clamped gate."""
    scaling = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }  # fmt: skip
    keys = {"max_position_embeddings": 131072, "num_local_experts": 32, "num_experts_per_tok": 4}
    released = spec_of(
        "gpt_oss", **keys, rope_scaling=scaling, rope_theta=150000, initial_context_length=4096, swiglu_limit=7.0,
        experts_per_token=4, sliding_window=128, attention_bias=True,
    )  # fmt: skip
    assert released == spec_of("gpt_oss", **keys)
    attention = [layer.mixer for layer in released.layers]
    assert all(isinstance(a, Attention) and a.sinks and a.qkv_bias and a.out_bias for a in attention)
    assert [a.window for a in attention if isinstance(a, Attention)] == [128, 0, 128, 0]
    moe = experts(released)[0]
    assert moe is not None
    assert (moe.act, moe.bias, moe.router.bias) == (ClampedSwiGLU(1.702, 7.0), True, True)
    rope = attention[0].rope
    assert rope is not None
    assert (rope.kind, rope.factor, rope.truncate, rope.theta) == ("yarn", 32.0, False, 150_000.0)
    assert rope.attention_factor == pytest.approx(1.3465735902799727)


@pytest.mark.parametrize(
    ("model_type", "changes", "error"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok: 9 is more than the 8 experts"),
        ("mixtral", {"num_local_experts": 100_000}, r"num_local_experts: 100000 is not in \[1, 1024\]"),
        ("mixtral", {"num_local_experts": True}, r"num_local_experts: True is not an integer"),
        ("qwen3_moe", {"num_experts_per_tok": 128}, r"num_experts_per_tok: 128 is not in \[1, 64\]"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, r"mlp_only_layers\[0\]: 4 is not in \[0, 3\]"),
        ("qwen3_moe", {"mlp_only_layers": 3}, r"mlp_only_layers: 3 is not a list of integers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step: 0 is not in"),
        ("qwen3_moe", {"n_group": 4}, r"n_group = 4 is not supported"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, r"scoring_func = 'sigmoid' is not supported"),
        ("mixtral", {"routed_scaling_factor": 2.5}, r"routed_scaling_factor = 2.5 is not supported"),
        ("gpt_oss", {"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported"),
        ("gpt_oss", {"swiglu_limit": 0}, r"swiglu_limit: 0 is not in"),
    ],
)
def test_refusals(model_type: str, changes: dict[str, Any], error: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=error):
        spec_of(model_type, **changes)
