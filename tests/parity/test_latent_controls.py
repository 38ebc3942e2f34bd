"""Negative controls of latent attention: a part that is left out, or a factor that is wrong, gives other logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.backends import BACKENDS, Backend
from helpers.checkpoints import LENGTH, random_tokens, tiny_model
from helpers.golden import Golden, MakeGolden
from helpers.specs import F32
from helpers.stepper import Stepper
from quire.executor.base import Limits
from quire.loader import Checkpoint, LoadRules, load
from quire.program.lower import lower
from quire.program.ops.rows import Norm
from quire.program.program import Program
from quire.spec.facts import read_model

LIMITS = Limits(max_tokens=LENGTH, max_rows=1, max_logit_rows=LENGTH, max_len=LENGTH, num_blocks=20)
Tensors = dict[str, torch.Tensor]
pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def difference(golden: Golden, folder: Path, backend: Backend, change: Callable[[Program], Program]) -> float:
    """Largest |logit difference| to transformers with the true checkpoint."""
    spec = read_model(folder).spec
    program = lower(spec, F32)
    executor = backend.make(change(program))
    with Checkpoint(folder) as source:
        load(program.params, source, executor, rules=LoadRules.of(spec))
    stepper = Stepper(executor.program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    number = stepper.add(random_tokens(0))
    logits = stepper.step(executor, {number: LENGTH})[number]
    return float(np.abs(logits - golden.logits(0)).max())


def same(program: Program) -> Program:
    return program


def without_query_norm(program: Program) -> Program:
    """Latents of queries go on as they are."""
    body = tuple(
        replace(op, weight=None) if isinstance(op, Norm) and "q_a_norm" in (op.weight or "") else op
        for op in program.body
    )
    assert body != program.body
    return replace(program, body=body)


def no_rotated_keys(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "kv_a_proj_with_mqa.weight" in name:
            tensor[32:] = 0


def no_rotated_queries(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "q_b_proj.weight" in name:
            tensor.view(4, 24, -1)[:, 16:] = 0


def plain_latent_norm(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "kv_a_layernorm" in name:
            tensor.fill_(1)


def heads_in_another_order(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if "kv_b_proj" in name:
            tensor.copy_(tensor.view(4, 36, -1).flip(0).reshape(tensor.shape))


@pytest.mark.parametrize(
    "change", [no_rotated_keys, no_rotated_queries, plain_latent_norm, heads_in_another_order]
)
def test_every_part_matters(
    change: Callable[[Tensors], None], backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    true = golden(tiny_model("deepseek3"))
    tensors = load_file(true.folder / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_text((true.folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    assert difference(true, true.folder, backend, same) <= backend.tolerance
    assert difference(true, tmp_path, backend, same) > 1e-3


def test_the_norm_of_queries_matters(backend: Backend, golden: MakeGolden) -> None:
    true = golden(tiny_model("deepseek3"))
    assert difference(true, true.folder, backend, without_query_norm) > 1e-3


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek3", {"mscale_all_dim": 0.5}),
        ("deepseek3", {"mscale_all_dim": None}),
        ("deepseek3", {"mscale": 0.1}),
        ("deepseek2-lite", {"mscale_all_dim": 0.5}),
        ("deepseek3", {"rope_theta": 20_000.0}),
    ],
    ids=str,
)
def test_factors_of_yarn_matter(
    name: str, changes: dict[str, float | None], backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    true = golden(tiny_model(name))
    config = json.loads((true.folder / "config.json").read_text())
    config["rope_parameters"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(true.folder / "model.safetensors")
    assert difference(true, tmp_path, backend, same) > 1e-3
