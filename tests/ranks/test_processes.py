"""Ranks in processes: the same tokens and logprobs as one process, and an end within seconds when one is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.torch

from helpers.rank_processes import Wide, answers, answers_of_replicas, bits, make
from quire import LLM, SamplingParams
from quire.engine.build import rank_processes
from quire.engine.build.rank_processes import RankStartError
from quire.executor.ranked import RankLostError
from quire.types import QuireError, UnsupportedModelError


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("qwen3", {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}),
        ("llama3.1", {"quantization": "int4"}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen2-mixed-windows", {"kv_cache_dtype": "int8"}, {"pipeline_parallel_size": 2}),
        ("qwen3-moe", {"quantization": "int8"}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek3", {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}),
        ("gemma3", {"speculate": "ngram"}, {"tensor_parallel_size": 2}),
    ],
    ids=["tensor", "tensor-and-pipeline", "pipeline", "experts", "latents", "drafts"],
)
def test_answers_are_those_of_one_process(
    wide: Wide, name: str, options: dict[str, Any], ranks: dict[str, Any]
) -> None:
    with make(wide(name), **options) as llm:
        alone = answers(llm)
    with make(wide(name), **options, **ranks) as llm:
        assert answers(llm) == alone
        pids = llm.built.ranks.pids.values()  # type: ignore[union-attr]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_replicas_of_ranks(wide: Wide) -> None:
    """Two replicas of two ranks, which hold whole experts."""
    options = {"quantization": "int8"}
    with make(wide("qwen3-moe"), **options) as llm:
        alone = answers(llm)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_size": 2}
    assert answers_of_replicas(wide("qwen3-moe"), **options, **ranks) == alone


def test_a_sum_that_is_cut_has_other_bits(wide: Wide) -> None:
    """The control: the same ranks, with partial sums."""
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    with make(wide("qwen3"), tensor_parallel_size=2, tensor_parallel_reduce="fast") as llm:
        assert answers(llm) != alone
        assert any("depend on their number" in notice for notice in llm.notices)


def test_blocks_are_swapped_on_all_ranks(wide: Wide) -> None:
    """Prompts that are asked again after others took their blocks."""
    rows = [np.random.default_rng(seed).integers(3, 128, 80).tolist() for seed in (1, 2, 3, 1, 2)]
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)

    def run(**options: Any) -> list[Any]:
        with make(wide("llama3.1"), num_kv_blocks=7, **options) as llm:
            found = [bits(llm.generate([row], asked)[0]) for row in rows]
            swap = llm.built.core.swap
            assert swap is None or (swap.blocks_out > 0 and swap.blocks_in > 0)
        return found

    alone = run()
    assert run(tensor_parallel_size=2, pipeline_parallel_size=2, swap_space=2**20) == alone


def test_embeddings_in_place_of_a_prompt_reach_the_first_stage(wide: Wide) -> None:
    rows = {"prompt_embeds": np.random.default_rng(5).standard_normal((40, 192)).astype(np.float32)}
    prompts: list[Any] = [rows, list(range(3, 30))]
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)

    def run(**options: Any) -> list[Any]:
        with make(wide("llama3.1"), enable_prompt_embeds=True, **options) as llm:
            return [bits(found) for found in llm.generate(prompts, [asked, asked])]

    alone = run()
    assert run(tensor_parallel_size=2) == alone
    assert run(pipeline_parallel_size=2) == alone


def ended(pids: dict[int, int]) -> None:
    """No process of a rank is left, and nothing that ranks shared is in /dev/shm."""
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    assert not list(Path("/dev/shm").glob("*quire*"))


def keep_busy(llm: LLM, stream: Iterator[Any]) -> NoReturn:
    """Until a step fails; one that waits for a rank that hangs ends in some seconds."""
    while True:
        list(stream)
        stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=70, ignore_eos=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_step(wide: Wide, number: signal.Signals) -> None:
    with make(wide("qwen3"), tensor_parallel_size=2) as llm:
        assert llm.built.ranks is not None
        pids = llm.built.ranks.pids
        stream = llm.stream(np.arange(3, 20).tolist(), SamplingParams(max_tokens=70, ignore_eos=True))
        next(stream)
        os.kill(pids[1], number)
        reason = "was killed by SIGKILL" if number == signal.SIGKILL else "does not answer"
        with pytest.raises(RankLostError, match=f"rank 1 of 2 {reason}"):
            keep_busy(llm, stream)
        with pytest.raises(QuireError, match=f"a step failed .RankLostError: rank 1 of 2 {reason}"):
            llm.generate([[5, 6, 7]])
    ended(pids)


def test_a_rank_of_another_version_does_not_start(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "rank_digest", lambda *_: "another")
    with pytest.raises(RankStartError, match="rank 1 of 2: its version, config or weights are not the same"):
        make(wide("qwen3"), tensor_parallel_size=2)


def test_a_rank_that_cannot_load_says_why(wide: Wide, tmp_path: Path) -> None:
    """The last stage alone has the head, the others do not read it."""
    for each in wide("llama3.1").iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    weights = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    tensors["model.embed_tokens.weight"][5, 7] = float("nan")
    safetensors.torch.save_file(tensors, weights)
    with pytest.raises(RankStartError, match=r"rank 0 of 2 CheckpointError: .*embed_tokens.weight"):
        make(tmp_path, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "cannot split hidden_size 192: it has 3 panels"),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_reduce": "fast", "enable_lora": True},
            "enable_lora: adapters are not supported with tensor_parallel_reduce fast",
        ),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size: 3 is more than the model's 2 layers"),
    ],
)
def test_what_ranks_cannot_do_is_refused(wide: Wide, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make(wide("qwen3"), **options)
