"""What the log costs: microseconds and bytes that it adds to a step, with and without a file.

python -m benchmarks.recording [--steps 3000]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.core import EngineCore
from quire.executor.plans import PlanCounts
from quire.steplog.log_files import LogFile
from quire.steplog.recorder import Recorder
from quire.types import Request, SamplingParams, SchedulerOutput, StepOutput, TokenIds


class NoWorker:
    """Computes nothing: what is left is the loop."""

    plans = PlanCounts()
    out: SchedulerOutput

    def begin(self, out: SchedulerOutput) -> None:
        self.out = out

    def forward(self, out: SchedulerOutput, beside: object = None) -> None: ...

    def sample(self, masks: object = None) -> StepOutput:
        rows = self.out.scheduled
        return StepOutput([[7] if row.sample else [] for row in rows], [None] * len(rows), [None] * len(rows))

    def count(self, added: object) -> None: ...


def seconds(rows: int, steps: int, recorder: Recorder | None, config: SchedulerConfig) -> float:
    """The median of a decode step."""
    core = EngineCore(Scheduler(config, random.Random(0)), NoWorker())
    if recorder is not None:
        core.record(recorder)
    for i in range(rows):
        params = SamplingParams(max_tokens=steps + 64, ignore_eos=True)
        core.add(Request(request_id=str(i), prompt_token_ids=TokenIds([i + 1] * 8), params=params))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print(f"{'rows':>5} {'step µs':>9} {'+ ring':>8} {'+ file':>8} {'bytes a step':>13} {'a row':>7}")
    for rows in (1, 8, 32, 128):
        config = SchedulerConfig(
            num_blocks=rows * (steps // 16 + 16),
            max_num_seqs=rows,
            max_num_batched_tokens=2048,
            max_model_len=steps + 128,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.qlog"
            file = LogFile(path, 2**32)
            plain = seconds(rows, steps, None, config)
            ring = seconds(rows, steps, Recorder(config), config)
            recorder = Recorder(config, file=file)
            written = seconds(rows, steps, recorder, config)
            recorder.close()  # until then the file has room for rows to come
            size = path.stat().st_size / steps
        print(
            f"{rows:>5} {1e6 * plain:>9.1f} {1e6 * (ring - plain):>8.1f} {1e6 * (written - plain):>8.1f} "
            f"{size:>13.0f} {size / rows:>7.1f}"
        )


if __name__ == "__main__":
    main()
