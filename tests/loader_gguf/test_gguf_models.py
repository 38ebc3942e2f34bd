"""GGUF files of the tiny models: the same spec, the same weights and the same tokens as from safetensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from helpers.checkpoints import random_tokens, save, tiny_model
from helpers.gguf_files import write_model
from quire.llm import LLM
from quire.loader import Checkpoint, GGUFFiles, GGUFSource
from quire.spec.facts import read_model
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
