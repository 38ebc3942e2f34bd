"""Two pieces of work at once, where one of them gives up the interpreter lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def beside(native: Callable[[], T], other: Callable[[], None]) -> T:
    """Run `native`, a call that works without the interpreter lock, in a thread while `other` runs here.

    The result is that of `native`; what either raises is raised when both have ended, that of `other` first.
    """
    results: list[T] = []
    failures: list[Exception] = []
    begun = threading.Event()

    def work() -> None:
        # Whoever waits for this needs the lock to go on, and gets it when the next line has given it up.
        begun.set()
        try:
            results.append(native())
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="quire-beside")
    thread.start()
    begun.wait()
    try:
        other()
    finally:
        thread.join()
    if failures:
        raise failures[0]
    return results[0]
