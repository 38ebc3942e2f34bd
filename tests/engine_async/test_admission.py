"""The door: what can never run is refused with the counts, and the queue is bounded."""

from __future__ import annotations

import pytest

from engine_async.running import ask
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import OverloadedError
from quire.engine.front.admission import Admission
from quire.engine.host.messages import Ready, StepReport
from quire.types import Request, RequestError, SamplingParams


def door(max_requests: int = 4, max_tokens: int = 1000, **limits: int) -> Admission:
    limits = {"num_blocks": 8, "max_num_seqs": 2, "max_model_len": 200} | limits
    facts = Ready(SchedulerConfig(**limits), 128, (2,), (), 0, {}, ())  # type: ignore[arg-type]
    return Admission(facts, max_requests, max_tokens)


def request(prompt: list[int], **params: object) -> Request:
    return Request(request_id="r", prompt_token_ids=prompt, params=SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "field", "numbers"),
    [
        (request([5] * 200), "prompt_token_ids", ["200 tokens", "of 200 tokens (max_model_len)"]),
        (request([5] * 150), "prompt_token_ids", ["150", "holds 129"]),
        (request([5] * 100, max_tokens=30), "max_tokens", ["100", "30", "129"]),
        (request([5, 128]), "prompt_token_ids", ["128", "vocabulary size 128"]),
        (request([]), "prompt_token_ids", []),
        (request([-1]), "prompt_token_ids", ["-1"]),
        (request([1], logit_bias={128: 1.0}), "logit_bias", ["128"]),
        (request([1], allowed_token_ids=[1] * 129), "allowed_token_ids", ["129", "128"]),
        (request([1], allowed_token_ids=[2], min_tokens=3), "min_tokens", ["3", "allowed_token_ids"]),
        (request([1], allowed_token_ids=[2, 9], stop_token_ids=[9], min_tokens=1), "min_tokens", []),
        (
            request([1], allowed_token_ids=[2, 8, 9], banned_token_ids=[8], stop_token_ids=[9], min_tokens=1),
            "min_tokens",
            ["banned_token_ids"],
        ),
        (request([1], banned_token_ids=[*range(2), *range(3, 128)], min_tokens=1), "min_tokens", []),
    ],
)
def test_the_impossible_is_refused_with_the_counts(asked: Request, field: str, numbers: list[str]) -> None:
    with pytest.raises(RequestError) as refused:
        door().check(asked)
    assert refused.value.field == field
    assert all(number in refused.value.message for number in numbers)


def test_the_largest_possible_is_let_in() -> None:
    door().check(request([5] * 99, max_tokens=30))
    door(num_blocks=100).check(request([5] * 199))
    door().check(request([5], allowed_token_ids=[2]))
    door().check(request([5], allowed_token_ids=[2], min_tokens=1, ignore_eos=True))
    door().check(request([5], allowed_token_ids=[2, 3], min_tokens=1))


def report(seen: int, running: int, waiting: int) -> StepReport:
    return StepReport(1, 0.0, 0.0, seen, running, waiting, 0, 0, b"", b"", b"", b"", b"", ())


def test_a_burst_fills_idle_places_before_it_counts_as_queue() -> None:
    admission = door(max_requests=4)
    for handle in range(1, 7):  # two places and four that wait
        admission.admit(handle, ask(str(handle)), 0.0)
    with pytest.raises(OverloadedError, match=r"4 requests are waiting \(limit 4\)"):
        admission.admit(7, ask("7"), 0.0)
    admission.remove(3)
    admission.admit(8, ask("8"), 0.0)


def test_requests_left_waiting_by_the_engine_count_whatever_slots_are_idle() -> None:
    admission = door(max_requests=2, max_num_seqs=64)
    for handle in (1, 2, 3):
        admission.admit(handle, ask(str(handle)), 0.0)
    admission.started(1, 0.0)
    admission.stepped(report(seen=3, running=1, waiting=2), 0.0)  # its cache is full
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        admission.admit(4, ask("4"), 0.0)
    admission.started(2, 1.0)
    admission.started(3, 1.0)
    admission.stepped(report(seen=3, running=3, waiting=0), 0.0)
    admission.admit(5, ask("5"), 1.0)
    assert admission.waiting == 1


def test_places_that_were_given_back_are_idle_again() -> None:
    admission = door(max_requests=1)
    for handle in (1, 2):
        admission.admit(handle, ask(str(handle)), 0.0)
        admission.started(handle, 0.0)
    admission.stepped(report(seen=2, running=0, waiting=0), 0.0)
    for handle in (3, 4, 5):
        admission.admit(handle, ask(str(handle)), 0.0)
    with pytest.raises(OverloadedError):
        admission.admit(6, ask("6"), 0.0)


def test_waiting_tokens_are_bounded_and_one_is_always_let_in() -> None:
    admission = door(max_tokens=50)
    admission.admit(1, ask("1", [5] * 60), 0.0)
    with pytest.raises(OverloadedError, match=r"60 prompt tokens are waiting, and 3 more .* limit of 50"):
        admission.admit(2, ask("2"), 0.0)
    admission.started(1, 0.0)
    assert admission.waiting_tokens == 0
    admission.admit(3, ask("3", [5] * 60), 0.0)


def test_a_tenant_leaves_as_much_of_the_queue_as_it_takes() -> None:
    """Idle places are anyone's. One tenant waits in half of the places, two in a third each."""
    admission = door(max_requests=12, max_num_seqs=8)
    handles = iter(range(1, 1000))
    for _ in range(8 + 6):
        admission.admit(next(handles), ask("x", tenant="a"), 0.0)
    with pytest.raises(OverloadedError, match=r"6 of its requests .* 6 of 12 places are left"):
        admission.admit(next(handles), ask("x", tenant="a"), 0.0)
    for handle in range(1, 9):
        admission.started(handle, 0.0)
    admission.stepped(report(seen=14, running=8, waiting=6), 0.0)
    for _ in range(3):  # what runs does not count
        admission.admit(next(handles), ask("x", tenant="b"), 0.0)
    with pytest.raises(OverloadedError, match=r"3 of its requests are waiting, and 3 of 12"):
        admission.admit(next(handles), ask("x", tenant="b"), 0.0)
    for handle in (9, 10):
        admission.remove(handle)
    admission.admit(next(handles), ask("x", tenant="b"), 0.0)
    admission.admit(next(handles), ask("x", tenant="c"), 0.0)
    with pytest.raises(OverloadedError, match="4 of its requests"):
        admission.admit(next(handles), ask("x", tenant="a"), 0.0)


def test_an_idle_server_refuses_no_key() -> None:
    admission = door(max_requests=4, max_num_seqs=64)
    for handle in range(1, 65):
        admission.admit(handle, ask("x", tenant="a"), 0.0)
        admission.started(handle, 0.0)
    admission.stepped(report(seen=64, running=60, waiting=0), 0.0)
    for handle in range(65, 69):
        admission.admit(handle, ask("x", tenant="a"), 0.0)


def test_a_tenant_leaves_as_many_prompt_tokens_as_it_takes() -> None:
    admission = door(max_requests=100, max_tokens=100, max_num_seqs=1)
    for handle in (1, 2):
        admission.admit(handle, ask("x", [5] * 20, tenant="a"), 0.0)
    admission.admit(3, ask("x", [5] * 50, tenant="b"), 0.0)  # one is let in while there is room for it
    with pytest.raises(
        OverloadedError, match=r"40 of its prompt tokens .* exceed the 10 of 100 that are left"
    ):
        admission.admit(4, ask("x", [5], tenant="a"), 0.0)
    admission.remove(3)
    admission.admit(5, ask("x", [5] * 20, tenant="a"), 0.0)


def test_the_retry_after_of_a_tenant_follows_the_measured_rate() -> None:
    admission = door(max_requests=80, max_num_seqs=1)
    for handle in range(1, 21):
        admission.admit(handle, ask("x", tenant="a"), 0.0)
        admission.started(handle, handle * 2.0)
    admission.stepped(report(seen=20, running=1, waiting=0), 0.0)
    for handle in range(21, 61):
        admission.admit(handle, ask("x", tenant="a"), 40.0)
    with pytest.raises(OverloadedError) as refused:
        admission.admit(61, ask("x", tenant="a"), 40.0)
    assert refused.value.retry_after == pytest.approx(10.0, rel=0.2)
    with pytest.raises(OverloadedError) as refused:
        admission.admit(61, ask("x", tenant="a"), 140.0)  # and none since: the latest eight in 114 seconds
    assert refused.value.retry_after == pytest.approx(5 * 114 / 8, rel=0.1)


def test_retry_after_follows_the_measured_rate() -> None:
    def refused_after(rate: float) -> float:
        admission = door(max_requests=80, max_num_seqs=1)
        for handle in range(1, 21):
            admission.admit(handle, ask(str(handle)), 0.0)
            admission.started(handle, handle / rate)
        admission.stepped(report(seen=20, running=1, waiting=0), 0.0)
        for handle in range(21, 101):
            admission.admit(handle, ask(str(handle)), 20 / rate)
        with pytest.raises(OverloadedError) as refused:
            admission.admit(101, ask("101"), 20 / rate)
        return refused.value.retry_after

    assert refused_after(1.0) == pytest.approx(10.0, rel=0.1)  # an eighth of 80 at one a second
    assert refused_after(2.0) == pytest.approx(5.0, rel=0.1)
    assert refused_after(1000.0) == 1.0
