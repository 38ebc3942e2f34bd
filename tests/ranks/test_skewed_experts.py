"""Replicas whose tokens choose the experts of one of them: their engines see it and have experts change places."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from helpers.rank_processes import COMMON, Wide, answered, make
from helpers.server import GUARD
from quire import AsyncLLM, SamplingParams
from quire.engine.api import EngineStats

SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
EXPERTS = 8
FAVOUR = 100.0  # logits of a router: far more than its rows make


def skewed(plain: Path, folder: Path) -> Path:
    """A GPT-OSS whose routers choose two of the first half of the experts, which the first replica holds."""
    shutil.copytree(plain, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("mlp.router.bias"):
            tensor[: EXPERTS // 2] += FAVOUR
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """As many as both replicas have rows for, half of them sampled."""
    params = [
        SamplingParams(max_tokens=80, temperature=0.9 * (row % 2), seed=row, logprobs=1, ignore_eos=True)
        for row in range(8)
    ]
    return [[40 + 9 * row, 41, 42] for row in range(8)], params


class Watched:
    """Two replicas in processes, whose every answer is compared."""

    def __init__(self, llm: AsyncLLM, alone: list[Any]) -> None:
        self._llm, self._alone = llm, alone

    async def next_look(self, was: EngineStats) -> EngineStats:
        """What the first replica reports once it has looked at the loads of both again."""
        while (found := self._llm._engine.stats).expert_pairs == was.expert_pairs:
            assert answered(await self._llm.generate(*asked())) == self._alone
        return found


@pytest.mark.ranks
def test_loads_make_experts_change_places(wide: Wide, tmp_path: Path) -> None:
    """Nothing is patched: the engines' own counts, choice, and share of the time."""
    folder = skewed(wide("gpt-oss", num_local_experts=EXPERTS), tmp_path / "skewed")
    with make(folder) as llm:
        alone = answered(llm.generate(*asked()))

    async def check() -> None:
        async with (
            AsyncLLM(folder, **(COMMON | {"memory": 4 * 2**30} | SHARED)) as llm,
            asyncio.timeout(GUARD),
        ):
            replicas = Watched(llm, alone)
            first = later = await replicas.next_look(EngineStats())
            assert first.expert_pairs[0] > 0
            assert first.expert_pairs[1] == 0
            assert first.expert_load["rank"] == 2.0
            while later.expert_load["rank"] > 1.2:
                later = await replicas.next_look(later)
            assert later.expert_moves >= 4  # one in each layer at least
            last = await replicas.next_look(later)
            pairs = [now - was for now, was in zip(last.expert_pairs, later.expert_pairs, strict=True)]
            assert max(pairs) < 1.2 * sum(pairs) / 2
            assert last.expert_load["rank"] < 1.2

    asyncio.run(check())
