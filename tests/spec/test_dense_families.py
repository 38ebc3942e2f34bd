"""Keys of the families other than Llama: old and new style, defaults of transformers, and refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.spec import ModelSpec, Rope
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.spec.rope import inverse_frequencies
from quire.types import CheckpointError, UnsupportedModelError

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def spec_of(model_type: str, **changes: Any) -> ModelSpec:
    """A config written by hand; a value of ... leaves the key out."""
    values = {**TINY, "model_type": model_type, "torch_dtype": "float32", **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    return read_spec(ConfigReader(json.loads(json.dumps(values))))[0]


def saved(config_class: str, **changes: Any) -> ModelSpec:
    """The same through transformers' config class, as it writes it today."""
    config = getattr(transformers, config_class)(**{**TINY, **changes})
    return read_spec(ConfigReader(json.loads(config.to_json_string())))[0]


def ropes(spec: ModelSpec) -> list[Rope]:
    found = [layer.mixer.rope for layer in spec.layers]
    return [rope for rope in found if rope is not None]


def windows(spec: ModelSpec) -> list[int]:
    return [layer.mixer.window for layer in spec.layers]


SHORT, LONG = [1.0 + 0.1 * k for k in range(6)], [2.0 + k for k in range(6)]
PHI = {
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": 128, "tie_word_embeddings": True,
    "rope_theta": 2e4,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi_old_and_new_keys(kind: str) -> None:
    factors = {"short_factor": SHORT, "long_factor": LONG}
    old = spec_of("phi3", **PHI, rope_scaling={"type": kind, **factors})
    new = saved(
        "Phi3Config", original_max_position_embeddings=128, tie_word_embeddings=True,
        rope_parameters={"rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.75, **factors},
    )  # fmt: skip
    assert old.layers == new.layers
    assert (old.max_positions, old.longest) == (new.max_positions, new.longest) == (128, 512)
    rope = ropes(old)[0]
    assert (rope.kind, rope.dim, rope.original_max, rope.factor) == ("longrope", 12, 128, 4.0)
    assert rope.attention_factor == pytest.approx((1 + np.log(4) / np.log(128)) ** 0.5)


@pytest.mark.parametrize("length", [1, 128, 129, 512])
def test_longrope_equals_transformers_at_the_length_of_the_engine(length: int) -> None:
    """One set of factors for all sequences, chosen once: docs/decisions/0014."""
    factors = {"short_factor": SHORT, "long_factor": LONG}
    rope = ropes(spec_of("phi3", **PHI, rope_scaling={"type": "longrope", **factors}))[0]
    parameters = {"rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.75, **factors}
    config = transformers.Phi3Config(**TINY, original_max_position_embeddings=128, rope_parameters=parameters)
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    np.testing.assert_allclose(inverse_frequencies(rope, length), expected.numpy(), rtol=3e-7)
    assert rope.attention_factor == pytest.approx(factor)


def test_phi_windows() -> None:
    assert windows(spec_of("phi3", sliding_window=47)) == [47] * 6
    assert windows(spec_of("phi3")) == windows(spec_of("phi3", sliding_window=None)) == [0] * 6


def test_gemma_gelu_is_its_tanh_approximation() -> None:
    for keys in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}):
        assert spec_of("gemma", **keys).layers[0].mlp.act == "gelu_tanh"
    spec = spec_of("gemma")
    assert (spec.embed_scale, spec.norm.added, spec.tied) == (8.0, 1.0, True)
    assert spec.layers[0].mixer.head_dim == 256


def test_gemma2() -> None:
    spec = spec_of("gemma2", sliding_window=9, query_pre_attn_scalar=144)
    assert windows(spec) == [9, 0, 9, 0, 9, 0]
    attention = spec.layers[0].mixer
    assert (attention.softcap, spec.logits_cap, attention.scale) == (50.0, 30.0, 1 / 12)
    assert (spec.layers[0].pre_norm, spec.layers[0].post_norm) == (True, True)
    off = spec_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.layers[0].mixer.softcap, off.logits_cap) == (0.0, 0.0)
    assert saved("Gemma2Config", sliding_window=9, query_pre_attn_scalar=144).layers == spec.layers


def test_gemma3_old_and_new_keys() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = spec_of(
        "gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling, sliding_window=9
    )
    new = saved(
        "Gemma3TextConfig", sliding_window=9,
        rope_parameters={"full_attention": {**scaling, "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    )  # fmt: skip
    assert old.layers == new.layers
    assert windows(old) == [9, 9, 9, 9, 9, 0]
    assert [(rope.theta, rope.kind) for rope in ropes(old)[4:]] == [(1e4, "default"), (1e6, "linear")]
    assert old.max_positions == 512  # what the config says is the scaled context
    assert windows(spec_of("gemma3_text", sliding_window=9, sliding_window_pattern=2)) == [9, 0] * 3
    assert [rope.theta for rope in ropes(spec_of("gemma3_text"))[4:]] == [1e4, 1e6]


def test_gemma3_with_an_image_tower_is_read_as_text() -> None:
    text = {key: value for key, value in TINY.items() if key not in {"vocab_size", "num_attention_heads"}}
    config = ConfigReader(
        {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text, "vision_config": {}}
    )
    spec, architecture = read_spec(config)
    assert architecture == "Gemma3ForConditionalGeneration"
    assert (spec.vocab, spec.layers[0].mixer.heads) == (262_208, 8)
    assert any("image tower" in notice for notice in config.notices)
    with pytest.raises(CheckpointError, match="text_config"):
        read_spec(ConfigReader({"model_type": "gemma3"}))


def test_olmo3_old_and_new_keys() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    old = spec_of("olmo3", rope_theta=5e5, rope_scaling=scaling, sliding_window=9)
    new = saved(
        "Olmo3Config", sliding_window=9,
        rope_parameters={"full_attention": {**scaling, "rope_theta": 5e5},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}},
    )  # fmt: skip
    assert old.layers == new.layers
    assert windows(old) == [9, 9, 9, 0, 9, 9]
    assert [rope.kind for rope in ropes(old)][2:4] == ["default", "yarn"]


def test_layers_that_do_not_rotate() -> None:
    spec = spec_of("cohere2", sliding_window=9)
    assert [layer.mixer.rope is None for layer in spec.layers] == [
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    assert windows(spec) == [9, 9, 9, 0, 9, 9]
    assert [x.mixer.rope is None for x in spec_of("smollm3").layers] == [False] * 3 + [True] + [False] * 2
    chosen = spec_of("smollm3", no_rope_layers=[1, 0, 1, 1, 1, 0])
    assert [layer.mixer.rope is None for layer in chosen.layers] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]


def test_rotated_part_of_a_head() -> None:
    assert ropes(spec_of("stablelm"))[0].dim == 4
    assert ropes(spec_of("stablelm", partial_rotary_factor=0.5))[0].dim == 8
    assert ropes(spec_of("stablelm", rope_parameters={"partial_rotary_factor": 1.0}))[0].dim == 16
    assert ropes(spec_of("glm", head_dim=16))[0].dim == 8
    assert ropes(spec_of("glm"))[0].interleaved
    assert not ropes(spec_of("stablelm"))[0].interleaved


def test_cohere() -> None:
    spec = spec_of("cohere", use_qk_norm=True)
    norm = spec.layers[0].mixer.qk_norm
    assert norm is not None
    assert (norm.norm.kind, norm.shared, norm.whole) == ("layer", False, False)
    assert (spec.logits_scale, spec.layers[0].parallel, spec.tied) == (0.0625, True, True)


def test_granite_multipliers_default_to_one() -> None:
    spec = spec_of("granite")
    assert (spec.embed_scale, spec.residual_scale, spec.logits_scale) == (1.0, 1.0, 1.0)
    assert spec.layers[0].mixer.scale == 1.0
    assert spec_of("granite", logits_scaling=8.0).logits_scale == 0.125


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("llama", {"residual_multiplier": 0.2}, ["residual_multiplier", "0.2"]),
        ("llama", {"query_pre_attn_scalar": 256}, ["query_pre_attn_scalar"]),
        ("qwen3", {"use_qk_norm": True}, ["use_qk_norm"]),
        ("qwen3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}, "sliding_attention": {}, "mamba": {}}}, ["mamba"]),
        ("cohere2", {"layer_types": ["chunked_attention"] * 6}, ["chunked_attention"]),
        ("cohere", {"no_rope_layers": [1, 0]}, ["no_rope_layers"]),
    ],
)  # fmt: skip
def test_not_implemented(model_type: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(model_type, **changes)
    assert all(word in str(caught.value) for word in words)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("phi3", {"rope_scaling": {"type": "longrope"}}, ["short_factor", "missing"]),
        ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7}}, ["long_factor", "8"]),
        ("phi3", {"rope_scaling": {**LONGROPE, "short_factor": [0.0] * 8}}, ["short_factor[0]"]),
        ("phi3", {"rope_scaling": {**LONGROPE, "short_factor": ["1"] * 8}}, ["short_factor[0]", "'1'"]),
        ("phi3", {"partial_rotary_factor": 0.7}, ["partial_rotary_factor", "11"]),
        ("stablelm", {"partial_rotary_factor": 0.0}, ["partial_rotary_factor"]),
        ("stablelm", {"partial_rotary_factor": 2}, ["partial_rotary_factor", "2"]),
        ("granite", {"logits_scaling": 0}, ["logits_scaling"]),
        ("gemma2", {"attn_logit_softcapping": 0}, ["attn_logit_softcapping"]),
        ("gemma2", {"query_pre_attn_scalar": -1}, ["query_pre_attn_scalar"]),
        ("smollm3", {"no_rope_layers": [1, 1]}, ["no_rope_layers", "6"]),
        ("cohere2", {"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
    ],
)  # fmt: skip
def test_malformed(model_type: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(model_type, **changes)
    assert all(word in str(caught.value) for word in words)
