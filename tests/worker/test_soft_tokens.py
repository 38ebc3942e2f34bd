"""Embeddings in place of ids: those that the table has for ids give the bits of the ids."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from helpers.backends import BACKENDS, Backend
from quire.executor.base import F32
from quire.types import Request, SoftSpan, TokenIds

from .running import PROGRAM, VOCAB, Rig, check_same, requests


class Rows:
    """The rows that the model's table has for the ids of spans."""

    def __init__(self) -> None:
        assert (PROGRAM.params[0].name, PROGRAM.params[0].rows) == (
            "head",
            VOCAB,
        )  # what `executor_of` fills first
        self.table: F32 = (np.random.default_rng(0).standard_normal((VOCAB, 48)) * 0.3).astype(np.float32)
        self.ids: dict[bytes, list[int]] = {}
        self.asked = 0

    def soft(self, request: Request) -> Request:
        """The request with stretches of it as soft tokens; equal ids have equal digests."""
        ids, spans = list(request.prompt_token_ids), []
        for start, stop in ((1, 4), (9, 16), (16, 27)):
            part = ids[start:stop]
            if part:
                digest = sha256(bytes(part)).digest()
                self.ids[digest] = part
                spans.append(SoftSpan(start, len(part), digest))
                ids[start:stop] = [0] * len(part)
        return replace(request, prompt_token_ids=TokenIds(ids), soft_tokens=tuple(spans))

    def get(self, digest: bytes) -> F32:
        self.asked += 1
        return self.table[self.ids[digest]]


ASKED = requests(9, repetition_penalty=1.0, frequency_penalty=0.0)  # penalties look at placeholders


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_rows_of_the_table_give_the_bits_of_their_ids(backend: Backend) -> None:
    """With chunks that cut spans, prefix hits, preemption and plain sequences in the same steps."""
    expected = Rig(backend, num_blocks=60).run(ASKED)
    rows = Rows()
    asked = [rows.soft(one) if number % 4 else one for number, one in enumerate(ASKED)]
    for options in (
        {"num_blocks": 60},
        {"num_blocks": 14, "max_num_batched_tokens": 23, "steps_in_flight": 2},
    ):
        rig = Rig(backend, embeddings=rows, soft_tokens=True, **options)
        check_same(rig.run(asked), expected, backend)
        assert rig.scheduler.prefix_stats.hit_tokens
        assert not rig.worker._slots.soft
    assert rows.asked > 20


def test_other_rows_give_other_tokens() -> None:
    rows = Rows()
    asked = [rows.soft(one) for one in ASKED]
    expected = Rig().run(ASKED)
    rows.table = rows.table[::-1].copy()
    found = Rig(embeddings=rows, soft_tokens=True).run(asked)
    assert sum(found[key].logprobs != made.logprobs for key, made in expected.items()) > len(expected) // 2


def test_what_is_not_there_is_refused() -> None:
    rows = Rows()
    asked = [rows.soft(ASKED[0])]
    with pytest.raises(ValueError, match="soft_tokens: this model takes no embeddings"):
        Rig(soft_tokens=True).run(asked)
    rows.ids = {digest: ids[:-1] for digest, ids in rows.ids.items()}
    with pytest.raises(ValueError, match="soft_tokens: 2 embeddings for a span of 3 tokens"):
        Rig(embeddings=rows, soft_tokens=True).run(asked)
