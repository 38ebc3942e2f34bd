"""The cost of a step before and after the executor: schedule + update, without a model.

    PYTHONPATH=src python benchmarks/scheduler.py [--steps 300] [--repeat 5]

Decode in steady state (every sequence one token a step, blocks taken and published as they fill), the same with a queue
under each policy, admission with and without prefix hits, the radix tree alone, and the cost model. Prints JSON, then
the same as a table, in microseconds. A decode step is the median of its run, and of `--repeat` runs the best counts,
since other work on the machine only ever adds. The garbage collector is left on, as in the engine.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from quire.cache_kinds import CacheGroup, FullGroup, SlidingGroup
from quire.core.cost_model import StepCostModel
from quire.core.radix import RadixTree
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import ServiceTerms
from quire.types import Request, SamplingParams, SchedulerOutput, StepOutput, TokenIds

FULL = (FullGroup((0,)),)
HYBRID = (FullGroup((0,)), *(SlidingGroup((g,), 1024) for g in range(1, 6)))


def result_of(out: SchedulerOutput) -> StepOutput:
    rows = len(out.scheduled)
    token_ids = [[7] if row.sample else [] for row in out.scheduled]
    return StepOutput(token_ids, [None] * rows, [None] * rows)


def make_scheduler(groups: tuple[CacheGroup, ...], num_blocks: int = 400_000) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            max_num_seqs=256,
            max_num_batched_tokens=1 << 20,
            max_model_len=1 << 17,
            groups=groups,
        )
    )


def request(index: int, prompt: list[int], max_tokens: int = 1 << 16) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=index)
    return Request(
        request_id=str(index), prompt_token_ids=TokenIds(prompt), params=params, arrival=float(index)
    )


def decode(rows: int, groups: tuple[CacheGroup, ...], steps: int) -> float:
    """Median seconds of schedule + update over `steps` steps of `rows` decoding sequences."""
    scheduler = make_scheduler(groups)
    for index in range(rows):
        # Different lengths and tokens: block boundaries fall on different steps, as in practice.
        scheduler.add(request(index, [index, *range(500 + index % 16)]))
    for _ in range(5):
        one_step(scheduler)
    return statistics.median(one_step(scheduler) for _ in range(steps))


def queued(rows: int, waiting: int, policy: str, steps: int) -> float:
    """Median seconds of schedule + update with a full queue. Sequences end and start all the time: at 200 tokens of
    output each, some row in nearly every step of 256. Half of the prompts share a prefix with others."""
    config = SchedulerConfig(
        num_blocks=400_000,
        max_num_seqs=rows,
        max_num_batched_tokens=1 << 20,
        max_model_len=1 << 17,
        policy=policy,
    )
    scheduler, rng = Scheduler(config), random.Random(0)
    systems = [[1000 + i] * 256 for i in range(8)]
    for index in range(rows + waiting):
        own = [index, *range(60)]
        prompt = rng.choice(systems) + own if index % 2 else own
        terms = ServiceTerms(account=f"key {index % 20}", due=rng.uniform(0, 1e4))
        scheduler.add(replace(request(index, prompt, rng.randint(100, 300)), terms=terms, priority=index % 3))
    for _ in range(120):
        one_step(scheduler)
    return statistics.median(one_step(scheduler) for _ in range(steps))


def fit() -> float:
    """Mean seconds for the cost model to take in a step."""
    model, rng = StepCostModel(), random.Random(0)
    seen = [
        (1.0, rng.randint(1, 64), rng.choice([0, 256]), rng.randint(0, 90_000), 0.0, 0, 0, 0)
        for _ in range(500)
    ]
    start = time.perf_counter()
    for features in seen:
        model.seconds(features)
        model.observe(features, 0.01 + 1e-4 * features[1] + 2e-4 * features[2])
    return (time.perf_counter() - start) / len(seen)


def blocked(length: int) -> float:
    """Mean seconds of a step of 32 decoding sequences while a prompt of `length` tokens, half of it cached, waits for
    blocks."""
    prompt = list(range(length))
    scheduler = make_scheduler(FULL, num_blocks=length // 16 + 200)
    scheduler.add(request(0, prompt[: length // 2], 1))
    one_step(scheduler)
    for index in range(1, 33):
        scheduler.add(request(index, [index, *range(95)], 256))
    for _ in range(3):
        one_step(scheduler)
    scheduler.add(request(33, prompt, 8))
    spent = statistics.fmean(one_step(scheduler) for _ in range(48))  # the lookups are one step in 16
    if scheduler.num_waiting != 1 or scheduler.num_running != 32:
        raise RuntimeError("the case no longer measures a blocked prompt")
    return spent


def one_step(scheduler: Scheduler) -> float:
    """Seconds of schedule + update of the next step."""
    start = time.perf_counter()
    out = scheduler.schedule()
    middle = time.perf_counter()
    result = result_of(out)
    again = time.perf_counter()
    scheduler.update(out, result)
    return middle - start + time.perf_counter() - again


def admit(length: int, *, hit: bool) -> float:
    """Seconds of the step that starts a prompt of `length` tokens, cached or not."""
    scheduler = make_scheduler(FULL)
    prompt = list(range(length))
    if hit:
        scheduler.add(request(0, prompt, 1))
        one_step(scheduler)
    scheduler.add(request(1, prompt, 8))
    return one_step(scheduler)


def match(length: int, prompts: int) -> float:
    """Seconds to match a key of `length` tokens in a tree of `prompts` prompts of 1,024 tokens."""
    tree: RadixTree[int] = RadixTree(64)
    for index in range(prompts):
        tree.insert(array("i", [index, *range(1023)]).tobytes(), list(range(64)))
    key = array("i", range(length)).tobytes()
    tree.insert(key, list(range(length // 16)))
    start = time.perf_counter()
    for _ in range(100):
        tree.match(key)
    return (time.perf_counter() - start) / 100


def cases(steps: int) -> dict[str, Callable[[], float]]:
    return {
        "decode step, 32 running": lambda: decode(32, FULL, steps),
        "decode step, 256 running": lambda: decode(256, FULL, steps),
        "decode step, 32 running, 1 full + 5 sliding groups": lambda: decode(32, HYBRID, steps),
        "decode step, 256 running, 1 full + 5 sliding groups": lambda: decode(256, HYBRID, steps),
        **{
            f"{policy}: a step, {rows} running, {waiting:,} waiting": partial(
                queued, rows, waiting, policy, steps
            )
            for rows, waiting in ((32, 1000), (256, 10_000))
            for policy in ("fcfs", "priority", "sjf", "lpm", "edf", "fair", "priority+fair+sjf")
        },
        "cost model: a step predicted and taken in": fit,
        "decode step, 32 running, a prompt of 8,192 tokens blocked": lambda: blocked(8192),
        "decode step, 32 running, a prompt of 65,536 tokens blocked": lambda: blocked(65536),
        "start a prompt of 2,048 tokens, new": lambda: admit(2048, hit=False),
        "start a prompt of 2,048 tokens, all but 16 cached": lambda: admit(2048, hit=True),
        "start a prompt of 65,536 tokens, all but 16 cached": lambda: admit(65536, hit=True),
        "radix match of 1,024 tokens among 2,000 prompts": lambda: match(1024, 2000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="decode steps a run")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each case, the best counts")
    asked = parser.parse_args()
    times = {
        name: round(min(case() for _ in range(asked.repeat)) * 1e6, 1)
        for name, case in cases(asked.steps).items()
    }
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(json.dumps({"python": python, "machine": platform.machine(), "microseconds": times}))
    print()
    for name, micro in times.items():
        print(f"| {name} | {micro:,.1f} µs |")


if __name__ == "__main__":
    main()
