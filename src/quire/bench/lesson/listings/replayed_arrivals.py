"""The arrivals of the listings about batching, replayed by the scheduler on a clock of 20 ms a step."""

import random

from quire.bench.batching import CostMachine, Job, SimulatedCost, replay
from quire.core.scheduler_config import SchedulerConfig


def show(policy: str) -> None:
    """Replay 40 requests of 10 to 200 tokens, four a second, and print what became of them."""
    rng = random.Random(1)
    jobs = [Job(due=i / 4, prompt=range(16), output_tokens=rng.randint(10, 200)) for i in range(40)]
    config = SchedulerConfig(num_blocks=4096, max_num_seqs=8, enable_prefix_caching=False)
    run = replay(jobs, config, CostMachine(SimulatedCost(base=0.02, token=0.0)), policy, wait=0.5)
    ends = [record.finished or 0.0 for record in run.records]
    waits = [end - record.scheduled for end, record in zip(ends, run.records, strict=True)]
    print(f"{sum(record.output_tokens or 0 for record in run.records):,} tokens in {max(ends):.1f} s")
    print(f"places in use: {run.slot_use:.0%}")
    print(f"mean time of a request: {sum(waits) / len(waits):.2f} s")
