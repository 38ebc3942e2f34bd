"""Plots of batching policies and of interference, and the rows of a result that they draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.bench.batching import Comparison, Interference
from quire.bench.results import Result
from quire.bench.svg import Plot, Series, TimelineRow, timeline

MOST_POINTS = 1000
_COLOURS = {"static": "c3", "dynamic": "c2", "continuous": "c1"}
_PHASES = (("waiting for a place and the first token", "p2"), ("decoding", "p3"))


def batching_tables(found: Comparison) -> dict[str, list[dict[str, Any]]]:
    """The steps of each policy, and when its requests waited and ran; seconds from the first due time."""
    steps = [
        {"policy": policy, "begin": step.begin, "seconds": step.seconds, "rows": step.rows, "tokens": step.tokens}
        for policy, run in found.runs.items() for step in run.steps
    ]  # fmt: skip
    requests = [
        {"policy": policy, "index": record.index, "due": record.scheduled, "first": record.times[0],
         "finished": record.finished, "output_tokens": record.output_tokens}
        for policy, run in found.runs.items() for record in run.records if record.times
    ]  # fmt: skip
    return {"policy_steps": steps, "policy_requests": requests}


def batching_plots(result: Result) -> Iterator[str]:
    """Plot the places in use under each policy, and the requests of each over time, on one axis."""
    steps, requests = result.tables["policy_steps"], result.tables["policy_requests"]
    end = max(row["begin"] + row["seconds"] for row in steps)
    places = float(result.settings["batch_size"])
    plot = Plot("Places of the batch in use", "seconds", "sequences in a step", (0, end), (0, 1.1 * places))
    for policy in dict.fromkeys(row["policy"] for row in steps):
        own = _thinned([row for row in steps if row["policy"] == policy])
        points = [
            (at, float(row["rows"])) for row in own for at in (row["begin"], row["begin"] + row["seconds"])
        ]
        plot.line(Series(policy, points, _COLOURS.get(policy, "c4"), dots=False))
    yield plot.svg()
    for policy in dict.fromkeys(row["policy"] for row in requests):
        own = sorted((row for row in requests if row["policy"] == policy), key=lambda row: row["due"])
        yield timeline(f"Requests under {policy} batching", [_lane(row) for row in own], end, _PHASES)


def _lane(row: Mapping[str, Any]) -> TimelineRow:
    name, due, first, end = f"request {row['index']}", row["due"], row["first"], row["finished"]
    return TimelineRow([
        (due, first, "p2", f"{name}: first token after {1e3 * (first - due):.1f} ms"),
        (first, end, "p3", f"{name}: {row['output_tokens']} tokens in {1e3 * (end - first):.1f} ms"),
    ])  # fmt: skip


def stream_gaps(runs: Mapping[str, Interference]) -> list[dict[str, Any]]:
    """The longest token gap of the streams at the time of each token, in seconds since the long prompt was due.

    `runs`: one per kind of prefill. The last record of a run is the long prompt.
    """
    rows = []
    for name, run in runs.items():
        *streams, long = run.records
        longest: dict[float, float] = {}
        for record in streams:
            for start, end in zip(record.times, record.times[1:], strict=False):
                at = end - long.scheduled
                longest[at] = max(longest.get(at, 0.0), end - start)
        rows += [{"prefill": name, "at": at, "gap": gap} for at, gap in sorted(longest.items())]
    return rows


def interference_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plot token gaps of the streams over time; the long prompt is due at zero."""
    first, last = min(row["at"] - row["gap"] for row in rows), max(row["at"] for row in rows)
    top = 1e3 * max(row["gap"] for row in rows)
    plot = Plot("Gaps between tokens of the running streams", "seconds since the long prompt was due", "ms",
                (first, last), (0, 1.1 * top))  # fmt: skip
    for name, kind in (("whole", "c3"), ("chunked", "c1")):
        own = [row for row in rows if row["prefill"] == name]
        # a gap is drawn as wide as it is long
        points = [(at, 1e3 * row["gap"]) for row in own for at in (row["at"] - row["gap"], row["at"])]
        if points:
            plot.line(Series(f"prefill {name}", points, kind, dots=False))
    plot.rule(0.0, "prompt due", vertical=True)
    return plot.svg()


def _thinned(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """At most MOST_POINTS of the rows, evenly spaced; the last stays."""
    every = -(-len(rows) // MOST_POINTS)
    return rows if every <= 1 else [*rows[:-1:every], rows[-1]]
