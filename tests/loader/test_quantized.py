"""Quantized checkpoints through the loader: the tiny model with its linears stored in each format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.backends import NATIVE
from helpers.checkpoints import LENGTH, load_reference, random_tokens, reference_logits, save, tiny_model
from helpers.quantized_folders import FORMATS, quantized_folder, tensors
from helpers.stepper import Stepper
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights, weight_origin
from quire.engine.build.opening import Model, open_model
from quire.executor.base import Limits
from quire.loader import Checkpoint, QuantizedSource, load
from quire.spec.facts import read_model
from quire.spec.quantization import Quantization
from quire.types import CheckpointError, UnsupportedModelError


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save(tiny_model("llama2"), folder, torch.float32)
    return folder


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_and_tokens(
    plain: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, values = quantized_folder(plain, tmp_path / kind, kind)
    facts = read_model(folder)
    assert facts.quantization is not None
    with Checkpoint(folder) as checkpoint:
        source = QuantizedSource(checkpoint, facts.quantization)
        assert {name for name in source.names() if not name.endswith(".bias")} == set(values)
        for name, expected in values.items():
            assert source.info(name).shape == expected.shape
            np.testing.assert_array_equal(source.read(name), expected)
            np.testing.assert_array_equal(source.read(name, 3, 9), expected[3:9])
    options = ["generate", str(folder), "--prompt-token-ids", "5,6,7", "--max-tokens", "3", "--ignore-eos"]
    for more, dequantized in (
        (["--quantization", "none"], True),
        ([], kind in FLOATS),
    ):
        assert main([*options, *more]) == 0
        assert ("are dequantized when loaded" in capsys.readouterr().err) == dequantized


@pytest.mark.parametrize("kind", FORMATS)
def test_logits(plain: Path, tmp_path: Path, kind: str) -> None:
    """transformers' on the plain checkpoint with the same numbers, and the same bits as that in Quire; near them when
    computed in the stored codes. (Random codes make sharp attention: rounding shows more than in the parity tests.)
    """
    folder, values = quantized_folder(plain, tmp_path / kind, kind)
    (tmp_path / "values").mkdir()
    shutil.copy(plain / "config.json", tmp_path / "values")
    save_file(tensors(values), tmp_path / "values/model.safetensors")
    tokens = random_tokens(3)
    expected = reference_logits(load_reference(tmp_path / "values", torch.float32), tokens)
    assert np.abs(expected).max() > 0.5
    model = open_model(folder, tokenizer=False)
    exact = logits_of(model, tokens, "none")
    plain_numbers = open_model(tmp_path / "values", tokenizer=False)
    np.testing.assert_array_equal(exact, logits_of(plain_numbers, tokens, "none"))
    np.testing.assert_allclose(exact, expected, rtol=0, atol=5e-4)
    codes = np.abs(logits_of(model, tokens, "auto") - expected)
    assert np.median(codes) < 0.05 * np.abs(expected).max()
    assert (codes.max() > 1e-3) == (kind not in FLOATS)


LIMITS = Limits(max_tokens=LENGTH, max_rows=1, max_logit_rows=LENGTH, max_len=LENGTH, num_blocks=20)
# Kinds whose numbers have no format in which kernels compute codes: float32 either way.
FLOATS = {
    "bitsandbytes",
    "bitsandbytes-int8",
    "gptq-desc-act",
    "auto-round",
    "float-quantized",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
}


def logits_of(model: Model, tokens: list[int], quantization: str) -> np.ndarray:
    """[tokens, vocabulary] of one sequence in one pass, in float32 unless it is computed in codes."""
    asked = EngineConfig(quantization=quantization, dtype="float32", kv_cache_dtype="float32", threads=2)
    _, program = choose(model, asked, machine_facts())
    executor = NATIVE.make(program)
    with open_weights(model) as source:
        load(program.params, source, executor, rules=weight_origin(model).rules)
    stepper = Stepper(program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    number = stepper.add(tokens)
    return stepper.step(executor, {number: len(tokens)})[number]


def test_inspect_names_the_format(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = quantized_folder(plain, tmp_path / "q", "gptq")
    assert main(["inspect", str(folder), "--no-measure"]) == 0
    assert "GPTQ 4-bit in groups of 32" in capsys.readouterr().out


def test_a_bias_that_is_not_zero_is_not_left_aside(plain: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folder(plain, tmp_path / "q", "gptq")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = header["model.layers.0.mlp.up_proj.bias"]["data_offsets"][0]
    data[8 + int.from_bytes(data[:8], "little") + begin + 1] = 0x3C
    path.write_bytes(data)
    from quire.llm import LLM

    with pytest.raises(
        CheckpointError, match=r"does not imply: 1 tensor: model\.layers\.0\.mlp\.up_proj\.bias"
    ):
        LLM(folder, progress=False)


def test_a_config_without_quantized_tensors_is_refused(plain: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folder(plain, tmp_path / "q", "awq")
    facts = read_model(folder)
    assert facts.quantization is not None
    with (
        Checkpoint(plain) as checkpoint,
        pytest.raises(CheckpointError, match="no tensor has the format of AWQ"),
    ):
        QuantizedSource(checkpoint, facts.quantization)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {
                "data_type": "fp",
                "bits": 8,
                "packing_format": "auto_round:fp8",
                "weight_block_size": [128, 128],
            },
            Quantization("AutoRound", "fp8", block=(128, 128)),
        ),
        (
            {"data_type": "mx_fp", "bits": 4, "packing_format": "auto_round:llm_compressor"},
            Quantization("AutoRound", "compressed"),
        ),
        ({"bits": 3, "packing_format": "auto_round:auto_gptq"}, Quantization("AutoRound", "gptq", 3, 1)),
        ({"bits": 4, "packing_format": "auto_round:auto_awq"}, Quantization("AutoRound", "awq")),
    ],
)
def test_checkpoints_of_auto_round(
    plain: Path, tmp_path: Path, settings: dict[str, Any], expected: Quantization
) -> None:
    config = json.loads((plain / "config.json").read_text())
    quantization = {"quant_method": "auto-round", "group_size": 128, "sym": True, **settings}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert read_model(tmp_path).quantization == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "quip"}, "quant_method = 'quip' is not supported; supported methods are gptq, awq"),
        ({"quant_method": "gptq", "bits": 5}, "bits = 5 is not supported"),
        ({"quant_method": "gptq"}, "bits: is missing"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": 8}}, "dynamic: a"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8 is not supported"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"},
            "packing_format = 'auto_round'",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}},
            "extra_config = .*'a'",
        ),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp"}, "data_type = 'nv_fp'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "sparsity_config",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: .* is not a pair"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit = null is not supported"),
    ],
)
def test_variants_that_are_not_read_are_named(
    plain: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read_model(tmp_path)
