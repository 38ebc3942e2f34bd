"""Experts change ranks while requests run: the bits of one rank, whatever moves."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_nodes import environment, following, fresh_address
from helpers.rank_processes import COMMON, Wide, answers, make
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


def copy_at_random(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> list[tuple[int, int, int]]:
    """Before every step an expert of each layer is copied over one that is at several places, and two change; returns
    what was copied, as it grows."""
    chance, made = random.Random(seed), []

    def step(self: ExpertBalance) -> None:
        experts = self._executor.experts
        for layer, places in experts.placed.items():
            spare = [place for place, expert in enumerate(places) if places.count(expert) > 1]
            other = chance.choice(spare)
            one = chance.choice([place for place, expert in enumerate(places) if expert != places[other]])
            experts.copy(layer, one, other)
            made.append((layer, one, other))
            experts.swap(layer, *chance.sample(range(len(places)), 2))

    monkeypatch.setattr(ExpertBalance, "step", step)
    return made


# More ranks than experts of a token: each of three has a ninth place for a copy.
MANY = {"num_experts": 24, "num_experts_per_tok": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
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
        pytest.param("qwen3-moe", {"quantization": "int8"}, "two", marks=pytest.mark.ranks),
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
        monkeypatch.setattr(HeldExperts, "put", lambda self, layer, placed: None)
        move_at_random(monkeypatch)
        assert answers(llm) != alone


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where node 0, which is this process, meets one other."""
    address = fresh_address()
    for name, value in environment(address, 2).items():
        monkeypatch.setenv(name, value)
    return address


def test_they_move_between_hosts(wide: Wide, two_hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, options = wide("gpt-oss"), {"quantization": "int8"}
    with make(folder, **options) as llm:
        alone = answers(llm)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with (
        following(folder, two_hosts, 2, COMMON | options | ranks),
        make(folder, **options, **ranks) as llm,
    ):
        moved = move_at_random(monkeypatch)
        assert answers(llm) == alone
    assert len(moved) > 20


@pytest.mark.ranks
def test_stages_of_experts_on_four_hosts(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = fresh_address(), wide("gpt-oss")
    with make(folder) as llm:
        alone = answers(llm)
    for name, value in environment(address, 4).items():
        monkeypatch.setenv(name, value)
    ranks = PLANS["stages"] | {"enable_expert_parallel": True}
    with following(folder, address, 4, COMMON | ranks), make(folder, **ranks) as llm:
        moved = move_at_random(monkeypatch)
        assert answers(llm) == alone
    assert len(moved) > 20


def test_copies_of_experts(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of one process, whatever is copied; and then with the engine's own choice."""
    folder = wide("qwen3-moe", **MANY)
    with make(folder, quantization="int8") as llm:
        alone = answers(llm)
        assert {len(places) for places in llm.built.executor.experts.placed.values()} == {24}
    ranks = PLANS["three"] | {"enable_expert_parallel": True}
    with make(folder, quantization="int8", **ranks) as llm:
        assert {len(places) for places in llm.built.executor.experts.placed.values()} == {27}
        assert answers(llm) == alone
        with monkeypatch.context() as patch:
            made = copy_at_random(patch)
            assert answers(llm) == alone
        assert len(made) > 20
        for name, value in {"LOOK_STEPS": 2, "_SHARE": 1e9, "_ENOUGH": 0}.items():
            monkeypatch.setattr(expert_balance, name, value)
        assert answers(llm) == alone
        assert llm.built.core.experts is not None
        assert llm.built.core.experts.moved > 0


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
