"""Servers that come and go with published loads, on a virtual clock: Quire's rule beside a reactive one.

    python -m benchmarks.scaling [--traces ../shared/data/traces]

For each trace and each time that a server takes to start: the share of requests whose prompt was not computed in time,
and hours of servers. The reactive rule is that of Kubernetes' HorizontalPodAutoscaler: with its usual target, and with
the target that costs about as many hours as Quire's rule. The last column is a number that never changes, which would
have been late as rarely.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from quire.bench.simulated_scaling import ScaledRun, WantedServers, by_forecast, by_utilization, run
from quire.bench.traces import TraceRow, read_trace
from quire.routing.router_policies import ANSWER_TOKEN
from quire.routing.servers_needed import BUSY, ScalingBounds

LEVEL, MOST = 2.0, 64
# Seconds for a token of a prompt are such that about as many servers are busy on average in each trace.
TRACES = {
    "azure_llm_2023_conv.csv": 8e-4, "azure_llm_2023_code.csv": 1.6e-3, "mooncake_conversation_trace.jsonl": 1.6e-4,
}  # fmt: skip
STARTS = {2.0: 60.0, 120.0: 300.0, 300.0: 300.0}  # seconds to start, and before fewer run
TARGETS = [number / 100 for number in range(20, 151, 5)]


def rows_of(rows: list[TraceRow], each: float, start: float, down: float) -> list[str]:
    """The cells of one row of the table."""
    work = sum(row.input_tokens + ANSWER_TOKEN * row.output_tokens for row in rows) * each
    first = math.ceil(work / (rows[-1].at or 1.0) / BUSY)
    bounds = ScalingBounds(1, MOST, down=down)

    def served(wanted: WantedServers, servers: int = first) -> ScaledRun:
        return run(rows, wanted, level=LEVEL, start=start, token_seconds=each, first=servers)

    own = served(by_forecast(LEVEL, start, bounds, each, first))
    usual = served(by_utilization(bounds, each, first))
    others = [served(by_utilization(bounds, each, first, target)) for target in TARGETS]
    equal = min(others, key=lambda one: abs(one.hours - own.hours))
    counts = range(1, MOST + 1)
    steady = ((count, served(lambda _, count=count: count, count)) for count in counts)  # type: ignore[misc]
    fixed = next((found for found in steady if found[1].late <= own.late), (MOST, own))
    return [
        *(f"{one.late:.1%}, {one.hours:.1f} h" for one in (own, usual, equal)), f"{fixed[0]}, {fixed[1].hours:.1f} h"
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    asked = parser.parse_args()
    print("| trace | start | Quire's rule | reactive | reactive, as many hours | fixed, as rarely late |")
    print("|---|---|---|---|---|---|")
    for file, each in TRACES.items():
        rows = read_trace(asked.traces / file)
        for start, down in STARTS.items():
            cells = rows_of(rows, each, start, down)
            print(f"| {file.partition('.')[0]} | {start:g} s | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
