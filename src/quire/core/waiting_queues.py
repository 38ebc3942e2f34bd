"""Queues of waiting sequences in which the first is not decided by ranks alone.

    Levels        one queue per level; the most urgent level with a sequence comes first
    FairQueue     one queue per account; the account that has been served least comes first

Fairness: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). An account
is charged 1 for a computed token of its prompts and 2 for a token of output, divided by its weight. One that comes back
after a pause is lifted to the least counter of those that wait, so that nobody saves up. While two accounts have
sequences waiting, the counter that is behind is served next: the two differ by no more than what the running sequences
of one account can still be charged (theorem 4.4 there). Over any time their shares differ from their weights by that.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from quire.core.policy import Policies, Policy, WaitingQueue
from quire.core.prefix_cache import PrefixCaches
from quire.core.prefix_queue import PrefixQueue
from quire.core.sequence import Account, Sequence, Status
from quire.core.service_estimates import ServiceEstimates

OUTPUT_PRICE = 2.0  # of a token of output; one of a prompt costs 1


class Queue(Protocol):
    """Waiting sequences, the next one first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, seq: Sequence) -> None:
        """Add a sequence; it becomes WAITING. It must not be in the queue."""

    def peek(self) -> Sequence | None:
        """The next one, or None."""

    def pop(self) -> Sequence:
        """Remove and return what `peek` returns; its rank is that with which it runs. Raises IndexError when empty."""

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence that has just ended while waiting."""


class Level:
    """The sequences of one level: a queue, and the followers of pairs, each of which comes right after its leader."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._ready = WaitingQueue()  # followers whose leaders run
        self._parked: set[Sequence] = set()  # whose leaders wait

    def __len__(self) -> int:
        return len(self.queue) + len(self._ready) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain(self.queue, self._ready, self._parked)

    def push(self, seq: Sequence) -> None:
        if seq.follows:
            seq.status = Status.WAITING
            self._parked.add(seq)
            self._follow(seq.partner)
        else:
            self.queue.push(seq)

    def peek(self) -> Sequence | None:
        while (seq := self._ready.peek()) is not None:
            if seq.partner is not None and seq.partner.status is Status.RUNNING:
                return seq
            self._parked.add(self._ready.pop())  # its leader was preempted
        return self.queue.peek()

    def pop(self) -> Sequence:
        first = self.peek()
        if first is not None and first.follows:
            return self._ready.pop()
        seq = self.queue.pop()
        seq.status = Status.RUNNING
        self._follow(seq)
        return seq

    def discard(self, seq: Sequence) -> None:
        if not seq.follows:
            self.queue.discard(seq)
        elif seq in self._parked:
            self._parked.remove(seq)
            seq.status = Status.ENDED
        else:
            self._ready.discard(seq)

    def _follow(self, leader: Sequence | None) -> None:
        """Where a leader runs, its follower is next."""
        follower = None if leader is None else leader.partner
        if leader is not None and leader.status is Status.RUNNING and follower in self._parked:
            assert follower is not None
            self._parked.remove(follower)
            follower.rank = (*leader.rank, 0.0)
            self._ready.push(follower)


class Levels:
    """A queue for each level, made for its first sequence and removed when it is empty."""

    def __init__(self, make: Callable[[Sequence], Queue]) -> None:
        self._make = make
        self._levels: dict[float, Level] = {}
        self._order: list[float] = []  # heap of the levels
        self.watching: list[PrefixQueue] = []  # queues that hear of blocks
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for level in self._levels.values() for seq in level)

    def push(self, seq: Sequence) -> None:
        level = self._levels.get(seq.rank[0])
        if level is None:
            level = self._levels[seq.rank[0]] = Level(self._make(seq))
            heapq.heappush(self._order, seq.rank[0])
            if isinstance(level.queue, PrefixQueue):
                self.watching.append(level.queue)
        level.push(seq)
        self._size += 1

    def peek(self) -> Sequence | None:
        while self._order:
            level = self._levels[self._order[0]]
            if level:
                return level.peek()
            del self._levels[heapq.heappop(self._order)]
            if isinstance(level.queue, PrefixQueue):
                self.watching.remove(level.queue)
        return None

    def pop(self) -> Sequence:
        if self.peek() is None:
            raise IndexError("the waiting queue is empty")
        self._size -= 1
        return self._levels[self._order[0]].pop()

    def discard(self, seq: Sequence) -> None:
        self._levels[seq.rank[0]].discard(seq)
        self._size -= 1


class Counters:
    """What accounts (API keys) have been served, in tokens by cost and weight. A new one is at `floor`."""

    def __init__(self) -> None:
        self.floor = 0.0
        self.last = ""  # the account of the last sequence that started
        self._accounts: dict[str, Account] = {}

    def account(self, name: str) -> Account:
        """The account of this name, opened at the floor if it is new."""
        found = self._accounts.get(name)
        if found is None:
            found = self._accounts[name] = Account(self.floor)
        return found

    def open(self, seq: Sequence, *, shares: bool) -> None:
        """Charge a sequence to its account from now on, or to none."""
        terms = seq.state.request.terms
        seq.account = self.account(terms.account) if shares else None
        seq.price = OUTPUT_PRICE / terms.weight

    def of(self, name: str) -> float:
        found = self._accounts.get(name)
        return self.floor if found is None else found.served

    def lift(self, name: str, other: str) -> None:
        """An account comes back after a pause, while another is to be served next, or was served last."""
        least = self.of(other)
        self.floor = max(self.floor, least)
        account = self.account(name)
        account.served = max(account.served, least)


class FairQueue:
    """Sequences of several accounts, within each in the order of a policy; no followers. O(log n) amortised."""

    def __init__(self, policy: Policy, estimates: ServiceEstimates, counters: Counters) -> None:
        self._policy, self._estimates, self._counters = policy, estimates, counters
        self._queues: dict[str, WaitingQueue] = {}
        self._heap: list[
            tuple[float, str]
        ] = []  # an entry per account; counters only rise, so it may be too low
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for queue in self._queues.values() for seq in queue)

    def push(self, seq: Sequence) -> None:
        account = seq.state.request.terms.account
        self._counters.open(seq, shares=True)
        seq.rank = self._policy.rank(seq, self._estimates)
        if not self._queues.get(account) and not seq.preemptions:
            first = self._first()
            self._counters.lift(account, self._counters.last if first is None else first)
        if account not in self._queues:
            self._queues[account] = WaitingQueue()
            heapq.heappush(self._heap, (self._counters.of(account), account))
        self._queues[account].push(seq)
        self._size += 1

    def peek(self) -> Sequence | None:
        account = self._first()
        return None if account is None else self._queues[account].peek()

    def pop(self) -> Sequence:
        account = self._first()
        if account is None:
            raise IndexError("the waiting queue is empty")
        self._size -= 1
        seq, self._counters.last = self._queues[account].pop(), account
        seq.rank = (seq.rank[0], self._counters.of(account), *seq.rank[2:])
        return seq

    def discard(self, seq: Sequence) -> None:
        self._queues[seq.state.request.terms.account].discard(seq)
        self._size -= 1

    def _first(self) -> str | None:
        """The account to be served next; None if nothing waits."""
        heap = self._heap
        while heap:
            known, account = heap[0]
            queue = self._queues.get(account)
            if not queue:
                heapq.heappop(heap)
                self._queues.pop(account, None)
            elif (served := self._counters.of(account)) > known:
                heapq.heapreplace(heap, (served, account))
            else:
                return account
        return None


def make_queue(
    policies: Policies,
    estimates: ServiceEstimates,
    counters: Counters,
    caches: PrefixCaches,
    block_size: int,
) -> Queue:
    """The queue of the policies. Under lpm it hears of the blocks that `caches` publish."""

    def make(seq: Sequence) -> Queue:
        policy = policies.of(seq.state.request)
        if policy.shares:
            return FairQueue(policy, estimates, counters)
        return WaitingQueue() if policy.order != "lpm" else PrefixQueue(policy, caches, block_size)

    known = {policies.usual, *policies.by_class}
    if not any(policy.shares or policy.order == "lpm" for policy in known):
        return WaitingQueue()
    levels = Levels(make)
    if any(policy.order == "lpm" for policy in known):
        caches.queues = levels.watching
    return levels
