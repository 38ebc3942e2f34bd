"""GGUF files of the tiny models: the same spec, the same weights and the same tokens as from safetensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoints import random_tokens, save, tiny_model
from helpers.gguf_files import write_model
from quire.cli.main import main
from quire.llm import LLM
from quire.loader import Checkpoint, GGUFFiles, GGUFSource, load
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.program.ops import Param, Part
from quire.quant import GroupCodes, check_codes, groups
from quire.quant.ggml import PACKED, READ_TYPES, BlockType, dequantize
from quire.spec.facts import read_model
from quire.spec.gguf import StoredTensor
from quire.types import SamplingParams

MODELS = {
    "llama2": "llama", "llama-wide-heads-gelu": None, "llama-linear": "llama", "llama-yarn": "llama",
    "qwen2-tied": "qwen2", "qwen3": "qwen3", "qwen3-biases-mha": "qwen3",
}  # fmt: skip
CASES = [(name, arch) for name, arch in MODELS.items() if arch]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """(model) -> its safetensors folder and its GGUF file."""
    found = {}

    def make(name: str):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            save(tiny_model(name), folder, torch.float32)
            found[name] = folder, write_model(folder, folder / "model.gguf", MODELS[name])
        return found[name]

    return make


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_same_spec(made, name: str, arch: str) -> None:
    folder, path = made(name)
    expected = read_model(folder).spec
    with GGUFFiles(path) as files:
        model = files.model()
    found = model.facts.spec
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) == getattr(expected, field.name), field.name
    assert model.facts.generation.eos_token_ids == (2,)
    assert model.facts.notices == ()


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_the_same_weights(made, name: str, arch: str) -> None:
    folder, path = made(name)
    with Checkpoint(folder) as checkpoint, GGUFFiles(path) as files:
        source = GGUFSource(files, files.model().tensors)
        assert set(source.names()) == set(checkpoint.names())
        for tensor in checkpoint.names():
            assert source.info(tensor) == checkpoint.info(tensor)
            rows = checkpoint.info(tensor).shape[0]
            for start, stop in ((0, None), (1, 2), (rows // 3, rows - 1)):
                np.testing.assert_array_equal(
                    source.read(tensor, start, stop), checkpoint.read(tensor, start, stop)
                )


@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_the_same_tokens(made, name: str) -> None:
    folder, path = made(name)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    found = []
    for model in (folder, path):
        with LLM(model, progress=False) as llm:
            (output,) = llm.generate([random_tokens(1)], params, progress=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


def test_norms_that_have_the_one_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gemma stores norm weights less one, its GGUF files store them whole: the same bits come out."""
    mqa = tiny_model("gemma-mqa")
    model = type(mqa)("gemma", mqa.config_class, dict(mqa.overrides) | {"hidden_act": "gelu_pytorch_tanh"})
    save(model, tmp_path / "m", torch.float32)
    path = write_model(tmp_path / "m", tmp_path / "m.gguf", "gemma")
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
    found = []
    for name in (tmp_path / "m", path):
        with LLM(name, progress=False) as llm:
            (output,) = llm.generate([random_tokens(1)], params, progress=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]
    for source, out in ((path, tmp_path / "back"), (tmp_path / "m", tmp_path / "again.gguf")):
        assert main(["convert", str(source), str(out), "--quiet"]) == 1
        assert "norm" in capsys.readouterr().err
        assert not out.exists()


class Kept:
    """A sink that keeps what it is given, as numbers."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}
        self.as_codes: set[str] = set()

    def _rows(self, param: Param, row_offset: int, rows: np.ndarray) -> None:
        shape = (param.rows, param.cols) if param.cols else (param.rows,)
        self.values.setdefault(param.name, np.full(shape, np.nan, np.float32))[
            row_offset : row_offset + len(rows)
        ] = rows

    def put(self, param: Param, row_offset: int, data: np.ndarray, dtype: str) -> None:
        assert dtype == "F32"
        self._rows(param, row_offset, data)

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        assert param.groups is not None
        check_codes(param, row_offset, given)
        bits = 4 if param.dtype == "i4" else 8
        self._rows(param, row_offset, groups.dequantize(param.groups, bits, given))
        self.as_codes.add(param.name)


@pytest.mark.parametrize(
    "kind", [kind for kind in READ_TYPES.values() if kind.unpack], ids=lambda kind: kind.name
)
def test_codes_are_the_same_numbers(tmp_path: Path, kind: BlockType) -> None:
    """q and k with permuted rows, fused, in row blocks that cut heads: codes and floats agree in every bit."""
    rng = np.random.default_rng(0)
    rows, cols = {"q": 48, "k": 24}, 256
    blocks = {}
    for name, count in rows.items():
        data = rng.integers(0, 256, (count * cols // kind.values, kind.nbytes), dtype=np.uint8)
        for at in range(0, min(kind.nbytes - 1, 4), 2):  # where floats may stand: small ones
            data[:, at + 1] &= 0x2F
        data[:, -1] &= 0x2F
        if kind.name == "Q2_K":
            data[:, [81, 83]] &= 0x2F
        if kind.name == "MXFP4":
            data[:, 0] = 120
        blocks[name] = data.reshape(count, -1)
    out = [OutTensor(name, kind.name, (count, cols)) for name, count in rows.items()]
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, out, lambda t: [blocks[t.name]])
    form = PACKED[kind.name]
    parts = tuple(Part(name, count, cols) for name, count in rows.items())
    found = []
    with GGUFFiles(tmp_path / "x.gguf") as files:
        source = GGUFSource(files, {"q": StoredTensor("q", 2), "k": StoredTensor("k", 1)})
        for param in (
            Param("qk", "linear", parts, form.dtype, form.groups),
            Param("qk", "linear", parts, "f32"),
        ):
            sink = Kept()
            summary = load([param], source, sink, block_bytes=1)
            assert bool(sink.as_codes) == (param.groups is not None)
            assert summary.dequantized == (() if sink.as_codes else (kind.name,))
            found.append(sink.values["qk"])
    np.testing.assert_array_equal(found[0], found[1])
    plain = dequantize(blocks["q"], kind)
    np.testing.assert_array_equal(found[0][1], plain[2])  # second of a head's first half: its second pair
