"""A memory bound for an engine of the test process."""

from __future__ import annotations

from quire.util.platform import resident_bytes


def memory_for(size: int) -> int:
    """A bound that leaves an engine `size` bytes: what the tests before this one have left behind counts too."""
    return resident_bytes() + size


def memory_for_replicas(size: int) -> int:
    """The same for a server of the test process and two replicas in threads of it, each of which counts the process."""
    return 3 * memory_for(size)
