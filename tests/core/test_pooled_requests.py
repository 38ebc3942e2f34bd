"""Requests without output: they end with their prompt, whole or in chunks, and their blocks are free again."""

from __future__ import annotations

import pytest

from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.types import (
    ContextLengthError,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    SchedulerOutput,
    SeqEvent,
    StepOutput,
    TokenIds,
)


def scheduler(**options: object) -> Scheduler:
    limits = {
        "num_blocks": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "pooling": True,
    }
    return Scheduler(SchedulerConfig(**{**limits, **options}))  # type: ignore[arg-type]


def request(name: str, length: int, *, pooling: bool = True) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(request_id=name, prompt_token_ids=TokenIds(range(length)), params=params, pooling=pooling)


def run(made: Scheduler, out: SchedulerOutput) -> list[SeqEvent]:
    """A step whose rows that reach the end of their text are pooled."""
    rows = out.scheduled
    empty: list[None] = [None] * len(rows)
    pooled = {i: f"row {row.seq_id}".encode() for i, row in enumerate(rows) if row.sample}
    events = made.update(out, StepOutput([[] for _ in rows], [*empty], [*empty], pooled=pooled))
    made.audit()
    return events


def test_a_text_ends_with_its_row() -> None:
    made = scheduler(enable_chunked_prefill=False, enable_prefix_caching=False)
    made.add(request("a", 20))
    made.add(request("b", 64))
    made.add(request("c", 44))
    first = made.schedule()
    assert [len(row.token_ids) for row in first.scheduled] == [20]  # b does not fit beside a, and is not cut
    events = run(made, first)
    assert [(e.request_id, e.new_token_ids, e.finish_reason) for e in events] == [
        ("a", [], FinishReason.STOP)
    ]
    assert events[0].pooled == f"row {first.scheduled[0].seq_id}".encode()
    assert made.blocks_used == 0
    while made.has_work():
        events += run(made, made.schedule())
    assert sorted(e.request_id for e in events) == ["a", "b", "c"]


def test_a_decoders_text_is_cut_and_its_prefix_is_kept() -> None:
    made = scheduler(max_num_batched_tokens=16)
    made.add(request("a", 40))
    steps = []
    while made.has_work():
        out = made.schedule()
        steps.append([len(row.token_ids) for row in out.scheduled])
        events = run(made, out)
    assert steps == [[16], [16], [8]]
    assert events[0].pooled
    made.add(request("b", 40))
    out = made.schedule()
    assert [row.start for row in out.scheduled] == [32]
    assert run(made, out)[0].cached_tokens == 32


def test_what_an_engine_is_not_for_is_refused() -> None:
    with pytest.raises(
        RequestError, match="model: this model gives vectors or scores for texts and generates none"
    ):
        scheduler().add(request("a", 3, pooling=False))
    with pytest.raises(RequestError, match="model: this model generates text"):
        scheduler(pooling=False).add(request("a", 3))
    with pytest.raises(ContextLengthError, match=r"65 tokens are over the 64 tokens of the model's context"):
        scheduler().add(request("a", 65))
    with pytest.raises(ContextLengthError, match="33 tokens are over the 32 tokens of the KV cache"):
        scheduler(num_blocks=2).add(request("a", 33))
