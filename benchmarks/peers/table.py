"""The comparison as one Markdown table: figures, ratios, bounds, versions, limits, commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.runs import MEMORY, OURS, better, gain, is_peer, lower_is_better, samples
from benchmarks.peers.summary import unit

from quire.bench import limits as limit_lines
from quire.bench.results import Result, Spread, spread

Key = tuple[str, str, str, str]  # engine, format, its format, work
Found = Mapping[Key, Spread]


def markdown(result: Result) -> str:
    """The report of a result of kind "peers"."""
    rows = result.tables["runs"]
    found = {key: spread(values) for key, values in samples(rows).items()}
    engines = sorted(dict.fromkeys(key[0] for key in found), key=is_peer)
    env = result.environment
    lines = [
        f"# The same work on {sum(map(is_peer, engines)) + 1} engines: {result.settings['shape']}, random weights",
        "",
        f"{env.cpu}, {env.usable_cores} cores{', virtual' if env.virtual else ''}, {result.started}. Medians, in "
        "brackets the least and most and the number of rounds; tokens per second if no unit is given.",
        "",
        f"    {' '.join(result.command)}",
        "",
        "| work | weights | "
        + " | ".join(engines)
        + " | best peer | Quire to best peer | by limits | bound | Quire of bound |",
        "|---" * (len(engines) + 7) + "|",
    ]
    bounds = {key: spread(values).median for key, values in samples(rows, "bound").items()}
    shares = {key: spread(values).median for key, values in samples(_shares(rows), "share").items()}
    for work, form in sorted(dict.fromkeys((key[3], key[1]) for key in found), key=_place):
        cells = [_cell(found, engine, form, work) for engine in engines]
        best, ours = best_peer(found, form, work), _best(found, OURS, form, work)
        ratio = by_limits = bound = share = "-"
        if best is not None and ours is not None:
            ratio = f"{gain(work, found[ours].median, found[best].median):.2f}"
            by_limits = f"{shares[ours] / shares[best]:.2f}" if {ours, best} <= shares.keys() else "-"
        if ours in bounds:
            bound, share = f"{bounds[ours]:.1f}", f"{shares[ours]:.0%}"
        name = f"{work}, {unit(work)}" if lower_is_better(work) else work
        found_cells = [*cells, _name(best), ratio, by_limits, bound, share]
        lines.append(f"| {name} | {form} | {' | '.join(found_cells)} |")
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
    memory = row[0].startswith(MEMORY)
    work = row[0].removeprefix(MEMORY)
    known = {"decode": 0, "prefill": 1, "first": 1_000_000}
    return 1_000_001 * memory + (known[work] if work in known else 1 + int(work[1:]))


def best_peer(found: Found, form: str, work: str) -> Key | None:
    """The best that is not Quire."""
    best: Key | None = None
    for engine in dict.fromkeys(key[0] for key in found):
        key = _best(found, engine, form, work)
        if key is None or not is_peer(engine):
            continue
        if best is None or better(work, found[key].median, found[best].median):
            best = key
    return best


def _name(key: Key | None) -> str:
    if key is None:
        return "-"
    return key[0] if key[2] == key[1] else f"{key[0]} {key[2]}"


def _shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with what part of their own bound they reached."""
    return [{**row, "share": row["value"] / row["bound"]} for row in rows if "bound" in row]


def _best(found: Found, engine: str, form: str, work: str) -> Key | None:
    """The engine's own format of as many bits that does best."""
    best: Key | None = None
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
