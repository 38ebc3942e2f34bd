"""quire convert: there and back, the same numbers, ids and spec; what cannot be said is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from helpers.checkpoints import (
    TinyModel,
    load_reference,
    random_tokens,
    reference_logits,
    rope_of,
    save,
    tiny_model,
)
from helpers.gguf_files import made_model, write_model
from helpers.quantized_folders import quantized_folder
from helpers.tokenizers import save_whole
from quire.cli.main import main
from quire.engine.build.opening import open_model
from quire.llm import LLM
from quire.loader import Checkpoint, GGUFFiles, GGUFSource
from quire.offline.texts import TEXT
from quire.quant.floats import from_float32, to_q8_0
from quire.quant.ggml import READ_TYPES, dequantize
from quire.spec.rope import inverse_frequencies
from quire.text.pretokenizers import WORDS
from quire.types import SamplingParams, UnsupportedModelError

_PLAIN_ROPE = rope_of("default")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("llama2", tmp_path_factory.mktemp("llama"))


def convert(*args: object) -> int:
    return main(["convert", *map(str, args), "--quiet"])


def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    assert convert(folder, tmp_path / "a.gguf") == 0
    assert convert(tmp_path / "a.gguf", tmp_path / "back") == 0
    first, middle, last = (open_model(path) for path in (folder, tmp_path / "a.gguf", tmp_path / "back"))
    assert first.facts.spec == middle.facts.spec == last.facts.spec
    assert last.facts.architecture == "LlamaForCausalLM"
    assert first.facts.generation.eos_token_ids == middle.facts.generation.eos_token_ids
    with Checkpoint(folder) as one, Checkpoint(tmp_path / "back") as other:
        assert set(one.names()) == set(other.names())
        for name in one.names():
            np.testing.assert_array_equal(one.read(name), other.read(name))
    assert first.tokenizer and middle.tokenizer and last.tokenizer  # noqa: PT018
    for text in ("Hello, <s>world</s>", " two  spaces\n", ""):
        ids = first.tokenizer.encode(text)
        assert middle.tokenizer.encode(text) == last.tokenizer.encode(text) == ids
    assert middle.tokenizer.chat_templates == last.tokenizer.chat_templates == first.tokenizer.chat_templates
    assert middle.tokenizer.special_tokens == first.tokenizer.special_tokens


@pytest.mark.parametrize(
    "name",
    ["gemma3", "phi3-longrope", "olmo3", "granite", "stablelm-head-norms", "cohere2", "mixtral", "qwen2-moe"],
)
def test_there_and_back_of_families(tmp_path: Path, name: str) -> None:
    """Norms with the one added, each head's norm, fused tensors, two ropes, multipliers: the same numbers return."""
    save(made_model(name), tmp_path / "in", torch.float32)
    assert convert(tmp_path / "in", tmp_path / "a.gguf") == 0
    assert convert(tmp_path / "a.gguf", tmp_path / "back") == 0
    with Checkpoint(tmp_path / "in") as one, Checkpoint(tmp_path / "back") as other:
        assert set(one.names()) == set(other.names())
        for tensor in one.names():
            # A one is added to some norms and taken off again: equal but for the last bits of small weights.
            np.testing.assert_allclose(other.read(tensor), one.read(tensor), rtol=0, atol=1e-7)
    tokens = random_tokens(4)
    logits = [reference_logits(load_reference(tmp_path / of, torch.float32), tokens) for of in ("in", "back")]
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5)
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
    found = []
    for of in ("a.gguf", "back"):
        with LLM(tmp_path / of, progress=False) as llm:
            (output,) = llm.generate([tokens], params, use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_latent_attention(tmp_path: Path, name: str) -> None:
    """kv_b becomes a stack of keys turned round and one of values: what a converter writes, number for number."""
    save(made_model(name), tmp_path / "in", torch.float32)
    expected = write_model(tmp_path / "in", tmp_path / "expected.gguf", "deepseek2")
    assert convert(tmp_path / "in", tmp_path / "a.gguf") == 0
    with GGUFFiles(expected) as theirs, GGUFFiles(tmp_path / "a.gguf") as ours:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for tensor, found in theirs.tensors.items():
            assert ours.tensors[tensor].shape == found.shape
            np.testing.assert_array_equal(
                ours.read(tensor, 0, found.shape[0]), theirs.read(tensor, 0, found.shape[0])
            )
        for key, value in theirs.metadata.items():
            if key.startswith("deepseek2."):
                exact = isinstance(value, str | bool)
                assert ours.metadata[key] == (value if exact else pytest.approx(value, rel=1e-6)), key
    assert convert(tmp_path / "a.gguf", tmp_path / "back") == 0
    specs = [open_model(tmp_path / of).facts.spec for of in ("in", "back")]
    assert dataclasses.replace(specs[0], ignored=(), mtp_layers=0) == dataclasses.replace(
        specs[1], ignored=()
    )
    with Checkpoint(tmp_path / "in") as one, Checkpoint(tmp_path / "back") as other:
        assert set(one.names()) == set(other.names())
        for tensor in one.names():
            np.testing.assert_array_equal(other.read(tensor), one.read(tensor))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek2-lite", {}, "an mscale of rope_scaling that differs from its mscale_all_dim"),
        ("deepseek3-dense-halves", {}, "latent attention without experts"),
        ("deepseek3", _PLAIN_ROPE | {"rope_interleave": False}, "layer 0: rope"),
        ("deepseek2-groups", {}, "layer 0: Layer"),  # biases of dense layers
    ],
)
def test_latent_attention_that_gguf_cannot_say(
    tmp_path: Path, name: str, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(name)
    changed = TinyModel(name, model.config_class, dict(model.overrides) | changes)
    save(changed, tmp_path / "in", torch.float32)
    assert convert(tmp_path / "in", tmp_path / "x.gguf") == 1
    assert f"GGUF cannot express {message}" in capsys.readouterr().err


def test_frequencies_that_have_no_key_go_as_a_tensor(tmp_path: Path) -> None:
    save(tiny_model("llama3.1"), tmp_path / "in", torch.float32)
    assert convert(tmp_path / "in", tmp_path / "out.gguf") == 0
    ropes = [
        open_model(path).facts.spec.layers[0].mixer.rope for path in (tmp_path / "in", tmp_path / "out.gguf")
    ]
    assert ropes[0] is not None
    assert ropes[1] is not None
    assert ropes[1].kind == "longrope"
    ours, theirs = (inverse_frequencies(rope, 256) for rope in ropes)
    np.testing.assert_allclose(ours, theirs, rtol=2e-7)
    assert not np.allclose(ours, inverse_frequencies(dataclasses.replace(ropes[0], kind="default"), 256))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_other_numbers(folder: Path, tmp_path: Path, dtype: str) -> None:
    assert convert(folder, tmp_path / "a.gguf", "--dtype", dtype) == 0
    kind = {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    with GGUFFiles(tmp_path / "a.gguf") as files, Checkpoint(folder) as checkpoint:
        source = GGUFSource(files, files.model().tensors)
        for name in checkpoint.names():
            plain = np.array(checkpoint.read(name))
            if plain.ndim == 1:
                expected = plain
            elif kind == "Q8_0":
                expected = dequantize(to_q8_0(plain), READ_TYPES[kind])
            else:
                expected = from_float32(plain, kind)
            np.testing.assert_array_equal(source.read(name), expected)


def test_safetensors_in_other_numbers(folder: Path, tmp_path: Path) -> None:
    assert convert(folder, tmp_path / "half", "--dtype", "bfloat16") == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with Checkpoint(folder) as one, Checkpoint(tmp_path / "half") as other:
        for name in one.names():
            expected = torch.from_numpy(np.array(one.read(name))).bfloat16().view(torch.uint16).numpy()
            np.testing.assert_array_equal(other.read(name), expected)


@pytest.mark.parametrize("kind", ["gptq", "fp8", "bitsandbytes"])
def test_quantized_safetensors(folder: Path, tmp_path: Path, kind: str) -> None:
    """To GGUF, and to plain safetensors: the numbers that the codes stand for, rounded to bfloat16."""
    quantized, values = quantized_folder(folder, tmp_path / kind, kind)
    assert convert(quantized, tmp_path / "a.gguf") == 0
    assert convert(quantized, tmp_path / "plain") == 0
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    with GGUFFiles(tmp_path / "a.gguf") as files, Checkpoint(tmp_path / "plain") as plain:
        source = GGUFSource(files, files.model().tensors)
        for name, numbers in values.items():
            if "_proj" in name:
                expected = from_float32(numbers, "BF16")
                np.testing.assert_array_equal(source.read(name), expected)
                np.testing.assert_array_equal(plain.read(name), expected)


def test_q8_0_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package (extra dev) is the oracle")
    values = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    values[3] = 0
    values[4, :32] = np.arange(32) * 0.5  # ties
    np.testing.assert_array_equal(to_q8_0(values), gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0))


def test_rounding_to_bfloat16_is_torchs() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 10_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isnan(values), np.float32(0), values)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(from_float32(values, "BF16"), expected)


@pytest.mark.parametrize(
    "name", ["mistral-window", "qwen2-mixed-windows", "llama-dynamic", "smollm3", "gemma2"]
)
def test_models_that_gguf_cannot_express_are_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_model(name), tmp_path / "in", torch.float32)
    assert convert(tmp_path / "in", tmp_path / "out.gguf") == 1
    assert "GGUF" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_nothing_is_overwritten(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.gguf").write_text("mine")
    assert convert(folder, tmp_path / "a.gguf") == 1
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "a.gguf").read_text() == "mine"
    assert convert(folder, tmp_path / "b", "--dtype", "q8_0") == 1
    assert "q8_0 is available for GGUF files only" in capsys.readouterr().err


def test_a_tokenizer_without_a_name_is_refused(folder: Path, tmp_path: Path) -> None:
    from quire.text.gguf_tokenizer_out import tokenizer_metadata

    state = json.loads((folder / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(UnsupportedModelError, match=r"Whitespace.* has no name in GGUF"):
        tokenizer_metadata(json.dumps(state).encode(), {}, 128, "some text")


def test_a_way_to_cut_words_that_a_named_one_resembles() -> None:
    """It has no name itself: one is written that gives the same tokens, and a note says so."""
    from quire.text.gguf_tokenizer_out import tokenizer_metadata

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = WORDS["qwen2"].pre_tokenizer()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    state = json.loads(tokenizer.to_str())
    split = state["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = "zzzz|" + split["pattern"]["Regex"]
    data = json.dumps(state)
    found, (note,) = tokenizer_metadata(data.encode(), {}, 400, TEXT)
    name = found["tokenizer.ggml.pre"]
    assert f"The file gets {name!r}, which gives the same tokens" in note
    ids = tokenizers.Tokenizer.from_str(data).encode(TEXT).ids
    tokenizer.pre_tokenizer = WORDS[name].pre_tokenizer()
    assert tokenizer.encode(TEXT).ids == ids


def test_a_way_to_cut_words_that_nothing_resembles_is_refused() -> None:
    from quire.text.gguf_tokenizer_out import tokenizer_metadata

    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "abb": 3}, [("a", "b"), ("ab", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split("ab", "isolated"), tokenizers.pre_tokenizers.ByteLevel(use_regex=False),
    ])  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"pre-tokenizer .* has no name in GGUF"):
        tokenizer_metadata(tokenizer.to_str().encode(), {}, 8, "ab abb")
