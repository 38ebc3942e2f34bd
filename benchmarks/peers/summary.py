"""What the measured rows add up to: metrics, the machine's limits, versions, and the bound of each workload."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import runs, workloads
from benchmarks.peers.engines import ENGINES, Engine, Place

from quire import _native
from quire.bench.results import MachineLimits, Metric, metric, spread
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts
from quire.engine.build.opening import open_model
from quire.program.cost import Row, peak_of, step_cost
from quire.program.program import Program

ROOT = Path(__file__).parents[2]


def unit(work: str) -> str:
    """Of a workload's figure."""
    return "MiB" if work.startswith(runs.MEMORY) else "s" if work == "first" else "tokens/s"


def metrics(rows: Sequence[dict[str, Any]]) -> dict[str, Metric]:
    """Every engine, format and workload, with its rounds."""
    return {
        f"{engine} {own} {work}": metric(
            values, unit(work), "lower" if runs.lower_is_better(work) else "higher"
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
    """What was measured: the versions that the rows were written with."""
    found = []
    for name in dict.fromkeys(row["engine"] for row in rows):
        engine = ENGINES[name]
        measured = dict.fromkeys(r["version"] for r in rows if r["engine"] == name and "version" in r)
        text = ", ".join(measured) or version(engine, place)
        found.append({"engine": name, "version": text, "packages": list(engine.packages)})
    return found


def version(engine: Engine, place: Place) -> str:
    """Of what is installed now; Quire's with its commit where there is one."""
    commit = "" if runs.is_peer(engine.name) else _commit()
    return engine.version(place) + (f" ({commit})" if commit else "")


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if not done.returncode else ""


def with_bounds(model: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows; those in tokens per second with "bound", the most that the limits measured around them allow.

    Weights count in Quire's format of as many bits whatever the engine, so that engines stay comparable.
    """
    found = []
    needed: dict[tuple[str, str, str], Needed] = {}
    for row in rows:
        if "bandwidth" not in row or runs.lower_is_better(row["work"]):
            found.append(row)
            continue
        cache = "int8" if row["its_format"].endswith(runs.KV8) else "auto"
        key = (row["format"], cache, row["work"])
        if key not in needed:
            needed[key] = needs(_program(model, row["format"], cache), row["work"])
        found.append({**row, "bound": bound(needed[key], row["bandwidth"], row["compute"])})
    return found


@functools.cache
def _program(model: Path, form: str, cache: str) -> Program:
    quantization = {"bf16": "none"}.get(form, form)
    asked = EngineConfig(quantization=quantization, kv_cache_dtype=cache, max_model_len=2048)
    return choose(open_model(model, tokenizer=False), asked, machine_facts())[1]


@dataclass(frozen=True)
class Needed:
    """What a workload takes: output tokens (of a prefill: the prompt's), and for each step operations by number
    format and bytes of weights, keys and values."""

    tokens: int
    steps: list[tuple[dict[str, int], int]]


def needs(program: Program, work: str) -> Needed:
    """Of a workload that is counted in tokens per second (see DEFINITIONS)."""

    def step(rows: Sequence[Row]) -> tuple[dict[str, int], int]:
        cost = step_cost(program, rows, len(rows))
        operations: dict[str, int] = {}
        for op, one in zip(program.ops, cost.ops, strict=True):
            peak = peak_of(program, op)
            operations[peak] = operations.get(peak, 0) + one.flops
        total = cost.total
        return operations, total.weight_bytes + total.kv_read_bytes + total.kv_written_bytes

    if work == "prefill":
        return Needed(workloads.LONG, [step([Row(workloads.LONG, 0)])])
    count = 1 if work == "decode" else workloads.requests_of(work)
    contexts = range(workloads.PROMPT, workloads.PROMPT + workloads.OUTPUT - 1)
    decoding = [step([Row(1, context)] * count) for context in contexts]
    if work == "decode":
        return Needed(len(contexts), decoding)
    return Needed(count * workloads.OUTPUT, [step([Row(workloads.PROMPT, 0)] * count), *decoding])


def bound(needed: Needed, bandwidth: float, compute: Mapping[str, float]) -> float:
    """Tokens per second where every step takes the longer of computing and moving its bytes."""
    seconds = sum(
        max(sum(count / compute[peak] for peak, count in operations.items()), moved / bandwidth)
        for operations, moved in needed.steps
    )
    return needed.tokens / seconds
