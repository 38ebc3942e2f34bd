"""Ranks that compute in torch, in processes that meet through torch.distributed: gloo, as there is no GPU here."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from helpers.rank_processes import Wide, answers, make
from helpers.torch_ranks import TORCH, same_answers
from quire import SamplingParams
from quire.executor.ranked import RankLostError

SLOW = pytest.mark.ranks


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("qwen3", {"tensor_parallel_size": 2}, marks=SLOW),
        pytest.param("qwen3", {"pipeline_parallel_size": 2}, marks=SLOW),
        pytest.param(
            "gpt-oss",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
            marks=SLOW,
        ),
        pytest.param("gpt-oss", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, marks=SLOW),
    ],
    ids=["columns", "stages", "stages-of-experts", "experts"],
)
def test_ranks_in_torch_answer_as_one(wide: Wide, name: str, plan: dict[str, Any]) -> None:
    with make(wide(name), **TORCH) as llm:
        alone = answers(llm)
    with make(wide(name), **TORCH, **plan) as llm:
        same_answers(answers(llm), alone)
        same_answers(answers(llm), alone)  # with cached prefixes


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=SLOW)])
def test_a_rank_that_is_gone_ends_the_step(wide: Wide, number: signal.Signals) -> None:
    with make(wide("qwen3"), **TORCH, tensor_parallel_size=2) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
        assert llm.built.ranks is not None
        os.kill(llm.built.ranks.pids[1], number)
        with pytest.raises(RankLostError, match=r"rank 1 of 2 (was killed by SIGKILL|does not answer)"):
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=80, ignore_eos=True))
