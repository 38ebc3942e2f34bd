"""Scheduling on a virtual clock: the real scheduler, cost model, controller and admission on published traces.

    python -m benchmarks.scheduling goodput --traces ../shared/data/traces [--requests 600]
    python -m benchmarks.scheduling policies --traces ../shared/data/traces
    python -m benchmarks.scheduling fairness

A step takes what a formula says (COSTS: a small model on two cores), with 3 % of noise; the cost model learns it while
requests run. The arrivals of a trace are the same for every policy; a load of 2 has them in half the time. Tokens of a
trace are divided by SCALE so that one prompt is a few steps, as on the machine that the costs are of. Prints tables in
Markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from quire.bench.goodput import PRESETS, Goodput, goodput
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.bench.statistics import percentile
from quire.bench.timeline import request_metrics
from quire.bench.traces import TraceRow, read_trace
from quire.core.scheduler_config import SchedulerConfig
from quire.objectives import SLO, ServiceClass

COSTS = (0.012, 4e-4, 3e-4, 2e-7, 4e-9, 2e-3, 3e-4, 2e-4)
# trace: file or folder, divisor of its tokens, requests per second at load 1
TRACES = {
    "Azure conversation": ("azure_llm_2023_conv.csv", 4, 4.0),
    "Azure code": ("azure_llm_2023_code.csv", 8, 2.0),
    "Mooncake conversation": ("mooncake_conversation_trace.jsonl", 16, 1.5),
    "Mooncake synthetic": ("mooncake_synthetic_trace.jsonl", 16, 1.5),
    "ServeGen": ("servegen_deepseek_r1", 4, 1.5),
}
LOADS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
LIMITS = SchedulerConfig(num_blocks=6000, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=16384)


def arrivals(rows: Sequence[TraceRow], scale: int, rate: float, *, known: bool = True) -> list[Arrival]:
    """The requests of a trace at a mean rate. Prompts with equal leading blocks have equal tokens there."""
    span = rows[-1].at or 1.0
    factor = len(rows) / span / rate
    return [
        Arrival(
            (row.at or 0.0) * factor, _prompt(i, row, scale), max(1, row.output_tokens // scale), known=known
        )
        for i, row in enumerate(rows)
    ]


def _prompt(index: int, row: TraceRow, scale: int) -> list[int]:
    length, made = min(16_000, max(1, row.input_tokens // scale)), []
    for block in row.blocks:
        made += random.Random(block).choices(range(30_000), k=max(1, row.block_tokens // scale))
    made += random.Random(f"{index} own").choices(range(30_000), k=max(0, length - len(made)))
    return made[:length]


def judged(run: SimulatedRun, slo: SLO) -> Goodput:
    metrics = [None if one.failed else request_metrics(one) for one in run.records]
    return goodput(metrics, slo, max(one.scheduled for one in run.records))


def errors(run: SimulatedRun) -> list[float]:
    """|predicted / real - 1| of the TTFT of admitted requests, in order."""
    found = []
    for index, predicted in run.predicted.items():
        record = run.records[index]
        found.append(abs(predicted / (record.times[0] - record.scheduled) - 1))
    return sorted(found)


def traces(folder: Path, count: int) -> Iterator[tuple[str, list[TraceRow], int, float]]:
    for name, (file, scale, rate) in TRACES.items():
        yield name, read_trace(folder / file, limit=count), scale, rate


def compare_goodput(folder: Path, count: int, preset: str) -> None:
    slo = PRESETS[preset][0]
    service = [ServiceClass(preset, slo)]
    print(
        f"Preset {preset}: {slo}. Goodput in requests a second; in brackets the share of requests that met the level.\n"
    )
    print(
        "| trace | load | offered | first come | held | ratio | refused | late of admitted | TTFT error p50, p90 |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, rows, scale, rate in traces(folder, count):
        for load in LOADS:
            asked = arrivals(rows, scale, rate * load)
            plain = judged(SimulatedServer(LIMITS, COSTS, service).run(asked), slo)
            config = replace(LIMITS, policy="edf")
            run = SimulatedServer(config, COSTS, service, admits=True, controls=True).run(asked)
            held, wrong = judged(run, slo), errors(run)
            late = (held.total - held.failed - held.passed) / max(1, held.total - held.failed)
            cells = [
                name, f"{load:g}", f"{len(asked) / asked[-1].at:.2f}", f"{plain.rate:.2f} ({plain.share:.0%})",
                f"{held.rate:.2f} ({held.share:.0%})", f"{held.rate / plain.rate:.2f}" if plain.rate else "–",
                f"{held.failed / held.total:.0%}", f"{late:.1%}",
                f"{percentile(wrong, 50):.0%}, {percentile(wrong, 90):.0%}",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)


def compare_policies(folder: Path, count: int) -> None:
    print(
        "| trace | policy | mean latency, s | p99, s | mean TTFT, s | prompt tokens from the cache | preemptions |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    for name, rows, scale, rate in traces(folder, count):
        if name not in {"Azure conversation", "Mooncake conversation"}:
            continue
        for label, policy, known in (
            ("fcfs", "fcfs", True), ("sjf, lengths known", "sjf", True), ("sjf, lengths predicted", "sjf", False),
            ("lpm", "lpm", True), ("edf", "edf", True),
        ):  # fmt: skip
            asked = arrivals(rows, scale, rate * 2, known=known)
            config = replace(LIMITS, policy=policy, num_blocks=1500)
            run = SimulatedServer(config, COSTS, [ServiceClass("chat", PRESETS["chat"][0])]).run(asked)
            took = sorted(request_metrics(one).e2e for one in run.records)
            first = statistics.fmean(request_metrics(one).ttft or 0.0 for one in run.records)
            print(
                f"| {name} | {label} | {statistics.fmean(took):.2f} | {percentile(took, 99):.2f} | {first:.2f} |"
                f" {run.hit_share:.1%} | {run.preemptions} |",
                flush=True,
            )


def compare_fairness() -> None:
    """A flooder against two accounts that ask now and then."""
    rng, polite = random.Random(0), []
    for account in "ab":
        at = 0.0
        while at < 120:
            at += rng.expovariate(0.7)
            polite.append(
                Arrival(
                    at, rng.choices(range(9999), k=rng.randint(50, 300)), rng.randint(10, 40), account=account
                )
            )
    flood = [
        Arrival(rng.uniform(0, 120), rng.choices(range(9999), k=200), 40, account="flood")
        for _ in range(2500)
    ]
    print("| policy | accounts | TTFT p50, s | TTFT p99, s |")
    print("|---|---|--:|--:|")
    for policy, asked in (("fcfs", polite), ("fcfs", [*polite, *flood]), ("fair", [*polite, *flood])):
        config = replace(LIMITS, policy=policy, max_num_seqs=16)
        run = SimulatedServer(config, COSTS).run(asked)
        first = sorted(request_metrics(one).ttft or 0.0 for one in run.records[: len(polite)])
        who = "two, alone" if asked is polite else "the same two beside a flood"
        print(f"| {policy} | {who} | {percentile(first, 50):.2f} | {percentile(first, 99):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("goodput", "policies", "fairness"))
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--requests", type=int, default=600, help="requests of each trace")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="chat")
    asked = parser.parse_args()
    if asked.what == "goodput":
        compare_goodput(asked.traces, asked.requests, asked.preset)
    elif asked.what == "policies":
        compare_policies(asked.traces, asked.requests)
    else:
        compare_fairness()


if __name__ == "__main__":
    main()
