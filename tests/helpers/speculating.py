"""Requests that speculation may not change, and what is compared of their answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire import RequestOutput, SamplingParams, StructuredOutput
from quire.speculate.step_costs import StepCosts
from quire.types import ScheduledSeq, SchedulerOutput
from quire.worker.worker import Worker

LENGTH, VOCAB = 160, 128
FORMATS = {
    "float32": ("qwen3", {"dtype": "float32"}),
    "bfloat16, sliding windows": ("qwen2-mixed-windows", {"dtype": "bfloat16"}),
    "int8, int8 cache": ("qwen3", {"quantization": "int8", "kv_cache_dtype": "int8"}),
}


def costs_without_a_clock(monkeypatch: pytest.MonkeyPatch, slope: float = 0.04) -> None:
    """How many drafts run depends on no clock: every token of a step costs a little."""
    observe = StepCosts.observe
    monkeypatch.setattr(
        StepCosts, "observe", lambda self, tokens, seconds: observe(self, tokens, 1 + slope * (tokens - 1))
    )


def tree_rows(monkeypatch: pytest.MonkeyPatch) -> list[ScheduledSeq]:
    """The rows with trees that workers run from now on."""
    found: list[ScheduledSeq] = []
    forward = Worker.forward

    def watched(self: Worker, out: SchedulerOutput) -> None:
        found.extend(row for row in out.scheduled if row.parents is not None)
        forward(self, out)

    monkeypatch.setattr(Worker, "forward", watched)
    return found


def prompts() -> list[list[int]]:
    """Some with much that repeats, some with nothing."""
    rng = random.Random(3)
    words = [[rng.randrange(3, VOCAB) for _ in range(6)] for _ in range(4)]
    repeating = [[token for _ in range(8) for token in rng.choice(words)] for _ in range(5)]
    return repeating + [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(3)]


def params() -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    return [
        SamplingParams(**common, temperature=0, logprobs=3),
        SamplingParams(**common, temperature=0, repetition_penalty=1.05),
        SamplingParams(**common, temperature=0.2, seed=1, n=2, logprobs=0),
        SamplingParams(**common, temperature=0.3, seed=2, top_k=5, frequency_penalty=0.2, min_tokens=30),
        SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[7, 9], prompt_logprobs=1),
        SamplingParams(**common, temperature=0, logit_bias={5: 3.0, 6: 3.0}, banned_token_ids=[8]),
        SamplingParams(**common, temperature=0, allowed_token_ids=[10, 11, 12]),
        SamplingParams(temperature=0, max_tokens=40, structured=StructuredOutput(regex="(ab|cd|e){30}")),
    ]


def edited(tokens: list[int], rng: random.Random) -> list[int]:
    """Tokens of which about every eighth was replaced, taken out or had one put before it."""
    made: list[int] = []
    for token in tokens:
        kind = rng.randrange(24)
        made += {0: [rng.randrange(3, VOCAB)], 1: [], 2: [rng.randrange(3, VOCAB), token]}.get(kind, [token])
    return made


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (
            [
                (s.token_ids, s.finish_reason, [c for p in s.logprobs or [] for c in p])
                for s in output.outputs
            ],
            [c for p in output.prompt_logprobs or [] if p for c in p],
        )
        for output in outputs
    ]
