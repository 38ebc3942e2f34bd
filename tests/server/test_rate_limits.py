"""Limits of tenants on a virtual clock: exact at their boundaries, whatever the clock of the day does."""

from __future__ import annotations

import random

import pytest

from quire.server.rate_limits import (
    DAY,
    MINUTE,
    NANO,
    Refusal,
    SlidingWindow,
    TenantLimits,
    TokenCharge,
    duration,
)


def test_requests_are_exact_to_the_nanosecond() -> None:
    limits = TenantLimits(requests=3)
    for at in (0, 5, 10):
        assert limits.enter(at) is None
    refusal = limits.enter(20)
    assert isinstance(refusal, Refusal)
    assert (refusal.limit, refusal.wait) == ("requests_per_minute", MINUTE - 20)
    assert limits.enter(MINUTE - 1) is not None
    assert limits.enter(MINUTE) is None
    assert limits.enter(MINUTE) is not None
    assert limits.enter(MINUTE + 5) is None


@pytest.mark.parametrize("seed", range(5))
def test_no_span_of_a_minute_has_more_than_the_limit(seed: int) -> None:
    """And what is refused would have broken it: the window is neither too strict nor too lenient."""
    rng = random.Random(seed)
    window, now, taken = SlidingWindow(50), 0, []
    for _ in range(2000):
        now += rng.choice([0, 1, NANO, rng.randint(0, 3 * NANO), MINUTE - 1])
        amount = rng.randint(1, 20)
        inside = sum(size for at, size in taken if at > now - MINUTE)
        assert window.used(now) == inside
        wait = window.wait(amount, now)
        assert (wait == 0) == (inside + amount <= 50)
        later = sum(size for at, size in taken if at > now + wait - MINUTE)
        just_before = sum(size for at, size in taken if at > now + wait - 1 - MINUTE)
        assert later + amount <= 50
        assert not wait or just_before + amount > 50
        if not wait:
            window.take(amount, now)
            taken.append((now, amount))


def test_tokens_are_corrected_when_a_request_has_ended() -> None:
    limits = TenantLimits(tokens=100)
    first = limits.charge(80, 0)
    assert isinstance(first, TokenCharge)
    assert isinstance(limits.charge(30, 1), Refusal)
    limits.settle(first, 20, 2)
    second = limits.charge(80, 3)
    assert isinstance(second, TokenCharge)
    limits.settle(second, 300, 4)  # a request without max_tokens may use more: the next ones wait for that
    refusal = limits.charge(1, MINUTE + 2)
    assert isinstance(refusal, Refusal)
    assert refusal.wait == 1
    assert isinstance(limits.charge(100, MINUTE + 3), TokenCharge)
    never = limits.charge(101, 10 * MINUTE)
    assert isinstance(never, Refusal)
    assert never.wait is None
    assert (
        never.message == "prompt and max_tokens are 101 tokens, over the 100 that this tenant has in a minute"
    )


def test_a_quota_begins_anew_at_the_end_of_its_day() -> None:
    limits = TenantLimits(daily=10, day_ends=1000)
    old = limits.charge(10, 0)
    assert isinstance(old, TokenCharge)
    refusal = limits.charge(1, 999)
    assert isinstance(refusal, Refusal)
    assert (refusal.limit, refusal.wait) == ("tokens_per_day", 1)
    assert isinstance(limits.charge(1, 999, background=True), Refusal)
    assert isinstance(limits.charge(10, 1000, background=True), TokenCharge)
    limits.settle(old, 0, 1001)  # that of yesterday gives nothing back today
    assert isinstance(limits.charge(1, 1002), Refusal)
    assert isinstance(limits.charge(1, 1000 + 3 * DAY), TokenCharge)
    assert limits.day.ends == 1000 + 4 * DAY


def test_requests_at_once() -> None:
    limits = TenantLimits(concurrent=2)
    assert limits.enter(0) is limits.enter(0) is None
    refusal = limits.enter(0)
    assert isinstance(refusal, Refusal)
    assert refusal.limit == "concurrent_requests"
    limits.leave()
    assert limits.enter(0) is None


def test_limits_change_with_what_was_counted() -> None:
    limits = TenantLimits(requests=10)
    for _ in range(5):
        limits.enter(0)
    limits.change(5, None, None, None)
    assert limits.enter(1) is not None
    limits.change(6, None, None, None)
    assert limits.enter(1) is None


def test_headers_are_those_of_openai() -> None:
    limits = TenantLimits(requests=10, tokens=1000)
    limits.enter(0)
    limits.charge(300, 0)
    assert dict(limits.headers(NANO // 2)) == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"9",
        b"x-ratelimit-reset-requests": b"59.5s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"700",
        b"x-ratelimit-reset-tokens": b"59.5s",
    }
    assert TenantLimits().headers(0) == []
    times = {
        0: b"0ms",
        20_000_000: b"20ms",
        1: b"1ms",
        NANO: b"1s",
        6 * MINUTE: b"6m0s",
        61_500_000_000: b"1m1.5s",
    }
    assert {at: duration(at) for at in times} == times
