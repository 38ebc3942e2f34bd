"""Rotary tables against transformers, for every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.spec import ModelSpec, Rope
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec
from quire.spec.rope import cos_sin, inverse_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default-theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-fraction": {"rope_type": "linear", "factor": 2.7, "rope_theta": 1e6},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512, "rope_theta": 5e5},
    "llama3-32": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64},
    "llama3-default-original": LLAMA3,
    "yarn": YARN,
    "yarn-default-original": {"rope_type": "yarn", "factor": 2.0},
    "yarn-betas": {**YARN, "beta_fast": 8, "beta_slow": 0.5},
    "yarn-no-truncation": {**YARN, "truncate": False, "factor": 3.3},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.25},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-mscale-alone": {**YARN, "mscale": 0.7},
    "yarn-factor-one": {**YARN, "factor": 1.0},
    "yarn-implied-factor": {**YARN, "factor": None},
}


def llama(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(rope)
    )


def spec_of(config: LlamaConfig | Qwen3Config) -> ModelSpec:
    return read_spec(ConfigReader(config.to_dict()))[0]


def rope_of(config: LlamaConfig | Qwen3Config) -> Rope:
    return spec_of(config).layers[0].mixer.rope


@pytest.mark.parametrize("name", CASES)
def test_tables_equal_transformers(name: str) -> None:
    config = llama(CASES[name])
    rope = rope_of(config)
    reference = LlamaRotaryEmbedding(config)
    ours = inverse_frequencies(rope, 2048)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(
        ours, reference.inv_freq.numpy(), rtol=3e-7, atol=0
    )  # two units in the last place
    assert rope.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-15)
    positions = torch.arange(2048)[None]
    expected = reference(torch.zeros(1, dtype=torch.float32), positions)
    for table, other in zip(cos_sin(rope, 2048), expected, strict=True):
        # One unit in the last place of a frequency moves an angle near 2048 radians by 1e-4.
        np.testing.assert_allclose(table, other[0, :, : rope.dim // 2].numpy(), atol=2e-4)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_wide_heads(kind: str) -> None:
    """head_dim is a key of its own in Qwen3; the rotation covers it whole."""
    config = Qwen3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        rope_parameters=dict(CASES[kind]),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config)
    np.testing.assert_allclose(inverse_frequencies(rope_of(config), 16), expected.numpy(), rtol=2e-7)
    assert rope_of(config).attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 3000, 8192])
def test_dynamic_equals_transformers_at_the_length_it_was_made_for(length: int) -> None:
    config = llama(CASES["dynamic"])
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    np.testing.assert_allclose(inverse_frequencies(rope_of(config), length), expected.numpy(), rtol=2e-7)


def test_dynamic_is_plain_up_to_the_original_length() -> None:
    plain = inverse_frequencies(Rope(theta=1e4, dim=128), 2048)
    rope = rope_of(llama(CASES["dynamic"]))
    assert np.array_equal(inverse_frequencies(rope, 100), plain)
    assert np.array_equal(inverse_frequencies(rope, 2048), plain)
    assert not np.array_equal(inverse_frequencies(rope, 2049), plain)


def test_only_dynamic_depends_on_the_length() -> None:
    for name, parameters in CASES.items():
        rope = rope_of(llama(parameters))
        same = np.array_equal(inverse_frequencies(rope, 16), inverse_frequencies(rope, 10**6))
        assert same == (name != "dynamic")


def test_top_level_original_length_wins() -> None:
    """transformers gives priority to a top-level original_max_position_embeddings."""
    config = {**llama(YARN).to_dict(), "original_max_position_embeddings": 256}
    rope = read_spec(ConfigReader(config))[0].layers[0].mixer.rope
    assert rope.original_max == 256


def test_ignored_rope_keys_are_reported() -> None:
    values = llama({"rope_type": "default"}).to_dict()
    values["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "beta_fast": 32, "rope_theta": 5e5}
    config = ConfigReader({**values, "rope_theta": 1e4, "dtype": "float32"})
    assert read_spec(config)[0].layers[0].mixer.rope.theta == 5e5
    assert len(config.notices) == 2
    assert "rope_theta" in config.notices[0]
    assert "beta_fast" in config.notices[1]
