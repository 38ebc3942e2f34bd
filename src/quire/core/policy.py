"""The order of sequences: which runs first, and which gives way.

A policy is written as parts joined by "+": at most one order, which may be preceded by `priority` and `fair`.

    rank        (level, key, arrival, number)      lowest first
    level       background work after all other; before that the class of service, with `priority` also the priority
    key         with `fair` what the account has been served, else that of the order:

    fcfs        arrival
    edf         what is due first; without a due date, and at the latest, `overtake` after arrival
    sjf         arrival + a delay that grows with the predicted work, below `overtake`
    lpm         arrival - a lead that grows with the cached part of the prompt, below `overtake`

So an order is first come, first served with keys moved by less than `overtake` seconds: within its level and account a
request is overtaken only by requests that arrive less than `overtake` seconds after it. This is ageing without a clock:
as time passes, the keys of all later arrivals are above it. A key is set when a sequence is queued; only `lpm` changes
it while the sequence waits, when a part of its prompt is published or evicted (core.prefix_queue). Each class of
service may have a policy of its own.

Ranks are total orders, so the running set is kept sorted and the victim of a preemption is its last member that may
give way: the first in rank is never a victim while another runs. What runs gives way to what waits on a more urgent
level; within a level it never does, as equals would preempt each other for ever. One that was preempted is passed over
until it has got further than before: each time that it is computed again, it gains a token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from quire.core.sequence import Rank, Sequence, Status
from quire.core.service_estimates import ServiceEstimates
from quire.records import dataclass
from quire.types import Request

ORDERS = ("fcfs", "sjf", "lpm", "edf")
# Above every priority that a request can name (32 bits).
BACKGROUND = 2**31
OVERTAKE_SECONDS = 30.0
# Tokens of a hit that give half of the largest lead.
_HALF_LEAD = 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that was parsed. `levels`: by priority; `shares`: fair between accounts."""

    order: str = "fcfs"
    levels: bool = False
    shares: bool = False
    overtake: float = OVERTAKE_SECONDS

    @classmethod
    def parse(cls, text: str, overtake: float = OVERTAKE_SECONDS) -> Policy:
        """Raises ValueError naming the part that is unknown or out of place."""
        parts = text.split("+")
        orders = [part for part in parts if part in ORDERS]
        for part in parts:
            if part not in ORDERS and part not in ("priority", "fair"):
                raise ValueError(f"policy: {part!r} is not one of priority, fair, {', '.join(ORDERS)}")
        wanted = [part for part in ("priority", "fair") if part in parts] + orders
        if parts != wanted or len(orders) > 1:
            raise ValueError(
                f"policy: {text!r} is not priority, fair and one order ({', '.join(ORDERS)}), in that order"
            )
        order = orders[0] if orders else "fcfs"
        if order == "lpm" and "fair" in parts:
            raise ValueError("policy: fair cannot be combined with lpm: accounts share no ranks")
        if not 0 < overtake < float("inf"):
            raise ValueError(f"overtake: {overtake} is not a positive number of seconds")
        return cls(order, "priority" in parts, "fair" in parts, overtake)

    @property
    def text(self) -> str:
        """As it is written."""
        parts = [name for name, there in (("priority", self.levels), ("fair", self.shares)) if there]
        if self.order != "fcfs" or not parts:
            parts.append(self.order)
        return "+".join(parts)

    @property
    def by_arrival(self) -> bool:
        """Whether running sequences are in order of arrival within a level."""
        return self.order == "fcfs" and not self.shares

    def rank(self, seq: Sequence, estimates: ServiceEstimates) -> Rank:
        """The sort key of a sequence that is queued: within its account under `fair`, without a hit under `lpm`."""
        return (*self.place(seq.state.request, estimates), seq.seq_id)

    def place(self, request: Request, estimates: ServiceEstimates) -> tuple[float, float, float]:
        """The rank of a request without the number of its sequence."""
        key = arrival = request.arrival
        if self.order == "sjf":
            key += self.overtake * estimates.relative_work(request)
        elif self.order == "edf":
            key += self.overtake
            if request.terms.due is not None:
                key = max(arrival, min(key, request.terms.due))
        return (self.level(request), key, arrival)

    def level(self, request: Request) -> float:
        """The first part of a rank: background work, then the class of service, then the priority."""
        if request.priority >= BACKGROUND:
            return float(2**62)
        return request.terms.service_class * 2.0**33 + (request.priority if self.levels else 0)

    def lead(self, hit: int) -> float:
        """Seconds by which a hit of so many tokens is ahead of its arrival under lpm: below `overtake`."""
        return self.overtake * hit / (hit + _HALF_LEAD)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy of each class of service, by its number; of others, and of background work, the `usual` one.

    Classes are levels of their own under every policy, so no rank of one policy is compared with one of another.
    """

    usual: Policy
    by_class: tuple[Policy, ...] = ()

    @classmethod
    def parse(cls, usual: str, by_class: Iterable[str], overtake: float = OVERTAKE_SECONDS) -> Policies:
        """`by_class` has "" for the usual policy. Raises ValueError as Policy.parse."""
        return cls(
            Policy.parse(usual, overtake), tuple(Policy.parse(text or usual, overtake) for text in by_class)
        )

    @property
    def by_arrival(self) -> bool:
        """Whether running sequences are in order of arrival within each level."""
        return all(policy.by_arrival for policy in (self.usual, *self.by_class))

    @property
    def levels(self) -> bool:
        """Whether some of them go by priorities."""
        return any(policy.levels for policy in (self.usual, *self.by_class))

    def of(self, request: Request) -> Policy:
        """The policy of a request."""
        number = request.terms.service_class
        if request.priority >= BACKGROUND or number >= len(self.by_class):
            return self.usual
        return self.by_class[number]

    def rank(self, seq: Sequence, estimates: ServiceEstimates) -> Rank:
        """See Policy.rank."""
        return self.of(seq.state.request).rank(seq, estimates)

    def place(self, request: Request, estimates: ServiceEstimates) -> tuple[float, float, float]:
        """See Policy.place."""
        return self.of(request).place(request, estimates)


def displaces(waiting: Sequence, running: Sequence) -> bool:
    """Whether `waiting` may preempt `running`: only if its level is more urgent."""
    return waiting.rank[0] < running.rank[0]


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
