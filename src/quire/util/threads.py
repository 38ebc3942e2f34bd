"""Pools of threads that are there from the start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def full_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of so many threads, all of them started: a limit of threads is met now, not by what is submitted later.

    Raises RuntimeError where the system starts no more.
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
