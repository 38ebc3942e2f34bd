"""Whole batches: which sequences join and which wait; continuous batching is unchanged."""

from __future__ import annotations

import math

import pytest

from quire.core.scheduler_config import SchedulerConfig
from quire.engine.whole_batches import BatchGate, WholeBatchScheduler

from .driver import Driver


def config(**options: object) -> SchedulerConfig:
    known = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
    }
    return SchedulerConfig(**{**known, **options})  # type: ignore[arg-type]


def running(driver: Driver) -> list[str]:
    return [seq.state.request.request_id for seq in driver.scheduler._running]


def test_no_sequence_joins_a_static_batch_until_all_of_it_has_ended() -> None:
    driver = Driver(config(), kind=WholeBatchScheduler)
    for length in (2, 5, 3):
        driver.add([1, 2, 3], max_tokens=length, ignore_eos=True)
    seen = []
    while driver.scheduler.has_work():
        driver.step()
        seen.append(running(driver))
    assert seen == [["r0", "r1"], ["r1"], ["r1"], ["r1"], [], ["r2"], ["r2"], []]
    driver.check_end()


def test_continuous_lets_the_next_in_at_once() -> None:
    driver = Driver(config())
    for length in (2, 5, 3):
        driver.add([1, 2, 3], max_tokens=length, ignore_eos=True)
    seen = []
    while driver.scheduler.has_work():
        driver.step()
        seen.append(running(driver))
    assert seen == [["r0", "r1"], ["r1"], ["r1", "r2"], ["r1", "r2"], []]


def test_a_batch_contains_the_sequences_waiting_at_its_start_however_long_their_prompts_are() -> None:
    driver = Driver(config(max_num_batched_tokens=4, max_num_seqs=3), kind=WholeBatchScheduler)
    driver.add([1] * 10, max_tokens=9, ignore_eos=True)
    driver.add([2] * 6, max_tokens=9, ignore_eos=True)
    driver.step()
    driver.add([3] * 2, max_tokens=3, ignore_eos=True)  # too late for this batch, though a place is free
    for _ in range(4):
        driver.step()
        assert "r2" not in running(driver)
    assert running(driver) == ["r0", "r1"]
    driver.drain()


def test_the_preempted_keep_their_place_in_the_batch() -> None:
    driver = Driver(config(num_blocks=7, max_num_seqs=3), kind=WholeBatchScheduler)
    for token in (1, 2):
        driver.add([token] * 8, max_tokens=12, ignore_eos=True)
    driver.step()
    driver.add([3], max_tokens=2, ignore_eos=True)
    while driver.scheduler.num_running:
        assert "r2" not in running(driver)
        driver.step()
    assert driver.scheduler.num_preemptions
    driver.drain()


class Queue:
    def __init__(self, running: int, waiting: int, oldest: float | None) -> None:
        self.num_running, self.num_waiting, self._oldest = running, waiting, oldest

    def oldest_arrival(self) -> float | None:
        return self._oldest


def test_the_gate_opens_for_a_full_batch_a_running_one_or_when_the_first_has_waited() -> None:
    def opens(queue: Queue, wait: float = 2.0) -> float:
        return BatchGate(queue, 4, wait).opens()  # type: ignore[arg-type]

    assert opens(Queue(1, 0, None)) == -math.inf
    assert opens(Queue(0, 4, 10.0)) == -math.inf
    assert opens(Queue(0, 3, 10.0)) == 12.0
    assert opens(Queue(0, 0, None)) == math.inf
    assert opens(Queue(0, 3, 10.0), math.inf) == math.inf
    for size, wait in ((0, 1.0), (1, -1.0), (1, math.nan)):
        with pytest.raises(ValueError, match=r"max_num_seqs|batch_wait_ms"):
            BatchGate(Queue(0, 0, None), size, wait)  # type: ignore[arg-type]
