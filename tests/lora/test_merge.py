"""Merged weights are W + scale · B · A, or DoRA's rows of their own length, in every layout that convert writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.adapters import PREFIX, RANK, Q, numbers, pair, peft_folder
from helpers.checkpoints import TinyModel, load_reference, random_tokens, reference_logits, save, tiny_model
from helpers.quantized_folders import quantized_folder
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.engine.build.opening import open_model
from quire.loader import Checkpoint
from quire.loader.source import Source
from quire.quant.floats import from_float32, to_float32

TABLE, HEAD = "model.embed_tokens", "lm_head"


def convert(*args: object) -> int:
    return main(["convert", *map(str, args), "--quiet"])


def matrix(source: Source, name: str) -> np.ndarray:
    return np.array(to_float32(np.array(source.read(name)), source.info(name).dtype))


def delta(tensors: dict[str, np.ndarray], scale: float = 6 / RANK) -> np.ndarray:
    a, b = tensors.values()
    found: np.ndarray = scale * (b.astype(np.float64) @ a.astype(np.float64))
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save(tiny_model("llama2"), folder, torch.float32)
    return folder


def test_weights_and_logits(base: Path, tmp_path: Path) -> None:
    """All other tensors stay as they are; torch with the sum in place of the weight says the same."""
    down = "model.layers.1.mlp.down_proj"
    q, d = pair(Q), pair(down, 64, 96, seed=5)
    adapter = peft_folder(tmp_path / "a", q | d)
    assert convert(base, tmp_path / "out", "--merge-adapter", adapter) == 0
    with Checkpoint(base) as before, Checkpoint(tmp_path / "out") as after:
        assert set(before.names()) == set(after.names())
        for name in before.names():
            plus = {f"{Q}.weight": delta(q), f"{down}.weight": delta(d)}.get(name, 0.0)
            np.testing.assert_allclose(matrix(after, name), matrix(before, name) + plus, rtol=1e-5, atol=1e-6)
    reference = load_reference(base, torch.float32)
    tokens = random_tokens(1)
    with torch.no_grad():
        for name, tensors in ((Q, q), (down, d)):
            reference.get_submodule(name).weight += torch.tensor(delta(tensors), dtype=torch.float32)
    with LLM(tmp_path / "out", dtype="float32", progress=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([tokens], params, use_tqdm=False)
    expected = tokens
    for _ in range(8):
        expected = [*expected, int(reference_logits(reference, expected)[-1].argmax())]
    assert output.outputs[0].token_ids == expected[len(tokens) :]


def test_in_the_format_of_the_base(tmp_path: Path) -> None:
    """Summed in float32 and rounded once to bfloat16."""
    save(tiny_model("llama2"), tmp_path / "base", torch.bfloat16)
    tensors = pair(Q)
    adapter = peft_folder(tmp_path / "a", tensors)
    assert convert(tmp_path / "base", tmp_path / "out", "--merge-adapter", adapter) == 0
    with Checkpoint(tmp_path / "base") as before, Checkpoint(tmp_path / "out") as after:
        assert {after.info(name).dtype for name in after.names()} == {"BF16"}
        a, b = tensors.values()
        summed = matrix(before, f"{Q}.weight") + (b @ a) * np.float32(6 / RANK)
        np.testing.assert_array_equal(after.read(f"{Q}.weight"), from_float32(summed, "BF16"))


def test_dora(base: Path, tmp_path: Path) -> None:
    """Each row (an output; a column of the paper's W) gets its magnitude as length."""
    tensors, magnitude = pair(Q), np.abs(numbers(9, 64)) + 0.5
    given = tensors | {f"{PREFIX}{Q}.lora_magnitude_vector": magnitude}
    adapter = peft_folder(tmp_path / "a", given, use_dora=True)
    assert convert(base, tmp_path / "out", "--merge-adapter", adapter) == 0
    with Checkpoint(base) as before, Checkpoint(tmp_path / "out") as after:
        direction = matrix(before, f"{Q}.weight") + delta(tensors)
        expected = magnitude[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)
        np.testing.assert_allclose(matrix(after, f"{Q}.weight"), expected, rtol=1e-5, atol=1e-6)


def test_several_with_scales(base: Path, tmp_path: Path) -> None:
    """W + Σ scale · (W' - W), W' being W with one of them: DoRA and whole matrices too."""
    one, two = pair(Q), pair(Q, seed=3)
    magnitude, head = np.abs(numbers(9, 64)) + 0.5, numbers(4, 128, 64)
    first = peft_folder(tmp_path / "a", one)
    more = {f"{PREFIX}{Q}.lora_magnitude_vector": magnitude, f"{PREFIX}lm_head.weight": head}
    second = peft_folder(tmp_path / "b", two | more, use_dora=True, modules_to_save=["lm_head"])
    both = ("--merge-adapter", f"{first}=0.5", "--merge-adapter", f"{second}=-2")
    assert convert(base, tmp_path / "out", *both) == 0
    with Checkpoint(base) as before, Checkpoint(tmp_path / "out") as after:
        weight = matrix(before, f"{Q}.weight")
        direction = weight + delta(two)
        dora = magnitude[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)
        expected = weight + 0.5 * delta(one) - 2 * (dora - weight)
        np.testing.assert_allclose(matrix(after, f"{Q}.weight"), expected, rtol=1e-4, atol=1e-5)
        weight = matrix(before, "lm_head.weight")
        np.testing.assert_allclose(
            matrix(after, "lm_head.weight"), weight - 2 * (head - weight), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("form", ["folder", "gguf", "from gguf"])
def test_a_tied_head_gets_its_own_weights(form: str, tmp_path: Path) -> None:
    """As PEFT computes: an adapter of the embedding leaves the head as it was, and the other way round."""
    save(tiny_model("qwen2-tied"), tmp_path / "base", torch.float32)
    a, b = numbers(1, RANK, 128), numbers(2, 64, RANK)
    tensors = {f"{PREFIX}{TABLE}.lora_embedding_A": a, f"{PREFIX}{TABLE}.lora_embedding_B": b}
    adapter, start = peft_folder(tmp_path / "a", tensors), tmp_path / "base"
    if form == "from gguf":
        start = tmp_path / "base.gguf"
        assert convert(tmp_path / "base", start) == 0
    out = tmp_path / ("out.gguf" if form == "gguf" else "out")
    assert convert(start, out, "--merge-adapter", adapter) == 0
    if form == "gguf":
        assert convert(out, tmp_path / "back") == 0
        out = tmp_path / "back"
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    with Checkpoint(tmp_path / "base") as before, Checkpoint(out) as after:
        weight = matrix(before, f"{TABLE}.weight")
        np.testing.assert_array_equal(matrix(after, f"{HEAD}.weight"), weight)
        expected = weight + 6 / RANK * (b @ a).T
        np.testing.assert_allclose(matrix(after, f"{TABLE}.weight"), expected, rtol=1e-5, atol=1e-5)
    assert not open_model(out).facts.spec.tied


def test_to_gguf_and_back(base: Path, tmp_path: Path) -> None:
    """Rows that a converter permutes, and a fused base."""
    adapter = peft_folder(tmp_path / "a", pair(Q))
    assert convert(base, tmp_path / "out", "--merge-adapter", adapter) == 0
    assert convert(base, tmp_path / "out.gguf", "--merge-adapter", adapter) == 0
    assert convert(tmp_path / "out.gguf", tmp_path / "back") == 0
    with Checkpoint(tmp_path / "out") as one, Checkpoint(tmp_path / "back") as other:
        for name in one.names():
            np.testing.assert_array_equal(one.read(name), other.read(name))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "mixtral"])
def test_experts(name: str, tmp_path: Path) -> None:
    """Experts of one matrix each, or of a stack of any layout, keep the layout of the base."""
    save(tiny_model(name), tmp_path / "base", torch.float32)
    spec = open_model(tmp_path / "base").facts.spec
    layer = len(spec.layers) - 1
    moe = spec.layers[layer].mlp
    width = moe.width  # type: ignore[union-attr]
    up, down = (part.format(i=layer, e=2) for part in (spec.names.expert_up, spec.names.expert_down))
    one, two = pair(up, width, 64), pair(down, 64, width, seed=3)
    adapter = peft_folder(tmp_path / "a", one | two)
    assert convert(tmp_path / "base", tmp_path / "out", "--merge-adapter", adapter) == 0
    reference, merged = (load_reference(tmp_path / of, torch.float32) for of in ("base", "out"))
    with torch.no_grad():
        experts = reference.model.layers[layer].mlp.experts
        turned = name == "gpt-oss"
        of_up = experts.gate_up_proj[2].T if turned else experts.gate_up_proj[2]
        of_down = experts.down_proj[2].T if turned else experts.down_proj[2]
        rows = slice(1, None, 2) if turned else slice(width, None)
        of_up[rows] += torch.tensor(delta(one), dtype=torch.float32)
        of_down += torch.tensor(delta(two), dtype=torch.float32)
    tokens = random_tokens(2)
    np.testing.assert_allclose(
        reference_logits(merged, tokens), reference_logits(reference, tokens), atol=2e-5
    )
    with Checkpoint(tmp_path / "base") as before, Checkpoint(tmp_path / "out") as after:
        assert {n: before.info(n).shape for n in before.names()} == {
            n: after.info(n).shape for n in after.names()
        }


def test_a_quantized_base_is_dequantized(base: Path, tmp_path: Path) -> None:
    folder, _ = quantized_folder(base, tmp_path / "base", "gptq")
    module = "model.layers.0.mlp.down_proj"
    spec = open_model(folder).facts.spec
    tensors = pair(module, spec.dim, spec.layers[0].mlp.width)  # type: ignore[union-attr]
    adapter = peft_folder(tmp_path / "a", tensors)
    assert convert(folder, tmp_path / "plain", "--dtype", "float32") == 0
    assert convert(folder, tmp_path / "out", "--dtype", "float32", "--merge-adapter", adapter) == 0
    with Checkpoint(tmp_path / "plain") as before, Checkpoint(tmp_path / "out") as after:
        expected = matrix(before, f"{module}.weight") + delta(tensors)
        np.testing.assert_allclose(matrix(after, f"{module}.weight"), expected, rtol=1e-5, atol=1e-5)


def test_mistakes_leave_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, huge = peft_folder(tmp_path / "a", pair(Q)), peft_folder(tmp_path / "b", pair(Q), lora_alpha=1e6)
    wrong = peft_folder(tmp_path / "c", pair(Q, 65))
    for given, message in (
        (f"{adapter}=x", "x is not a finite number"),
        (f"{adapter}=nan", "nan is not a finite number"),
        ("nowhere", "no adapter folder or file"),
        (wrong, "was trained on another base"),
        (f"{huge}=1e38", "with the adapter it has NaN or infinite elements"),
    ):
        assert convert(base, tmp_path / "out", "--merge-adapter", given) != 0
        assert message in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_row_of_zeros_has_no_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DoRA divides by its length; quire says so in place of writing NaN."""
    save(TinyModel("zeros", "LlamaConfig", {}), tmp_path / "base", torch.float32)
    tensors = pair(Q)
    with Checkpoint(tmp_path / "base") as source:
        row = matrix(source, f"{Q}.weight")[3]
    b = tensors[f"{PREFIX}{Q}.lora_B.weight"]
    b[3] = 0
    low = tensors[f"{PREFIX}{Q}.lora_A.weight"]
    low[0], b[3, 0] = row, -1.0
    given = tensors | {f"{PREFIX}{Q}.lora_magnitude_vector": np.ones(64, np.float32)}
    adapter = peft_folder(tmp_path / "a", given, use_dora=True, lora_alpha=RANK)
    assert convert(tmp_path / "base", tmp_path / "out", "--merge-adapter", adapter) != 0
    assert "DoRA divides row 3 by its length, which is 0" in capsys.readouterr().err
