"""One request gives the same bits alone and in any company: the first promise, seen through the whole engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.logprobs import PositionLogprobs

WINDOWS = "qwen2-mixed-windows"
LENGTH = 96


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """Token ids and the exact logprobs of the chosen and the five likeliest tokens, sample by sample."""
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def params(seed: int, **more: object) -> SamplingParams:
    asked: dict[str, object] = {
        "max_tokens": 40, "temperature": 0.9, "seed": seed, "logprobs": 5, "ignore_eos": True
    }  # fmt: skip
    return SamplingParams(**(asked | more))  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


# Tokens and sequences of a step. Small steps take long, and differ from the others in numbers alone.
CROWDS = [(64, 8), (24, 3), (8, 8)]
CASES = [
    *itertools.product(["qwen3", WINDOWS], ["float32", "bfloat16", "int8", "int8-kv"]),
    *itertools.product(["qwen3"], ["float16", "int4", "float32-head", "fp8-kv", "int4-kv"]),
]
IN_EVERY_CROWD = [("qwen3", "float32"), (WINDOWS, "bfloat16")]


@pytest.mark.parametrize(
    ("name", "dtype", "crowds"),
    [
        *((*case, CROWDS) for case in IN_EVERY_CROWD),
        *((*case, CROWDS[:2]) for case in CASES if case not in IN_EVERY_CROWD),
        *(
            pytest.param(*case, CROWDS[2:], marks=pytest.mark.long)
            for case in CASES
            if case not in IN_EVERY_CROWD
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "-".join(str(tokens) for tokens, _ in part),
)
def test_alone_or_crowded(checkpoint: Folder, name: str, dtype: str, crowds: list[tuple[int, int]]) -> None:
    """Alone on one thread, whole; then among others on two threads, in chunks, preempted, with prefix hits."""
    folder = checkpoint(name)
    formats: dict[str, object] = {"quantization" if dtype.startswith("int") else "dtype": dtype}
    if dtype.endswith("-kv"):
        formats = {"kv_cache_dtype": dtype.removesuffix("-kv")}
    if dtype == "float32-head":
        formats = {"dtype": "bfloat16", "fp32_lm_head": True}
    common = {"max_model_len": LENGTH, "progress": False, **formats}
    asks = [(prompt(seed, 10 + 7 * seed), params(seed)) for seed in range(6)]
    asks += [(asks[5][0][:40] + prompt(9, 5), params(7)), (asks[5][0], params(8, n=2, temperature=1.3))]
    with LLM(folder, threads=1, enable_prefix_caching=False, **common) as llm:
        alone = [bits(llm.generate([p], one)[0]) for p, one in asks]
    groups = 4 if name == WINDOWS else 1
    for step_tokens, seqs in crowds:
        with LLM(
            folder, threads=2, max_num_batched_tokens=step_tokens, max_num_seqs=seqs,
            num_kv_blocks=8 * groups, **common,
        ) as llm:  # fmt: skip
            for _ in range(2):  # the second time finds its prompts in the prefix cache
                outputs = llm.generate([p for p, _ in asks], [one for _, one in asks])
                assert [bits(out) for out in outputs] == alone
            records = llm.step_records()
            cached = sum(out.usage.cached_tokens for out in outputs)
        assert cached > 0, "no prefix hit was exercised"
        if step_tokens == 64:
            assert sum(record.preempted for record in records) > 0, "no preemption was exercised"


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    seeds=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    step_tokens=st.integers(6, 50),
    blocks=st.integers(7, 14),
    caching=st.booleans(),
)
def test_any_company(
    checkpoint: Folder, seeds: list[int], step_tokens: int, blocks: int, caching: bool
) -> None:
    folder = checkpoint("llama3.1", torch.bfloat16)
    common = {"max_model_len": LENGTH, "progress": False}
    asks = [(prompt(seed % 4, 5 + 3 * seed), params(seed, max_tokens=30)) for seed in seeds]
    with LLM(folder, threads=1, **common) as llm:
        alone = [bits(llm.generate([p], one)[0]) for p, one in asks]
    with LLM(
        folder, threads=2, max_num_batched_tokens=step_tokens, max_num_seqs=6, num_kv_blocks=blocks,
        enable_prefix_caching=caching, **common,
    ) as llm:  # fmt: skip
        outputs = llm.generate([p for p, _ in asks], [one for _, one in asks])
    assert [bits(out) for out in outputs] == alone


def test_prompt_logprobs_do_not_depend_on_chunks(checkpoint: Folder) -> None:
    def run(step_tokens: int) -> list[PositionLogprobs | None]:
        with LLM(
            checkpoint("qwen3"), max_num_batched_tokens=step_tokens, max_num_seqs=3, max_model_len=LENGTH,
            progress=False,
        ) as llm:  # fmt: skip
            asked = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3)
            (output,) = llm.generate([prompt(1, 50)], asked)
        assert output.prompt_logprobs is not None
        return output.prompt_logprobs

    whole = run(64)
    assert len(whole) == 50
    assert run(7) == whole


def test_a_different_summation_order_would_be_seen(checkpoint: Folder) -> None:
    """Negative control: the comparison is exact, so another instruction set's order of sums is caught."""
    from quire import _native

    if len(_native.supported_isas()) < 2:
        pytest.skip("only the baseline instruction set runs on this machine")
    found = []
    for isa in ("baseline", _native.supported_isas()[0]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIRE_ISA", isa)
            with LLM(checkpoint("qwen3"), max_model_len=LENGTH, progress=False) as llm:
                found.append(bits(llm.generate([prompt(1, 50)], params(1, temperature=0))[0]))
    (tokens_a, logprobs_a), (tokens_b, logprobs_b) = found[0][0], found[1][0]
    assert tokens_a == tokens_b
    assert logprobs_a != logprobs_b
    assert np.allclose(logprobs_a, logprobs_b, atol=1e-4)
