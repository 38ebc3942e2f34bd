"""The engine's side of lending between models: which blocks it has taken into use, and how many it may borrow.

Blocks of its own become memory when they are taken for the first time; until then their bytes are lent to other
models. Before a step takes one that was not granted yet, the engine asks, and waits for the answer: a borrower gives
cached blocks back between two of its steps. Borrowed bytes hold blocks that had to leave the pool (worker.swap_space).
Sequences hold none of them, so what was admitted depends on no other model.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.block_pool import BlockPool
from quire.engine.host.channel import Channel, ChannelClosedError
from quire.engine.host.messages import Command, GrantRoom, Stop, UsesRoom
from quire.executor.base import Executor
from quire.worker.swap_space import SwapSpace

_CHUNK = 2**24  # bytes; and at least a sixteenth of all
_PAGE = 2**21  # the largest pages that the cache may have


class RoomInUse:
    """What an engine has of its own share, `own_bytes` for the blocks of a pool in the caches of `executors`, and what
    it has borrowed for a swap space, if it has one. Belongs to the thread of the engine's loop.
    """

    def __init__(
        self,
        channel: Channel,
        pool: BlockPool,
        own_bytes: int,
        executors: Sequence[Executor],
        swap: SwapSpace | None,
    ) -> None:
        self._channel, self._pool, self._executors, self._swap = channel, pool, executors, swap
        self._own_bytes = own_bytes
        self._chunk = max(1, max(_CHUNK, own_bytes // 16) * pool.num_blocks // max(1, own_bytes))
        self._granted = self._asked = 0  # blocks of its own
        self._given = 0  # bytes that the ledger has granted for them, and may still count
        self._borrowed = self._wished = 0  # bytes
        self._refused = self._seen = 0

    def begin(self) -> None:
        """Say what is in use after loading, and lend the rest from now on."""
        found = [each.warm_blocks(self._chunk) for each in self._executors]
        touched = [self._pool.num_blocks if each is None else max(each, self._chunk) for each in found]
        self._granted = self._asked = min(self._pool.num_blocks, max(touched))
        self._given = self._bytes(self._asked)
        self._pool.reach = self.reach
        self._say()

    def reach(self, top: int) -> None:
        """Return when all blocks below `top` are granted, for which others may have to give some back. Raises
        ChannelClosedError if the engine is to stop."""
        if top <= self._granted and top + self._chunk // 2 <= self._asked:
            return
        if self._asked < min(self._pool.num_blocks, top + self._chunk // 2):
            self._asked = min(self._pool.num_blocks, top + self._chunk)
            if self._bytes(self._asked) <= self._given:  # the same whole pages: nobody would answer
                self._granted = self._asked
            self._say()
        later: list[Command] = []
        while self._granted < top:
            for command in self._channel.receive(wait=True):
                if isinstance(command, GrantRoom):
                    self.obey(command)
                elif isinstance(command, Stop):
                    raise ChannelClosedError
                else:
                    later.append(command)
        if later:
            self._channel.put_back(later)

    def obey(self, command: GrantRoom) -> None:
        """Use what was granted, and give back what was taken away."""
        self._given = command.own
        if command.own >= self._bytes(self._asked):
            self._granted = self._asked
        for each in self._executors:
            each.warm_blocks(self._granted)
        if self._swap is not None:
            self._borrowed = self._wished = command.borrowed
            self._swap.resize(self._swap.own + command.borrowed // self._swap.place_bytes)
        self._seen = command.number
        self._say()

    def stepped(self) -> None:
        """After a step: wish for more where blocks had to leave that others might want."""
        swap = self._swap
        if swap is None or swap.refused == self._refused:
            return
        self._refused = swap.refused
        most = (swap.most - swap.own) * swap.place_bytes
        if self._borrowed == self._wished < most:
            self._wished = min(most, max(2 * self._borrowed, _CHUNK, 8 * swap.place_bytes))
            self._say()

    def give(self) -> None:
        """All that is cached was forgotten, and its pages are given back."""
        if self._swap is not None:
            self._swap.clear()
            self._swap.resize(self._swap.own)
            self._borrowed = self._wished = 0
        if all(each.warm_blocks(0) is not None for each in self._executors):
            self._pool.forget_top()
            self._granted = self._asked = min(self._granted, self._pool.top)
        self._say()

    def _say(self) -> None:
        own = self._bytes(self._asked)
        self._given = min(self._given, own)  # the ledger counts no more once it has heard this
        self._channel.send(UsesRoom(self._seen, own, self._wished, self._borrowed))

    def _bytes(self, blocks: int) -> int:
        """What so many blocks take at most, in whole pages."""
        if not blocks:
            return 0
        size = -(-blocks * self._own_bytes // self._pool.num_blocks)
        return min(self._own_bytes, -(-size // _PAGE) * _PAGE + _PAGE * len(self._executors))
