"""The rarer samplers through the whole engine: the same bits in any company, and texts among the parameters."""

from __future__ import annotations

import re

import numpy as np
import pytest

from helpers.tokenizers import Folder
from quire import LLM, RequestOutput, SamplingParams
from quire.structured.ask import StructuredOutput
from quire.types import SAMPLERS, RequestError

LENGTH = 96
WAYS: list[dict[str, object]] = [
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "repetition_penalty": 1.2},
    {"mirostat": 2, "n": 2, "dry_multiplier": 0.8},
    {"typical_p": 0.7, "min_keep": 3},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "top_n_sigma": 2.0},
    {"dynatemp_range": 0.4, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": 20},
    {
        "samplers": SAMPLERS,
        "top_k": 40,
        "repeat_last_n": 16,
        "presence_penalty": 0.7,
        "bad_words": ["e", "the"],
    },
    {"temperature": 0.0, "dry_multiplier": 5.0, "logit_bias": {"a": 3.0, 7: -1.0}},
]


def bits(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """Token ids and the exact logprobs of each sample."""
    return [(s.token_ids, [c.logprob for p in s.logprobs or [] for c in p]) for s in output.outputs]


def params(seed: int, **more: object) -> SamplingParams:
    asked: dict[str, object] = {
        "max_tokens": 40, "temperature": 0.9, "seed": seed, "logprobs": 3, "ignore_eos": True
    }  # fmt: skip
    return SamplingParams(**(asked | more))  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_alone_or_crowded(checkpoint: Folder, speculate: str) -> None:
    """One by one; then together in chunks, preempted, and with drafts where there may be some."""
    folder = checkpoint("qwen3")
    asks = [(prompt(i % 2, 12) * 2, params(i, **way)) for i, way in enumerate(WAYS)]
    common = {"max_model_len": LENGTH, "progress": False}
    with LLM(folder, threads=1, enable_prefix_caching=False, **common) as llm:
        alone = [bits(llm.generate([text], one)[0]) for text, one in asks]
    with LLM(
        folder, threads=2, max_num_batched_tokens=24, max_num_seqs=6, num_kv_blocks=14, speculate=speculate,
        **common,
    ) as llm:  # fmt: skip
        together = llm.generate([text for text, _ in asks], [one for _, one in asks])
        assert [bits(output) for output in together] == alone
        assert sum(record.preempted for record in llm.step_records()) > 0, "no preemption was exercised"


def test_under_a_grammar(checkpoint: Folder) -> None:
    """Parts are free and parts are forced; with drafts where there may be some, and beside each other."""
    pattern = r"(a letter: [a-z]{4,9}\. ){2}"
    ways = [
        {name: value for name, value in way.items() if name not in {"bad_words", "logit_bias"}}
        for way in WAYS
    ]
    ways += [{"watermark_delta": 3.0}, {"guidance_scale": 2.0, "mirostat": 2}]
    asks = [
        params(i, **way, max_tokens=70, ignore_eos=False, structured=StructuredOutput(regex=pattern))
        for i, way in enumerate(ways)
    ]
    folder, prompts = checkpoint("qwen3"), [prompt(i, 12) for i in range(len(asks))]
    common = {"max_model_len": LENGTH, "progress": False}
    with LLM(folder, threads=1, enable_prefix_caching=False, **common) as llm:
        alone = [llm.generate([text], one)[0] for text, one in zip(prompts, asks, strict=True)]
    for output in alone:
        assert all(re.fullmatch(pattern, sample.text) for sample in output.outputs)
    with LLM(folder, threads=2, max_num_batched_tokens=24, speculate="ngram", **common) as llm:
        together = llm.generate(prompts, asks)
    assert list(map(bits, together)) == list(map(bits, alone))


def test_bad_words_do_not_come(checkpoint: Folder) -> None:
    with LLM(checkpoint("qwen3"), max_model_len=LENGTH, progress=False) as llm:
        free = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        text = llm.generate(["Hello"], free)[0].outputs[0].text
        word = next(word for word in text.split() if word.isascii())
        banned = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, bad_words=[word])
        assert llm.generate(["Hello"], banned)[0].outputs[0].text != text
        forced = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logit_bias={"z": 100.0})
        assert llm.generate(["Hello"], forced)[0].outputs[0].text == "zzzz"
        for wrong, field in (
            (SamplingParams(bad_words=[" "]), "bad_words"),
            (SamplingParams(bad_words=[f"{i:03} {'é' * 240}" for i in range(40)]), "bad_words"),
        ):
            with pytest.raises(RequestError, match=field):
                llm.generate(["Hello"], wrong)
