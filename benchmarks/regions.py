"""Time to divide an answer into text, reasoning and calls: a token, in answers of several lengths.

python -m benchmarks.regions
"""

from __future__ import annotations

import time

from quire.text.regions.families import CALLS, REASONING
from quire.text.regions.markers import Markers
from quire.text.regions.reader import RegionReader
from quire.text.regions.spec import RegionSpec

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
LENGTHS = (1_000, 10_000, 100_000)
RUNS = 5
MARKERS = Markers({"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4})
# What: the format of calls, whether they are held back, how the region is opened, and a token in it.
PLACES: tuple[tuple[str, str, bool, tuple[str | int, ...], str], ...] = (
    ("text", "hermes", False, (), " word"),
    ("reasoning", "hermes", False, (1,), " word"),
    ("arguments in JSON", "hermes", False, (3, '{"name": "f", "arguments": {"a": "'), " word"),
    ("arguments in JSON, held back", "hermes", True, (3, '{"name": "f", "arguments": {"a": "'), " word"),
    ("arguments in tags", "qwen3_coder", False, ("<tool_call>\n<function=f>\n<parameter=a>\n",), " word"),
    ("arguments of Python", "pythonic", False, ("[f(a='",), " word"),
)


def seconds(calls: str, held: bool, opening: tuple[str | int, ...], token: str, length: int) -> float:
    """The time of a token."""
    spec = RegionSpec(CALLS[calls], REASONING["qwen3"])
    reader = RegionReader(spec, MARKERS if calls == "hermes" else None, tools=TOOLS, eager=not held)
    for piece in opening:
        if isinstance(piece, int):
            reader.push(piece, "")
        else:
            reader.push(-1, piece)
    start = time.process_time()
    for _ in range(length):
        reader.push(9, token)
    return (time.process_time() - start) / length


def main() -> None:
    print("| place | " + " | ".join(f"{length:,} tokens" for length in LENGTHS) + " |")
    print("|---|" + "--:|" * len(LENGTHS))
    for what, calls, held, opening, token in PLACES:
        times = [min(seconds(calls, held, opening, token, n) for _ in range(RUNS)) for n in LENGTHS]
        print(f"| {what} | " + " | ".join(f"{value * 1e6:.1f} µs" for value in times) + " |")


if __name__ == "__main__":
    main()
