"""Thread pools whose threads are all started in advance."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def full_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of `count` threads, all of them started: a limit on threads is hit now and not by a later submit.

    Raises RuntimeError if the system starts no more threads.
    """
    pool = ThreadPoolExecutor(count, name)
    all_there = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_there.wait)
    except RuntimeError:
        all_there.abort()
        pool.shutdown(wait=False)
        raise
    all_there.wait()
    return pool
