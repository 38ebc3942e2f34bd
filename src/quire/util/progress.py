"""Progress bars for long work; silent on request or without a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


class ByteProgress:
    """A progress bar over bytes, for callbacks (done, total). A context manager; shows nothing until called.

    If `done` decreases, new work has begun, with its own bar and the next label.
    """

    unit = "B"

    def __init__(self, *labels: str, enabled: bool = True) -> None:
        self._labels = list(labels)
        self._enabled = enabled and sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if not self._enabled:
            return
        if self._bar is not None and done < self._done:
            self._bar.close()
            self._bar, self._done = None, 0
        if self._bar is None:
            from tqdm import tqdm

            label = self._labels.pop(0) if len(self._labels) > 1 else self._labels[0]
            bar: tqdm[Any] = tqdm(
                total=total, desc=label, unit=self.unit, unit_scale=True, file=sys.stderr, leave=False
            )
            self._bar = bar
        self._bar.update(done - self._done)
        self._done = done

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class CountProgress(ByteProgress):
    """A progress bar over counted items."""

    def __init__(self, label: str, unit: str, *, enabled: bool = True) -> None:
        super().__init__(label, enabled=enabled)
        self.unit = f" {unit}"
