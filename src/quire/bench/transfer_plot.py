"""Where moving a KV cache takes longer than computing the prompt again: what pools for prompts have to stay below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.svg import Plot, Series

_KINDS = ("c1", "c2", "c3", "c4", "c5", "c6")


def transfer_plot(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The rows of `quire plan --details`: `prompt` tokens, `prefill_ms`, `links` with ms by name. As an SVG."""
    prompts = [float(row["prompt"]) for row in rows]
    times = [ms for row in rows for ms in (row["prefill_ms"], *row["links"].values())]
    plot = Plot(
        title, "prompt tokens", "ms", (min(prompts), max(prompts)), (min(times), max(times)), log_x=True,
        log_y=True, x_ticks=prompts,
    )  # fmt: skip
    plot.line(Series("computing the prompt", [(row["prompt"], row["prefill_ms"]) for row in rows], _KINDS[0]))
    for kind, link in zip(_KINDS[1:], rows[0]["links"], strict=False):
        eaten = [row["prompt"] for row in rows if row["links"][link] > row["prefill_ms"]]
        name = f"moving it over {link}" + (f": longer from {min(eaten):,} tokens on" if eaten else "")
        plot.line(Series(name, [(row["prompt"], row["links"][link]) for row in rows], kind))
    return plot.standalone()
