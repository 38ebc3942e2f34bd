"""Experts change ranks while requests run: the bits of one rank, whatever moves."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_processes import Wide, answers, make
from quire.engine.build import load_weights
from quire.executor.expert_places import HeldExperts
from quire.executor.native_ranks import LeadingExecutor
from quire.worker import expert_balance
from quire.worker.expert_balance import ExpertBalance


def move_at_random(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> list[tuple[int, int, int]]:
    """Two experts of each layer change their ranks before every step; returns what was exchanged, as it grows."""
    chance, moved = random.Random(seed), []

    def step(self: ExpertBalance) -> None:
        for layer, pairs in self._loads.items():
            places = range(len(pairs))
            split = len(places) // self.ranks  # the first place of the second rank
            move = layer, chance.choice(places[:split]), chance.choice(places[split:])
            self._executor.experts.swap(*move)
            moved.append(move)

    monkeypatch.setattr(ExpertBalance, "step", step)
    return moved


PLANS: dict[str, dict[str, Any]] = {
    "two": {"tensor_parallel_size": 2},
    "three": {"tensor_parallel_size": 3},
    "stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def check(wide: Wide, name: str, options: dict[str, Any], plan: str, patch: pytest.MonkeyPatch) -> None:
    with make(wide(name), **options) as llm:
        alone = answers(llm)
    with make(wide(name), **options, **PLANS[plan], enable_expert_parallel=True) as llm:
        moved = move_at_random(patch)
        assert answers(llm) == alone
    assert len(moved) > 20


@pytest.mark.parametrize(
    ("name", "options", "plan"),
    [
        ("qwen3-moe", {"quantization": "int8"}, "two"),
        ("gpt-oss", {"dtype": "bfloat16"}, "stages"),  # experts with biases
    ],
)
def test_answers_are_those_of_one_process(
    wide: Wide, name: str, options: dict[str, Any], plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(wide, name, options, plan, monkeypatch)


LATENT = ["deepseek2-lite", "deepseek3"]  # three ranks share their heads
MOVING = [
    *itertools.product(
        ["mixtral", "qwen2-moe-dense-layers", "glm4-moe", "gpt-oss", *LATENT], ["two", "stages"]
    ),
    *itertools.product(LATENT, ["three"]),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int4"}], ids=str
)
@pytest.mark.parametrize(("name", "plan"), MOVING)
def test_every_family_moves(
    wide: Wide, name: str, options: dict[str, Any], plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(wide, name, options, plan, monkeypatch)


def test_routers_must_know(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: weights change places, and routers are not told."""
    with make(wide("qwen3-moe")) as llm:
        alone = answers(llm)
    with make(wide("qwen3-moe"), tensor_parallel_size=2, enable_expert_parallel=True) as llm:
        monkeypatch.setattr(HeldExperts, "renumber", lambda self, layer, one, other: None)
        move_at_random(monkeypatch)
        assert answers(llm) != alone


def test_loads_are_counted_and_followed(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine's own choice of what moves, every second step."""
    monkeypatch.setattr(expert_balance, "LOOK_STEPS", 2)
    monkeypatch.setattr(expert_balance, "_SHARE", 1e9)
    monkeypatch.setattr(expert_balance, "_ENOUGH", 0)
    with make(wide("qwen3-moe")) as llm:
        alone = answers(llm)
        one = llm.built.core.experts
        assert one is not None
        one.look()
        assert one.ratios.keys() == {"expert"}
    with make(wide("qwen3-moe"), tensor_parallel_size=2, enable_expert_parallel=True) as llm:
        assert isinstance(llm.built.executor, LeadingExecutor)
        assert answers(llm) == alone
        two = llm.built.core.experts
        assert two is not None
        two.look()
        assert two.moved > 0
        assert sum(two.pairs) == sum(one.pairs) > 0
        assert two.ratios["rank"] < two.ratios["expert"]


def test_experts_of_one_rank_have_nowhere_to_go(wide: Wide) -> None:
    with (
        make(wide("qwen3-moe")) as llm,
        pytest.raises(RuntimeError, match="places 0 and 1 of layer 1 are of one rank"),
    ):
        llm.built.executor.experts.swap(1, 0, 1)


def test_experts_move_in_mapped_weights(wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that changed are not given back to the file, and the file stays as it is. Only the leading rank keeps
    packed weights of a model as small as this."""
    monkeypatch.setattr(load_weights, "SMALLEST", 0)
    options = {
        "dtype": "bfloat16",
        "weight_cache": "on",
        "weight_cache_dir": str(tmp_path),
        "enable_prefix_caching": False,
    }
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with make(wide("mixtral"), **options, **ranks) as llm:
        alone = answers(llm)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept
    with make(wide("mixtral"), **options, **ranks) as llm:
        assert llm.built.weights.source == "packed"
        with monkeypatch.context() as patch:
            moved = move_at_random(patch)
            assert answers(llm) == alone
            assert len(moved) > 20
        llm.built.executor.give_pages()
        assert answers(llm) == alone
    assert kept == {path: path.read_bytes() for path in kept}
