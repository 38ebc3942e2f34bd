"""Special tokens and sampling defaults from config.json and generation_config.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.spec import ModelFacts, read_model
from quire.types import CheckpointError, SamplingParams

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


def facts(folder: Path, generation: dict[str, Any] | None = None, **config: Any) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model(folder)


def test_facts_of_a_plain_model(tmp_path: Path) -> None:
    read = facts(tmp_path, eos_token_id=2, bos_token_id=1)
    assert read.architecture == "LlamaForCausalLM"
    assert read.generation.eos_token_ids == (2,)
    assert read.generation.bos_token_id == 1
    assert read.generation.pad_token_id is None
    assert read.generation.sampling == {}
    assert read.longest == read.spec.max_positions == 512
    assert read.spec.dtype == "bfloat16"
    assert read.notices == ()
    assert read.config_sha256 == hashlib.sha256((tmp_path / "config.json").read_bytes()).hexdigest()


def test_generation_config_wins(tmp_path: Path) -> None:
    read = facts(tmp_path, {"eos_token_id": [7, 9, 7], "pad_token_id": 3}, eos_token_id=2, bos_token_id=1)
    assert read.generation.eos_token_ids == (7, 9)
    assert (read.generation.bos_token_id, read.generation.pad_token_id) == (1, 3)
    assert facts(tmp_path, {"eos_token_id": None}, eos_token_id=[2, 4]).generation.eos_token_ids == (2, 4)
    assert facts(tmp_path, {}).generation.eos_token_ids == ()


def test_sampling_defaults(tmp_path: Path) -> None:
    recommended = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    read = facts(tmp_path, {**recommended, "max_new_tokens": 256, "transformers_version": "4.51.0"})
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 256}
    assert read.generation.sampling == expected
    SamplingParams(**read.generation.sampling)
    assert facts(tmp_path, {"do_sample": False, "temperature": 0.7}).generation.sampling == {
        "temperature": 0.0
    }
    assert facts(tmp_path, {"temperature": 0.6}).generation.sampling == {"temperature": 0.6}


def test_files_written_by_transformers(tmp_path: Path) -> None:
    transformers.Qwen3Config(**{**CONFIG, "num_key_value_heads": 4, "architectures": None}).save_pretrained(
        tmp_path
    )
    transformers.GenerationConfig(
        eos_token_id=[5, 6], do_sample=True, temperature=0.6, top_k=20, top_p=0.95
    ).save_pretrained(tmp_path)
    read = read_model(tmp_path)
    assert read.generation.eos_token_ids == (5, 6)
    assert read.generation.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_parameters_that_are_not_applied_are_reported(tmp_path: Path) -> None:
    read = facts(
        tmp_path, {"no_repeat_ngram_size": 3, "suppress_tokens": [1], "num_beams": 1, "typical_p": 1.0}
    )
    assert [notice.split(": ")[1].split(" ")[0] for notice in read.notices] == [
        "no_repeat_ngram_size",
        "suppress_tokens",
    ]


def test_ids_out_of_range(tmp_path: Path) -> None:
    for eos, left, named in ((96, (), "[96]"), (-1, (), "[-1]"), ([2, 96, 10**30], (2,), f"[96, {10**30}]")):
        read = facts(tmp_path, eos_token_id=eos)
        assert read.generation.eos_token_ids == left
        assert read.notices == (
            f"config.json: eos_token_id: {named} is outside the vocabulary of 96 tokens: ignored",
        )
    assert facts(tmp_path, {"eos_token_id": 99}, eos_token_id=2).generation.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    read = facts(tmp_path, bos_token_id=-1, pad_token_id=96)
    assert (read.generation.bos_token_id, read.generation.pad_token_id) == (None, None)
    assert len(read.notices) == 2


@pytest.mark.parametrize(
    ("generation", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"do_sample": 1}, "do_sample"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"eos_token_id": list(range(2000))}, "1024"),
        ({"bos_token_id": 1.0}, "bos_token_id"),
    ],
)
def test_malformed_values(tmp_path: Path, generation: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{word}"):
        facts(tmp_path, generation)


def test_malformed_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 1, "top_k": 2}')
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: not valid JSON: duplicate key 'top_k'"
    ):
        facts(tmp_path)


def test_dynamic_rope_may_run_longer_on_request(tmp_path: Path) -> None:
    read = facts(tmp_path, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (read.spec.max_positions, read.longest) == (512, 2048)
    read = facts(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert (read.spec.max_positions, read.longest) == (2048, 2048)
