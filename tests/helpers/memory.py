"""A memory bound for an engine of the test process."""

from __future__ import annotations

from quire.util.platform import resident_bytes


def memory_for(size: int) -> int:
    """A bound that leaves an engine `size` bytes: what the tests before this one have left behind counts too."""
    return resident_bytes() + size
