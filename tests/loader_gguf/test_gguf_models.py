"""GGUF files of the tiny models: the same spec, the same weights and the same tokens as from safetensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.checkpoints import random_tokens, save
from helpers.gguf_files import MODELS, made_model, write_model
from quire.llm import LLM
from quire.loader import Checkpoint, GGUFFiles, GGUFSource, LoadRules, load
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.program.formats import CODE_BITS, NumberFormats
from quire.program.lower import lower
from quire.program.tensors import Param, Part
from quire.quant import GroupCodes, check_codes, groups
from quire.quant.ggml import PACKED, READ_TYPES, BlockType, dequantize
from quire.spec.facts import read_model
from quire.spec.gguf_architectures import Architecture
from quire.spec.gguf_config import StoredTensor, spec_of_file
from quire.spec.model import ModelSpec
from quire.spec.rope import inverse_frequencies
from quire.types import CheckpointError, SamplingParams, UnsupportedModelError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """(model) -> its safetensors folder and its GGUF file."""
    found = {}

    def make(name: str):
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            save(made_model(name), folder, torch.float32)
            found[name] = folder, write_model(folder, folder / "model.gguf", MODELS[name][2])
        return found[name]

    return make


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model(made, name: str) -> None:
    check_same_model(*made(name))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "smollm3",
        "qwen2",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe-dense-layer",
        "deepseek3",
        "gpt-oss",
        "stablelm",
    ],
)
def test_fused_tensors(made, tmp_path: Path, name: str) -> None:
    """What llama.cpp's converter writes with --fuse-qkv and --fuse-gate-up-exps."""
    folder, path = made(name)
    fused = write_model(folder, tmp_path / "fused.gguf", MODELS[name][2], fuse=True)
    with GGUFFiles(path) as plain, GGUFFiles(fused) as files:
        assert any("attn_qkv" in tensor or "gate_up_exps" in tensor for tensor in files.tensors)
        assert len(files.tensors) < len(plain.tensors)
    check_same_model(folder, fused)


def test_fused_rows_that_are_too_many(made, tmp_path: Path) -> None:
    folder, _ = made("llama")
    path = write_model(
        folder, tmp_path / "x.gguf", "llama", fuse=True, **{"llama.attention.head_count_kv": 2}
    )
    with GGUFFiles(path) as files, pytest.raises(CheckpointError, match="192 rows, but its heads have 128"):
        files.model()


def test_sampling_that_a_file_recommends(made, tmp_path: Path) -> None:
    folder, _ = made("llama")
    said = {"temp": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "penalty_repeat": 1.5}
    path = write_model(
        folder,
        tmp_path / "x.gguf",
        "llama",
        **{f"general.sampling.{key}": value for key, value in said.items()},
    )
    with GGUFFiles(path) as files:
        assert files.model().facts.generation.sampling == {
            "temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5
        }  # fmt: skip


def check_same_model(folder: Path, path: Path) -> None:
    """The program of the checkpoint, from the file: its spec, and every number where the program wants it."""
    expected = read_model(folder).spec
    with GGUFFiles(path) as files, Checkpoint(folder) as checkpoint:
        model = files.model()
        assert model.facts.generation.eos_token_ids == (2,)
        assert model.facts.notices == ()
        check_same_spec(model.facts.spec, expected)
        source = GGUFSource(files, model.tensors)
        ours, theirs = Kept(), Kept()
        for spec, tensors, sink in ((model.facts.spec, source, ours), (expected, checkpoint, theirs)):
            load(
                lower(spec, NumberFormats("f32")).params,
                tensors,
                sink,
                rules=LoadRules.of(spec),
                block_bytes=1,
            )
    assert ours.values.keys() == theirs.values.keys()
    for param, values in theirs.values.items():
        np.testing.assert_array_equal(ours.values[param], values)


def check_same_spec(found: ModelSpec, expected: ModelSpec) -> None:
    """Everything but how norms and ropes are stored; ropes must turn the same."""
    expected = spec_of_file(expected, Architecture(model_type="", whole_norms=not found.norm.added), {})
    for field in dataclasses.fields(found):
        if field.name not in {"names", "layers", "ignored", "mtp_layers"}:
            assert getattr(found, field.name) == getattr(expected, field.name), field.name
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        a, b = ours.mixer.rope, theirs.mixer.rope
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            for length in (64, 4096):
                np.testing.assert_array_equal(inverse_frequencies(a, length), inverse_frequencies(b, length))
            assert np.float32(a.attention_factor) == np.float32(b.attention_factor)
            assert (a.dim, a.interleaved) == (b.dim, b.interleaved)
        attention = dataclasses.replace(ours.mixer, rope=b)
        assert dataclasses.replace(ours, mixer=attention) == theirs


@pytest.mark.parametrize("name", ["llama", "phi3-longrope", "granite", "gemma3", "qwen2-moe", "gpt-oss"])
def test_the_same_tokens(made, name: str) -> None:
    """And so the same bits, here seen from outside."""
    folder, path = made(name)
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    found = []
    for model in (folder, path):
        with LLM(model, progress=False) as llm:
            (output,) = llm.generate([random_tokens(1)], params, use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "cohere2"])
@pytest.mark.parametrize("pattern", [3, np.array([True, False, False, True, True, False, True])])
def test_a_pattern_of_windows_that_is_not_the_usual_one(
    made, tmp_path: Path, name: str, pattern: int | np.ndarray
) -> None:
    folder, _ = made(name)
    count = len(read_model(folder).spec.layers)
    given = pattern if isinstance(pattern, int) else pattern[:count]
    arch = MODELS[name][2]
    path = write_model(
        folder, tmp_path / "x.gguf", arch, **{f"{arch}.attention.sliding_window_pattern": given}
    )
    with GGUFFiles(path) as files:
        found = [layer.mixer.window > 0 for layer in files.model().facts.spec.layers]
    expected = [layer % 3 < 2 for layer in range(count)] if isinstance(given, int) else given.tolist()
    assert found == expected


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("gemma2", {"gemma2.attention.sliding_window_pattern": np.array([True])}, "is not a list of 3 booleans"),
        ("cohere2", {"cohere2.rope.freq_base_swa": 5.0}, "rope.freq_base_swa = 5.0 is not supported"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "a Granite without rotation"),
        ("granite", {"granite.attention.scale": 0.0}, "attention.scale: is missing"),
        ("phi3-longrope", {"phi3.rope.scaling.original_context_length": 0}, "original_context_length: is missing"),
        ("gemma3", {"gemma3.attention.layer_norm_rms_epsilon": 0.5}, "rms_norm_eps: 0.5 is not in"),
        ("llama", {"llama.attention.temperature_scale": 0.1}, "temperature_scale = 0.1 is not supported"),
    ],
)  # fmt: skip
def test_keys_that_are_refused(
    made, tmp_path: Path, name: str, more: dict[str, object], message: str
) -> None:
    folder, _ = made(name)
    path = write_model(folder, tmp_path / "x.gguf", MODELS[name][2], **more)
    with GGUFFiles(path) as files, pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        files.model()


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
        bits = CODE_BITS[param.dtype]
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
