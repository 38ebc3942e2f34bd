"""Linears that are rounded one after another: what is summed at each, and what comes of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from helpers.checkpoints import random_tokens
from helpers.tokenizers import save_whole
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights
from quire.engine.build.opening import open_model
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.in_order import STREAM_SHARE, SiteSums
from quire.offline.quantize.layer import Replaced
from quire.offline.quantize.sites import RESIDUAL

F32 = npt.NDArray[np.float32]
# Of o and down: whether their outputs are added to the residual stream as they are.
FAMILIES = {"llama2": 2, "qwen3": 2, "gemma2": 0, "granite": 0, "olmo2": 0, "phi3-window": 2}


@pytest.mark.parametrize(("name", "added"), FAMILIES.items())
def test_what_is_added_to_the_stream(name: str, added: int, tmp_path: Path) -> None:
    """Behind a site whose outputs are added, the stream is what it was and these outputs."""
    model = open_model(save_whole(name, tmp_path))
    config, _ = choose(model, EngineConfig().replace(threads=1), machine_facts())
    tokens = random_tokens(3)[:16]
    layer = LayerForward(model.facts.spec, config, 0, len(tokens))
    sites = [site for site in layer.sites if site.added]
    assert len(sites) == added
    with open_weights(model) as source:
        layer.load(source)
    for site in sites:
        layer.begin(tokens, None)
        layer.advance(site.op)
        before = layer.rows(RESIDUAL)
        layer.advance(site.op + 1)
        expected = before + layer.rows(site.added)
        after = before
        for op in range(site.op + 2, len(layer.program.body) + 1):
            layer.advance(op)
            after = layer.rows(RESIDUAL)
            if (after != before).any():
                break
        np.testing.assert_array_equal(after, expected)
    layer.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_targets_are_those_of_all_rows(threads: int, tmp_path: Path) -> None:
    """Each linear's weight of least squares, from all its inputs at once in float64."""
    folder = save_whole("llama2", tmp_path)
    model = open_model(folder)
    config, _ = choose(model, EngineConfig().replace(threads=1), machine_facts())
    spec, windows = model.facts.spec, [random_tokens(seed)[:32] for seed in range(8)]
    pair = [LayerForward(spec, config, 1, 32) for _ in range(2)]
    rng = np.random.default_rng(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {
        name: weight + rng.normal(scale=0.1 * weight.std(), size=weight.shape).astype(np.float32)
        for name, weight in weights.items()
    }
    streams = [rng.normal(size=(2, len(window), spec.dim)).astype(np.float32) for window in windows]
    with open_weights(model) as source, ThreadPoolExecutor(threads) as pool:
        pair[0].load(Replaced(source, noisy))
        pair[1].load(source)
        for site in pair[0].sites:
            sums, rows = SiteSums(site, pool), list[tuple[F32, F32]]()
            for window, (rounded, original) in zip(windows, streams, strict=True):
                for layer, stream in zip(pair, (rounded, original), strict=True):
                    layer.begin(window, stream)
                    layer.advance(site.op)
                x, y = pair[0].rows(site.buffer), pair[1].rows(site.buffer)
                lacking = pair[1].rows(RESIDUAL) - pair[0].rows(RESIDUAL)
                weight = weights[site.modules[0].tensor]
                wanted, scale = y @ weight.T, np.ones(len(x), np.float32)
                if site.added:
                    scale = 1 / np.sqrt(np.square(pair[1].rows(RESIDUAL) + wanted).mean(1))
                    wanted += STREAM_SHARE * lacking
                rows.append((x * scale[:, None], wanted * scale[:, None]))
                sums.add(*pair)  # both stand at the site
            sums.finish()
            x, wanted = (np.concatenate(part).astype(np.float64) for part in zip(*rows, strict=True))
            h = x.T @ x
            h += 0.01 * np.trace(h) / len(h) * np.eye(len(h))
            expected = weight + np.linalg.solve(h, x.T @ (wanted - x @ weight.T)).T
            np.testing.assert_allclose(sums.target(weight, 0.01), expected, atol=3e-3 * np.abs(weight).max())
        for layer in pair:
            layer.close()
