"""config.json to ModelSpec: transformers' own configs, the same facts in older keys, and their meaning."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.spec import ModelFacts, ModelSpec, read_model
from quire.spec.config_reader import ConfigReader
from quire.spec.families import FAMILIES, read_spec

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}
OTHERS = {
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "olmo2": "Olmo2Config",
    "granite": "GraniteConfig",
    "stablelm": "StableLmConfig",
    "cohere": "CohereConfig",
    "cohere2": "Cohere2Config",
}


def saved(folder: Path, model_type: str, **changes: Any) -> ModelFacts:
    """A config as transformers writes it today."""
    config = getattr(transformers, CLASSES[model_type])(**{**TINY, "dtype": "float32", **changes})
    config.save_pretrained(folder)
    return read_model(folder)


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    """A config written by hand; a value of ... leaves the key out."""
    values = {**TINY, "model_type": model_type, "torch_dtype": "float32", **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    return read_spec(ConfigReader(json.loads(json.dumps(values))))[0]


def windows(spec: ModelSpec) -> list[int]:
    return [layer.mixer.window for layer in spec.layers]


YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "truncate": False}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", **YARN},
]


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_new_and_old_style_give_equal_specs(
    tmp_path: Path, model_type: str, rope: dict[str, Any], type_key: str
) -> None:
    facts = saved(tmp_path, model_type, rope_parameters={**rope, "rope_theta": 5e5})
    scaling = {type_key: rope["rope_type"], **{k: v for k, v in rope.items() if k != "rope_type"}}
    old = spec_of(
        model_type,
        rope_theta=5e5,
        rope_scaling=None if rope["rope_type"] == "default" else scaling,
        head_dim=16 if model_type != "qwen3" else 128,
    )
    assert facts.spec == old
    assert facts.notices == ()


@pytest.mark.parametrize("model_type", CLASSES | OTHERS)
def test_every_tensor_of_a_transformers_model_is_accounted_for(model_type: str) -> None:
    """Names, shapes, biases and norms of the program equal those of the model that transformers builds."""
    from quire.program.formats import NumberFormats
    from quire.program.lower import lower

    rarer = {"use_qkv_bias": True, "qk_layernorm": True, "use_qk_norm": True, "use_parallel_residual": True}
    for changes in (
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        rarer,
    ):
        made = getattr(transformers, (CLASSES | OTHERS)[model_type])
        known = {key: value for key, value in changes.items() if key not in rarer or hasattr(made(), key)}
        config = made(**TINY, **known)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        spec, _ = read_spec(ConfigReader(config.to_dict()))
        program = lower(spec, NumberFormats())
        assert {part.tensor: part.shape for p in program.params for part in p.parts} == expected


def test_llama_biases_and_tying() -> None:
    spec = spec_of("llama", attention_bias=True, tie_word_embeddings=True, pretraining_tp=4)
    attention = spec.layers[0].mixer
    assert (attention.qkv_bias, attention.out_bias, spec.layers[0].mlp.bias) == (True, True, False)
    assert spec.tied
    assert spec_of("llama", mlp_bias=True).layers[0].mlp.bias
    assert not spec_of("llama").tied


def test_defaults_of_absent_keys_are_those_of_transformers() -> None:
    for model_type, name in CLASSES.items():
        kept = {key: TINY[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
        kept |= {"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 1024}
        config = getattr(transformers, name)(**kept)
        absent = dict.fromkeys(set(TINY) - set(kept), ...)
        spec = spec_of(model_type, **absent, **kept)
        attention = spec.layers[0].mixer
        assert attention.kv_heads == config.num_key_value_heads
        assert attention.head_dim == (getattr(config, "head_dim", None) or 32)
        assert attention.rope.theta == config.rope_parameters["rope_theta"]
        assert attention.scale == attention.head_dim**-0.5
        assert spec.max_positions == config.max_position_embeddings
        assert spec.norm.eps == config.rms_norm_eps
        assert spec.layers[0].mlp.act == config.hidden_act
        assert windows(spec) == [config.sliding_window or 0 if model_type == "mistral" else 0] * 2


def test_null_kv_heads_mean_as_many_as_heads() -> None:
    for model_type in CLASSES:
        assert spec_of(model_type, num_key_value_heads=None).layers[0].mixer.kv_heads == 4


def test_head_dim() -> None:
    assert spec_of("llama", head_dim=24).layers[0].mixer.head_dim == 24
    assert spec_of("llama", head_dim=24, hidden_size=66).layers[0].mixer.rope.dim == 24
    assert spec_of("qwen3").layers[0].mixer.head_dim == 128
    assert spec_of("mistral", head_dim=None).layers[0].mixer.head_dim == 16
    assert spec_of("qwen3").layers[0].mixer.qk_norm


def test_mistral_window() -> None:
    assert windows(spec_of("mistral")) == [4096] * 3
    assert windows(spec_of("mistral", sliding_window=None)) == [0] * 3
    assert windows(spec_of("mistral", sliding_window=7)) == [7] * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(spec_of("mistral", sliding_window=7, layer_types=types)) == [7, 0, 7]
    assert windows(spec_of("ministral", sliding_window=7, layer_types=types)) == [7, 0, 7]
    assert windows(spec_of("mistral", sliding_window=None, layer_types=["full_attention"] * 3)) == [0] * 3


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type: str, tmp_path: Path) -> None:
    assert windows(spec_of(model_type, sliding_window=7, max_window_layers=1)) == [0, 0, 0]
    used = {"use_sliding_window": True, "sliding_window": 7}
    assert windows(spec_of(model_type, max_window_layers=1, **used)) == [0, 7, 7]
    assert windows(spec_of(model_type, **used)) == [0, 0, 0]  # max_window_layers is 28
    assert windows(spec_of(model_type, use_sliding_window=True, max_window_layers=0)) == [4096] * 3
    assert (
        windows(spec_of(model_type, use_sliding_window=True, sliding_window=None, max_window_layers=0))
        == [0] * 3
    )
    types = ["sliding_attention", "attention", "full_attention"]
    assert windows(spec_of(model_type, layer_types=types, max_window_layers=0, **used)) == [7, 0, 0]
    facts = saved(tmp_path, model_type, max_window_layers=2, **used)
    assert windows(facts.spec) == [0, 0, 7]


def test_llama_with_the_leftovers_of_another_family() -> None:
    assert windows(spec_of("llama", sliding_window=4096, use_sliding_window=False)) == [0] * 3
    assert windows(spec_of("llama", sliding_window=None, layer_types=["full_attention"] * 3)) == [0] * 3


def test_activations() -> None:
    names = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
    }
    for name, act in names.items():
        assert spec_of("llama", hidden_act=name).layers[0].mlp.act == act


def test_dtype_keys() -> None:
    assert spec_of("llama", torch_dtype="float16").dtype == "float16"
    assert spec_of("llama", torch_dtype="float16", dtype="bfloat16").dtype == "bfloat16"
    config = ConfigReader({**TINY, "model_type": "llama"})
    assert read_spec(config)[0].dtype == "bfloat16"
    assert "dtype" in config.notices[0]


def test_max_positions_follow_the_scaling() -> None:
    def positions(**scaling: Any) -> int:
        return spec_of("llama", rope_scaling=scaling).max_positions

    assert positions(type="linear", factor=2.5) == 1280
    assert positions(type="dynamic", factor=4.0) == 512
    assert positions(type="llama3", **LLAMA3) == 512
    assert positions(type="yarn", factor=4.0, original_max_position_embeddings=512) == 2048
    assert positions(type="yarn", factor=4.0, original_max_position_embeddings=128) == 512
    assert positions(type="yarn", factor=2.0, original_max_position_embeddings=128) == 512


def test_architecture_alone_identifies_a_family() -> None:
    spec, name = read_spec(ConfigReader({**TINY, "architectures": ["Qwen2ForCausalLM"]}))
    assert name == "Qwen2ForCausalLM"
    assert spec.layers[0].mixer.qkv_bias


def test_readers_of_the_registry_exist() -> None:
    for family in FAMILIES:
        module, function = family.reader.split(".")
        assert callable(getattr(import_module(f"quire.spec.families.{module}"), function)), family.model_type


def test_registry_names_exist_in_transformers() -> None:
    for family in FAMILIES:
        if family.model_type in {"kimi_k2", "new"}:  # released with code of their own
            continue
        assert transformers.AutoConfig.for_model(family.model_type).model_type == family.model_type
        assert any(hasattr(transformers, name) for name in family.architectures)
