"""Tiny models that can be split, and what an LLM answers over ranks in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import TinyModel
from quire import LLM, AsyncLLM, RequestOutput, SamplingParams

Wide = Callable[..., Path]
# Panels of 64 columns for up to three ranks, the last one short in the vocabulary and the experts.
COMMON: dict[str, Any] = {"max_model_len": 96, "threads": 1, "max_num_batched_tokens": 24, "max_num_seqs": 4}
WIDER = {"hidden_size": 192, "intermediate_size": 200, "vocab_size": 330}


def wider(model: TinyModel) -> TinyModel:
    """The same family, with enough panels to split, and a context that the prompts fit into."""
    widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
    more: dict[str, Any] = {name: 136 for name in widths if name in model.overrides}
    if model.config_class == "Phi3Config":  # whose rope has a factor for each pair of a head's columns
        more["num_attention_heads"] = 12
    if "max_position_embeddings" in model.overrides:
        more["max_position_embeddings"] = max(96, model.overrides["max_position_embeddings"])
    return replace(model, overrides={**model.overrides, **WIDER, **more})


def make(folder: Path, **options: Any) -> LLM:
    return LLM(folder, progress=False, **(COMMON | options))


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
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
    return rows, asks


def answers(llm: LLM) -> list[Any]:
    """What is answered to these, to the bit."""
    return answered(llm.generate(*asked()))


def answers_of_replicas(folder: Path, **options: Any) -> list[Any]:
    """The same of a server's engine, which may have replicas."""

    async def run() -> list[Any]:
        async with AsyncLLM(folder, **(COMMON | {"memory": 4 * 2**30} | options)) as llm:
            return answered(await llm.generate(*asked()))

    return asyncio.run(run())


def answered(found: list[RequestOutput]) -> list[Any]:
    """Tokens and logprobs of answers and of prompts."""
    prompts = [[c.logprob for p in out.prompt_logprobs or [] if p for c in p] for out in found]
    return [list(map(bits, found)), prompts]
