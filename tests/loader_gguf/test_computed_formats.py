"""Quantized checkpoints computed from their codes: native and torch agree, and so do the sizes of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.checkpoints import random_tokens, save, tiny_model
from helpers.gguf_files import write_model
from helpers.memory import memory_for
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import build
from quire.engine.build.opening import open_model
from quire.llm import LLM
from quire.loader import GGUFFiles
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.quant.ggml import PACKED, READ_TYPES
from quire.types import SamplingParams

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose rows are whole blocks of every type."""
    model = tiny_model("llama2")
    wide = type(model)("llama-256", model.config_class, dict(model.overrides) | WIDE)
    folder = tmp_path_factory.mktemp("plain")
    save(wide, folder, torch.float32)
    return write_model(folder, folder / "plain.gguf", "llama")


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Blocks of a type with random codes and scales such that values are about as large as a weight's."""
    block = READ_TYPES[kind]
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.size // block.values, block.nbytes), dtype=np.uint8)
    scale, where = {
        "Q4_0": (0.02, (0,)), "Q4_1": (0.01, (0, 2)), "Q5_0": (0.01, (0,)), "Q8_0": (0.001, (0,)),
        "Q4_K": (0.0004, (0, 2)), "Q5_K": (0.0002, (0, 2)), "Q6_K": (0.00005, (208,)), "Q2_K": (0.003, (80, 82)),
        "Q3_K": (0.002, (108,)), "IQ4_NL": (0.001, (0,)), "IQ4_XS": (0.00005, (0,)),
    }[kind]  # fmt: skip
    for at in where:
        blocks[:, at : at + 2] = (rng.random(len(blocks)) * scale).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks


def quantized(plain: Path, out: Path, kind: str, *, head: str = "F32", last_v: str = "") -> Path:
    """`last_v`: another type for the value projections of the last layer."""
    with GGUFFiles(plain) as files:
        tensors, data = [], {}
        for name, tensor in files.tensors.items():
            form = kind if name.startswith("blk") else head
            form = last_v if last_v and name == "blk.1.attn_v.weight" else form
            values = np.array(files.read(name, 0, tensor.shape[0]))
            matrix = len(tensor.shape) == 2 and form != "F32"
            tensors.append(OutTensor(name, form if matrix else "F32", tensor.shape))
            data[name] = blocks_of(values, form) if matrix else values
        metadata = {
            key: value for key, value in files.metadata.items() if isinstance(value, int | float | str)
        }
        write_gguf(out, metadata, tensors, lambda tensor: [data[tensor.name]])
    return out


def logprobs(path: Path, **options: Any) -> list[float]:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    with LLM(path, progress=False, kv_cache_dtype="float32", **options) as llm:
        (output,) = llm.generate([random_tokens(3)], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [position[0].logprob for position in output.prompt_logprobs if position]


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "Q5_0", "Q5_K", "Q2_K", "Q3_K", "IQ4_XS"]
)
def test_native_equals_torch_and_is_near_the_floats(plain: Path, tmp_path: Path, kind: str) -> None:
    path = quantized(plain, tmp_path / "q.gguf", kind)
    built = build(open_model(path), EngineConfig(memory=memory_for(2**31)))
    forms = {param.name: param.format for param in built.program.params if param.kind == "linear"}
    built.executor.close()
    assert {name for name, form in forms.items() if form == PACKED[kind]} == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("qkv", "o", "gate_up", "down")
    }
    assert built.weights.dequantized == ()
    native = logprobs(path)
    np.testing.assert_allclose(native, logprobs(path, executor="torch"), atol=0.02)
    floats = logprobs(path, quantization="none", dtype="float32")
    np.testing.assert_allclose(native, floats, atol=0.6)
    assert native == logprobs(path, max_num_batched_tokens=16, max_num_seqs=4)  # the same bits in chunks


@pytest.mark.parametrize(("kind", "values"), [("Q4_K", "Q6_K"), ("Q8_0", "Q4_0")])
def test_fused_weights_of_two_types(plain: Path, tmp_path: Path, kind: str, values: str) -> None:
    """q and k in one format, v in another, as in Q4_K_M files: each in its own codes, into one buffer."""
    path = quantized(plain, tmp_path / "q.gguf", kind, last_v=values)
    built = build(open_model(path), EngineConfig(memory=memory_for(2**31)))
    forms = {param.name: param.format for param in built.program.params if "qkv" in param.name}
    built.executor.close()
    assert forms == {
        "layers.0.qkv": PACKED[kind], "layers.1.qkv.0": PACKED[kind], "layers.1.qkv.2": PACKED[values],
    }  # fmt: skip
    assert built.weights.dequantized == ()
    native = logprobs(path)
    np.testing.assert_allclose(native, logprobs(path, executor="torch"), atol=0.02)
    np.testing.assert_allclose(native, logprobs(path, quantization="none", dtype="float32"), atol=0.6)
    assert native == logprobs(path, max_num_batched_tokens=16, max_num_seqs=4)  # the same bits in chunks


def test_a_quantized_head_and_mixed_types(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = quantized(plain, tmp_path / "q.gguf", "Q4_K", head="Q6_K")
    built = build(open_model(path), EngineConfig(memory=memory_for(2**31)))
    assert built.program.param("head").format == PACKED["Q6_K"]
    built.executor.close()
    assert main(["inspect", str(path), "--no-measure"]) == 0
    shown = capsys.readouterr().out
    assert "Q4_K" in shown
    assert "computed from their codes" in shown
