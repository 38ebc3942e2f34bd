"""The linears of a layer, their inputs, and what absorbs factors: against transformers, family by family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import load_reference, random_tokens, reference_logits
from helpers.tokenizers import save_whole
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights
from quire.engine.build.opening import Model, open_model
from quire.loader import LoadRules
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.layer import LayerWeights, stored_names
from quire.offline.quantize.scaling import _tied, apply_factors
from quire.offline.quantize.sites import Site

F32 = npt.NDArray[np.float32]
# Absorbers that a layer has: norms before attention and feed-forward, values, "up".
FAST = {
    "llama-biases-mqa-tied": 4,
    "qwen3": 4,
    "gemma2": 4,
    "phi3-window": 4,
    "cohere": 3,
    "olmo2": 2,
    "glm4": 4,
}
MORE = {"llama2": 4, "gemma3": 4, "olmo3": 2, "smollm3": 4, "stablelm": 4, "stablelm-parallel-head-norms": 3,
        "cohere2": 3, "granite": 4, "qwen2-tied": 4}  # fmt: skip
FAMILIES = [
    *(pytest.param(*item, id=item[0]) for item in FAST.items()),
    *(pytest.param(*item, id=item[0], marks=pytest.mark.quantize) for item in MORE.items()),
]


def layers_of(model: Model, longest: int) -> list[LayerForward]:
    config, _ = choose(model, EngineConfig().replace(threads=1), machine_facts())
    return [LayerForward(model.facts.spec, config, at, longest) for at in range(len(model.facts.spec.layers))]


@pytest.mark.parametrize(("name", "absorbers"), FAMILIES)
def test_inputs_of_linears_are_those_of_transformers(name: str, absorbers: int, tmp_path: Path) -> None:
    folder, tokens = save_whole(name, tmp_path), random_tokens(3)
    reference = load_reference(folder, torch.float32)
    seen: dict[str, F32] = {}
    for path, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, path=path: seen.__setitem__(
                    path, inputs[0].reshape(-1, inputs[0].shape[-1]).numpy()
                )
            )
    reference_logits(reference, tokens)
    model = open_model(folder)
    residual, checked = None, set[str]()

    def take(site: Site, rows: F32, experts: object) -> None:
        assert experts is None
        for module in site.modules:
            np.testing.assert_allclose(rows, seen[module.name], atol=2e-4, rtol=1e-3, err_msg=module.name)
            checked.add(module.name)

    with open_weights(model) as source:
        for layer in layers_of(model, len(tokens)):
            assert sum(site.absorber is not None for site in layer.sites) == absorbers
            layer.load(source)
            residual = layer.run(tokens, residual, take)
            layer.close()
    assert checked == set(seen) - {"lm_head"}


@pytest.mark.parametrize(("name", "absorbers"), FAMILIES)
def test_factors_change_no_output(name: str, absorbers: int, tmp_path: Path) -> None:
    """(x / s)(s w) = x w: the logits of a model with random factors everywhere are those without."""
    del absorbers
    folder, tokens = save_whole(name, tmp_path), random_tokens(4)
    before = reference_logits(load_reference(folder, torch.float64), tokens)
    model, rng = open_model(folder), np.random.default_rng(0)
    changed: dict[str, F32] = {}
    with open_weights(model) as source:
        stored = stored_names(model.facts.spec, source, LoadRules.of(model.facts.spec).twins)
        for layer in layers_of(model, 1):
            weights = LayerWeights(source, stored)
            for site in layer.sites:
                if site.absorber is not None:
                    factors = np.exp(rng.normal(size=site.cols)).astype(np.float32)
                    apply_factors(weights, site, np.ascontiguousarray(_tied(factors, site.absorber)))
            changed |= {stored[name]: values for name, values in weights.changed.items()}
    tensors = load_file(folder / "model.safetensors")
    assert len(changed) > len(model.facts.spec.layers) * 3
    for tensor, values in changed.items():
        assert not np.array_equal(tensors[tensor].numpy(), values)
        tensors[tensor] = torch.from_numpy(np.ascontiguousarray(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    after = reference_logits(load_reference(folder, torch.float64), tokens)
    np.testing.assert_allclose(after, before, atol=2e-5)
