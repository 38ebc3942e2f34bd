"""Blocks that gave way and come back: the same bits as without swap space, and copies in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.core.scheduler import Scheduler
from quire.worker.swap_space import SwapSpace

LENGTH = 192


def answers(folder: Any, **options: Any) -> tuple[list[Any], Scheduler, SwapSpace | None]:
    """Eight streams in a pool that holds two of them, then two of the prompts again."""
    llm = LLM(
        folder, max_model_len=LENGTH, num_kv_blocks=28, max_num_seqs=8, threads=1, progress=False, **options
    )
    try:
        scheduler = llm._built.core.scheduler
        asked = [
            SamplingParams(max_tokens=90, temperature=0.8, seed=seed, logprobs=1, ignore_eos=True)
            for seed in range(8)
        ]
        prompts = [[3 + (7 * i + 3 * j) % 90 for j in range(64)] for i in range(8)]
        outputs = llm.generate(prompts, asked) + llm.generate(prompts[:2], asked[:2])
        made = [
            (sample.token_ids, [c.logprob for p in sample.logprobs or [] for c in p])
            for output in outputs
            for sample in output.outputs
        ]
        return made, scheduler, scheduler._blocks.caches.tier  # type: ignore[return-value]
    finally:
        llm.close()


def test_bits_are_those_of_recomputing(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    plain, recomputing, none = answers(folder)
    swapped, swapping, space = answers(folder, swap_space=2**20)
    assert none is None
    assert space is not None
    assert recomputing.num_preemptions > 0
    assert swapping.num_preemptions > 0
    assert space.blocks_out > 0
    assert space.blocks_in > 0
    assert swapped == plain


def test_it_is_in_the_memory_plan_and_has_its_limits(checkpoint: Folder) -> None:
    folder = checkpoint("qwen3")
    llm = LLM(folder, max_model_len=LENGTH, swap_space=3 * 2**20, threads=1, progress=False)
    assert llm._built.plan.parts["swap"] == 3 * 2**20
    llm.close()
    with pytest.raises(ValueError, match="swap_space: has no room for a block"):
        LLM(folder, max_model_len=LENGTH, swap_space=100, threads=1, progress=False)
    with pytest.raises(ValueError, match="swap_space: needs enable_prefix_caching"):
        LLM(folder, swap_space=2**20, enable_prefix_caching=False)


def test_the_block_used_longest_ago_makes_room() -> None:
    space = SwapSpace(2, 4)
    for name in (b"a", b"b"):
        assert space.withdrawn((name, 0), offered=True)
        space.put((name, 0), np.full(4, name[0], np.uint8))
    assert space.get((b"a", 0)).tolist() == [97] * 4  # type: ignore[union-attr]
    assert not space.withdrawn((b"a", 0), offered=True)  # its content is here already
    assert space.withdrawn((b"c", 0), offered=True)
    assert not space.holds((b"b", 0))
    space.put((b"b", 0), np.zeros(4, np.uint8))  # its place was given away before it came
    assert space.get((b"b", 0)) is None
    assert space.get((b"a", 0)).tolist() == [97] * 4  # type: ignore[union-attr]
    assert not space.withdrawn((b"a", 0), offered=False)  # it may be damaged
    assert not space.holds((b"a", 0))
    assert len(space) == 1


def test_a_place_without_its_content_has_none() -> None:
    """A copy in may run after the step in which another block was given the same name's place again."""
    space, name = SwapSpace(1, 8), (b"name", 0)
    assert space.withdrawn((b"other", 0), offered=True)
    space.put((b"other", 0), np.full(8, 1, np.uint8))
    assert space.withdrawn(name, offered=True)
    assert space.get((b"other", 0)) is None
    assert space.get(name) is None
    space.put(name, np.full(8, 2, np.uint8))
    found = space.get(name)
    assert found is not None
    assert (found == 2).all()
