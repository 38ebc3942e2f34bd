"""What a request may expect, by what the API process has seen of steps, of the times beside them, of idle engines."""

from __future__ import annotations

import pytest

from engine_async.running import ask
from quire.config.schema import SchedulerOptions
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import EngineStats
from quire.engine.front.outlook import Outlook
from quire.engine.host.messages import StepReport

PROMPT = 10
STEP, TOKEN = 0.010, 0.001  # seconds of a step, and of a token of a prompt in it
STATS = EngineStats(steps=100, step_costs=(STEP, 0.0, TOKEN, 0.0, 0.0, 0.0, 0.0, 0.0))
USUAL = STEP + PROMPT * TOKEN
SWING = 0.002  # running medians swing by a quarter


def report(start: float, end: float, *, started: bytes = b"", running: int = 0) -> StepReport:
    """A step that computed a prompt."""
    return StepReport(1, start, end, 1, running, 0, PROMPT, 0, started, b"", b"", b"", b"", ())


def predicted(outlook: Outlook) -> float:
    """The TTFT, from its arrival, of a request that comes to an engine without others."""
    said: list[float] = []
    asked = ask("new", range(PROMPT), predicted=said.append)
    outlook.check(asked, [], asked.request.arrival, STATS)
    return said[0]


def woken(outlook: Outlook, *, waking: float, cold: float, delay: float, times: int = 120) -> float:
    """An idle engine is woken so often: it begins after `waking`, its step takes `cold` more, and is heard of after
    `delay`. Returns the time then."""
    now = 0.0
    for _ in range(times):
        now += 1.0
        asked = ask("one", range(PROMPT))
        prediction = outlook.check(asked, [], now, STATS)
        outlook.admitted(asked, prediction, now)
        start = now + waking
        end = start + USUAL + cold
        outlook.stepped(report(start, end, started=b"1"), end + delay, busy=False)
    return now


@pytest.mark.parametrize(
    ("waking", "cold", "delay"), [(0.004, 0.0, 1e-4), (1e-4, 0.006, 1e-4), (1e-4, 0.0, 0.005)]
)
def test_an_idle_engine_takes_as_long_to_begin_as_it_did(waking: float, cold: float, delay: float) -> None:
    outlook = Outlook(SchedulerConfig(num_blocks=100), SchedulerOptions())
    first = predicted(outlook)
    assert first == pytest.approx(USUAL, abs=0.003)
    woken(outlook, waking=waking, cold=cold, delay=delay)
    assert predicted(outlook) == pytest.approx(waking + USUAL + cold + delay, abs=SWING)


def test_a_single_stall_changes_little() -> None:
    outlook = Outlook(SchedulerConfig(num_blocks=100), SchedulerOptions())
    predicted(outlook)
    woken(outlook, waking=0.001, cold=0.001, delay=1e-4)
    before = predicted(outlook)
    woken(outlook, waking=0.5, cold=0.5, delay=0.5, times=1)
    assert predicted(outlook) == pytest.approx(before, abs=SWING / 2)


def test_steps_one_after_another_tell_nothing_of_waking() -> None:
    outlook = Outlook(SchedulerConfig(num_blocks=100), SchedulerOptions())
    predicted(outlook)  # it learns from then on
    now = woken(outlook, waking=0.004, cold=0.006, delay=1e-4)
    for _ in range(200):  # of a stream: each begins as the one before ends, and is short
        outlook.stepped(report(now, now + STEP, running=1), now + STEP + 1e-4, busy=True)
        now += STEP
    outlook.stepped(report(now, now + STEP), now + STEP + 1e-4, busy=False)
    assert predicted(outlook) == pytest.approx(0.004 + USUAL + 0.006, abs=2 * SWING)
