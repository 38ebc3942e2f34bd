"""What became of drafts in a log, for simulations to draw from.

Whole samples are taken, in the order of the log, as some are guessed better than others.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence

from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_rows import SAMPLE_BITS, AnyRow


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """By sample, two numbers for each row behind its prompt: the drafts that it ran, and how many were right."""

    samples: Sequence[array[int]]


def recorded_drafts(log: Sequence[AnyRow]) -> RecordedDrafts | None:
    """Those of a log; None if no row had any."""
    prompts: dict[int, int] = {}
    samples: dict[int, array[int]] = {}
    some = False
    for row in log:
        if isinstance(row, rows.Arrived):
            prompts[row.number] = row.prompt_tokens
        elif isinstance(row, rows.Step):
            notes, flat = row.notes, row.rows
            drafts = {notes[i]: notes[i + 2] for i in range(0, len(notes), 3) if notes[i + 1] == rows.DRAFTS}
            some = some or bool(drafts)
            for i in range(0, len(flat), 4):
                key, start, _, accepted = flat[i : i + 4]
                if accepted and start >= prompts.get(key >> SAMPLE_BITS, start + 1):
                    samples.setdefault(key, array("i")).extend((drafts.get(i // 4, 0), accepted - 1))
    return RecordedDrafts(list(samples.values())) if some else None


class DraftWalk:
    """Goes along the rows of a recorded sample for each sequence of a simulation, and begins again at their end. The
    first sequence has the first sample with seed 0, else one by chance."""

    def __init__(self, drafts: RecordedDrafts, seed: int) -> None:
        samples = drafts.samples
        first = random.Random(f"drafts {seed}").randrange(len(samples)) if seed else 0
        self._samples = itertools.cycle([*samples[first:], *samples[:first]])
        self._places: dict[int, tuple[array[int], int]] = {}  # by sequence

    def ran(self, seq: int, drafts: int) -> int:
        """How many drafts of the row of a sequence are right, of those that it ran."""
        line, place = self._places.get(seq) or self._begin(seq)
        self._places[seq] = line, (place + 2) % len(line)
        return min(drafts, line[place + 1])

    def proposed(self, seq: int) -> int:
        """How many drafts the next row of a sequence may have."""
        line, place = self._places.get(seq) or self._begin(seq)
        return line[place]

    def forget(self, seq: int) -> None:
        """A sequence has ended, or starts again."""
        self._places.pop(seq, None)

    def _begin(self, seq: int) -> tuple[array[int], int]:
        found = self._places[seq] = next(self._samples), 0
        return found
