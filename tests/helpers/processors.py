"""The processors that a process of the suite keeps to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

EVERY = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # of this machine, for us


def keep_to_a_share() -> None:
    """A process of pytest-xdist stays on processors that no other one has, and so does what its tests start: threads of
    an engine that wait for each other would wait for those of another's. Where processors are fewer, nothing changes.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if 1 < count <= len(EVERY):
        # One in the place of another that has ended has the next number.
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % count
        first, end = (len(EVERY) * at // count for at in (number, number + 1))
        os.sched_setaffinity(0, EVERY[first:end])


@contextlib.contextmanager
def on_every_processor() -> Iterator[None]:
    """For tests of several processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, EVERY)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
