"""From the start of a run to its Result: when, how long, on what, and beside whom."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

from quire.bench.environment import Watch, environment
from quire.bench.results import Result, plain_command


class Recording:
    """Begins when made. `words` is the command line."""

    def __init__(self, kind: str, words: Sequence[str]) -> None:
        self.kind, self.words = kind, words
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.perf_counter()
        self._watch = Watch()

    def result(self, **fields: Any) -> Result:
        """The result of the run, which ends now; `fields` are those of Result that the run itself found."""
        return Result(
            kind=self.kind,
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._clock, 3),
            command=plain_command(self.words),
            environment=environment(),
            noise=self._watch.stop(),
            **fields,
        )
