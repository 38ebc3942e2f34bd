"""The order of sequences: which runs first, and which gives way.

Background work (BACKGROUND) ranks below all other requests under both policies, and gives way to them.

Both policies are total orders, so the running set is kept sorted and the victim of a preemption is always its last
member: the oldest (or most urgent) sequence is never a victim while another runs, and a preempted one waits ahead of
all that rank below it. Under fcfs every request therefore completes: no starvation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.core.sequence import Rank, Sequence, Status

POLICIES = ("fcfs", "priority")
# Above every priority that a request can name (32 bits).
BACKGROUND = 2**31


def rank(policy: str, seq: Sequence) -> Rank:
    """Sort key, lowest first: what is not in the background, arrival, order of adding; under "priority" the priority
    comes first.
    """
    request = seq.state.request
    if policy == "priority":
        return (request.priority, request.arrival, seq.seq_id)
    return (request.priority >= BACKGROUND, request.arrival, seq.seq_id)


def displaces(policy: str, waiting: Sequence, running: Sequence) -> bool:
    """Whether `waiting` may preempt `running`: only if more urgent, as equals would preempt each other for ever."""
    first, second = waiting.state.request.priority, running.state.request.priority
    return first < second and (policy == "priority" or second >= BACKGROUND)


class WaitingQueue:
    """Waiting sequences by rank. Push and pop are O(log n), discard is O(1) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._heap if seq.status is Status.WAITING)

    def push(self, seq: Sequence) -> None:
        """Add a sequence whose rank is set; it becomes WAITING. It must not be in the queue."""
        seq.status = Status.WAITING
        heapq.heappush(self._heap, (seq.rank, seq))
        self._size += 1

    def peek(self) -> Sequence | None:
        """The first in rank, or None."""
        while self._heap and self._heap[0][1].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Remove and return what `peek` returns. Raises IndexError when empty."""
        if self.peek() is None:
            raise IndexError("the waiting queue is empty")
        self._size -= 1
        return heapq.heappop(self._heap)[1]

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence that has just ended while waiting."""
        seq.status = Status.ENDED
        self._size -= 1
        # It stays in the heap until it reaches the top; under overload that may be never, so the heap is rebuilt at
        # times.
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
