"""What the simulator costs beside the scheduler that it runs: python -m benchmarks.simulation_speed [--requests 40000]

Requests of 64 prompt tokens and 200 answer tokens come by chance at nine tenths of what 32 places serve. CPU time of
the process: of a simulated step, of `schedule` and `update` in it, of the figures at the end; what a million requests
would take, and what a request needs in memory, both by what three quarters of the requests took more. Figures are of
two million gaps between tokens at most, which a quarter of 40,000 requests has: from there on more requests cost less.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

from quire.bench.request_metrics import summarize
from quire.bench.simulated_server import Arrival, SimulatedServer
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig

COSTS = (0.004, 1e-4, 5e-5, 0.0, 0.0, 0.0, 0.0, 0.0)
ROWS, PROMPT, OUTPUT = 32, 64, 200
RATE = 0.9 * ROWS / (OUTPUT * (COSTS[0] + ROWS * COSTS[1]))
MILLION = 1_000_000


def arrivals(count: int) -> list[Arrival]:
    rng, at, found = random.Random(1), 0.0, []
    for i in range(count):
        at += rng.expovariate(RATE)
        found.append(Arrival(at, array("i", range(i * PROMPT + 1, (i + 1) * PROMPT + 1)), OUTPUT))
    return found


class TimedScheduler:
    """While it is entered, `schedule` and `update` count their CPU time, which costs a microsecond of it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._plain: tuple[Callable[..., Any], ...] = Scheduler.schedule, Scheduler.update

    def __enter__(self) -> TimedScheduler:
        for name, plain in zip(("schedule", "update"), self._plain, strict=True):
            setattr(Scheduler, name, self._timed(plain))
        return self

    def __exit__(self, *_: object) -> None:
        for name, plain in zip(("schedule", "update"), self._plain, strict=True):
            setattr(Scheduler, name, plain)

    def _timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*words: Any) -> Any:
            start = time.process_time()
            found = plain(*words)
            self.seconds += time.process_time() - start
            return found

        return timed


def measured(count: int) -> tuple[float, float, float, float, int]:
    """Seconds of the run, of the scheduler in it, of the figures; steps; and the most memory so far, in bytes."""
    config = SchedulerConfig(
        num_blocks=4096, max_num_seqs=ROWS, max_num_batched_tokens=512, max_model_len=2048
    )
    load = arrivals(count)
    with TimedScheduler() as scheduler:
        start = time.process_time()
        run = SimulatedServer(config, COSTS, noise=0.03, learns=False).run(load)
        seconds = time.process_time() - start
    start = time.process_time()
    summarize(run.records)
    figures = time.process_time() - start
    return (
        seconds,
        scheduler.seconds,
        figures,
        run.steps,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    gc.set_threshold(100_000, 20, 100)  # as quire sim does
    few = asked.requests // 4
    first, _, first_figures, _, least = measured(few)
    rounds = [measured(asked.requests) for _ in range(asked.rounds)]
    print("| µs a step | of schedule and update | ratio | figures, µs a request more | 10⁶ requests, min |")
    print("|--:|--:|--:|--:|--:|")
    whole = []
    for seconds, inner, figures, steps, _ in rounds:
        start = first + first_figures
        million = start + (seconds + figures - start) * (MILLION - few) / (asked.requests - few)
        whole.append(million)
        print(
            f"| {1e6 * seconds / steps:.1f} | {1e6 * inner / steps:.1f} | {seconds / inner:.2f} |"
            f" {1e6 * (figures - first_figures) / (asked.requests - few):.0f} | {million / 60:.1f} |"
        )
    more = (rounds[0][4] - least) / (asked.requests - few)
    print(
        f"\nmedian {statistics.median(whole) / 60:.1f} min for 10⁶ requests of {OUTPUT} tokens;"
        f" {more / 1024:.1f} KiB a request more"
    )


if __name__ == "__main__":
    main()
