"""What the measured rows add up to: metrics, the machine's limits, versions, and the bound of each workload."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import runs, workloads
from benchmarks.peers.engines import ENGINES, Place

from quire import _native
from quire.bench.bounds import step_bound
from quire.bench.results import MachineLimits, Metric, metric, spread
from quire.config.schema import EngineConfig
from quire.engine.build import choose, machine_facts
from quire.engine.opening import open_model
from quire.program.cost import Row, step_cost
from quire.program.ops import Program

ROOT = Path(__file__).parents[2]
UNITS = {"memory": "MiB", "first": "s"}


def metrics(rows: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """Every engine, format and workload, with its rounds."""
    return {
        f"{engine} {own} {work}": metric(
            values, UNITS.get(work, "tokens/s"), "lower" if work in runs.LOWER_IS_BETTER else "higher"
        )
        for (engine, _, own, work), values in runs.samples(rows).items()
    }


def limits(rows: Sequence[dict[str, Any]], threads: int) -> MachineLimits | None:
    """Of all processes together."""
    rows = [row for row in rows if "bandwidth" in row]
    if not rows:
        return None
    compute = {name: spread([row["compute"][name] for row in rows]) for name in rows[0]["compute"]}
    isa = _native.Executor("", 1).isa
    return MachineLimits(isa, threads, spread([row["bandwidth"] for row in rows]), compute)


def versions(place: Place, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured, with Quire's commit where there is one."""
    found = []
    for name in dict.fromkeys(row["engine"] for row in rows):
        engine = ENGINES[name]
        version = engine.version(place)
        if name == runs.OURS and (commit := _commit()):
            version += f" ({commit})"
        found.append({"engine": name, "version": version, "packages": list(engine.packages)})
    return found


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if not done.returncode else ""


def bounds(model: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of Quire's formats and workloads: the most that the limits around its runs allow, median of them."""
    found: dict[tuple[str, str], list[float]] = {}
    programs: dict[str, Program] = {}
    for row in rows:
        if row["engine"] != runs.OURS or "bandwidth" not in row or row["work"] in runs.LOWER_IS_BETTER:
            continue
        form = row["its_format"]
        if form not in programs:
            asked = EngineConfig(quantization={"bf16": "none"}.get(form, form), max_model_len=2048)
            programs[form] = choose(open_model(model, tokenizer=False), asked, machine_facts())[1]
        most = bound(programs[form], row["work"], row["bandwidth"], row["compute"])
        found.setdefault((row["work"], row["format"]), []).append(most)
    return [
        {"work": work, "format": form, "value": spread(values).median}
        for (work, form), values in found.items()
    ]


def bound(program: Program, work: str, bandwidth: float, compute: dict[str, float]) -> float:
    """Tokens per second of a workload at the machine's limits (see DEFINITIONS)."""

    def seconds(lengths: Sequence[Row]) -> float:
        cost = step_cost(program, lengths, len(lengths))
        return max(step_bound(program, cost, bandwidth, compute))

    if work == "prefill":
        return workloads.LONG / seconds([Row(workloads.LONG, 0)])
    count = 1 if work == "decode" else workloads.requests_of(work)
    steps = range(workloads.PROMPT, workloads.PROMPT + workloads.OUTPUT - 1)
    decoding = sum(seconds([Row(1, context)] * count) for context in steps)
    if work == "decode":
        return len(steps) / decoding
    return count * workloads.OUTPUT / (seconds([Row(workloads.PROMPT, 0)] * count) + decoding)
