"""Number formats of weights and the output head: choices, notices and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.gguf_files import write_model
from helpers.tokenizers import Folder
from helpers.weight_files import write
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.resolve import MachineFacts, ModelTraits, resolve
from quire.config.schema import EngineConfig, ResolvedConfig
from quire.loader import Checkpoint
from quire.types import CheckpointError

SHORT = {"progress": False, "max_model_len": 64, "threads": 1, "num_kv_blocks": 16}
ASK = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)


def resolved(stored: str, *, best: bool = False, **asked: object) -> ResolvedConfig:
    machine = MachineFacts(2, 0, 1 << 32, best_float16=best)
    return resolve(EngineConfig(**asked), ModelTraits(stored, 128, 128), machine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored", "best", "asked", "chosen", "notice"),
    [
        (
            "float16",
            False,
            {},
            ("bf16", "bf16"),
            "is rounded to bfloat16, .*KL.*--dtype float16.*2 times as long",
        ),
        ("float16", True, {}, ("f16", "f16"), ""),
        ("float16", False, {"dtype": "float16"}, ("f16", "f16"), "prompts take about 2 times as long"),
        ("float16", True, {"dtype": "float16", "kv_cache_dtype": "bfloat16"}, ("f16", "bf16"), ""),
        ("float16", False, {"dtype": "bfloat16"}, ("bf16", "bf16"), ""),
        ("float16", False, {"quantization": "int8"}, ("bf16", "bf16"), ""),
        ("bfloat16", True, {}, ("bf16", "bf16"), ""),
        ("bfloat16", True, {"kv_cache_dtype": "float16"}, ("bf16", "f16"), ""),
        ("float32", True, {}, ("f32", "f32"), ""),
    ],
)
def test_chosen_formats_and_notices(
    stored: str, best: bool, asked: dict[str, str], chosen: tuple[str, str], notice: str
) -> None:
    config = resolved(stored, best=best, **asked)
    assert (config.weights, config.kv) == chosen
    assert len(config.notices) == bool(notice)
    assert all(re.search(notice, text) for text in config.notices)


def test_a_float32_head_goes_with_every_format_but_a_quantized_head() -> None:
    for more in ({}, {"dtype": "float16"}, {"quantization": "int8"}, {"quantize_head": "none"}):
        assert resolved("bfloat16", fp32_lm_head=True, **more).head == "f32"
    assert resolved("bfloat16").head is None
    with pytest.raises(ValueError, match="fp32_lm_head: cannot be combined with quantize_head = int8"):
        EngineConfig(fp32_lm_head=True, quantize_head="int8")


def test_inspect_and_notices_state_the_cost_of_a_float32_head(
    checkpoint: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("qwen3", torch.bfloat16)

    def report(*flags: str) -> dict[str, object]:
        assert main(["inspect", str(folder), "--json", "--no-measure", *flags]) == 0
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    plain, wide = report(), report("--fp32-lm-head")
    assert wide["formats"] == {"weights": "bf16", "head": "f32", "kv": "bf16"}
    sizes = [{p["name"]: p["bytes"] for p in found["params"]} for found in (plain, wide)]  # type: ignore[attr-defined]
    assert sizes[1].pop("head") == 2 * sizes[0].pop("head")
    assert sizes[0] == sizes[1]
    assert plain["notices"] == []
    (notice,) = wide["notices"]  # type: ignore[misc]
    assert "head and the tied embedding are float32: 32.00 KiB instead of 16.00 KiB" in notice
    with LLM(folder, fp32_lm_head=True, **SHORT) as llm:  # type: ignore[arg-type]
        assert notice in llm.built.notices()


def test_a_quantized_model_keeps_its_float32_head(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    with LLM(folder, quantization="int8", fp32_lm_head=True, **SHORT) as llm:  # type: ignore[arg-type]
        formats = {p.name: p.dtype for p in llm.built.program.params if p.kind == "linear"}
        assert formats.pop("head") == "f32"
        assert set(formats.values()) == {"i8"}
        assert len(llm.generate([[5, 6, 7]], ASK)[0].outputs[0].token_ids) == 12


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_weights_outside_the_range_of_float16_are_refused_by_name(
    checkpoint: Folder, tmp_path: Path, executor: str
) -> None:
    """65,519 is rounded to its largest number, 65,520 to infinity."""
    folder = checkpoint("llama2")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.mlp.up_proj.weight"
    with Checkpoint(folder) as source:
        tensors = {tensor: np.array(source.read(tensor)) for tensor in source.names()}

    def start(number: float) -> None:
        tensors[name][3, 7] = number
        write(tmp_path / "model.safetensors", tensors)
        LLM(tmp_path, dtype="float16", executor=executor, weight_cache="off", **SHORT).close()  # type: ignore[arg-type]

    start(-65519)
    with pytest.raises(
        CheckpointError,
        match=rf"{name}: element \[3, 7\] is -65520, which exceeds the limit of float16.*--dtype",
    ):
        start(-65520)


def test_a_gguf_file_in_float16(checkpoint: Folder, tmp_path: Path) -> None:
    """Matrices in F16: kept, with the tokens and logprobs that float32 gives, in a cache of float32."""
    path = write_model(checkpoint("llama2"), tmp_path / "half.gguf", "llama", half=True)
    found = []
    for dtype in ("float16", "float32"):
        with LLM(path, dtype=dtype, kv_cache_dtype="float32", **SHORT) as llm:  # type: ignore[arg-type]
            assert llm.built.config.weights == {"float16": "f16", "float32": "f32"}[dtype]
            (sample,) = llm.generate([[5, 6, 7, 8]], ASK)[0].outputs
            found.append((sample.token_ids, [c.logprob for p in sample.logprobs or [] for c in p]))
    assert found[0] == found[1]
