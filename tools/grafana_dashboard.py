"""Writes examples/monitoring/quire-dashboard.json, a dashboard for Grafana, from the table of panels below.

python -m tools.grafana_dashboard; a test compares the file, and asks a running server for every metric that is named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "examples/monitoring/quire-dashboard.json"
_OF = '{model_name=~"$model"}'


class Panel(NamedTuple):
    """A panel: its title, the unit of Grafana, and the query of each line by its name."""

    title: str
    unit: str
    lines: dict[str, str]


def _rate(name: str, by: str = "", of: str = _OF) -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{of}[$__rate_interval]))"


def _sum(name: str, by: str = "", of: str = _OF) -> str:
    return f"sum{f' by ({by})' if by else ''} ({name}{of})"


def _quantiles(name: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({name}_bucket{_OF}[$__rate_interval]))"
    return {f"p{100 * share:g}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.9, 0.99)}


_JOB = '{job="quire"}'  # of what has no model
ROWS: dict[str, list[Panel]] = {
    "What clients see": [
        Panel("Time to the first token", "s", _quantiles("quire_time_to_first_token_seconds")),
        Panel("Between tokens", "s", _quantiles("quire_inter_token_latency_seconds")),
        Panel("Whole answers", "s", _quantiles("quire_e2e_request_latency_seconds")),
        Panel("Goodput", "reqps", {
            "{{service_class}}": _sum("quire_goodput_requests_per_second", "service_class", _JOB),
        }),
        Panel("Service levels missed", "reqps", {
            "{{service_class}}": _rate("quire_service_level_missed_total", "service_class", _JOB),
        }),
        Panel("Ended requests", "reqps", {
            "{{finished_reason}}": _rate("quire_request_success_total", "finished_reason"),
        }),
    ],
    "The engine": [
        Panel("Tokens", "short", {
            "output": _rate("quire_step_decode_tokens_total"), "prompts": _rate("quire_step_prefill_tokens_total"),
            "from the cache": _rate("quire_prefix_cache_hits_total"),
        }),
        Panel("Sequences", "short", {
            "running": _sum("quire_num_requests_running"), "waiting": _sum("quire_num_requests_waiting"),
        }),
        Panel("Time in steps", "percentunit", {"busy": _rate("quire_step_seconds_total")}),
        Panel("Parts of steps", "percentunit", {"{{phase}}": _rate("quire_step_phase_seconds_total", "phase", _JOB)}),
        Panel("Time in the queue", "s", _quantiles("quire_request_queue_time_seconds")),
        Panel("Error of predicted steps", "percentunit", {
            "median": f"max (quire_step_cost_error_ratio{_OF})", "p90": f"max (quire_step_cost_error_p90_ratio{_OF})",
        }),
    ],
    "The KV cache": [
        Panel("Blocks", "short", {
            "held": _sum("quire_kv_blocks_used"), "cached": _sum("quire_kv_blocks_cached"),
            "all": _sum("quire_kv_blocks"),
        }),
        Panel("Prompt tokens found", "percentunit", {
            "share": f"{_rate('quire_prefix_cache_hits_total')} / {_rate('quire_prefix_cache_queries_total')}",
        }),
        Panel("Preemptions", "ops", {"preemptions": _rate("quire_num_preemptions_total")}),
    ],
    "Speculation and tenants": [
        Panel("Drafts that were right", "percentunit", {
            "share": f"{_rate('quire_spec_decode_num_accepted_tokens_total')} / "
            f"{_rate('quire_spec_decode_num_draft_tokens_total')}",
        }),
        Panel("Tokens by tenant", "short", {"{{tenant}}": _rate("quire_tenant_generation_tokens_total", "tenant")}),
        Panel("Requests over a limit", "reqps", {
            "{{tenant}}": _rate("quire_rate_limited_requests_total", "tenant"),
        }),
    ],
    "The processes": [
        Panel("Memory plan", "bytes", {"{{part}}": _sum("quire_memory_bytes", "part", _JOB)}),
        Panel("Resident", "bytes", {
            "engine": _sum("quire_engine_resident_bytes"), "server": _sum("process_resident_memory_bytes", of=_JOB),
        }),
        Panel("HTTP statuses", "reqps", {"{{status}}": _rate("http_requests_total", "status", _JOB)}),
    ],
}  # fmt: skip
_WIDE, _HIGH, _ACROSS = 8, 8, 3


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [query for panels in ROWS.values() for panel in panels for query in panel.lines.values()]


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number, "type": "timeseries", "title": panel.title,
        "gridPos": {"x": x, "y": y, "w": _WIDE, "h": _HIGH},
        "datasource": {"type": "prometheus", "uid": "$source"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + index), "expr": query, "legendFormat": name}
            for index, (name, query) in enumerate(panel.lines.items())
        ],
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": title, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        })  # fmt: skip
        y += 1
        for index, panel in enumerate(row):
            place = index % _ACROSS * _WIDE, y + index // _ACROSS * _HIGH
            panels.append(_panel(panel, len(panels) + 1, *place))
        y += -(-len(row) // _ACROSS) * _HIGH
    variables = [
        {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
        {
            "name": "model", "label": "Model", "type": "query", "datasource": {"type": "prometheus", "uid": "$source"},
            "query": "label_values(quire_num_requests_running, model_name)", "refresh": 2, "includeAll": True,
            "allValue": ".*", "multi": True,
        },
    ]  # fmt: skip
    return {
        "uid": "quire", "title": "Quire", "schemaVersion": 39, "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
