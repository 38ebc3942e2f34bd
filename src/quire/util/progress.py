"""Progress bars for long work; silent on request or without a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def shows_progress() -> bool:
    """Whether a bar would be seen: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def make_bar(**options: Any) -> tqdm[Any]:
    """A bar of tqdm for where this runs: of widgets in a notebook that has them, else of characters."""
    import tqdm as bars

    if _in_notebook():
        from tqdm.auto import tqdm as with_widgets

        return with_widgets(**options)
    return bars.tqdm(**options)


def _in_notebook() -> bool:
    """Whether a kernel of Jupyter runs this process, as tqdm itself finds it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


class ByteProgress:
    """A progress bar over bytes, for callbacks (done, total). A context manager; shows nothing until called.

    If `done` decreases, new work has begun, with its own bar and the next label.
    """

    unit = "B"

    def __init__(self, *labels: str, enabled: bool = True) -> None:
        self._labels = list(labels)
        self._enabled = enabled and shows_progress()
        self._bar: tqdm[Any] | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if not self._enabled:
            return
        if self._bar is not None and done < self._done:
            self._bar.close()
            self._bar, self._done = None, 0
        if self._bar is None:
            label = self._labels.pop(0) if len(self._labels) > 1 else self._labels[0]
            # what is done already says nothing of the rate
            self._bar = make_bar(
                total=total, desc=label, unit=self.unit, unit_scale=True, leave=False, initial=done
            )
            self._done = done
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
