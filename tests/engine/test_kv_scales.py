"""Scales of an fp8 cache: found under the names that checkpoints have, checked before anything runs, used by layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.tokenizers import Folder
from helpers.weight_files import write
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.loader import Checkpoint
from quire.loader.kv_scales import read_scales, read_scales_file, scale_name, write_scales
from quire.loader.safetensors import SafetensorsFile
from quire.program.formats import HeadScales
from quire.types import CheckpointError

SHORT = {"progress": False, "max_model_len": 64, "threads": 1, "num_kv_blocks": 16}
ASK = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
SCALES = {0: HeadScales((0.5, 0.25), (2.0,)), 1: HeadScales((1.5,), (0.125, 3.0))}


def stored(path: Path, tensors: dict[str, object]) -> SafetensorsFile:
    write(path, {name: np.array(value, np.float32) for name, value in tensors.items()})
    return SafetensorsFile(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_names_of_checkpoints(tmp_path: Path, key: str, value: str) -> None:
    tensors = {f"model.layers.{i}.{key}": [0.5] for i in range(2)}
    tensors |= {f"model.layers.{i}.{value}": [2.0, 3.0] for i in range(2)}
    found = read_scales(
        stored(tmp_path / "s", {**tensors, "model.layers.0.mlp.up_proj.weight_scale": [1.0]}), {0: 2, 1: 2}
    )
    assert found == {i: HeadScales((0.5,), (2.0, 3.0)) for i in range(2)}


def test_one_scale_for_both(tmp_path: Path) -> None:
    file = stored(tmp_path / "s", {"layers.0.self_attn.kv_scale": 0.5})
    assert read_scales(file, {0: 4}) == {0: HeadScales((0.5,), (0.5,))}


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    assert read_scales(stored(tmp_path / "s", {"model.norm.weight": [1.0]}), {0: 2}) == {}
    with pytest.raises(CheckpointError, match="has no scales of a cache"):
        read_scales_file(tmp_path / "s", {0: 2})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"k_scale": [np.nan]}, r"self_attn\.k_scale: scale nan is not a finite number above 0"),
        ({"v_scale": [0.0]}, "scale 0 is not a finite number above 0"),
        ({"k_scale": [-1.0]}, "scale -1 is not a finite number above 0"),
        ({"k_scale": [1.0, 2.0, 3.0]}, r"shape \[3\] is neither one scale nor one for each of 2 heads"),
        ({"v_scale": None}, "has no v_scale for layer 0, but for others"),
        ({"kv_scale": [9.0]}, "has other scales for layer 0 too"),
    ],
)
def test_bad_scales_are_refused_by_name(tmp_path: Path, changed: dict[str, object], told: str) -> None:
    scales: dict[str, object] = {"k_scale": [1.0], "v_scale": [1.0], **changed}
    tensors = {f"layers.0.self_attn.{name}": value for name, value in scales.items() if value is not None}
    tensors |= {"layers.1.self_attn.k_scale": [1.0], "layers.1.self_attn.v_scale": [1.0]}
    with pytest.raises(CheckpointError, match=told):
        read_scales(stored(tmp_path / "s", tensors), {0: 2, 1: 2})


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the model has no attention in layer 7"):
        read_scales(stored(tmp_path / "s", {"layers.7.self_attn.k_scale": [1.0]}), {0: 2})


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_scales(tmp_path / "s", SCALES)
    assert read_scales_file(tmp_path / "s", {0: 2, 1: 2}) == SCALES


def with_scales(folder: Path, to: Path, scale: float) -> Path:
    """A checkpoint with the same scale for every layer."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    with Checkpoint(folder) as source:
        tensors = {name: np.array(source.read(name)) for name in source.names()}
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for layer in range(layers):
        for which in "kv":
            tensors[scale_name(layer, which)] = np.array([scale], np.float32)
    write(to / "model.safetensors", tensors)
    return to


def answer(folder: Path, **options: object) -> list[float]:
    with LLM(folder, **(SHORT | options)) as llm:  # type: ignore[arg-type]
        (sample,) = llm.generate([[5, 6, 7, 8, 9]], ASK)[0].outputs
        return [c.logprob for position in sample.logprobs or [] for c in position]


def test_scales_of_the_checkpoint_and_of_a_file_are_used(checkpoint: Folder, tmp_path: Path) -> None:
    """A power of two changes nothing while numbers are normal; numbers beyond the largest are clamped."""
    folder = checkpoint("qwen3")
    plain = answer(folder, kv_cache_dtype="fp8_e5m2")
    (tmp_path / "two").mkdir(), (tmp_path / "tiny").mkdir()
    two, tiny = with_scales(folder, tmp_path / "two", 2.0), with_scales(folder, tmp_path / "tiny", 1e-5)
    assert answer(two, kv_cache_dtype="fp8_e5m2") == plain
    clamped = answer(tiny, kv_cache_dtype="fp8_e5m2")
    assert clamped != plain
    assert answer(tiny) == answer(folder)  # another cache has no scales
    layers = len(layers_of(folder))
    write_scales(tmp_path / "file", dict.fromkeys(range(layers), HeadScales((1e-5,), (1e-5,))))
    assert answer(folder, kv_cache_dtype="fp8_e5m2", kv_cache_scales=str(tmp_path / "file")) == clamped


def layers_of(folder: Path) -> set[str]:
    with Checkpoint(folder) as source:
        return {name.split(".")[2] for name in source.names() if name.startswith("model.layers.")}


def test_calibrated_scales_reach_the_largest_key(
    checkpoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every head's greatest key and value becomes 448; answers are nearer to those of a float32 cache than with 1."""
    folder, out, text = checkpoint("qwen3"), tmp_path / "scales.safetensors", tmp_path / "text"
    text.write_text("the cat sat on the mat and the dog sat on the log " * 30)
    assert main(["calibrate", str(folder), "--out", str(out), "--text", str(text), "--quiet"]) == 0
    assert "scales of 2 layers" in capsys.readouterr().err
    found = read_scales_file(out, {0: 2, 1: 2})
    assert all(len(each.keys) == len(each.values) == 2 for each in found.values())
    exact, scaled = answer(folder), answer(folder, kv_cache_dtype="fp8", kv_cache_scales=str(out))
    assert np.abs(np.subtract(scaled, exact)).mean() < 0.2
    assert scaled != exact


def test_scales_are_of_an_fp8_cache() -> None:
    assert EngineConfig(kv_cache_dtype="fp8").formats.kv_cache_dtype == "fp8_e4m3"
    assert EngineConfig(kv_cache_dtype="bf16").formats.kv_cache_dtype == "bfloat16"
    assert EngineConfig(kv_cache_dtype="fp16").formats.kv_cache_dtype == "float16"
    with pytest.raises(
        ValueError,
        match="kv_cache_scales: scales are of an fp8 or kvquant3 cache, but kv_cache_dtype is int8",
    ):
        EngineConfig(kv_cache_dtype="int8", kv_cache_scales="x")
