"""Against transformers' processors: the scores they leave, inverted at the same uniform, give our token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from quire.executor.sampler import HostSampler
from quire.types import SamplingParams

from .reference import as_rows, ints, new_seq, race, sample_one, times_of

SIZE = 5000
PROMPT = [3, 8, 8, 4000, 17]
OUTPUT = [9, 9, 9, 3, 120]


def processed(logits: np.ndarray, processors: list[Any]) -> np.ndarray:
    ids, scores = torch.tensor([PROMPT + OUTPUT]), torch.tensor(as_rows(logits))
    for processor in processors:
        scores = processor(ids, scores)
    return torch.softmax(scores.double(), -1)[0].numpy()


CASES: dict[str, tuple[SamplingParams, list[Any]]] = {
    "temperature": (SamplingParams(temperature=0.7), [hf.TemperatureLogitsWarper(0.7)]),
    "top_k": (SamplingParams(top_k=40), [hf.TopKLogitsWarper(40)]),
    "top_p": (SamplingParams(top_p=0.9), [hf.TopPLogitsWarper(0.9)]),
    "min_p": (SamplingParams(min_p=0.03), [hf.MinPLogitsWarper(0.03)]),
    "warpers": (
        SamplingParams(temperature=1.7, top_k=300, top_p=0.8, min_p=0.02),
        [
            hf.TemperatureLogitsWarper(1.7),
            hf.TopKLogitsWarper(300),
            hf.TopPLogitsWarper(0.8),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
    "repetition": (SamplingParams(repetition_penalty=1.3), [hf.RepetitionPenaltyLogitsProcessor(1.3)]),
    "repetition below 1": (
        SamplingParams(repetition_penalty=0.6),
        [hf.RepetitionPenaltyLogitsProcessor(0.6)],
    ),
    "repetition, then warpers": (
        SamplingParams(repetition_penalty=1.2, temperature=0.5, top_k=20),
        [
            hf.RepetitionPenaltyLogitsProcessor(1.2),
            hf.TemperatureLogitsWarper(0.5),
            hf.TopKLogitsWarper(20),
        ],
    ),
    "banned": (
        SamplingParams(banned_token_ids=(5, 6, 7)),
        [hf.SuppressTokensLogitsProcessor([5, 6, 7], device="cpu")],
    ),
    "watermark": (
        SamplingParams(watermark_delta=2.0),
        [hf.WatermarkLogitsProcessor(SIZE, "cpu", 0.25, 2.0, 15485863, "lefthash", 1)],
    ),
    "watermark of another key": (
        SamplingParams(watermark_delta=3.5, watermark_gamma=0.6, watermark_key=2**31 - 1),
        [hf.WatermarkLogitsProcessor(SIZE, "cpu", 0.6, 3.5, 2**31 - 1, "lefthash", 1)],
    ),
    "bias": (
        SamplingParams(logit_bias={4: 7.5, 11: -3.0}),
        [hf.SequenceBiasLogitsProcessor({(4,): 7.5, (11,): -3.0})],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_transformers(name: str) -> None:
    params, processors = CASES[name]
    rng = np.random.default_rng(len(name))
    logits = rng.normal(0, 3, SIZE).astype(np.float32)
    logits[PROMPT + OUTPUT] = rng.normal(6, 4, len(PROMPT + OUTPUT))
    probabilities = processed(logits, processors)
    ids = np.flatnonzero(probabilities)
    for seed in range(60):
        new = new_seq(params, PROMPT + OUTPUT, len(PROMPT), seed=seed)
        position = len(PROMPT + OUTPUT)
        times = times_of(new, position, SIZE)
        assert sample_one(logits, new) in race(ids, probabilities[ids], times)


def test_min_tokens_matches_min_new_tokens() -> None:
    stop = 42
    logits = np.zeros(SIZE, np.float32)
    logits[stop], logits[7] = 10.0, 5.0
    for outputs, expected in ((2, 7), (3, 7), (4, stop)):
        tokens = [1] * len(PROMPT) + [2] * outputs
        processor = hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, stop, device="cpu")
        scores = processor(torch.tensor([tokens]), torch.tensor(as_rows(logits)))
        params = SamplingParams(temperature=0.0, min_tokens=4)
        got = sample_one(logits, new_seq(params, tokens, len(PROMPT), stop_ids=[stop]))
        assert got == int(scores.argmax()) == expected


def test_penalties_see_the_same_tokens_as_generate() -> None:
    """A greedy loop with a repetition penalty, compared step by step with transformers' processor."""
    rng = np.random.default_rng(5)
    table = rng.normal(0, 2, (64, 64)).astype(np.float32)  # a language model: the row of the last token
    processor = hf.RepetitionPenaltyLogitsProcessor(1.5)
    tokens = [1, 2, 3]
    sampler = HostSampler(64, 1)
    sampler.add(0, new_seq(SamplingParams(temperature=0.0, repetition_penalty=1.5), tokens))
    for _ in range(60):
        scores = processor(torch.tensor([tokens]), torch.tensor(table[tokens[-1]][None]))
        got = sampler.sample({"logits": table[tokens[-1]][None]}, ints(0), ints(len(tokens))).token_ids
        assert int(got[0]) == int(scores.argmax())
        tokens.append(int(got[0]))
