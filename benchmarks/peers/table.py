"""The comparison as one Markdown table: figures, ratios, versions, limits, commands."""

from __future__ import annotations

from typing import Any

from quire.bench import limits as limit_lines
from quire.bench.results import Result, Spread, spread

OURS = "quire"


def markdown(result: Result) -> str:
    """The report of a result of kind "peers"."""
    rows = [row for row in result.tables["runs"] if row["work"] != "memory"]
    found = medians(rows)
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    env = result.environment
    lines = [
        f"# The same work on {len(engines)} engines: {result.settings['shape']}, random weights",
        "",
        f"{env.cpu}, {env.usable_cores} cores{', virtual' if env.virtual else ''}, {result.started}, "
        f"rounds in turns: {result.settings['rounds']}; medians. Tokens per second, in brackets the least and most.",
        "",
        f"    {' '.join(result.command)}",
        "",
        "| work | weights | " + " | ".join(engines) + " | best peer | Quire / best peer |",
        "|---" * (len(engines) + 4) + "|",
    ]
    for work, form in dict.fromkeys((row["work"], row["format"]) for row in rows):
        cells = [_cell(found.get((engine, form, work))) for engine in engines]
        best, ratio = compare(found, form, work)
        lines.append(f"| {work} | {form} | {' | '.join(cells)} | {best} | {ratio} |")
    lines += ["", "| engine | version | its names of the formats |", "|---|---|---|"]
    for entry in result.tables["engines"]:
        names = dict.fromkeys(
            f"{row['format']} = {row['its_format']}" for row in rows if row["engine"] == entry["engine"]
        )
        lines.append(f"| {entry['engine']} | {entry['version']} | {', '.join(names)} |")
    if result.limits is not None:
        lines += ["", "```", *limit_lines.lines(result.limits), "```"]
    if result.noise is not None:
        lines += [
            "",
            f"Other processes took {result.noise.others:.2f} CPUs meanwhile, the hypervisor {result.noise.stolen:.2f}.",
        ]
    lines += [""] + [f"- {name}: {text}" for name, text in result.definitions.items()]
    lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines) + "\n"


def medians(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], Spread]:
    """(engine, format, work) -> the rounds' figures."""
    samples: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        samples.setdefault((row["engine"], row["format"], row["work"]), []).append(row["value"])
    return {key: spread(values) for key, values in samples.items()}


def compare(found: dict[tuple[str, str, str], Spread], form: str, work: str) -> tuple[str, str]:
    """The best other engine and Quire's figure over its; "-" where one of the two is missing."""
    others = {e: s.median for (e, f, w), s in found.items() if (f, w) == (form, work) and e != OURS}
    if not others:
        return "-", "-"
    best = max(others, key=lambda name: others[name])
    ours = found.get((OURS, form, work))
    return best, "-" if ours is None else f"{ours.median / others[best]:.2f}"


def _cell(found: Spread | None) -> str:
    return "-" if found is None else f"{found.median:.1f} ({found.low:.1f}–{found.high:.1f})"
