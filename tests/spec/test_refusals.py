"""Every config that is malformed or needs something not implemented is refused, naming key and value."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.spec import read_model
from quire.spec.config_reader import ConfigReader
from quire.spec.consistency import check_token_ids, check_tokenizer_size
from quire.spec.families import FAMILIES, read_spec
from quire.types import CheckpointError, UnsupportedModelError

BASE: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32",
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


def read(**changes: Any) -> None:
    values = {**BASE, **changes}
    read_spec(ConfigReader({key: value for key, value in values.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "gpt2", "llama, mistral, ministral, qwen2, qwen3"]),
        ({"model_type": ..., "architectures": ...}, ["model_type", "null", "supported"]),
        ({"model_type": ..., "architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel"]),
        ({"architectures": ["LlamaForTokenClassification"]}, ["architectures", "LlamaForTokenClassification"]),
        ({"model_type": "bert", "architectures": ["BertModel"], "is_decoder": True}, ["is_decoder", "True"]),
        ({"model_type": "bert", "architectures": ["BertModel"], "position_embedding_type": "relative_key"},
         ["position_embedding_type", "relative_key"]),
        ({"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "prenorm": True}, ["prenorm", "True"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "relu2", "silu"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder"]),
        ({"add_cross_attention": True}, ["add_cross_attention"]),
        ({"is_causal": False}, ["is_causal"]),
        ({"dual_chunk_attention_config": {"chunk_size": 9}}, ["dual_chunk_attention_config"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"dtype": ..., "torch_dtype": "int8"}, ["torch_dtype", "int8"]),
        ({"sliding_window": 128}, ["sliding_window", "128"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "linear_attention"]),
        ({"model_type": "qwen2", "architectures": ..., "layer_types": ["attention", "mamba"]}, ["mamba"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "proportional"}}, ["rope_type", "proportional", "yarn"]),
        ({"rope_scaling": {"type": "su"}}, ["type", "su"]),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, ["type", "mrope"]),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, ["mrope_section"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, ["alpha", "1000"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention", "per layer"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, ["rope_scaling", "dynamic"]),
    ],
)  # fmt: skip
def test_not_implemented(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(**changes)
    for word in words:
        assert word in str(caught.value)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": ...}, ["vocab_size", "missing"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000", "1024"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 2.0}, ["num_hidden_layers", "2.0", "integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers", "'2'"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"vocab_size": 2**63}, ["vocab_size"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads", "8"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"hidden_size": 60}, ["head_dim", "15"]),
        ({"head_dim": 2**20}, ["head_dim"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps", "number"]),
        ({"hidden_act": 3}, ["hidden_act", "3", "string"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"attention_bias": 1}, ["attention_bias", "1"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({"architectures": [1]}, ["architectures", "list"]),
        ({"model_type": 7}, ["model_type", "7"]),
        ({"rope_theta": 0.0}, ["rope_theta", "0.0"]),
        ({"rope_theta": 1.0}, ["rope_theta", "1.0"]),
        ({"rope_theta": float("nan")}, ["rope_theta", "nan"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'", "object"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor", "0"]),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, ["factor", "nan"]),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, ["factor", "inf"]),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, ["factor", "'4'"]),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
         ["rope_scaling", "rope_parameters"]),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor", "low_freq_factor"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["low_freq_factor", "missing"]),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, ["original_max_position"]),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 512}}, ["factor", "missing"]),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, ["beta_fast", "beta_slow"]),
        ({"rope_scaling": {**YARN, "attention_factor": 0}}, ["attention_factor"]),
        ({"rope_scaling": {**YARN, "truncate": None}}, ["truncate"]),
        ({"model_type": "mistral", "architectures": ..., "sliding_window": 0}, ["sliding_window", "0"]),
        ({"model_type": "mistral", "architectures": ..., "layer_types": ["full_attention"]},
         ["layer_types", "1 entries", "2"]),
        ({"model_type": "qwen2", "architectures": ..., "layer_types": ["sliding_attention"] * 2},
         ["layer_types", "sliding_window"]),
        ({"model_type": "qwen3", "architectures": ..., "head_dim": None}, ["head_dim", "null"]),
    ],
)  # fmt: skip
def test_malformed(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json: ")
    for word in words:
        assert word in str(caught.value)


def write(folder: Path, text: str | bytes, name: str = "config.json") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        ('{"model_type": "llama", "model_type": "qwen2"}', "duplicate key 'model_type'"),
        ('{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON"),
        (b'{"a": "' + b"x" * (4 * 2**20) + b'"}', "limit of 4194304 bytes"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_files_that_are_not_a_config(tmp_path: Path, text: str | bytes, word: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: ") as caught:
        read_model(write(tmp_path, text))
    assert word in str(caught.value)


def test_missing_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        read_model(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_model(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"params\.json"):
        read_model(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_model(tmp_path)


def test_custom_code_is_reported_and_never_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text('raise SystemExit(f\'{open("touched", "w")}\')')
    facts = read_model(write(tmp_path, json.dumps({**BASE, "auto_map": {"AutoConfig": "evil.Config"}})))
    assert any("auto_map" in notice for notice in facts.notices)
    assert not (tmp_path / "touched").exists()
    with pytest.raises(UnsupportedModelError, match="custom"):
        read(model_type="custom", auto_map={"AutoConfig": "evil.Config"})


def test_unknown_keys_are_fine() -> None:
    read(transformers_version="9.9", use_cache=False, something_new={"a": [1]}, attention_dropout=0.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [*BASE, "head_dim", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "hidden_act",
     "use_sliding_window", "max_window_layers", "attention_bias", "partial_rotary_factor"]
)  # fmt: skip
SCALING = st.dictionaries(
    st.sampled_from(
        ["type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "mscale"]
    ),
    st.sampled_from(["yarn", "linear", "dynamic", "llama3", 0, 1, 2.5, -1, 1e300, float("nan"), None, True])
    | JSON,
)


@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([f.model_type for f in FAMILIES]),
    st.dictionaries(KEYS, JSON, max_size=4),
    st.none() | SCALING,
)
def test_no_config_crashes_the_reader(model_type: str, changes: dict[str, Any], scaling: Any) -> None:
    values = {**BASE, "model_type": model_type, "architectures": None, **changes}
    if scaling is not None:
        values["rope_scaling"] = scaling
    with contextlib.suppress(CheckpointError, UnsupportedModelError):
        read_spec(ConfigReader(values))


def test_consistency_checks() -> None:
    check_tokenizer_size(96, 96)
    check_token_ids("eos_token_id", (0, 95), 96)
    with pytest.raises(CheckpointError, match=r"96.*96"):
        check_tokenizer_size(97, 96)
    for token in (-1, 96):
        with pytest.raises(CheckpointError, match="eos_token_id"):
            check_token_ids("eos_token_id", (2, token), 96)
