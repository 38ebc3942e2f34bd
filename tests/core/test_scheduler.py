"""The scheduler: one rule for prompts, chunks and decode; ends, failures, the prefix cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.cache_kinds import FullGroup, SlidingGroup, StateGroup
from quire.logprobs import LogprobTable, TokenLogprob
from quire.types import NO_BLOCK, FinishReason, Request, RequestError, SchedulerOutput, SeqEvent, StepOutput

from .driver import Driver
from .scheduling import answer, ask, config, make, run, spans


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


def test_events_of_usual_rows_have_every_field() -> None:
    """They are made without the constructor."""
    scheduler = make()
    scheduler.add(ask("a", [1] * 3, max_tokens=9))
    (_, [first]), (_, [second]) = run(scheduler), run(scheduler)
    for event in (first, second):
        token = event.new_token_ids
        assert event == SeqEvent("a", 0, token, None, None, None, None, 0)
        assert repr(event)


def test_a_usual_step_needs_a_token_for_each_row() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.add(ask(name, [1] * 3, max_tokens=9))
    run(scheduler)
    out = scheduler.schedule()
    none: list[LogprobTable | None] = [None, None]
    with pytest.raises(ValueError, match="row 1 should have sampled"):
        scheduler.update(out, StepOutput([[4], []], none, none))
    events = scheduler.update(out, StepOutput([[4], [5]], none, none))
    assert [event.new_token_ids for event in events] == [[4], [5]]


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


def test_who_waits_behind_a_longer_prompt() -> None:
    """Counted while a prompt is computed, for prompts that are shorter than it."""
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=8, num_blocks=64)
    scheduler.add(ask("long", [1] * 24, max_tokens=4))
    for name, length in (("short", 5), ("middle", 12), ("longest", 30)):
        scheduler.add(ask(name, [2] * length, max_tokens=4))
    counts = []
    for _ in range(5):
        run(scheduler)
        counts.append(scheduler.behind_longer())
    assert counts == [2, 2, 2, 0, 0]
