"""Classifier-free guidance: the tokens and logprobs of transformers, the same bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.structured.ask import StructuredOutput
from quire.types import RequestError

LENGTH = 96
WINDOWS = "qwen2-mixed-windows"


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """Token ids and the exact logprobs of each sample."""
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def params(seed: int, **more: object) -> SamplingParams:
    asked: dict[str, object] = {
        "max_tokens": 40, "temperature": 0.9, "seed": seed, "logprobs": 3, "ignore_eos": True,
        "guidance_scale": 1.7,
    }  # fmt: skip
    return SamplingParams(**(asked | more))  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


@pytest.mark.parametrize(
    ("name", "scale", "negative"), [("qwen3", 1.5, 9), (WINDOWS, 3.0, 30), ("qwen3", 0.5, 0)]
)
def test_tokens_and_logprobs_equal_transformers(
    checkpoint: Folder, name: str, scale: float, negative: int
) -> None:
    """Without a negative prompt that is the last token of the prompt."""
    folder = checkpoint(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids, against = prompt(1, 14), prompt(2, negative)
    with torch.inference_mode():
        out: Any = model.generate(
            torch.tensor([ids]), guidance_scale=scale, max_new_tokens=20, do_sample=False, eos_token_id=[],
            pad_token_id=0, negative_prompt_ids=torch.tensor([against]) if against else None,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    expected = out.sequences[0, len(ids) :].tolist()
    scores = torch.log_softmax(torch.cat(out.scores), -1)
    with LLM(folder, dtype="float32", progress=False, max_model_len=LENGTH) as llm:
        asked = SamplingParams(
            temperature=0, max_tokens=20, ignore_eos=True, logprobs=0, guidance_scale=scale
        )
        found = llm.generate([ids], asked, negative_prompt=[against] if against else None)[0].outputs[0]
        plain = llm.generate([ids], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]
    assert found.token_ids == expected
    assert found.token_ids != plain.outputs[0].token_ids
    assert found.logprobs is not None
    for step, (token, entry) in enumerate(zip(expected, found.logprobs, strict=True)):
        assert entry[0].logprob == pytest.approx(scores[step, token].item(), abs=2e-4)


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_alone_or_crowded(checkpoint: Folder, speculate: str) -> None:
    """One by one; then together in chunks, preempted, beside requests without guidance and with drafts."""
    folder = checkpoint("qwen3")
    word = StructuredOutput(regex="[a-z ]{30,60}")
    ways: list[tuple[dict[str, object], int]] = [
        ({}, 5),
        ({"n": 3, "guidance_scale": 0.6}, 33),
        ({"mirostat": 2, "repetition_penalty": 1.2}, 0),
        ({"structured": word, "temperature": 0}, 11),
        ({"guidance_scale": 1}, 0),
        ({"dry_multiplier": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.01}, 20),
        ({"guidance_scale": 1, "temperature": 0}, 0),
    ]
    asks = [(prompt(i % 2, 12) * 2, params(i, **way)) for i, (way, _) in enumerate(ways)]
    negatives: list[Any] = [prompt(50 + i, length) if length else "" for i, (_, length) in enumerate(ways)]
    common = {"max_model_len": LENGTH, "progress": False}
    with LLM(folder, threads=1, enable_prefix_caching=False, **common) as llm:
        alone = [
            bits(llm.generate([text], one, negative_prompt=[negative])[0])
            for (text, one), negative in zip(asks, negatives, strict=True)
        ]
    with LLM(
        folder, threads=2, max_num_batched_tokens=24, max_num_seqs=7, num_kv_blocks=18, speculate=speculate,
        **common,
    ) as llm:  # fmt: skip
        together = llm.generate(
            [text for text, _ in asks], [one for _, one in asks], negative_prompt=negatives
        )
        assert [bits(output) for output in together] == alone
        assert sum(record.preempted for record in llm.step_records()) > 0, "no preemption was exercised"


def test_what_cannot_be_guided_is_refused(checkpoint: Folder) -> None:
    with LLM(checkpoint("qwen3"), max_model_len=LENGTH, num_kv_blocks=8, progress=False) as llm:
        for wrong, negative, field in (
            (params(0, guidance_scale=1), [5], "negative_prompt: has no effect"),
            (params(0, prompt_logprobs=1), [5], "prompt_logprobs: not supported with guidance_scale"),
            (params(0), [500], "negative_prompt: 500 is not a token id"),
            (params(0), prompt(0, 95), "negative_prompt: "),
            (params(0, max_tokens=60), [5], "max_tokens: with a negative prompt"),
        ):
            with pytest.raises(RequestError, match=field):
                llm.generate([prompt(1, 20)], wrong, negative_prompt=[negative])
        whole = llm.generate([prompt(1, 20)], params(0, max_tokens=None), negative_prompt=[prompt(2, 9)])[0]
        assert len(whole.outputs[0].token_ids) == 45  # 64 and 53 tokens computed fill 4 blocks each
    with (
        LLM(checkpoint("qwen3"), max_num_seqs=1, max_model_len=LENGTH, progress=False) as llm,
        pytest.raises(RequestError, match="guidance_scale: needs max_num_seqs"),
    ):
        llm.generate([prompt(1, 20)], params(0))
