from __future__ import annotations

import random

import pytest

from quire.core.policy import BACKGROUND, Policy, WaitingQueue, displaces
from quire.core.sequence import Rank, RequestState, Sequence, Status
from quire.core.service_estimates import ServiceEstimates
from quire.types import FinishReason, Request, SamplingParams


def make(
    seq_id: int, *, arrival: float = 0.0, priority: int = 0, prompt: int = 3, **params: object
) -> Sequence:
    request = Request(
        request_id=str(seq_id),
        prompt_token_ids=[1] * prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        arrival=arrival,
        priority=priority,
        eos_token_ids=(5,),
    )
    return Sequence(seq_id, 0, RequestState(request, "", None, 0), limit=10, seed=0)


def rank(policy: str, seq: Sequence) -> Rank:
    return Policy.parse(policy).rank(seq, ServiceEstimates())


def displacing(policy: str, waiting: Sequence, running: Sequence) -> bool:
    for seq in (waiting, running):
        seq.rank = rank(policy, seq)
    return displaces(waiting, running)


def test_fcfs_is_arrival_then_order_of_adding() -> None:
    seqs = [make(3, arrival=1), make(0, arrival=2, priority=-9), make(2, arrival=1), make(1, arrival=1.5)]
    assert [seq.seq_id for seq in sorted(seqs, key=lambda seq: rank("fcfs", seq))] == [2, 3, 1, 0]


def test_priority_is_priority_then_arrival_then_order_of_adding() -> None:
    seqs = [make(3, arrival=1), make(0, arrival=2, priority=-9), make(2, arrival=1), make(1, priority=1)]
    assert [seq.seq_id for seq in sorted(seqs, key=lambda seq: rank("priority", seq))] == [0, 2, 3, 1]


def test_only_a_more_urgent_class_displaces() -> None:
    urgent, early, late = make(0, priority=1), make(1, priority=2, arrival=1), make(2, priority=2, arrival=2)
    assert displacing("priority", urgent, early)
    assert not displacing("priority", early, late)
    assert not displacing("priority", early, urgent)
    assert not displacing("fcfs", urgent, early)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_background_work_runs_last_and_gives_way(policy: str) -> None:
    early, late, client = (
        make(0, priority=BACKGROUND),
        make(1, arrival=1, priority=BACKGROUND),
        make(2, arrival=9),
    )
    assert sorted([late, early, client], key=lambda seq: rank(policy, seq)) == [client, early, late]
    assert displacing(policy, client, early)
    assert not displacing(policy, early, late)
    assert not displacing(policy, early, client)


def test_the_queue_gives_back_in_rank_without_the_ended() -> None:
    rng = random.Random(0)
    queue = WaitingQueue()
    seqs = [make(i, arrival=rng.random()) for i in range(500)]
    for seq in seqs:
        seq.rank = rank("fcfs", seq)
        queue.push(seq)
    gone = rng.sample(seqs, 450)
    for seq in gone:
        queue.discard(seq)
    assert len(queue._heap) < 200  # those that ended do not pile up
    left = sorted(set(seqs) - set(gone), key=lambda seq: seq.rank)
    assert len(queue) == len(left) == 50
    assert sorted(queue, key=lambda seq: seq.rank) == left
    for seq in left:
        assert queue.peek() is seq
        assert queue.pop() is seq
    assert queue.peek() is None
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()


def test_a_sequence_ends_by_stop_or_length_whichever_token_comes_first() -> None:
    assert make(0).append([1, 2]) == (2, None, None)
    assert make(0).append([1, 5, 2]) == (2, FinishReason.STOP, 5)
    assert make(0, ignore_eos=True).append([1, 5, 2]) == (3, None, None)
    assert make(0, stop_token_ids=[9]).append([9]) == (1, FinishReason.STOP, 9)
    assert make(0, min_tokens=2).append([5, 5, 5, 1]) == (3, FinishReason.STOP, 5)
    assert make(0).append([1] * 9) == (7, FinishReason.LENGTH, None)
    assert make(0).append([1] * 6 + [5]) == (7, FinishReason.STOP, 5)  # on the last place, stop wins


def test_the_usable_prefix() -> None:
    assert make(0).usable_prefix() == 2
    seq = make(0, prompt_logprobs=0)
    assert seq.usable_prefix() == 0
    assert make(0, prompt_logprobs=0, prompt_logprobs_start=2).usable_prefix() == 1
    seq.prompt_logprobs_left = 1
    assert seq.usable_prefix() == 1
    seq.prompt_logprobs_left = 0
    seq.tokens.append(4)
    assert seq.usable_prefix() == 3
    assert seq.status is Status.WAITING
