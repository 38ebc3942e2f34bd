"""Who has how much of the memory that several engines share: each its own share, and what others do not use of theirs.

    bound  ≥  sum over engines of   fixed + own blocks in use + borrowed blocks
                                    `------ at most its share ----'

An engine counts with its whole share while it loads, and from then on with what its blocks take that were in use. The
rest is lent: blocks that leave the cache of another engine are kept there. An engine that takes more of its own blocks
into use, or begins to load, has a claim, which goes first: borrowers are told to give back, and count with what they
had until they have said that it is done. So the sum never exceeds the bound, and a claim waits for a step at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_LEAST = 2**20  # no less is lent at a time
_KEPT = 32  # this part of the bound is not lent, so that most claims need not wait


class Granted(Protocol):
    """Is told how many bytes an engine may have, in blocks of its own and in borrowed ones; messages have numbers."""

    def __call__(self, number: int, own: int, borrowed: int) -> None: ...


class MemoryLedger:
    """The accounts of all engines under a `bound` in bytes. Belongs to one event loop."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._entries: list[LedgerEntry] = []  # of engines that have memory or wait for it
        self._claims: list[LedgerEntry] = []  # in order

    @property
    def used(self) -> int:
        """Bytes that all engines have at most."""
        return sum(entry.counted for entry in self._entries)

    @property
    def borrowed(self) -> int:
        """Bytes that all engines have borrowed at most."""
        return sum(max(entry.borrowed, entry.held) for entry in self._entries)

    def entry(self, share: int) -> LedgerEntry:
        """The account of an engine with this share, which has nothing yet."""
        return LedgerEntry(self, min(share, self.bound))

    @contextmanager
    def spare(self, size: int) -> Iterator[bool]:
        """Whether so many bytes are free for something else, which has them for the time of the context."""
        there = self.used + size <= self.bound
        entry = self.entry(size)
        if there:
            entry.fixed = entry.share
            self.settle(entry)
        try:
            yield there
        finally:
            entry.leave()

    def lent_by(self, entry: LedgerEntry) -> int:
        """Bytes of an engine's share that others have: it lends as all do, in proportion to what is unused."""
        unused = self.bound - self.used + self.borrowed
        return self.borrowed * max(0, entry.unused) // unused if unused > 0 else 0

    def settle(self, changed: LedgerEntry, *, claims: bool = False) -> None:
        """See what can be granted now that an entry has changed; whether it `claims` its own."""
        if changed.counted or claims:
            if changed not in self._entries:
                self._entries.append(changed)
        elif changed in self._entries:
            self._entries.remove(changed)
        if claims and changed not in self._claims:
            self._claims.append(changed)
        free = self.bound - self.used
        while self._claims and self._claims[0].claimed <= free:
            free -= self._claims[0].claimed
            self._claims.pop(0).grant_claim()
        if self._claims:
            self._take_back(sum(entry.claimed for entry in self._claims) - free)
        else:
            self._lend(free - self.bound // _KEPT)

    def withdraw(self, entry: LedgerEntry) -> None:
        """An engine that waited for its memory does not come."""
        if entry in self._claims:
            self._claims.remove(entry)

    def _take_back(self, short: int) -> None:
        short -= sum(max(0, entry.held - entry.borrowed) for entry in self._entries)  # on its way
        while short > 0:
            entry = max(self._entries, key=lambda each: each.borrowed)
            cut = min(short, entry.borrowed)
            if not cut:
                return
            short -= cut
            entry.change_borrowed(entry.borrowed - cut)

    def _lend(self, free: int) -> None:
        wanting = sorted((each for each in self._entries if each.wished > each.borrowed), key=_borrowed)
        for at, entry in enumerate(wanting):
            size = min(entry.wished - entry.borrowed, free // (len(wanting) - at))
            if size >= _LEAST:
                free -= size
                entry.change_borrowed(entry.borrowed + size)


class LedgerEntry:
    """The account of one engine, in bytes: `fixed` is all but its blocks, `own` its blocks in use, `borrowed` what it
    may have of others and `held` what it had when it last said so.
    """

    def __init__(self, ledger: MemoryLedger, share: int) -> None:
        self._ledger, self.share = ledger, share
        self.fixed = self.own = self.borrowed = self.held = self.wished = 0
        self._wants = 0  # own blocks that it claims
        self._sent = self._told = 0  # messages, and the bytes of its own blocks that it knows to be granted
        self._send: Granted = _nobody
        self._entering: asyncio.Future[None] | None = None

    @property
    def counted(self) -> int:
        """What it may have now."""
        return self.fixed + self.own + max(self.borrowed, self.held)

    @property
    def unused(self) -> int:
        """What of its share it does not use."""
        return self.share - self.fixed - self.own

    @property
    def lent(self) -> int:
        """What of its share others have."""
        return self._ledger.lent_by(self)

    @property
    def most_borrowed(self) -> int:
        """The most that it could ever borrow."""
        return max(0, self._ledger.bound - self.share)

    @property
    def claimed(self) -> int:
        """What it is waiting for of its own."""
        return self.unused if self._entering is not None else max(0, self._wants - self.own)

    async def enter(self, send: Granted) -> None:
        """Return when its whole share is free: it begins to load. `send` tells it the bytes of its own blocks and of
        borrowed ones that it may have, once it has loaded."""
        self._send, self._sent, self._told = send, 0, 0
        entering = self._entering = asyncio.get_running_loop().create_future()
        self._ledger.settle(self, claims=True)
        try:
            await entering
        except BaseException:
            self._entering = None
            self.leave()
            raise

    def loaded(self, fixed: int, own: int) -> None:
        """It has loaded: besides `fixed` it may come to have `own` bytes of blocks, all of which count until it says
        which are in use."""
        self.fixed, self.own = fixed, min(own, self.share - fixed)
        self._wants = self.own
        self._ledger.settle(self)

    def use(self, seen: int, own: int, wished: int, held: int) -> None:
        """What it says of itself after the message with the number `seen`: blocks of its own that it wants to use,
        bytes that it would borrow, and has borrowed. That it has less counts once it knows all that it was granted."""
        if seen == self._sent:
            self.own, self.borrowed, self.held = min(self.own, own), min(self.borrowed, wished), held
            self._told = min(self._told, self.own)
        self._wants, self.wished = own, wished
        self._ledger.settle(self, claims=own > self.own)
        if (
            self._told < own <= self.own
        ):  # it waits for what is counted already, as all of it is after loading
            self._tell()

    def leave(self, kept: int = 0) -> None:
        """Its process has ended; `kept` bytes stay in this one."""
        self.fixed, self.own, self.borrowed, self.held, self.wished, self._wants = kept, 0, 0, 0, 0, 0
        self._ledger.withdraw(self)
        self._ledger.settle(self)

    def grant_claim(self) -> None:
        """The ledger has what it waits for."""
        if self._entering is not None:
            self.fixed, entering, self._entering = self.share, self._entering, None
            if not entering.done():
                entering.set_result(None)
        else:
            self.own = max(self.own, self._wants)
            self._tell()

    def change_borrowed(self, size: int) -> None:
        """It may have so much of others from now on."""
        if size < self.borrowed:
            self.wished = size
        self.held = max(self.held, size)
        self.borrowed = size
        self._tell()

    def _tell(self) -> None:
        self._sent, self._told = self._sent + 1, self.own
        self._send(self._sent, self.own, self.borrowed)


def _borrowed(entry: LedgerEntry) -> int:
    return entry.borrowed


def _nobody(number: int, own: int, borrowed: int) -> None:
    """Nobody listens yet."""
