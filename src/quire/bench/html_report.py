"""Render result files as one HTML page: no scripts, no external resources, light or dark like the reader's system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from quire.bench.batching_plots import batching_plots, interference_plot
from quire.bench.eval_plots import channel_plots, divergence_plots, layer_error_plots, weight_plots
from quire.bench.results import Result, write_text
from quire.bench.roofline_plot import points_of, roofline
from quire.bench.server_bench import records_of
from quire.bench.speculation_plots import speculation_plots
from quire.bench.svg import Bars, Plot, Series, TimelineRow, histogram, stacked, timeline
from quire.bench.text import figure
from quire.bench.timeline import RequestRecord, gap_clusters, latencies, request_metrics
from quire.objectives import parse_slo

MOST_SAMPLES = 200_000
MOST_STEPS = 1000
_TITLES = {
    "ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency: every gap",
    "icl": "Inter-chunk latency: every gap", "e2el": "End-to-end latency", "stream_rate": "Speed of one stream",
    "send_lag": "Client's delay",
}  # fmt: skip
_PHASES = (
    ("due, not yet sent", "p1"),
    ("waiting for the first token", "p2"),
    ("decoding", "p3"),
    ("failed", "p4"),
)


def write_report(results: Sequence[Result], path: Path) -> None:
    """Write the page atomically."""
    write_text(path, page(results))


def page(results: Sequence[Result]) -> str:
    """The HTML of one or several results."""
    title = ", ".join(dict.fromkeys(_title(result) for result in results))
    body = "".join(_section(result) for result in results)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/><style>{_STYLE}</style></head>'
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def _title(result: Result) -> str:
    command = "quire eval" if result.kind.startswith("eval ") else "quire bench"
    return f"{command} {result.kind.removeprefix('eval ')}"


def _section(result: Result) -> str:
    parts = [_head(result)]
    if result.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in result.notes)}</ul>')
    parts.append(_tiles(result))
    if result.limits is not None and points_of(result):
        parts.append(f"<figure>{roofline(result)}</figure>")
    plots = [plot for name, draw in _PLOTS.items() if result.tables.get(name) for plot in draw(result)]
    if plots:
        parts += ['<div class="plots">', *plots, "</div>"]
    for name, rows in result.tables.items():
        if rows and name not in _PLOTTED:
            parts += [f"<h3>{escape(name.replace('_', ' '))}</h3>", _table(rows)]
    parts += [_metrics_table(result), _definitions(result), _settings(result)]
    return f"<section>{''.join(parts)}</section>"


def _head(result: Result) -> str:
    env = result.environment
    what = [str(result.settings[name]) for name in ("model", "workload", "pace") if result.settings.get(name)]
    machine = f"{env.cpu}, {env.usable_cores} of {env.cores} cores, Quire {env.quire}, {result.started}"
    noise = result.noise
    if noise is not None:
        machine += f"; other processes used {noise.others:.2f} CPUs during the run"
    return f"<h2>{escape(' · '.join(what) or result.kind)}</h2><p class='sub'>{escape(machine)}</p>"


def _tiles(result: Result) -> str:
    names = ("goodput", "request_rate", "output_token_rate", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50",
             "e2el_p50", "failure_rate", "knee_goodput", "knee_rate", "highest_served",
             "perplexity", "original_perplexity", "kl_mean", "kl_p99", "top1_agreement",
             "greedy_agreement")  # fmt: skip
    tiles = []
    for name in names:
        metric = result.metrics.get(name)
        if metric is not None:
            value, unit = metric.value, metric.unit
            if unit == "share" and value is not None:
                value, unit = 100 * value, "%"
            tiles.append(f'<div class="tile"><b>{escape(figure(value))}</b> {escape(unit)}'
                         f"<span>{escape(name.replace('_', ' '))}</span></div>")  # fmt: skip
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _request_plots(result: Result) -> Iterator[str]:
    records = [r for r in records_of(result.tables["requests"]) if not r.warm_up]
    metrics = [request_metrics(record) for record in records if not record.failed]
    bounds = _bounds(result)
    one = latencies(metrics)
    gaps = [gap for cluster in gap_clusters(metrics)["itl"] for gap in cluster]
    points = {row["name"]: row for row in result.tables.get("latencies", [])}
    for name, seconds in (("ttft", one["ttft"]), ("tpot", one["tpot"]), ("itl", gaps), ("e2el", one["e2el"])):
        if seconds:
            values = [1e3 * value for value in seconds[:: len(seconds) // MOST_SAMPLES + 1]]
            row = points.get(name, {})
            rules = [(row[p], f"{p} {figure(row[p])}", "rule") for p in ("p50", "p90", "p99")
                     if row.get(p) is not None]  # fmt: skip
            if name in bounds:
                rules.append((bounds[name], f"SLO {bounds[name]:g} ms", "slo"))
            yield histogram(_TITLES[name], values, "ms", rules)
    yield _timeline(records)


def _timeline(records: Sequence[RequestRecord]) -> str:
    lanes = []
    for record in sorted(records, key=lambda r: r.scheduled):
        start, sent = record.scheduled, record.scheduled if record.sent is None else record.sent
        first, end = (record.times[0] if record.times else record.closed), record.finished or record.closed
        name = f"request {record.index}"
        spans = [(start, sent, "p1", f"{name}: due, not sent for {1e3 * (sent - start):.1f} ms")]
        if record.failed:
            spans.append((sent, record.closed, "p4", f"{name}: {record.error}"))
        else:
            spans.append((sent, first, "p2", f"{name}: first token after {1e3 * (first - start):.1f} ms"))
            spans.append(
                (first, end, "p3", f"{name}: {record.output_tokens} tokens in {1e3 * (end - first):.1f} ms")
            )
        lanes.append(TimelineRow([span for span in spans if span[1] > span[0]]))
    return timeline("Requests over time", lanes, max(r.closed for r in records), _PHASES)


def _bounds(result: Result) -> dict[str, float]:
    text = result.settings.get("goodput")
    return parse_slo([text]).bounds if text else {}


def _load_plots(result: Result) -> Iterator[str]:
    rows = sorted(result.tables["loads"], key=lambda row: row["rate"])
    rates = [row["rate"] for row in rows]
    log = rates[0] > 0 and rates[-1] / rates[0] > 20
    ends = (rates[0], rates[-1])
    done = [(row["rate"], row["request_rate"]) for row in rows if row.get("request_rate") is not None]
    good = [(row["rate"], row["goodput"]) for row in rows]
    plot = Plot("Goodput and throughput by load", "offered requests/s", "requests/s", ends,
                (0, 1.1 * max(value for _, value in [*done, *good])), log_x=log)  # fmt: skip
    plot.line(Series("done, until the last answer", done, "c2"))
    plot.line(Series("goodput", good, "c1"))
    knee = result.metrics.get("knee_rate")
    if knee is not None and knee.value is not None:
        plot.rule(knee.value, "knee", vertical=True)
    yield plot.svg()
    bounds = _bounds(result)
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "End-to-end latency")):
        yield from _curve(rows, name, title, bounds.get(name))


def _curve(rows: Sequence[dict[str, Any]], name: str, title: str, bound: float | None) -> Iterator[str]:
    """Latency over throughput, with the objective's line and the zone under it."""
    series = []
    for percent, kind in (("p50", "c1"), ("p99", "c3")):
        points = [(row["output_token_rate"], row[f"{name}_{percent}"]) for row in rows
                  if row.get("output_token_rate") is not None and row.get(f"{name}_{percent}") is not None]  # fmt: skip
        if points:
            series.append(Series(percent, points, kind))
    if not series:
        return
    values = [y for one in series for _, y in one.points] + ([bound] if bound else [])
    rates = [x for one in series for x, _ in one.points]
    log = min(values) > 0 and max(values) / min(values) > 30
    plot = Plot(f"{title} by throughput", "output tokens/s", "ms", (0, max(rates) * 1.05),
                (min(values) * 0.8 if log else 0, max(values) * 1.15), log_y=log)  # fmt: skip
    if bound:
        plot.zone(bound, "goodput zone: the objective is met")
        plot.rule(bound, f"SLO {bound:g} ms", kind="slo")
    for one in series:
        plot.line(one)
    yield plot.svg()


def _server_plots(rows: Sequence[dict[str, float]]) -> Iterator[str]:
    edges = [max(0.0, rows[0]["at"] - 1.0), *(row["at"] for row in rows)]
    stacks = [Bars(name.replace("_", " "), [row.get(name, 0.0) for row in rows], kind)
              for name, kind in (("decode_tokens", "c1"), ("prefill_tokens", "c2")) if name in rows[0]]  # fmt: skip
    if stacks:
        yield stacked("Contents of the server's steps", "tokens", edges, stacks, least=1.0)
    names = [name for name in ("running", "waiting") if name in rows[0]]
    if names:
        top = max(1.0, *(1.1 * row.get(name, 0.0) for row in rows for name in names))
        plot = Plot("Requests in the server", "seconds", "requests", (edges[0], edges[-1]), (0, top))
        for name, kind in zip(names, ("c1", "c3"), strict=False):
            points = [(row["at"], row.get(name, 0.0)) for row in rows]
            plot.line(Series(name, points, kind, dots=len(rows) < 60))
        yield plot.svg()


def _step_plots(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Plot the engine's steps of the first iteration: contents and duration."""
    rows = [row for row in rows if row["iteration"] == rows[0]["iteration"]][:MOST_STEPS]
    edges = [*(row["begin"] for row in rows), rows[-1]["begin"] + rows[-1]["seconds"]]
    cut = f" (the first {MOST_STEPS})" if len(rows) == MOST_STEPS else ""
    yield stacked(f"Contents of each step{cut}", "tokens", edges, [
        Bars("decode tokens", [row["decode_tokens"] for row in rows], "c1"),
        Bars("prefill tokens", [row["prefill_tokens"] for row in rows], "c2"),
    ], least=1.0)  # fmt: skip
    yield stacked(f"Duration of each step{cut}", "ms", edges, [
        Bars("forward", [1e3 * row["forward"] for row in rows], "c1"),
        Bars("sampling", [1e3 * (row["seconds"] - row["forward"] - row["engine"]) for row in rows], "c3"),
        Bars("engine: outside the native calls", [1e3 * row["engine"] for row in rows], "c2"),
    ])  # fmt: skip


_PLOTS: dict[str, Callable[[Result], Iterable[str]]] = {  # by the table that a plot shows
    "loads": _load_plots,
    "requests": _request_plots,
    "server": lambda result: _server_plots(result.tables["server"]),
    "steps": lambda result: _step_plots(result.tables["steps"]),
    "policy_steps": batching_plots,
    "speculation": speculation_plots,
    "predictions": divergence_plots,
    "layer_errors": layer_error_plots,
    "channels": channel_plots,
    "weights": weight_plots,
    "stream_gaps": lambda result: [interference_plot(result.tables["stream_gaps"])],
}
# Tables with a row per request or step: shown as plots only.
_PLOTTED = _PLOTS.keys() - {"loads", "speculation", "channels"} | {"policy_requests", "channel_curves"}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if not name.endswith(("_low", "_high", "_with_failures"))]
    names = [name for name in names if not any(isinstance(row.get(name), list | dict) for row in rows)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(_cell(row, name) for name in names)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    text = _short(value) if isinstance(value, float) else _plain(value)
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if f"{name}_low" in row:
        text += f" <small>[{figure(low)}, {figure(high)}]</small>"
        return f"<td>{text}</td>"
    return f"<td>{escape(text)}</td>"


def _short(value: float) -> str:
    """Like `figure`, with letters for billions and millions."""
    for unit, letter in ((1e9, "G"), (1e6, "M")):
        if unit <= abs(value) < 1e15:
            return f"{figure(value / unit)} {letter}"
    return figure(value)


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)


def _metrics_table(result: Result) -> str:
    rows = [
        {"metric": name, "value": metric.value, "unit": metric.unit}
        for name, metric in result.metrics.items()
    ]
    return f"<details><summary>All figures</summary>{_table(rows)}</details>" if rows else ""


def _definitions(result: Result) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in result.definitions.items()
    )
    return f"<h3>Definitions</h3><dl>{rows}</dl>" if rows else ""


def _settings(result: Result) -> str:
    rows = [{"setting": name, "value": str(value)} for name, value in result.settings.items()]
    rows.append({"setting": "command", "value": " ".join(result.command)})
    return f"<details><summary>Settings</summary>{_table(rows)}</details>"


_STYLE = """
:root{color-scheme:light dark;--bg:#fbfaf8;--fg:#1f2328;--soft:#66707a;--line:#dcdfe3;--card:#ffffff;--c1:#2463a8;
--c2:#c26a1b;--c3:#8b3a8f;--c4:#4c7a2f;--c5:#7a6a2f;--bad:#b3261e;--p1:#b6bcc4;--zone:#2463a814}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e6e8eb;--soft:#9aa4ae;--line:#333a42;--card:#1c2026;
--c1:#6aa6e8;--c2:#e59a52;--c3:#cf8ad3;--c4:#93c26f;--c5:#cbb86a;--bad:#ff8a80;--p1:#56606b;--zone:#6aa6e81f}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1360px;margin:0 auto;padding:24px}h1{font-size:22px;margin:0 0 8px}h2{font-size:18px;margin:24px 0 0}
h3{font-size:15px;margin:24px 0 6px}.sub{color:var(--soft);margin:2px 0 12px}
.notes{border-left:3px solid var(--c2);margin:12px 0;padding:6px 12px 6px 28px;background:var(--card)}
.tiles{display:flex;flex-wrap:wrap;gap:8px;margin:12px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 14px;color:var(--soft)}
.tile b{color:var(--fg);font-size:20px;font-weight:600}.tile span{display:block;font-size:12px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:12px;margin:12px 0}
figure{margin:0;align-self:start;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:10px}
figcaption{font-weight:600}.keys{color:var(--soft);font-size:12px;min-height:18px}.key{margin-right:14px;display:inline-block}
.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.mid{text-anchor:middle}.end{text-anchor:end}svg .note{fill:var(--fg)}svg.plain text{fill:#222}
svg .note,svg .label{paint-order:stroke;stroke:var(--card);stroke-width:3px}.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--soft)}.line{fill:none;stroke-width:2}.rule{stroke:var(--soft);stroke-dasharray:3 3}
.slo{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 3}.zone{fill:var(--zone)}
.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}
.bar,.dot{stroke:none}.bar.c1,.dot.c1{fill:var(--c1)}.bar.c2,.dot.c2{fill:var(--c2)}.bar.c3,.dot.c3{fill:var(--c3)}
.bar.c4,.dot.c4{fill:var(--c4)}.bar.c5,.dot.c5{fill:var(--c5)}
.bar.p1{fill:var(--p1)}.bar.p2{fill:var(--c2)}.bar.p3{fill:var(--c1)}.bar.p4{fill:var(--bad)}
.swatch.c1{background:var(--c1)}.swatch.c2{background:var(--c2)}.swatch.c3{background:var(--c3)}
.swatch.c4{background:var(--c4)}.swatch.c5{background:var(--c5)}.swatch.p1{background:var(--p1)}
.swatch.p2{background:var(--c2)}.swatch.p3{background:var(--c1)}.swatch.p4{background:var(--bad)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}td small{color:var(--soft)}
details{margin:12px 0}summary{cursor:pointer}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;font-size:13px}
dt{font-weight:600}dd{margin:0;color:var(--soft)}
""".replace("\n", "")
