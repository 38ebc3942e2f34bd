"""The least KV memory: what a sequence of the full length holds at once, windows and all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import tiny_model
from helpers.tokenizers import save_whole
from quire import LLM, SamplingParams
from quire.core.capacity import least_blocks
from quire.types import MemoryBudgetError, RequestError

LENGTH = 512
COMMON: dict[str, Any] = {"max_model_len": LENGTH, "progress": False, "threads": 1, "max_num_seqs": 2}
# 511 computed tokens: 32 blocks of 16 where attention is full, and 4 that a window of 40 can touch.
MODELS = [("llama2", 32), ("mistral-window", 4), ("gemma3", 32 + 3 * 4)]


@pytest.fixture(scope="module", params=MODELS, ids=lambda param: param[0])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    name, least = request.param
    tiny = tiny_model(name)
    sizes = {"max_position_embeddings": LENGTH}
    if "sliding_window" in tiny.overrides:
        sizes["sliding_window"] = 40
    tiny = replace(tiny, overrides={**tiny.overrides, **sizes})
    return save_whole(tiny, tmp_path_factory.mktemp(name)), least


def test_a_sequence_of_the_full_length_runs_in_the_least_blocks(model: tuple[Path, int]) -> None:
    folder, least = model
    prompt = [3 + i % 90 for i in range(LENGTH - 100)]
    asked = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    tokens = []
    for blocks in (least, 1024):
        with LLM(folder, num_kv_blocks=blocks, **COMMON) as llm:
            assert llm.built.plan.limits.num_blocks == blocks
            (output,) = llm.generate([prompt], asked, use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
            assert llm.built.core.scheduler.num_preemptions == 0
    assert len(tokens[0]) == 100
    assert tokens[0] == tokens[1]


def test_one_block_fewer_is_refused(model: tuple[Path, int]) -> None:
    folder, least = model
    with pytest.raises(MemoryBudgetError, match=f"one sequence of {LENGTH} tokens"):
        LLM(folder, num_kv_blocks=least - 1, **COMMON)
    with LLM(folder, num_kv_blocks=least, **COMMON) as llm:
        scheduler, asked = llm.built.core.scheduler, SamplingParams(max_tokens=LENGTH - 100)
        scheduler.config = replace(scheduler.config, num_blocks=least - 1)
        with pytest.raises(RequestError, match="exceed the KV cache"):
            llm.generate([[3] * 100], asked, use_tqdm=False)


def test_a_whole_prompt_needs_blocks_for_all_of_it(model: tuple[Path, int]) -> None:
    folder, _ = model
    with LLM(folder, enable_chunked_prefill=False, **COMMON) as llm:
        groups = llm.built.program.cache_groups
        whole = len(groups) * LENGTH // 16
        assert least_blocks(groups, LENGTH, LENGTH, 16) == whole
        assert llm.built.plan.limits.num_blocks == 2 * 2 * whole  # both places, and as much again
    with pytest.raises(MemoryBudgetError):
        LLM(folder, enable_chunked_prefill=False, num_kv_blocks=whole - 1, **COMMON)
