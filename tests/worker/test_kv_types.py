"""Caches of few bits under a scheduler: the same bits in chunks, with prefix hits and preempted, alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.specs import decoder_spec
from quire.cache_kinds import KVType
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.types import Request, SamplingParams

from .running import VOCAB, Rig, check_same

SPEC = decoder_spec(VOCAB, 48, 40, (4, 2, 16), [0, 24], tied=True, qk_norm=True)


def asked() -> list[Request]:
    """Long texts, some of which begin alike, so that tokens are rounded behind recent ones; answers of 70 tokens."""
    random = np.random.default_rng(3)
    common = random.integers(0, VOCAB, 170).tolist()
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=common[: (170, 64, 100)[number % 3]]
            + random.integers(0, VOCAB, 10 + number).tolist(),
            params=SamplingParams(temperature=0.8, seed=number, logprobs=2, max_tokens=70, ignore_eos=True),
            arrival=float(number),
            eos_token_ids=(),
        )
        for number in range(6)
    ]


@pytest.mark.parametrize("kv", ["e4m3", "e5m2", "i4", "kivi4", "kivi2", "kvquant3"])
def test_alone_or_crowded(kv: KVType) -> None:
    """Whole prompts of one sequence at a time; then four at once in chunks, in few blocks, which some give up."""
    common: dict[str, Any] = {
        "program": lower(SPEC, NumberFormats("f32", kv)), "block_size": 32, "max_model_len": 256,
    }  # fmt: skip
    alone = Rig(num_blocks=120, max_num_seqs=1, max_num_batched_tokens=256, **common).run(asked())
    assert all(len(made.tokens) == 70 for made in alone.values())
    blocks = 44 if kv.startswith("kivi") else 18
    for step_tokens in (7, 90):
        crowded = Rig(num_blocks=blocks, max_num_seqs=4, max_num_batched_tokens=step_tokens, **common)
        check_same(crowded.run(asked()), alone)
    assert crowded.scheduler.num_preemptions
