"""Run two calls at once, one of which releases the interpreter lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def beside(native: Callable[[], T], other: Callable[[], None]) -> T:
    """Run `native`, a call that releases the interpreter lock, in a thread while `other` runs in this one.

    Returns the result of `native`. Exceptions are raised after both have ended, that of `other` first.
    """
    results: list[T] = []
    failures: list[Exception] = []
    begun = threading.Event()

    def work() -> None:
        # The waiting thread needs the lock to continue, and gets it when the next line releases it.
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
