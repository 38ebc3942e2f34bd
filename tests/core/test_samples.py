"""Samples of one request: they share its prompt and nothing else."""

from __future__ import annotations

import pytest

from quire.core.cache_groups import kv_group
from quire.types import FinishReason

from .scheduling import answer, ask, make, run, spans


@pytest.mark.parametrize("caching", [True, False])
def test_samples_wait_for_the_first_and_share_its_prompt(caching: bool) -> None:
    scheduler = make(enable_prefix_caching=caching, max_num_batched_tokens=8)
    scheduler.add(ask("a", list(range(1, 15)), n=3, max_tokens=2))
    assert scheduler.num_waiting == 3
    assert spans(run(scheduler)[0]) == [(0, 0, 8)]
    assert spans(run(scheduler)[0]) == [(0, 8, 14)]
    out, events = run(scheduler)
    assert spans(out) == [(0, 14, 15), (1, 12, 14), (2, 12, 14)]
    assert scheduler.blocks_used == 2 * 1 + 3  # three whole blocks of prompt once, one block more for each
    assert [event.cached_tokens for event in events] == [0, 0, 0]
    run(scheduler)
    assert not scheduler.has_work()
    assert scheduler.blocks_cached == (3 if caching else 0)
    scheduler.audit()


@pytest.mark.parametrize("windows", [(0,), (0, 3)])
def test_samples_start_as_soon_as_the_prompt_is_computed_and_share_nothing_else(
    windows: tuple[int, ...],
) -> None:
    groups = tuple(kv_group((g,), window) for g, window in enumerate(windows))
    scheduler = make(enable_prefix_caching=False, max_num_batched_tokens=12, groups=groups)
    scheduler.add(ask("a", list(range(1, 15)), n=2, max_tokens=12))
    assert [spans(run(scheduler)[0]) for _ in range(3)] == [
        [(0, 0, 12)],
        [(0, 12, 14)],  # ends within the block it began: no block is full, but the prompt is known
        [(0, 14, 15), (1, 12, 14)],
    ]
    for _ in range(8):
        run(scheduler)
    assert scheduler.has_work()
    assert (
        len(scheduler._blocks.caches.of()._tree) == 3
    )  # the prompt's whole blocks: outputs are of no use to others


def test_if_the_first_sample_ends_early_the_next_one_leads() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(ask("a", list(range(1, 15)), n=3, max_tokens=2))
    run(scheduler)
    event = scheduler.finish("a", 0, FinishReason.STOP)
    assert event is not None
    assert (event.sample_index, event.finish_reason) == (0, FinishReason.STOP)
    assert scheduler.finish("a", 0, FinishReason.STOP) is None
    assert scheduler.finish("a", 3, FinishReason.STOP) is None
    assert scheduler.finish("b", 0, FinishReason.STOP) is None
    assert spans(run(scheduler)[0]) == [(1, 8, 14)]
    assert spans(run(scheduler)[0]) == [(1, 14, 15), (2, 12, 14)]
    scheduler.audit()


def test_abort_ends_every_sample_once_wherever_it_is() -> None:
    scheduler = make()
    scheduler.add(ask("a", list(range(1, 11)), n=3, max_tokens=5))
    scheduler.add(ask("b", [1], max_tokens=5, arrival=1))
    out = scheduler.schedule()
    events = scheduler.abort("a")  # while the step runs
    assert [(event.sample_index, event.finish_reason) for event in events] == [
        (i, FinishReason.ABORT) for i in range(3)
    ]
    assert scheduler.abort("a") == scheduler.abort("zzz") == []
    events = scheduler.update(out, answer(out, [[7], [7]]))
    assert [event.request_id for event in events] == ["b"]
    scheduler.audit()
    assert scheduler.schedule().gone == [0]
