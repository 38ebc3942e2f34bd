"""What has been measured: one JSON object a line in a file that grows, so that a comparison goes on where it ended."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "quire"
KV8 = "-kv8"  # behind the names of Quire and its formats where keys and values are kept in 8 bits
MEMORY = "memory of "  # before a workload: the peak memory of the process that did it


def is_peer(engine: str) -> bool:
    """Whether an engine is not Quire, whatever its KV format."""
    return engine.removesuffix(KV8) != OURS


def lower_is_better(work: str) -> bool:
    """Whether a figure of a workload counts seconds or bytes."""
    return work == "first" or work.startswith(MEMORY)


@dataclass(frozen=True)
class Unit:
    """One process to measure: an engine with one of its formats doing some workloads, in one round."""

    round: int
    engine: str
    format: str  # ours: bf16, int8, int4
    its_format: str
    works: tuple[str, ...]

    def __str__(self) -> str:
        return f"round {self.round + 1}: {self.engine} {self.its_format} {'+'.join(self.works)}"


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of the file; none where it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def done(rows: Iterable[dict[str, Any]], unit: Unit) -> bool:
    """Whether a figure of each of the unit's workloads is there."""
    key = (unit.round, unit.engine, unit.its_format)
    found = {r["work"] for r in rows if (r["round"], r["engine"], r["its_format"]) == key and "value" in r}
    return found >= set(unit.works)


def failures(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What failed and was never measured, one line each."""
    rows = list(rows)
    measured = {(r["engine"], r["its_format"], r["work"]) for r in rows if "value" in r}
    lines = {}
    for row in rows:
        key = (row["engine"], row["its_format"], row["work"])
        if "error" in row and key not in measured:
            lines[key] = f"{' '.join(key)}: {row['error']}"
    return list(lines.values())


def rows_of(unit: Unit, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one measured process (see burst.py): one for each workload, and its peak memory in those that decode."""
    base = {"round": unit.round, "engine": unit.engine, "format": unit.format, "its_format": unit.its_format}
    around: dict[str, Any] = {
        name: found[name] for name in ("bandwidth", "compute", "others", "stolen") if name in found
    }
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = found.get("lines", [])
    for work in unit.works:
        line = next((line for line in lines if line["work"] == work), None)
        if line is not None and "value" in line:
            rows.append({**base, "work": work, "value": line["value"], **around})
        else:
            error = (line and line.get("error")) or found.get("error") or "nothing was reported"
            rows.append({**base, "work": work, "error": error})
    done = [row["work"] for row in rows if "value" in row and row["work"] not in {"first", "prefill"}]
    if "memory" in found:
        rows += [{**base, "work": MEMORY + work, "value": found["memory"]} for work in done]
    return rows


Medians = dict[tuple[str, str, str, str], list[float]]


def samples(rows: Iterable[dict[str, Any]], field: str = "value") -> Medians:
    """(engine, format, its format, work) -> one figure a round, the latest."""
    by_round: dict[tuple[tuple[str, str, str, str], int], float] = {}
    for row in rows:
        if field in row and "value" in row:
            key = (row["engine"], row["format"], row["its_format"], row["work"])
            by_round[key, row["round"]] = row[field]
    found: Medians = {}
    for (key, _), value in by_round.items():
        found.setdefault(key, []).append(value)
    return found


def better(work: str, value: float, than: float) -> bool:
    """Whether a figure of a workload is better than another."""
    return value < than if lower_is_better(work) else value > than


def gain(work: str, value: float, than: float) -> float:
    """How many times better: above 1 where `value` is."""
    return than / value if lower_is_better(work) else value / than


def contends(rows: Iterable[dict[str, Any]], unit: Unit, part: float) -> bool:
    """Whether another round of a unit can matter: Quire's always, a peer's where nothing is known of it yet or it
    reached `part` of the best peer's median in one of the unit's workloads."""
    if not is_peer(unit.engine):
        return True
    medians = {key: statistics.median(values) for key, values in samples(rows).items() if is_peer(key[0])}
    for work in unit.works:
        own = medians.get((unit.engine, unit.format, unit.its_format, work))
        rivals = [v for (_, form, _, w), v in medians.items() if (form, w) == (unit.format, work)]
        if own is None or all(gain(work, own, rival) >= part for rival in rivals):
            return True
    return False
