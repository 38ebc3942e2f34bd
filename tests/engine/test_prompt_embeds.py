"""Rows of embeddings in place of a prompt: those of the table are its ids, and no two prompts share a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.types import RequestError

LENGTH = 96
DIM = 64


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """Token ids and the exact logprobs of each sample."""
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def params(seed: int, **more: object) -> SamplingParams:
    asked: dict[str, object] = {
        "max_tokens": 40, "temperature": 0.9, "seed": seed, "logprobs": 3, "ignore_eos": True
    }  # fmt: skip
    return SamplingParams(**(asked | more))  # type: ignore[arg-type]


def opened(folder: Any, **more: Any) -> LLM:
    return LLM(folder, enable_prompt_embeds=True, max_model_len=LENGTH, progress=False, **more)


def given(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"prompt_embeds": rows}


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_rows_are_what_transformers_takes_as_embeddings(checkpoint: Folder, executor: str) -> None:
    folder = checkpoint("llama3.1")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = torch.randn(21, DIM, generator=torch.Generator().manual_seed(3)) * 0.3
    ids = np.random.default_rng(0).integers(3, 128, 30).tolist()
    with torch.inference_mode():
        expected = model.generate(
            inputs_embeds=rows[None], max_new_tokens=16, do_sample=False, eos_token_id=[], pad_token_id=0
        )[0].tolist()
        table = model.get_input_embeddings().weight[ids].numpy()
    with opened(folder, dtype="float32", executor=executor) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        assert llm.generate(given(rows), greedy)[0].outputs[0].token_ids == expected
        by_ids, by_rows = llm.generate([ids, given(table)], params(1))
        assert bits(by_ids) == bits(by_rows)


def test_alone_or_crowded(checkpoint: Folder) -> None:
    """In chunks, preempted, found in the cache by equal rows and by no others."""
    folder = checkpoint("qwen3")
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((length, DIM)).astype(np.float32) for length in (40, 33, 7)]
    rows.append(np.concatenate([rows[0][:32], rows[1][:5]]))  # begins as the first
    changed = rows[0].copy()
    changed[0, 0] += 1
    prompts: list[Any] = [*map(given, rows), given(changed), [0] * 40, given(rows[0])]
    asks = [params(i, **({"n": 2} if i == 1 else {})) for i in range(len(prompts))]
    with opened(folder, threads=1, enable_prefix_caching=False) as llm:
        alone = [bits(llm.generate([one], ask)[0]) for one, ask in zip(prompts, asks, strict=True)]
    with opened(folder, threads=2, max_num_batched_tokens=24, num_kv_blocks=14, speculate="ngram") as llm:
        for _ in range(2):
            together = llm.generate(prompts, asks)
            assert [bits(output) for output in together] == alone
        assert sum(record.preempted for record in llm.step_records()) > 0, "no preemption was exercised"
    with opened(folder) as llm:
        found = [
            llm.generate([one], ask)[0].usage.cached_tokens for one, ask in zip(prompts, asks, strict=True)
        ]
    assert found == [0, 0, 0, 0, 0, 0, 32]


@pytest.mark.parametrize(
    ("change", "more", "field"),
    [
        (lambda rows: rows[:, :-1], {}, r"prompt_embeds: \[5, 63\] is not \[tokens, 64\]"),
        (lambda rows: rows[0], {}, r"prompt_embeds: \[64\] is not"),
        (lambda rows: rows[:0], {}, r"prompt_embeds: \[0, 64\] is not"),
        (lambda rows: rows * np.inf, {}, "prompt_embeds: holds NaN or infinity"),
        (lambda rows: rows.astype(np.float64) * 1e300, {}, "prompt_embeds: holds NaN or infinity"),
        (lambda rows: rows.astype(np.int32), {}, "prompt_embeds: int32 is not a float type"),
        (lambda rows: np.tile(rows, (40, 1)), {}, "prompt_token_ids: "),
        (lambda rows: rows, {"repetition_penalty": 1.2}, "repetition_penalty: not supported"),
        (lambda rows: rows, {"prompt_logprobs": 1}, "prompt_logprobs: not supported"),
        (lambda rows: rows, {"guidance_scale": 2.0}, "negative_prompt: is needed"),
    ],
)  # fmt: skip
def test_what_is_refused(
    checkpoint: Folder, change: Callable[[np.ndarray], np.ndarray], more: dict[str, Any], field: str
) -> None:
    rows = np.ones((5, DIM), np.float32)
    with opened(checkpoint("qwen3")) as llm, pytest.raises(RequestError, match=field):
        llm.generate(given(change(rows)), params(0, **more))


def test_it_is_off_unless_asked_for(checkpoint: Folder) -> None:
    with (
        LLM(checkpoint("qwen3"), max_model_len=LENGTH, progress=False) as llm,
        pytest.raises(RequestError, match="prompt_embeds: not accepted: start with"),
    ):
        llm.generate(given(np.ones((5, DIM), np.float32)), params(0))
