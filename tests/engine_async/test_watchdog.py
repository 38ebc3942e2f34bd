"""Stalls are seen, and slow is not stalled. Time is a number here."""

from __future__ import annotations

from quire.engine.host.watchdog import Verdict, Watchdog

FINE, ASK, STALLED = Verdict.FINE, Verdict.ASK, Verdict.STALLED


def test_no_step_for_the_timeout_is_a_stall() -> None:
    dog = Watchdog(10.0, 0.0)
    dog.began(5.0)
    assert dog.check(14.9, working=True, cpu_seconds=None) is FINE
    assert dog.check(15.1, working=True, cpu_seconds=None) is STALLED
    dog.stepped(10.0, 15.2)
    assert dog.check(20.0, working=True, cpu_seconds=None) is FINE


def test_slow_steps_raise_the_limit() -> None:
    dog = Watchdog(10.0, 0.0)
    dog.stepped(3.0, 3.0)
    assert dog.check(62.0, working=True, cpu_seconds=None) is FINE
    assert dog.check(63.1, working=True, cpu_seconds=None) is STALLED
    for i in range(300):  # the slow step is no longer recent
        dog.stepped(0.01, 64.0 + i)
    assert dog.check(363.0 + 10.1, working=True, cpu_seconds=None) is STALLED


def test_an_idle_engine_is_asked_and_must_answer() -> None:
    dog = Watchdog(10.0, 0.0)
    assert dog.check(4.9, working=False, cpu_seconds=0.0) is FINE
    assert dog.check(5.1, working=False, cpu_seconds=0.0) is ASK
    assert dog.check(15.0, working=False, cpu_seconds=0.0) is FINE  # asked once, not again
    assert dog.check(15.2, working=False, cpu_seconds=0.0) is STALLED
    dog.answered(15.3)
    assert dog.check(16.0, working=False, cpu_seconds=0.0) is FINE


def test_a_long_first_step_is_no_stall_while_it_computes_and_a_stopped_one_is() -> None:
    computing, stopped = Watchdog(10.0, 0.0), Watchdog(10.0, 0.0)
    verdicts = set()
    for second in range(1, 290):
        verdicts.add(computing.check(float(second), working=True, cpu_seconds=0.9 * second))
        frozen = stopped.check(float(second), working=True, cpu_seconds=0.9 * min(second, 3))
        assert frozen is (STALLED if second > 10 else FINE)
    assert verdicts == {FINE}
    assert computing.check(301.0, working=True, cpu_seconds=280.0) is STALLED  # it spins


def test_time_when_the_watchdog_did_not_run_does_not_count() -> None:
    dog = Watchdog(10.0, 0.0)
    dog.began(0.0)
    assert dog.check(1.0, working=True, cpu_seconds=None) is FINE
    assert dog.check(3601.0, working=True, cpu_seconds=None, overslept=3600.0) is FINE
    assert dog.check(3612.0, working=True, cpu_seconds=None) is STALLED
