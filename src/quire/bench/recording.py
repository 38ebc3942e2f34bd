"""Record time, machine and noise of a run for its Result."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

from quire.bench.environment import Watch, environment
from quire.bench.results import Result, plain_command


class Recording:
    """Starts on construction. `words` is the command line."""

    def __init__(self, kind: str, words: Sequence[str]) -> None:
        self.kind, self.words = kind, words
        self._started = datetime.datetime.now(datetime.UTC)
        self._clock = time.perf_counter()
        self._watch = Watch()

    def result(self, **fields: Any) -> Result:
        """End the run and return its result; `fields` are the fields of Result that the run measured."""
        return Result(
            kind=self.kind,
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._clock, 3),
            command=plain_command(self.words),
            environment=environment(),
            noise=self._watch.stop(),
            **fields,
        )
