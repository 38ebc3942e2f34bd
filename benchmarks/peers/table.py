"""The comparison as one Markdown table: figures, ratios, bounds, versions, limits, commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.runs import OURS, better, gain, samples

from quire.bench import limits as limit_lines
from quire.bench.results import Result, Spread, spread

UNITS = {"first": "s", "memory": "MiB"}
Found = Mapping[tuple[str, str, str, str], Spread]


def markdown(result: Result) -> str:
    """The report of a result of kind "peers"."""
    rows = result.tables["runs"]
    found = {key: spread(values) for key, values in samples(rows).items()}
    engines = list(dict.fromkeys(key[0] for key in found))
    env = result.environment
    lines = [
        f"# The same work on {len(engines)} engines: {result.settings['shape']}, random weights",
        "",
        f"{env.cpu}, {env.usable_cores} cores{', virtual' if env.virtual else ''}, {result.started}. Medians, in "
        "brackets the least and most and the number of rounds; tokens per second if no unit is given.",
        "",
        f"    {' '.join(result.command)}",
        "",
        "| work | weights | "
        + " | ".join(engines)
        + " | best peer | Quire to best peer | bound | Quire of bound |",
        "|---" * (len(engines) + 6) + "|",
    ]
    bounds = {(row["work"], row["format"]): row["value"] for row in result.tables.get("bounds", [])}
    for work, form in sorted(dict.fromkeys((key[3], key[1]) for key in found), key=_place):
        cells = [_cell(found, engine, form, work) for engine in engines]
        peer, ratio = compare(found, form, work)
        ours, most = _best(found, OURS, form, work), bounds.get((work, form))
        bound = "-" if most is None else f"{most:.1f}"
        share = "-" if most is None or ours is None else f"{found[ours].median / most:.0%}"
        name = f"{work}, {UNITS[work]}" if work in UNITS else work
        lines.append(f"| {name} | {form} | {' | '.join(cells)} | {peer} | {ratio} | {bound} | {share} |")
    lines += ["", "| engine | version | its names of the formats |", "|---|---|---|"]
    for entry in result.tables["engines"]:
        names = dict.fromkeys(f"{form}: {own}" for engine, form, own, _ in found if engine == entry["engine"])
        lines.append(f"| {entry['engine']} | {entry['version']} | {', '.join(names)} |")
    if result.limits is not None:
        lines += ["", "```", *limit_lines.lines(result.limits), "```"]
    lines += ["", *_noise(rows)]
    lines += [f"- {name}: {text}" for name, text in result.definitions.items()]
    lines += [f"- {note}" for note in result.notes]
    return "\n".join(lines) + "\n"


def _place(row: tuple[str, str]) -> int:
    """Where a work's rows stand in the table; rows of one place stay in the order of the runs."""
    work = row[0]
    known = {"decode": 0, "prefill": 1, "first": 1_000_001, "memory": 1_000_002}
    return known[work] if work in known else 1 + int(work[1:])


def compare(found: Found, form: str, work: str) -> tuple[str, str]:
    """The best other engine, and how many times better Quire is; "-" where one of the two is missing."""
    peers = [_best(found, engine, form, work) for engine in dict.fromkeys(key[0] for key in found)]
    best = None
    for key in peers:
        if key is None or key[0] == OURS:
            continue
        if best is None or better(work, found[key].median, found[best].median):
            best = key
    if best is None:
        return "-", "-"
    name = best[0] if best[2] == form else f"{best[0]} {best[2]}"
    ours = _best(found, OURS, form, work)
    return name, "-" if ours is None else f"{gain(work, found[ours].median, found[best].median):.2f}"


def _best(found: Found, engine: str, form: str, work: str) -> tuple[str, str, str, str] | None:
    """The engine's own format of as many bits that does best."""
    best = None
    for key in found:
        if (key[0], key[1], key[3]) == (engine, form, work) and (
            best is None or better(work, found[key].median, found[best].median)
        ):
            best = key
    return best


def _cell(found: Found, engine: str, form: str, work: str) -> str:
    keys = [key for key in found if (key[0], key[1], key[3]) == (engine, form, work)]
    texts = []
    for key in keys:
        one = found[key]
        digits = 0 if one.median >= 200 else 1 if one.median >= 3 else 2
        low, mid, high = (f"{value:.{digits}f}" for value in (one.low, one.median, one.high))
        around = f" ({low}–{high}, {one.count})" if one.count > 1 else " (1)"
        texts.append(f"{key[2]} {mid}{around}" if len(keys) > 1 else f"{mid}{around}")
    return "; ".join(texts) or "-"


def _noise(rows: list[dict[str, Any]]) -> list[str]:
    """How quiet the machine was."""
    others = [row["others"] for row in rows if "others" in row]
    stolen = [row["stolen"] for row in rows if "stolen" in row]
    if not others:
        return []
    a, b = spread(others), spread(stolen)
    return [
        f"CPUs taken by other processes while engines ran: median {a.median:.2f}, most {a.high:.2f}; "
        f"by the hypervisor {b.median:.2f}, {b.high:.2f}.",
        "",
    ]
