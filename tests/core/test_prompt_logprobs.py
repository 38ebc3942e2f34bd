"""Prompt logprobs in the scheduler: asked for once, whatever is cut or found in the cache."""

from __future__ import annotations

from quire.logprobs import LogprobTable, TokenLogprob
from quire.types import StepOutput

from .driver import Driver
from .scheduling import ask, config, make


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
