from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from quire.core.cache_groups import kv_group
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.logprobs import LogprobTable, TokenLogprob
from quire.types import (
    NEXT_TOKEN,
    NO_BLOCK,
    FinishReason,
    FullGroup,
    Request,
    RequestError,
    SamplingParams,
    SchedulerOutput,
    SeqEvent,
    SlidingGroup,
    StateGroup,
    StepOutput,
)

from .driver import Driver


def make(**changes: Any) -> Scheduler:
    return Scheduler(config(**changes), random.Random(1))


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(values | changes))


def ask(name: str, prompt: list[int], *, priority: int = 0, arrival: float = 0.0, **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),
        arrival=arrival,
        priority=priority,
        eos_token_ids=(0,),
    )


def run(scheduler: Scheduler, token: int = 7) -> tuple[SchedulerOutput, list[SeqEvent]]:
    """One step in which every sampling row gives `token`."""
    out = scheduler.schedule()
    return out, scheduler.update(out, answer(out, [[token] if row.sample else [] for row in out.scheduled]))


def answer(out: SchedulerOutput, token_ids: list[list[int]], failed: tuple[int, ...] = ()) -> StepOutput:
    rows = len(out.scheduled)
    return StepOutput(token_ids, [None] * rows, [None] * rows, dict.fromkeys(failed, FinishReason.ERROR))


def spans(out: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(row.seq_id, row.start, row.start + len(row.token_ids)) for row in out.scheduled]


def test_one_rule_serves_prompts_chunks_and_decode() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(ask("a", [1] * 3, max_tokens=4))
    out, _ = run(scheduler)
    assert spans(out) == [(0, 0, 3)]
    scheduler.add(ask("b", list(range(20)), max_tokens=4, arrival=1))
    # One token of budget decodes, the rest goes to chunks of the prompt.
    steps = [spans(run(scheduler)[0]) for _ in range(4)]
    assert steps == [
        [(0, 3, 4), (1, 0, 7)],
        [(0, 4, 5), (1, 7, 14)],
        [(0, 5, 6), (1, 14, 20)],
        [(1, 20, 21)],
    ]
    assert scheduler.step_counts.decode_tokens == 1
    assert scheduler.step_counts.context_tokens == 21


def test_the_last_prompt_token_is_prefill_and_later_ones_are_decode() -> None:
    scheduler = make(max_num_batched_tokens=4)

    def counts() -> tuple[int, int]:
        run(scheduler)
        return scheduler.step_counts.prefill_tokens, scheduler.step_counts.decode_tokens

    scheduler.add(ask("one", [1], max_tokens=3))
    assert [counts(), counts(), counts()] == [(1, 0), (0, 1), (0, 1)]
    scheduler.add(ask("five", [1, 2, 3, 4, 5], max_tokens=2, arrival=1))
    assert [counts(), counts(), counts()] == [(4, 0), (1, 0), (0, 1)]


def test_the_worker_is_informed_of_everything_once() -> None:
    scheduler = make()
    scheduler.add(ask("a", [5, 6, 7, 8, 9], max_tokens=9, seed=-1, stop_token_ids=[3]))
    out, _ = run(scheduler)
    [new] = out.new
    assert (new.request_id, new.token_ids, new.prompt_len, new.sample_index) == ("a", [5, 6, 7, 8, 9], 5, 0)
    assert (new.seed, new.stop_ids, new.blocks) == (2**64 - 1, (0, 3), ([],))
    [row] = out.scheduled
    assert len(row.new_blocks[0]) == 2
    assert row.sample
    later = [run(scheduler)[0] for _ in range(4)]
    assert all(not out.new and not out.gone for out in later)
    assert [len(out.scheduled[0].new_blocks[0]) for out in later] == [0, 0, 0, 1]
    new.token_ids.clear()  # its own copy
    scheduler.audit()


def test_seeds_are_drawn_once_a_request_from_the_given_generator() -> None:
    def seeds() -> list[tuple[int, int]]:
        scheduler = make(max_num_seqs=8)
        scheduler.add(ask("a", [1], n=2, max_tokens=3))
        scheduler.add(ask("b", [1], max_tokens=3))
        outs = [run(scheduler)[0] for _ in range(3)]
        return sorted((new.sample_index, new.seed) for out in outs for new in out.new)

    first = seeds()
    assert first == seeds()
    assert len({seed for _, seed in first}) == 2
    assert all(0 <= seed < 2**64 for _, seed in first)


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop"),
    [
        ({"max_tokens": 3}, [7, 7, 7], FinishReason.LENGTH, None),
        ({"max_tokens": 9}, [7, 0], FinishReason.STOP, 0),
        ({"max_tokens": 2}, [7, 0], FinishReason.STOP, 0),
        ({"max_tokens": 3, "ignore_eos": True}, [7, 0, 0], FinishReason.LENGTH, None),
        ({"max_tokens": 9, "stop_token_ids": [5]}, [5], FinishReason.STOP, 5),
        ({"max_tokens": 9, "min_tokens": 2}, [0, 0, 0], FinishReason.STOP, 0),
        ({}, [7] * 61, FinishReason.LENGTH, None),
    ],
)
def test_ends(params: dict[str, Any], tokens: list[int], reason: FinishReason, stop: int | None) -> None:
    scheduler = make()
    scheduler.add(ask("a", [1, 2, 3], **params))
    made: list[int] = []
    for token in tokens:
        _, [event] = run(scheduler, token)
        made += event.new_token_ids
        if len(made) < len(tokens):
            assert event.finish_reason is None
    assert made == tokens
    assert (event.finish_reason, event.stop_token_id) == (reason, stop)
    assert not scheduler.has_work()
    assert scheduler.schedule().gone == [0]
    scheduler.audit()


def test_several_accepted_tokens_are_cut_at_the_end_with_their_logprobs() -> None:
    scheduler = make()
    scheduler.add(ask("a", [1, 2, 3], max_tokens=9, logprobs=0))
    out = scheduler.schedule()
    logprobs = LogprobTable.of([TokenLogprob(token, -1.0, 1)] for token in (7, 8, 0, 9))
    [event] = scheduler.update(out, StepOutput([[7, 8, 0, 9]], [logprobs], [None]))
    assert (event.new_token_ids, event.logprobs) == ([7, 8, 0], logprobs[:3])
    assert (event.finish_reason, event.stop_token_id) == (FinishReason.STOP, 0)


def test_accepted_tokens_that_no_row_ran_are_computed_next() -> None:
    scheduler = make()
    scheduler.add(ask("a", [1, 2, 3], max_tokens=9))
    out = scheduler.schedule()
    scheduler.update(out, answer(out, [[7, 8]]))
    assert spans(scheduler.schedule()) == [(0, 3, 5)]


def test_rejected_drafts_do_not_count_as_computed() -> None:
    scheduler = make(max_draft_tokens=8)
    scheduler.add(ask("a", [1, 2, 3], max_tokens=9))
    out = scheduler.schedule()
    proposed = [[8, 9, 9], [8], [4, 4], []]
    scheduler.update(out, replace(answer(out, [[7]]), drafts={0: proposed[0]}))
    for drafts, then, accepted, next_start in zip(
        proposed, proposed[1:], ([8, 5], [6], [4, 4, 1]), (5, 6, 9), strict=False
    ):
        out = scheduler.schedule()
        [row] = out.scheduled
        assert (row.token_ids[1:], row.drafts, row.sample) == (drafts, len(drafts), True)
        counts = scheduler.step_counts
        assert (counts.prefill_tokens, counts.decode_tokens) == (0, 1 + len(drafts))
        scheduler.update(out, replace(answer(out, [accepted]), drafts={0: then}))
        assert scheduler._running[0].computed == next_start
        assert len(scheduler._running[0].tokens) == next_start + 1
        scheduler.audit()
    assert not scheduler.schedule().scheduled[0].drafts


def test_drafts_use_only_the_remaining_budget_blocks_and_length() -> None:
    def drafted(proposed: int, **changes: Any) -> list[int]:
        scheduler = make(**({"max_draft_tokens": 8} | changes))
        scheduler.add(ask("a", [1, 2, 3], max_tokens=9))
        scheduler.add(ask("b", [4, 5, 6], max_tokens=4, arrival=1))
        out = scheduler.schedule()
        result = answer(out, [[7], [7]])
        result.drafts = {0: [8] * proposed, 1: [9] * proposed}
        scheduler.update(out, result)
        out = scheduler.schedule()
        scheduler.audit()
        assert [row.token_ids[0] for row in out.scheduled] == [7, 7]
        assert [len(blocks[0]) for blocks in (row.new_blocks for row in out.scheduled)] == [
            (3 + row.drafts) // 4 for row in out.scheduled
        ]
        return [row.drafts for row in out.scheduled]

    assert drafted(2) == [2, 2]
    assert drafted(5) == [5, 2]  # the last token of b is never computed
    assert drafted(3, max_draft_tokens=4) == [3, 1]
    assert drafted(3, max_num_batched_tokens=6) == [3, 1]
    assert drafted(5, num_blocks=3) == [4, 0]  # with one block more there is no preemption
    assert drafted(5, max_draft_tokens=0) == [0, 0]


def test_tokens_after_a_draft_that_was_not_accepted_are_refused() -> None:
    scheduler = make(max_draft_tokens=4)
    scheduler.add(ask("a", [1, 2, 3], max_tokens=9))
    out = scheduler.schedule()
    scheduler.update(out, replace(answer(out, [[7]]), drafts={0: [8, 9]}))
    out = scheduler.schedule()
    with pytest.raises(ValueError, match=r"row 0 accepted \[8, 3, 4\], its drafts were \[8, 9\]"):
        scheduler.update(out, answer(out, [[8, 3, 4]]))
    [event] = scheduler.update(out, answer(out, [[8, 9, 4]]))
    assert event.new_token_ids == [8, 9, 4]


def test_the_second_step_is_scheduled_while_the_first_runs() -> None:
    scheduler = make(steps_in_flight=2, max_num_batched_tokens=8)
    scheduler.add(ask("a", [1, 2, 3], max_tokens=3))
    scheduler.add(ask("b", list(range(10)), max_tokens=2, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="step 1 has not been passed to update"):
        scheduler.schedule()
    assert spans(first) == [(0, 0, 3), (1, 0, 5)]
    assert spans(second) == [(0, 3, 4), (1, 5, 10)]
    assert [row.token_ids for row in second.scheduled] == [[NEXT_TOKEN], [5, 6, 7, 8, 9]]
    assert [row.sample for row in second.scheduled] == [True, True]
    with pytest.raises(ValueError, match="step 2 is not the oldest one in flight"):
        scheduler.update(second, answer(second, [[7], [7]]))
    [event] = scheduler.update(first, answer(first, [[7], []]))
    assert event.new_token_ids == [7]
    third = scheduler.schedule()
    assert spans(third) == [(0, 4, 5), (1, 10, 11)]
    assert [row.token_ids for row in third.scheduled] == [[NEXT_TOKEN], [NEXT_TOKEN]]
    scheduler.update(second, answer(second, [[8], [9]]))
    assert not scheduler.schedule().scheduled  # what step 3 samples is the last of both
    events = scheduler.update(third, answer(third, [[6], [6]]))
    assert [event.finish_reason for event in events] == [FinishReason.LENGTH] * 2
    assert not scheduler.has_work()
    assert scheduler.wasted_rows == 0
    scheduler.audit()


def test_a_stop_costs_one_row_in_flight_and_an_abort_two() -> None:
    scheduler = make(steps_in_flight=2)
    scheduler.add(ask("a", [1, 2, 3], max_tokens=9))
    scheduler.add(ask("b", [4, 5, 6], max_tokens=9, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    [stopped, _] = scheduler.update(first, answer(first, [[0], [7]]))
    assert stopped.finish_reason is FinishReason.STOP
    third = scheduler.schedule()
    assert third.gone == [0]
    assert scheduler.update(second, answer(second, [[7], [7]]))[0].request_id == "b"
    assert scheduler.wasted_rows == 1
    fourth = scheduler.schedule()
    scheduler.abort("b")
    assert scheduler.blocks_used == 0
    assert not scheduler.update(third, answer(third, [[7]]))
    assert not scheduler.update(fourth, answer(fourth, [[7]]))
    assert scheduler.wasted_rows == 3
    scheduler.audit()


def test_a_row_whose_next_input_needs_the_host_sits_a_step_out() -> None:
    scheduler = make(steps_in_flight=2, max_draft_tokens=4)
    scheduler.add(replace(ask("a", [1, 2, 3], max_tokens=9), stepwise=True))
    scheduler.add(ask("b", [4, 5, 6], max_tokens=9, arrival=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert spans(second) == [(1, 3, 4)]
    with pytest.raises(ValueError, match="row 1 has drafts or several tokens"):
        scheduler.update(first, replace(answer(first, [[7], [7]]), drafts={1: [8]}))
    with pytest.raises(ValueError, match="row 1 has drafts or several tokens"):
        scheduler.update(first, answer(first, [[7], [7, 8]]))
    scheduler.update(first, replace(answer(first, [[7], [7]]), drafts={0: [8]}))
    third = scheduler.schedule()
    assert [row.token_ids for row in third.scheduled] == [[7, 8], [NEXT_TOKEN]]
    scheduler.update(second, answer(second, [[7]]))
    assert spans(scheduler.schedule()) == [(1, 5, 6)]


def test_prompt_logprobs_are_asked_for_once_by_steps_in_flight() -> None:
    scheduler = make(steps_in_flight=2, max_num_batched_tokens=6)
    scheduler.add(ask("a", list(range(10)), max_tokens=4, prompt_logprobs=0))
    first, second = scheduler.schedule(), scheduler.schedule()
    tables = [LogprobTable.of([[TokenLogprob(1, 0.0, 1)]] * n) for n in (6, 3)]
    scheduler.update(first, StepOutput([[]], [None], [tables[0]]))
    third = scheduler.schedule()
    rows = [out.scheduled[0] for out in (first, second, third)]
    assert [row.prompt_logprobs for row in rows] == [True, True, False]
    [event] = scheduler.update(second, StepOutput([[7]], [None], [tables[1]]))
    assert event.prompt_logprobs == tables[1]


def test_a_second_request_starts_where_the_prefix_is_known() -> None:
    scheduler = make()
    scheduler.add(ask("a", list(range(1, 11)), max_tokens=1))
    _, [event] = run(scheduler)
    assert event.cached_tokens == 0
    scheduler.add(ask("b", [*range(1, 9), 20], max_tokens=1))
    scheduler.add(ask("c", list(range(1, 9)), max_tokens=1, arrival=1))  # never its last token
    out, events = run(scheduler)
    assert spans(out) == [(1, 8, 9), (2, 4, 8)]
    assert [len(new.blocks[0]) for new in out.new] == [2, 1]
    assert [event.cached_tokens for event in events] == [8, 4]
    assert (scheduler.prefix_stats.queried_tokens, scheduler.prefix_stats.hit_tokens) == (27, 12)


def test_outputs_are_found_again_by_the_next_turn() -> None:
    scheduler = make()
    scheduler.add(ask("a", [1, 2, 3], max_tokens=6))
    for _ in range(6):
        run(scheduler)
    scheduler.add(ask("b", [1, 2, 3, 7, 7, 7, 7, 7, 7, 5], max_tokens=1))
    assert spans(run(scheduler)[0]) == [(1, 8, 10)]


def test_without_caching_or_in_another_namespace_nothing_is_shared() -> None:
    for changes, namespace in (({"enable_prefix_caching": False}, ""), ({}, "tenant")):
        scheduler = make(**changes)
        scheduler.add(ask("a", list(range(1, 11)), max_tokens=1))
        run(scheduler)
        second = ask("b", list(range(1, 11)), max_tokens=1)
        scheduler.add(
            Request(**{**{f: getattr(second, f) for f in second.__slots__}, "namespace": namespace})
        )
        assert spans(run(scheduler)[0]) == [(1, 0, 10)]
        assert scheduler.blocks_used == 0


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


def test_a_failed_row_ends_alone_and_leaves_nothing_in_the_cache() -> None:
    scheduler = make()
    scheduler.add(ask("a", list(range(1, 11)), max_tokens=5))
    scheduler.add(ask("b", [9, 9, 9, 9, 9], max_tokens=5, arrival=1))
    run(scheduler)
    out = scheduler.schedule()
    events = scheduler.update(out, answer(out, [[], [7]], failed=(0,)))
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("a", FinishReason.ERROR),
        ("b", None),
    ]
    assert scheduler.blocks_cached == 0
    scheduler.audit()
    assert scheduler.schedule().gone == [0]


def test_a_row_without_a_token_to_sample_ends_alone_and_its_prompt_stays_known() -> None:
    scheduler = make()
    scheduler.add(ask("a", list(range(1, 11)), max_tokens=5))
    scheduler.add(ask("b", [9, 9, 9, 9, 9], max_tokens=5, arrival=1))
    run(scheduler)
    out = scheduler.schedule()
    result = answer(out, [[], [7]])
    result.failed[0] = FinishReason.NO_TOKEN
    events = scheduler.update(out, result)
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("a", FinishReason.NO_TOKEN),
        ("b", None),
    ]
    assert scheduler.blocks_cached > 0
    scheduler.audit()


def test_prompt_logprobs_come_once_without_hits() -> None:
    driver = Driver(config(num_blocks=5, max_num_batched_tokens=6, max_num_seqs=2))
    driver.add(list(range(9)), max_tokens=6, prompt_logprobs=1)
    driver.drain()
    driver.add(list(range(9)), max_tokens=6, prompt_logprobs=1)
    driver.step()
    driver.add(list(range(9)), max_tokens=6, prompt_logprobs=1, n=2)
    driver.drain()
    assert driver.samples["r1", 0].cached_tokens == 0
    assert driver.samples["r2", 1].prompt_logprobs == []  # one sample reports for all
    assert driver.scheduler.prefix_stats.queried_tokens == 0


def test_prompt_logprobs_from_a_place_on_leave_the_tokens_before_to_the_cache() -> None:
    """Also when no block ends at that place, when nothing is cached, and when the prompt ends before it."""
    driver, prompt = Driver(config(max_num_batched_tokens=6)), list(range(15))
    for start in (10, 10, 40):
        driver.add(prompt, max_tokens=3, prompt_logprobs=1, prompt_logprobs_start=start)
        while driver.scheduler.has_work():
            driver.step()
    samples = [driver.samples[f"r{i}", 0] for i in range(3)]
    assert [sample.prompt_logprobs for sample in samples] == [prompt[10:], prompt[10:], []]
    assert [sample.cached_tokens for sample in samples] == [0, 8, 12]
    assert driver.scheduler.prefix_stats.queried_tokens == 45
    driver.drain()


def test_prompt_logprobs_cut_by_preemption_go_on_where_they_stopped() -> None:
    driver = Driver(config(num_blocks=9, block_size=2, max_num_batched_tokens=6, policy="priority"))
    driver.add(list(range(15)), max_tokens=3, prompt_logprobs=1)
    driver.step()
    driver.add([9] * 12, max_tokens=2, priority=-1)
    driver.drain()
    assert driver.scheduler.num_preemptions == 1
    assert driver.samples["r0", 0].prompt_logprobs == list(range(1, 15))


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    scheduler = make(enable_chunked_prefill=False, max_num_batched_tokens=10)
    scheduler.add(ask("a", [1] * 6, max_tokens=2))
    scheduler.add(ask("b", [2] * 6, max_tokens=2, arrival=1))
    scheduler.add(ask("c", [3] * 2, max_tokens=2, arrival=2))
    assert spans(run(scheduler)[0]) == [(0, 0, 6)]  # c would fit, but b came before it
    assert spans(run(scheduler)[0]) == [(0, 6, 7), (1, 0, 6), (2, 0, 2)]
    with pytest.raises(RequestError, match="max_num_batched_tokens 10"):
        scheduler.add(ask("d", [1] * 11, max_tokens=2))


def test_without_chunks_a_sequence_that_outgrew_the_budget_resumes_in_pieces() -> None:
    limits = config(max_num_batched_tokens=8, max_num_seqs=1, policy="priority", enable_prefix_caching=False)
    driver = Driver(replace(limits, enable_chunked_prefill=False))
    driver.add([1] * 8, max_tokens=20, ignore_eos=True)
    for _ in range(10):
        driver.step()
    driver.add([2] * 2, max_tokens=1, priority=-1)
    driver.drain()
    assert driver.scheduler.num_preemptions == 1


def test_when_blocks_run_out_the_last_in_rank_gives_way_and_resumes() -> None:
    scheduler = make(num_blocks=6, enable_prefix_caching=False)
    scheduler.add(ask("a", [1] * 7, max_tokens=10))
    scheduler.add(ask("b", [2] * 4, max_tokens=10, arrival=1))
    run(scheduler)
    run(scheduler)
    for _ in range(20):
        out, _ = run(scheduler)
        scheduler.audit()
        if out.gone:
            break
    assert out.gone == [1]
    assert scheduler.num_preemptions == scheduler.step_counts.preempted == 1
    assert [row.seq_id for row in out.scheduled] == [0]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    while not out.new:
        out, _ = run(scheduler)
    [again] = out.new
    assert again.seq_id == 1
    assert again.prompt_len == 4
    assert len(again.token_ids) > 4
    assert spans(out)[-1] == (1, 0, len(again.token_ids))


def test_cached_blocks_go_before_anyone_is_preempted() -> None:
    scheduler = make(num_blocks=6)
    scheduler.add(ask("a", [1] * 12, max_tokens=1))
    run(scheduler)
    assert scheduler.blocks_cached == 3
    scheduler.add(ask("b", [2] * 16, max_tokens=6))
    for _ in range(6):
        run(scheduler)
    assert scheduler.num_preemptions == 0
    assert not scheduler.has_work()


def test_a_prompt_is_admitted_only_with_room_for_all_of_it() -> None:
    scheduler = make(num_blocks=10, max_num_batched_tokens=4, enable_prefix_caching=False)
    scheduler.add(ask("a", [1] * 20, max_tokens=8))
    run(scheduler)
    scheduler.add(ask("b", [2] * 16, max_tokens=2, arrival=1))
    while scheduler.num_running == 1:
        run(scheduler)
    assert scheduler.num_preemptions == 0
    assert scheduler.has_work()


def test_a_more_urgent_request_takes_slot_and_blocks() -> None:
    scheduler = make(max_num_seqs=2, policy="priority", num_blocks=8)
    scheduler.add(ask("low", [1] * 8, priority=5, max_tokens=9))
    scheduler.add(ask("mid", [2] * 4, priority=3, max_tokens=9))
    run(scheduler)
    scheduler.add(ask("peer", [3] * 4, priority=5, max_tokens=9))
    assert not run(scheduler)[0].new  # equals never displace each other
    scheduler.add(ask("high", [4] * 4, priority=0, max_tokens=2))
    out, _ = run(scheduler)
    assert out.gone == [0]
    assert [row.seq_id for row in out.scheduled] == [1, 3]
    assert sum(len(row.token_ids) for row in out.scheduled) == 5
    scheduler.audit()


def test_a_hit_is_looked_up_again_after_a_preemption() -> None:
    scheduler = make(max_num_seqs=2, policy="priority")
    scheduler.add(ask("low", list(range(1, 13)), priority=5, max_tokens=9))
    run(scheduler)
    scheduler.add(ask("mid", list(range(1, 13)), priority=3, max_tokens=9, prompt_logprobs=0))
    out = scheduler.schedule()
    logprobs = LogprobTable.of([[TokenLogprob(1, 0.0, 1)]] * 11)
    scheduler.update(out, StepOutput([[7], [7]], [None, None], [None, logprobs]))
    # The prefix that "high" finds is held by "low", which gives way to it: its blocks pass to "mid"'s twins.
    scheduler.add(ask("high", list(range(1, 14)), priority=0, max_tokens=2))
    out, _ = run(scheduler)
    assert out.gone == [0]
    assert spans(out)[-1] == (2, 12, 13)
    scheduler.audit()


def test_no_preemption_is_in_vain() -> None:
    scheduler = make(max_num_seqs=4, policy="priority", num_blocks=8)
    scheduler.add(ask("urgent", [1] * 16, priority=0, max_tokens=9))
    run(scheduler)
    scheduler.add(ask("low", [2] * 3, priority=5, max_tokens=9))
    run(scheduler)
    scheduler.add(ask("mid", [3] * 15, priority=3, max_tokens=9))
    out, _ = run(scheduler)
    assert not out.gone
    assert scheduler.num_running == 2


def test_a_sliding_group_releases_blocks_behind_the_window() -> None:
    groups = (FullGroup((0,)), SlidingGroup((1,), 6))
    scheduler = make(groups=groups, num_blocks=40, enable_prefix_caching=False)
    scheduler.add(ask("a", [1] * 16, max_tokens=40, ignore_eos=True))
    run(scheduler)
    assert scheduler.blocks_used == 4 + 2
    for _ in range(30):
        run(scheduler)
        assert scheduler.blocks_used <= 12 + 3
    scheduler.audit()


def test_states_take_the_blocks_of_one_position_whatever_the_length() -> None:
    groups = (FullGroup((0,)), StateGroup((1,), 64))
    scheduler = make(groups=groups, num_blocks=40, enable_prefix_caching=False)
    scheduler.add(ask("a", [1] * 16, max_tokens=40, ignore_eos=True))
    run(scheduler)
    assert scheduler.blocks_used == 4 + 1
    for length in range(17, 47):
        run(scheduler)
        assert scheduler.blocks_used == -(-length // 4) + 1
    scheduler.audit()


def test_a_preempted_sequence_goes_on_from_a_state_that_was_kept() -> None:
    groups = (FullGroup((0,)), StateGroup((1,), 64))
    scheduler = make(groups=groups, num_blocks=40, max_num_seqs=1, policy="priority")
    scheduler.add(ask("a", list(range(1, 15)), priority=1, max_tokens=20, ignore_eos=True))
    run(scheduler)
    scheduler.add(ask("b", [9] * 34, max_tokens=4))
    starts = []
    while scheduler.has_work():
        out, _ = run(scheduler)
        starts += [row.start for new in out.new for row in out.scheduled if row.seq_id == new.seq_id == 0]
    assert scheduler.num_preemptions == 1
    assert starts == [12]  # of 14 known tokens: where a block ends


def test_a_hit_in_a_sliding_group_starts_with_entries_that_are_never_read() -> None:
    groups = (FullGroup((0,)), SlidingGroup((1,), 6))
    scheduler = make(groups=groups, num_blocks=40)
    scheduler.add(ask("a", list(range(1, 17)), max_tokens=1))
    run(scheduler)
    scheduler.add(ask("b", [*range(1, 17), 5], max_tokens=1))
    out, _ = run(scheduler)
    [new] = out.new
    assert [len(blocks) for blocks in new.blocks] == [4, 4]
    assert NO_BLOCK not in new.blocks[0]
    assert [block == NO_BLOCK for block in new.blocks[1]] == [True, True, False, False]


def test_a_result_that_does_not_fit_the_step_is_refused_and_changes_nothing() -> None:
    scheduler = make()
    scheduler.add(ask("a", [1] * 3, max_tokens=3, prompt_logprobs=0))
    out = scheduler.schedule()
    one, two = (LogprobTable.of([[TokenLogprob(1, 0.0, 1)]] * n) for n in (1, 2))
    for bad, message in (
        (StepOutput([], [], []), "1 rows"),
        (StepOutput([[]], [None], [two]), "row 0 should have sampled"),
        (StepOutput([[7]], [None], [one]), "prompt logprobs of 2 positions"),
        (StepOutput([[7]], [None], [None]), "prompt logprobs of 2 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.update(out, bad)
    with pytest.raises(ValueError, match="has not been passed to update"):
        scheduler.schedule()
    good = StepOutput([[7]], [None], [two])
    with pytest.raises(ValueError, match="step 9 is not the oldest one"):
        scheduler.update(SchedulerOutput(9, out.scheduled, [], []), good)
    [event] = scheduler.update(out, good)
    assert event.prompt_logprobs == two
    with pytest.raises(ValueError, match="is not the oldest one"):
        scheduler.update(out, good)
    out = scheduler.schedule()
    scheduler.update(out, answer(out, [[7]]))
    scheduler.add(ask("b", [1] * 20, max_tokens=3, arrival=1))
    out = scheduler.schedule()
    with pytest.raises(ValueError, match="row 1 should not have sampled"):
        scheduler.update(out, answer(out, [[7], [7]]))


def test_a_request_id_is_used_once_at_a_time() -> None:
    scheduler = make()
    scheduler.add(ask("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(ask("a", [1], max_tokens=1))
    run(scheduler)
    scheduler.add(ask("a", [1], max_tokens=1))


def test_the_oldest_request_moves_in_every_step_however_crowded() -> None:
    rng = random.Random(5)
    driver = Driver(
        config(num_blocks=17, max_num_seqs=5, max_num_batched_tokens=9, enable_prefix_caching=False)
    )
    for _ in range(120):
        if rng.random() < 0.4:
            prompt = [rng.randint(0, 9) for _ in range(rng.randint(1, 40))]
            driver.add(prompt, max_tokens=rng.randint(1, 20))
        alive = [i for i in range(len(driver.requests)) if driver.samples[f"r{i}", 0].reason is None]
        before = driver.worker.computed_tokens
        driver.step()
        if alive:
            slots = {slot.new.request_id for slot in driver.worker.slots.values()}
            assert f"r{alive[0]}" in slots or driver.samples[f"r{alive[0]}", 0].reason
            assert driver.worker.computed_tokens > before
    driver.drain()
    assert driver.scheduler.num_preemptions > 3
