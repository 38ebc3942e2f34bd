"""What a reader notices of latencies: rules of thumb of lessons about inference. They were not measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORD_BY_WORD = 66.0  # ms a token
# figure, percentile -> the most ms, and what it is like up to there; then what it is like beyond
_LEVELS: Mapping[tuple[str, str], tuple[Sequence[tuple[float, str]], str]] = {
    ("ttft", "p50"): (
        ((100.0, "begins at once, also for completions while one types"), (500.0, "begins without a noticed pause")),
        "begins after a pause that is noticed",
    ),
    ("tpot", "p50"): (
        ((20.0, "is fast enough for speech"), (40.0, "is like instant typing"),
         (WORD_BY_WORD, "is a stream"), (1e3 / 6.5, "comes word by word")),
        "is slower than a person reads",  # five words of 1.3 tokens a second
    ),
    ("itl", "p99"): (((100.0, "hardly ever stutters"),), "stutters"),
}  # fmt: skip


def perceived(latencies: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for a table of latencies in ms, as Distribution.row has them; none without streams."""
    rows = {row["name"]: row for row in latencies}
    said = []
    for (name, point), (levels, beyond) in _LEVELS.items():
        value = rows.get(name, {}).get(point)
        if value is not None:
            words = next((words for most, words in levels if value <= most), beyond)
            said.append(f"{words} ({name.upper()} {point} {value:.3g} ms)")
    return [f"  to a reader  it {', '.join(said)}"] if said else []
