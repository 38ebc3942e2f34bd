"""Ranks in processes: the same tokens and logprobs as one process, and an end within seconds when one is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from helpers.checkpoints import TinyModel, tiny_model
from helpers.tokenizers import save_whole
from quire import LLM, RequestOutput, SamplingParams
from quire.engine.build import rank_processes
from quire.engine.build.rank_processes import RankStartError
from quire.executor.ranked import RankLostError
from quire.types import QuireError, UnsupportedModelError

Wide = Callable[..., Path]
# Panels of 64 columns for up to three ranks, the last one short in the vocabulary and the experts.
WIDER = {"hidden_size": 192, "intermediate_size": 200, "vocab_size": 330}


def wider(model: TinyModel) -> TinyModel:
    """The same family, with enough panels to split."""
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
    return replace(
        model,
        overrides={**model.overrides, **WIDER, **{name: 136 for name in widths if name in model.overrides}},
    )


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    """wide(name, dtype=torch.float32): folder of a tiny model that ranks can split."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name, dtype] = save_whole(wider(tiny_model(name)), folder, dtype)
        return made[name, dtype]

    return get


def make(folder: Path, **options: Any) -> LLM:
    common = {"max_model_len": 96, "threads": 1, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    return LLM(folder, progress=False, **(common | options))


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def answers(llm: LLM) -> list[Any]:
    """Prompts in chunks beside decoding ones, with a prefix that two share; a sampled one and a greedy one."""
    rows = [np.random.default_rng(seed).integers(3, 128, 12 + 17 * seed).tolist() for seed in range(4)]
    rows.append(rows[3][:40] + rows[0])
    asks = [
        SamplingParams(
            max_tokens=12, temperature=0.9 if seed % 2 else 0.0, seed=seed, logprobs=3, ignore_eos=True,
            prompt_logprobs=2 if seed == 1 else None, n=2 if seed == 3 else 1,
        )
        for seed in range(5)
    ]  # fmt: skip
    found = llm.generate(rows, asks)
    prompts = [[c.logprob for p in out.prompt_logprobs or [] if p for c in p] for out in found]
    return [list(map(bits, found)), prompts]


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("qwen3", {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}),
        ("llama3.1", {"quantization": "int4"}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("qwen2-mixed-windows", {"kv_cache_dtype": "int8"}, {"pipeline_parallel_size": 2}),
    ],
    ids=["tensor", "tensor-and-pipeline", "pipeline"],
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


def ended(pids: dict[int, int]) -> None:
    """No process of a rank is left, and nothing that ranks shared is in /dev/shm."""
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    assert not list(Path("/dev/shm").glob("*quire*"))


def keep_busy(llm: LLM, stream: Iterator[Any]) -> None:
    began = time.monotonic()
    while time.monotonic() < began + 30:
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
        began = time.monotonic()
        reason = "was killed by SIGKILL" if number == signal.SIGKILL else "does not answer"
        with pytest.raises(RankLostError, match=f"rank 1 of 2 {reason}"):
            keep_busy(llm, stream)
        assert time.monotonic() - began < 20
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
        ({"tensor_parallel_size": 2, "enable_lora": True}, "enable_lora: adapters are not supported with"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size: 3 is more than the model's 2 layers"),
    ],
)
def test_what_ranks_cannot_do_is_refused(wide: Wide, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make(wide("qwen3"), **options)
