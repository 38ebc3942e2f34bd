"""Unused shares of the memory are lent, and what is claimed comes back: the sum is never over the bound."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.core.block_pool import AuditError, BlockPool
from quire.engine.host.borrowing import RoomInUse
from quire.engine.host.channel import ChannelClosedError
from quire.engine.host.memory_ledger import LedgerEntry, MemoryLedger
from quire.engine.host.messages import GrantRoom, Ping, Stop, UsesRoom
from quire.records import dataclass
from quire.worker.swap_space import SwapSpace, place_bytes

MIB = 2**20


@dataclass(slots=True)
class Engine:
    """An engine as the ledger sees it: messages take their time both ways, and it uses all that it was granted."""

    entry: LedgerEntry
    fixed: int
    inbox: deque[tuple[int, int, int]] = field(default_factory=deque)
    outbox: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    state: str = "absent"
    seen: int = 0
    own: int = 0  # granted
    asked: int = 0
    borrowed: int = 0

    @property
    def uses(self) -> int:
        """Bytes that it may have touched."""
        if self.state == "absent":
            return 0
        return self.entry.share if self.state == "loading" else self.fixed + self.own + self.borrowed

    def say(self, wish: int | None = None) -> None:
        self.outbox.append((self.seen, self.asked, self.borrowed if wish is None else wish, self.borrowed))

    def receive(self) -> None:
        self.seen, own, self.borrowed = self.inbox.popleft()
        if own >= self.asked:
            self.own = self.asked
        self.say()


async def enters(engine: Engine) -> None:
    await engine.entry.enter(lambda *told: engine.inbox.append(told))
    engine.state = "loading"


@pytest.mark.parametrize("seed", range(6))
def test_the_sum_stays_under_the_bound_and_every_claim_is_granted(seed: int) -> None:
    draw = random.Random(seed)

    async def run() -> None:
        bound = 400 * MIB
        ledger = MemoryLedger(bound)
        engines = [Engine(ledger.entry(100 * MIB), 20 * MIB) for _ in range(4)]
        waiting: dict[int, asyncio.Task[None]] = {}
        most_borrowed = 0
        for _ in range(3000):
            at = draw.randrange(4)
            engine = engines[at]
            what = draw.random()
            if engine.state == "absent":
                if at not in waiting:
                    waiting[at] = asyncio.create_task(enters(engine))
            elif engine.state == "loading":
                engine.state, engine.seen, engine.own, engine.asked = "up", 0, 80 * MIB, 10 * MIB
                engine.entry.loaded(engine.fixed, 80 * MIB)
                engine.own = engine.asked
                engine.say()
            elif what < 0.35:
                if engine.inbox:
                    engine.receive()
            elif what < 0.7:
                if engine.outbox:
                    engine.entry.use(*engine.outbox.popleft())
            elif what < 0.8:
                engine.asked = min(80 * MIB, engine.asked + draw.randrange(30 * MIB))
                engine.say()
            elif what < 0.9:
                engine.say(engine.borrowed + draw.randrange(100 * MIB))
            elif what < 0.95:  # it sleeps: all is given back
                engine.own = engine.asked = engine.borrowed = 0
                engine.say()
            elif what < 0.97:  # killed
                engine.state, engine.own, engine.borrowed, engine.asked, engine.seen = "absent", 0, 0, 0, 0
                engine.inbox.clear()
                engine.outbox.clear()
                engine.entry.leave()
            await asyncio.sleep(0)
            for number in [number for number, task in waiting.items() if task.done()]:
                waiting.pop(number).result()
            assert sum(each.uses for each in engines) <= ledger.used <= bound
            most_borrowed = max(most_borrowed, sum(each.borrowed for each in engines))
        assert most_borrowed > 50 * MIB
        for engine in engines:  # all that was said is heard: nobody waits
            engine.asked = engine.asked and 80 * MIB
            if engine.state == "up":
                engine.say()
        for _ in range(40):
            for engine in engines:
                while engine.outbox:
                    engine.entry.use(*engine.outbox.popleft())
                while engine.inbox:
                    engine.receive()
            await asyncio.sleep(0)
            for at, engine in enumerate(engines):
                if engine.state == "loading":
                    engine.state = "up"
                    engine.seen, engine.own, engine.asked = 0, 10 * MIB, 10 * MIB
                    engine.entry.loaded(engine.fixed, 80 * MIB)
                    engine.say()
                if at in waiting and waiting[at].done():
                    waiting.pop(at).result()
        assert not waiting
        assert all(each.own == each.asked for each in engines if each.state == "up")

    asyncio.run(run())


def test_an_idle_share_is_lent_and_comes_back_for_loading() -> None:
    async def run() -> None:
        ledger = MemoryLedger(320 * MIB)
        told: list[tuple[int, int, int]] = []
        first, second = ledger.entry(160 * MIB), ledger.entry(160 * MIB)
        await first.enter(lambda *message: told.append(message))
        first.loaded(60 * MIB, 100 * MIB)
        first.use(0, 100 * MIB, 500 * MIB, 0)
        (number, own, borrowed), *_ = told
        assert (own, borrowed) == (100 * MIB, 150 * MIB)  # all but a thirty-second part of the bound
        assert (second.lent, first.borrowed) == (150 * MIB, 150 * MIB)
        entering = asyncio.create_task(second.enter(lambda *_: None))
        await asyncio.sleep(0)
        assert not entering.done()
        assert told[-1][2] == 0
        first.use(number, 100 * MIB, 150 * MIB, 150 * MIB)  # said before it knew
        await asyncio.sleep(0)
        assert not entering.done()
        first.use(told[-1][0], 100 * MIB, 0, 0)
        await entering
        assert ledger.used == 320 * MIB
        second.leave(kept=5 * MIB)
        assert (second.counted, second.unused) == (5 * MIB, 155 * MIB)

    asyncio.run(run())


def test_a_wait_for_memory_can_be_given_up() -> None:
    async def run() -> None:
        ledger = MemoryLedger(100 * MIB)
        first, second, third = (ledger.entry(size * MIB) for size in (80, 60, 20))
        await first.enter(lambda *_: None)
        given_up = asyncio.create_task(second.enter(lambda *_: None))
        behind = asyncio.create_task(third.enter(lambda *_: None))
        await asyncio.sleep(0)
        assert not behind.done()  # in order
        given_up.cancel()
        await asyncio.wait_for(behind, 5)
        assert ledger.used == 100 * MIB

    asyncio.run(run())


def test_places_of_a_swap_space_are_given_back() -> None:
    size = 5000
    space = SwapSpace(1, size, 6)
    assert place_bytes(size) == 8192 + 512
    contents = {name: np.full(size, name, np.uint8) for name in range(8)}

    def swap_out(name: int) -> bool:
        kept = space.withdrawn((bytes([name]), 0), offered=True)
        if kept:
            space.put((bytes([name]), 0), contents[name])
        return kept

    assert [swap_out(name) for name in (0, 1)] == [True, True]
    assert (len(space), space.refused) == (1, 1)
    space.resize(4)
    assert all(swap_out(name) for name in (2, 3, 4))
    assert (len(space), space.backed, space.refused) == (4, 4, 1)
    space.resize(2)  # those used longest ago go
    assert [space.holds((bytes([name]), 0)) for name in (1, 2, 3, 4)] == [False, False, True, True]
    assert space.backed == 2
    space.resize(9)
    assert all(swap_out(name) for name in (5, 6, 7, 1))
    assert (space.backed, len(space)) == (6, 6)
    for name in (3, 4, 5, 6, 7, 1):
        found = space.get((bytes([name]), 0))
        assert found is not None
        assert (found == contents[name]).all()
    space.clear()
    space.resize(1)
    assert (len(space), space.backed) == (0, 1)


@dataclass(slots=True)
class Socket:
    """The engine's end of a channel: what comes, in batches, and what was said."""

    batches: deque[list[Any]] = field(default_factory=deque)
    said: list[UsesRoom] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)

    def receive(self, *, wait: bool) -> list[Any]:
        assert wait
        return self.batches.popleft()

    def send(self, report: UsesRoom) -> None:
        self.said.append(report)

    def put_back(self, commands: list[Any]) -> None:
        self.returned += commands


@dataclass(slots=True)
class Cache:
    """An executor whose pages are warmed up to a block."""

    warm: int = 0

    def warm_blocks(self, count: int) -> int:
        self.warm = count
        return 4


def test_an_engine_takes_no_block_before_it_is_granted() -> None:
    pool, socket, cache, swap = BlockPool(160), Socket(), Cache(), SwapSpace(0, MIB, 40)
    room = RoomInUse(socket, pool, 160 * MIB, [cache], swap)  # type: ignore[arg-type, list-item]
    room.begin()
    assert (socket.said[-1].own, cache.warm) == (18 * MIB, 16)
    taken = pool.take(6)
    assert len(socket.said) == 1
    taken += pool.take(4)  # half of it is in use: more is asked for, and nobody waits
    assert (socket.said[-1].own, pool.top) == (28 * MIB, 10)
    socket.batches += [[Ping(1), GrantRoom(1, 28 * MIB, 0)], [GrantRoom(2, 46 * MIB, 0)]]
    taken += pool.take(18)
    assert (pool.top, cache.warm, socket.returned, len(socket.batches)) == (28, 44, [Ping(1)], 0)
    assert socket.said[-1] == UsesRoom(2, 46 * MIB, 0, 0)
    pool.audit([taken])
    # a block leaves the pool, and there is no place for it: the engine wishes for some
    assert not swap.withdrawn((b"a", 0), offered=True)
    room.stepped()
    assert socket.said[-1] == UsesRoom(2, 46 * MIB, 16 * MIB, 0)
    room.obey(GrantRoom(3, 46 * MIB, 16 * MIB))
    assert swap.withdrawn((b"a", 0), offered=True)
    room.obey(GrantRoom(4, 46 * MIB, 0))
    assert (len(swap), swap.backed, socket.said[-1]) == (0, 0, UsesRoom(4, 46 * MIB, 0, 0))
    socket.batches += [[Stop()]]
    with pytest.raises(ChannelClosedError):
        pool.take(40)
    assert pool.num_held == 28
    pool.release(taken)
    room.give()
    assert (pool.top, socket.said[-1].own) == (0, 0)
    pool.audit([])
    socket.batches += [[GrantRoom(5, 20 * MIB, 0)]]
    assert pool.take(1) == [0]
    pool.top = 0
    with pytest.raises(AuditError, match="a block from 0 on is in use"):
        pool.audit([[0]])


def test_memory_for_something_else_is_there_or_not() -> None:
    ledger = MemoryLedger(100 * MIB)
    with ledger.spare(60 * MIB) as first, ledger.spare(60 * MIB) as second:
        assert (first, second, ledger.used) == (True, False, 60 * MIB)
    assert ledger.used == 0


class Waits(Exception):
    """An engine reads its socket, and nothing is there."""


class Versions:
    """Versions of a model in place of each other under one ledger, with both ends as they are: what one end says is
    heard later, in order, and what an engine says right after it has loaded may be heard before the ledger knows that.
    """

    SHARE, FIXED, PLACE = 160 * MIB, 66 * MIB, MIB // 16

    def __init__(self, seed: int) -> None:
        self.draw, self.ledger = random.Random(seed), MemoryLedger(387 * MIB)
        self.entries: list[LedgerEntry] = []
        self.rooms: dict[int, RoomInUse] = {}
        self.pools: dict[int, BlockPool] = {}
        self.down: dict[int, deque[GrantRoom]] = {}
        self.up: dict[int, deque[UsesRoom | None]] = {}  # None: it has loaded
        self.wanted: dict[int, int] = {}

    async def add(self) -> None:
        number, entry = len(self.entries), self.ledger.entry(self.SHARE)
        self.entries.append(entry)
        self.down[number], self.up[number] = deque(), deque()
        await entry.enter(lambda *told: self.down[number].append(GrantRoom(*told)))
        kv = self.SHARE - self.FIXED
        swap = SwapSpace(0, self.PLACE, entry.most_borrowed // self.PLACE)
        self.pools[number] = BlockPool(kv // self.PLACE)
        end = SimpleNamespace(send=self.up[number].append, receive=lambda wait: self.receive(number))
        room = RoomInUse(end, self.pools[number], kv, [Cache()], swap)  # type: ignore[arg-type, list-item]
        self.up[number].append(None)
        room.begin()
        self.rooms[number] = room

    def receive(self, number: int) -> list[GrantRoom]:
        if not self.down[number]:
            raise Waits
        return [self.down[number].popleft()]

    def hear(self, number: int) -> None:
        """The ledger hears the next thing that an engine has said."""
        entry, up = self.entries[number], self.up[number]
        if up and up[0] is None and len(up) > 1 and self.draw.random() < 0.5:
            said = up[1]
            del up[1]
        elif up:
            said = up.popleft()
        else:
            return
        if said is None:
            entry.loaded(self.FIXED, self.SHARE - self.FIXED)
        else:
            entry.use(said.seen, said.own, said.borrowed, said.held)

    def work(self, number: int) -> bool:
        """An engine goes on; returns whether it can."""
        pool, room = self.pools[number], self.rooms[number]
        if number not in self.wanted and self.draw.random() < 0.5 and pool.top < pool.num_blocks:
            self.wanted[number] = min(pool.num_blocks, pool.top + self.draw.randint(1, 400))
        try:
            if number in self.wanted:
                room.reach(self.wanted[number])
                pool.top = self.wanted.pop(number)
            elif self.down[number]:
                room.obey(self.down[number].popleft())
        except Waits:
            return False
        return True

    def end(self, number: int) -> None:
        self.entries[number].leave()
        for known in (self.rooms, self.up, self.down, self.wanted):
            known.pop(number, None)


@pytest.mark.parametrize("seed", range(40))
def test_an_engine_that_takes_blocks_at_once_is_answered(seed: int) -> None:
    async def run() -> None:
        world = Versions(seed)
        coming = asyncio.create_task(world.add())
        for _ in range(500):
            await asyncio.sleep(0)
            if not world.rooms:
                continue
            number = world.draw.choice([*world.rooms])
            world.draw.choice((world.work, world.hear))(number)
            assert world.ledger.used <= world.ledger.bound
            if coming.done() and len(world.rooms) == 1 and world.draw.random() < 0.02:
                coming = asyncio.create_task(world.add())
            elif len(world.rooms) == 2 and world.draw.random() < 0.03:
                world.end(min(world.rooms))
        for _ in range(50):  # all that was said is heard
            await asyncio.sleep(0)
            for number in world.rooms:
                while world.up[number]:
                    world.hear(number)
                world.work(number)
        await coming
        for number in [*world.rooms]:
            for _ in range(9):
                while world.up[number]:
                    world.hear(number)
                if world.work(number) and number not in world.wanted:
                    break
            assert number not in world.wanted, "it waits for ever"

    asyncio.run(run())
