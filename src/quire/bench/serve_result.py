"""A measured run as a result file, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.bench.arrivals import variation
from quire.bench.perception import perceived
from quire.bench.recording import Recording
from quire.bench.request_metrics import DEFINITIONS, Summary
from quire.bench.results import Metric, Result, plain_word
from quire.bench.server_bench import Outcome, Pace, ServerBench, request_rows
from quire.bench.text import aligned, figure
from quire.bench.workloads import Workload

_DEFINED = ("percentiles", "seconds", "request_rate", "input_token_rate", "output_token_rate", "total_token_rate",
            "concurrency", "failure_rate", "with_failures")  # fmt: skip


def definitions_used(summary: Summary) -> dict[str, str]:
    """The definitions that a report of this run needs."""
    names = [name for name in DEFINITIONS if name in summary.distributions or name in _DEFINED]
    names = [name for name in names if name != "with_failures" or summary.failed]
    if summary.slo is not None:
        names.append("goodput")
    return {name: DEFINITIONS[name] for name in names}


def serve_result(
    recording: Recording,
    bench: ServerBench,
    workload: Workload,
    pace: Pace,
    outcome: Outcome,
    settings: dict[str, Any],
) -> Result:
    """Build the result of `quire bench serve`."""
    summary = outcome.summary
    tables: dict[str, list[dict[str, Any]]] = {
        "latencies": [one.row() for one in summary.distributions.values()],
        "requests": request_rows(outcome.records),
    }
    if outcome.server_samples:
        tables["server"] = list(outcome.server_samples)
    if summary.failures:
        tables["failures"] = [{"kind": kind, "requests": n} for kind, n in summary.failures.most_common()]
    if summary.goodput is not None:
        tables["misses"] = [{"objective": k, "requests": n} for k, n in summary.goodput.misses.items()]
    metrics = summary.metrics()
    metrics |= {f"client_{k}": Metric(v, _unit(k)) for k, v in outcome.overhead.items() if k != "words"}
    metrics |= {f"server_{k}_mean": Metric(v * 1e3, "ms") for k, v in outcome.server_means.items()}
    metrics |= {f"server_{k}": Metric(v, "count") for k, v in outcome.server_counters.items()}
    return recording.result(
        settings=settings
        | {
            "url": bench.options.target.url,
            "backend": bench.backend,
            "api": bench.options.api,
            "model": plain_word(bench.model),
            "workload": workload.text,
            "workload_digest": workload.digest(),
            "workload_facts": workload.facts,
            "pace": str(pace),
            "arrival_variation": round(variation(sorted(r.scheduled for r in outcome.records)), 3),
            "goodput": str(summary.slo) if summary.slo is not None else "",
            "requests": summary.total,
            "words_per_token": round(outcome.overhead["words"] / max(1, summary.output_tokens), 4),
        },
        metrics=metrics,
        definitions=definitions_used(summary),
        tables=tables,
        notes=[*summary.warnings(), *outcome.notes],
    )


def _unit(name: str) -> str:
    return {"cpu_share": "cores", "connections": "count"}.get(name, "s")


def lines(result: Result) -> list[str]:
    """Format a result of `serve` as text."""
    value = {name: metric.value for name, metric in result.metrics.items()}
    text = [
        f"{result.settings['model'] or 'the model'} at {result.settings['url']} ({result.settings['backend']})",
        f"  {result.settings['workload']}; {result.settings['pace']}",
        "",
        f"  requests     {result.settings['requests']:,} measured, {figure(value['request_rate'])}/s done, "
        f"{figure(value['offered_rate'])}/s offered, {100 * (value['failure_rate'] or 0):.1f} % failed, "
        f"{figure(value['concurrency'])} in flight on average",
        f"  tokens       {figure(value['input_token_rate'])}/s in, {figure(value['output_token_rate'])}/s out, "
        f"{figure(value['total_token_rate'])}/s together"
        f" ({figure((value['output_token_rate'] or 0) * result.settings['words_per_token'])} words/s out)",
    ]
    if "goodput" in value:
        text.append(
            f"  goodput      {figure(value['goodput'])} requests/s, {100 * (value['goodput_share'] or 0):.1f} % of all "
            f"met {result.settings['goodput']} (ms)"
        )
        missed = [
            f"{row['objective']} {row['requests']}"
            for row in result.tables.get("misses", [])
            if row["requests"]
        ]
        if missed:
            text.append(f"               missed: {', '.join(missed)}")
    latencies = result.tables.get("latencies", [])
    text += ["", *latency_table(latencies)]
    text += ["", *perceived(latencies), *_client_lines(value), *_server_lines(value)]
    text += ["", *(f"note: {note}" for note in result.notes)] if result.notes else []
    text += ["", "definitions:", *(f"  {name:<18}{words}" for name, words in result.definitions.items())]
    return text


def latency_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Percentiles with their 95 % intervals; "–" if there are too few samples."""
    columns = [
        key for key in (rows[0] if rows else {}) if key.startswith("p") and key[1:].replace(".", "").isdigit()
    ]
    head = ["", "unit", "n", "mean", "min", *columns, "max"]
    table = [head]
    for row in rows:
        cells = [row["name"], row["unit"], f"{row['count']:,}", figure(row["mean"]), figure(row["min"])]
        for column in columns:
            low, high = row[f"{column}_low"], row[f"{column}_high"]
            value = row[column]
            cells.append("–" if value is None else f"{figure(value)} [{figure(low)}, {figure(high)}]")
        table.append([*cells, figure(row["max"])])
        names = [f"{column}_with_failures" for column in columns]
        if any(name in row for name in names):
            late = [
                "–" if name not in row else "∞" if row[name] is None else figure(row[name]) for name in names
            ]
            table.append(["  with failures", "", "", "", "", *late, ""])
    return [f"  {line}" for line in aligned(table, left=(0, 1))]


def _client_lines(value: dict[str, float | None]) -> list[str]:
    def ms(name: str) -> str:
        return f"{(value.get(f'client_{name}') or 0.0) * 1e3:.2f} ms"

    trip = f", HTTP round trip {ms('round_trip')}" if "client_round_trip" in value else ""
    return [
        f"  client       {100 * (value['client_cpu_share'] or 0):.1f} % of a core, "
        f"{(value['client_cpu_per_chunk'] or 0) * 1e6:.0f} µs of CPU per chunk, event loop lag {ms('loop_lag_p50')} "
        f"(p99 {ms('loop_lag_p99')}){trip}"
    ]


def _server_lines(value: dict[str, float | None]) -> list[str]:
    means = [f"{name.upper()} {figure(value[key])}" for name in ("ttft", "itl", "tpot", "e2el", "queue", "prefill")
             if (key := f"server_{name}_mean") in value]  # fmt: skip
    text = [f"  server says  means in ms: {', '.join(means)}"] if means else []
    asked = value.get("server_prefix_queries")
    if asked:
        hits = value.get("server_prefix_hits") or 0.0
        text.append(f"  server says  {100 * hits / asked:.1f} % of prompt tokens were prefix hits")
    return text
