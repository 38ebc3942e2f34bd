"""Start-up times: named phases from the start of the process to the first token.

Times are those of time.monotonic(), which all processes of a machine share, so that the phases of the server and of its
engine process have one time axis.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from quire.records import dataclass

# This module is the first of the package that a command imports.
_LOADED, _LOADED_CPU = time.monotonic(), time.process_time()
_START_TICKS = 21  # of /proc/self/stat, counted from 0 (proc(5): starttime is field 22)


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of start-up. `process` is "main" or "engine"; an event ("ready") begins and ends at once."""

    process: str
    name: str
    begin: float
    end: float
    cpu: float = 0.0  # seconds of all threads of the process


def process_start() -> float:
    """The start of this process, to the clock tick (10 ms); if unknown, the import of this module."""
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[_START_TICKS - 2])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return _LOADED
    return min(_LOADED, time.monotonic() - age)


class Startup:
    """The phases of one start. Made after the imports of a command; begins with "interpreter" and "imports"."""

    def __init__(self, process: str = "main") -> None:
        self._process = process
        self._origin = process_start()
        self._spans = [
            Span(process, "interpreter", self._origin, _LOADED, _LOADED_CPU),
            Span(process, "imports", _LOADED, time.monotonic(), time.process_time() - _LOADED_CPU),
        ]
        self._marked: set[str] = set()

    @property
    def spans(self) -> tuple[Span, ...]:
        """All phases so far, in the order in which they ended."""
        return tuple(self._spans)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the block as a phase. Phases may overlap."""
        begin, cpu = time.monotonic(), time.process_time()
        yield
        spent = time.process_time() - cpu
        self._spans.append(Span(self._process, name, begin, time.monotonic(), spent))

    def mark(self, name: str) -> None:
        """Record the first occurrence of an event."""
        if name not in self._marked:
            self._marked.add(name)
            now = time.monotonic()
            self._spans.append(Span(self._process, name, now, now))

    def add(self, spans: Iterable[Span]) -> None:
        """Add phases of another process of the same start."""
        self._spans.extend(spans)

    def report(self) -> list[dict[str, Any]]:
        """The phases as plain JSON values, in seconds from the start of this process, sorted by begin."""
        return [
            {
                "process": span.process,
                "phase": span.name,
                "begin": round(span.begin - self._origin, 6),
                "end": round(span.end - self._origin, 6),
                "cpu": round(span.cpu, 6),
            }
            for span in sorted(self._spans, key=lambda span: (span.begin, span.end))
        ]
