"""Checkpoints without heads, channels or layers: what they compute, who loads them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.checkpoints import random_tokens
from helpers.tokenizers import save_whole
from helpers.tolerances import logits
from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.offline.prune import prune_run
from quire.offline.prune.prune_run import prune_structure
from quire.offline.prune.structures import kept_layers, renumbered
from quire.offline.quantize.recipe import Recipe
from quire.offline.texts import TEXT
from quire.types import CheckpointError, QuireError, UnsupportedModelError

ASKED = EngineConfig(threads=1, dtype="float32")
# Groups of two query heads; biases; one head of keys and values; sandwich norms and windows; one tensor for q, k, v and
# one for gate and up.
FAMILIES = ("qwen3", "qwen2-tied", "gemma-mqa", "gemma2", "phi3-window")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT.encode("ascii", "ignore").decode())
    return str(path)


def _recipe(structure: str, sparsity: float = 0.5) -> Recipe:
    return Recipe(method="structured", structure=structure, sparsity=sparsity, samples=4, length=128)


def _prune(model: Path, out: Path, structure: str, text: str, **more: Any) -> Any:
    return prune_structure(str(model), out, _recipe(structure), ASKED, calibration=text, **more)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_smaller_model_computes_what_zeros_would(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, then channels of the result: as the model before with zeros in its output projections."""
    before = save_whole(name, tmp_path / "model")
    for structure in ("heads", "channels"):
        chosen: dict[str, np.ndarray] = {}
        choose = prune_run.choose

        def watched(*given: Any, choose: Any = choose, chosen: Any = chosen) -> Any:
            kept, found = choose(*given)
            chosen.update({tensor: rounded.values() for tensor, (rounded, _) in found.items()})
            return kept, found

        monkeypatch.setattr(prune_run, "choose", watched)
        after = tmp_path / structure
        result = _prune(before, after, structure, text)
        monkeypatch.setattr(prune_run, "choose", choose)
        assert 0 < max(result.errors.values()) < 1
        zeroed = tmp_path / f"{structure}-zeroed"
        zeroed.mkdir()
        (zeroed / "config.json").write_text((before / "config.json").read_text())
        weights: dict[str, torch.Tensor] = {}
        for file in before.glob("*.safetensors"):
            weights |= load_file(file)
        save_file(weights | {k: torch.tensor(v) for k, v in chosen.items()}, zeroed / "model.safetensors")
        found = logits(after, {"dtype": "float32"})
        np.testing.assert_allclose(found, logits(zeroed, {"dtype": "float32"}), atol=2e-4)
        assert np.abs(found - logits(before, {"dtype": "float32"})).max() > 1e-2
        reference = transformers.AutoModelForCausalLM.from_pretrained(after, attn_implementation="eager")
        with torch.inference_mode():
            expected = reference(torch.tensor([random_tokens(0)])).logits[0].numpy()
        np.testing.assert_allclose(found, expected, atol=2e-4)
        before = after
    spec = open_model(before).facts.spec
    assert {layer.mlp.width for layer in spec.layers} == {48}  # type: ignore[union-attr]
    assert {layer.mixer.heads for layer in spec.layers} == {2}  # type: ignore[union-attr]


def test_half_of_the_layers(text: str, tmp_path: Path) -> None:
    """Lists by layer follow; what stays is the same tensors under other numbers, and transformers agrees."""
    model = save_whole("qwen2-mixed-windows", tmp_path / "model")
    result = _prune(model, tmp_path / "out", "layers", text)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    old = json.loads((model / "config.json").read_text())
    gone = {i for i in range(4) if str(i) in result.lines[0].split("are taken")[0]}
    kept = [i for i in range(4) if i not in gone]
    assert (len(kept), config["num_hidden_layers"]) == (2, 2)
    assert kept[0] == 0
    assert config["layer_types"] == [old["layer_types"][i] for i in kept]
    found = logits(tmp_path / "out", {"dtype": "float32"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([random_tokens(0)])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("structure", ["heads", "layers"])
def test_a_run_that_was_interrupted_continues_to_the_same_bytes(
    structure: str, text: str, tmp_path: Path
) -> None:
    model = save_whole("qwen3", tmp_path / "model")
    _prune(model, tmp_path / "whole", structure, text)

    class Killed(BaseException):
        pass

    def killed(done: int, _total: int) -> None:
        if done == 6:  # in the second pass of the first layer, or in the second layer
            raise Killed

    out = tmp_path / "resumed"
    for stop in (killed, None):
        try:
            _prune(model, out, structure, text, progress=stop)
        except Killed:
            assert not out.exists()
    for file in (tmp_path / "whole").iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_cannot_be_taken_out(text: str, tmp_path: Path) -> None:
    """Refused by name before anything is written."""
    for name, structure, message in (
        ("deepseek3", "heads", "heads of LatentAttention cannot be taken out"),
        ("olmo2", "heads", "with a norm over all heads"),
        ("mixtral", "channels", "channels of experts cannot be taken out"),
        ("gpt-oss", "channels", "experts"),
    ):
        model = save_whole(name, tmp_path / name)
        with pytest.raises(UnsupportedModelError, match=message):
            _prune(model, tmp_path / "out", structure, text)
        assert not list(tmp_path.glob("out*"))
    model = tmp_path / "mixtral"
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        _prune(model, tmp_path / "there", "layers", text)
    short = tmp_path / "short.txt"
    short.write_text("Hello")
    with pytest.raises(ValueError, match="fewer than a window of 128"):
        _prune(model, tmp_path / "out", "layers", str(short))
    recipe = _recipe("layers", 0.1)
    with pytest.raises(ValueError, match=r"sparsity: 0\.1 takes out none of the 2 layers"):
        prune_structure(str(model), tmp_path / "out", recipe, ASKED, calibration=text)
    with pytest.raises(ValueError, match="structure: 'tails' is not one of heads, channels, layers"):
        _recipe("tails")
    assert not list(tmp_path.glob("out*"))


def test_a_result_that_is_refused_has_no_name(text: str, tmp_path: Path) -> None:
    """The finished layers stay; the same call without the refusal takes them over."""
    model, out = save_whole("qwen3", tmp_path / "model"), tmp_path / "out"

    def refuse(folder: Path) -> None:
        assert open_model(folder).facts.spec.layers
        raise QuireError("too much")

    with pytest.raises(QuireError, match="too much"):
        _prune(model, out, "channels", text, judge=refuse)
    assert not out.exists()
    passes: list[tuple[int, int]] = []
    _prune(model, out, "channels", text, progress=lambda done, total: passes.append((done, total)))
    assert out.is_dir()
    assert not passes  # nothing was computed again


def test_layers_of_known_influence() -> None:
    assert kept_layers({1: 0.5, 2: 0.1, 3: 0.2}, 4, 0.5) == [0, 1]
    assert kept_layers({1: 0.5, 2: 0.1, 3: 0.2}, 4, 0.99) == [0]
    assert (
        renumbered("model.layers.11.mlp.experts.3.up_proj.weight", 7)
        == "model.layers.7.mlp.experts.3.up_proj.weight"
    )
