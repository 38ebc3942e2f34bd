"""Drafts over the features of a model on many ranks: they are those that one rank makes, and no bit depends on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import drafts
from helpers.checkpoints import load_reference
from helpers.rank_nodes import environment, following, fresh_address
from helpers.rank_processes import COMMON, Wide, answers, make
from helpers.speculating import costs_without_a_clock
from quire.speculate.draft_modules import ModuleDraftProposer
from quire.speculate.feature_drafts import FeatureDraftProposer
from quire.speculate.medusa import MedusaProposer
from quire.speculate.step_costs import PassCosts

TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
BOTH = TENSOR | STAGES
CASES: list[tuple[str, list[dict[str, Any]]]] = [
    ("eagle", [TENSOR, BOTH]), ("eagle3", [TENSOR, STAGES]), ("medusa", [TENSOR, STAGES]), ("mtp", [TENSOR, STAGES]),
]  # fmt: skip
WIDTHS = {"hidden_size": 192, "intermediate_size": 80, "vocab_size": 330}


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All drafts that are made from now on. The time that steps take chooses none."""
    costs_without_a_clock(monkeypatch, 0.01)
    monkeypatch.setattr(PassCosts, "of", lambda self, tokens, unit: 0.01)
    found: list[Any] = []

    def recording(propose: Any) -> Any:
        def recorded(self: Any, rooms: Any) -> Any:
            made = propose(self, rooms)
            found.append(dict(made))
            return made

        return recorded

    for kind in (FeatureDraftProposer, ModuleDraftProposer, MedusaProposer):
        monkeypatch.setattr(kind, "propose", recording(kind.propose))
    return found


def written(
    method: str, wide: Wide, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, Any]]:
    """A target that ranks can split, and the draft for it; which borrows what the target holds in parts."""
    for name, value in {"DIM": 192, "HEAD_DIM": 48, "VOCAB": 330}.items():
        monkeypatch.setattr(drafts, name, value)
    if method == "mtp":
        source, target = wide("deepseek3"), folder / "target"
        drafts.write_mtp(target, load_reference(source, torch.float32), source, 2)
        for file in source.iterdir():
            if not (target / file.name).exists():
                (target / file.name).write_bytes(file.read_bytes())
        return target, {"method": method, "num_speculative_tokens": 2}
    model = folder / "draft"
    if method == "medusa":
        drafts.write_medusa(model, original_lm_head=True)
    else:
        {"eagle": drafts.write_eagle, "eagle3": drafts.write_eagle3}[method](model, **WIDTHS)
    return wide("smollm3"), {"method": method, "num_speculative_tokens": 3, "model": str(model)}


@pytest.mark.parametrize(
    ("method", "plans"),
    [
        pytest.param(*each, id=each[0], marks=pytest.mark.ranks if each[0] in {"eagle", "medusa"} else ())
        for each in CASES
    ],
)
def test_drafts_are_those_of_one_rank(
    wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafted: list[Any], method: str,
    plans: list[dict[str, Any]],
) -> None:  # fmt: skip
    folder, chosen = written(method, wide, tmp_path, monkeypatch)
    with make(folder) as llm:
        alone = answers(llm)
    with make(folder, speculative_config=chosen) as llm:
        assert answers(llm) == alone
    made = list(drafted)
    assert sum(len(each) for each in made) > 10
    for plan in plans:
        drafted.clear()
        with make(folder, speculative_config=chosen, **plan) as llm:
            assert answers(llm) == alone
            assert llm.built.core.speculation is not None
            assert not llm.built.core.speculation.faults
        assert drafted == made, plan


@pytest.mark.ranks
def test_features_of_a_stage_on_another_host(
    wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafted: list[Any]
) -> None:
    folder, chosen = written("eagle3", wide, tmp_path, monkeypatch)
    with make(folder, speculative_config=chosen) as llm:
        alone = answers(llm)
    made = list(drafted)
    drafted.clear()
    address, options = fresh_address(), {"speculative_config": chosen, **STAGES}
    for name, value in environment(address, 2).items():
        monkeypatch.setenv(name, value)
    with following(folder, address, 2, COMMON | options), make(folder, **options) as llm:
        assert answers(llm) == alone
    assert drafted == made
