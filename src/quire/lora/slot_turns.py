"""Which adapter has which slot of the pool: the least recently used one makes room, and nobody waits for ever.

A request enters the slot of its adapter before it is scheduled and leaves it when it has ended; a slot that nobody is
in can be claimed for another adapter. Where there is none, the slot that was entered least recently is promised:
requests for its present adapter that arrive later wait behind, those in it end, and the first that waits for another
adapter gets it. Requests for adapters in other slots are not held up.
"""

from __future__ import annotations


class SlotTurns:
    """The slots, by number. Keys are digests of adapters."""

    def __init__(self, count: int) -> None:
        self._keys: list[str | None] = [None] * count
        self._users = [0] * count
        self._entered = [0] * count  # when it was entered last, by the clock below
        self._promised: dict[int, str] = {}
        self._clock = 0

    def begin_round(self) -> None:
        """All requests that wait ask again, the oldest first: promises to those that have gone are void."""
        self._promised.clear()

    def slot_of(self, key: str) -> int | None:
        """The slot that an adapter has, or None."""
        return self._keys.index(key) if key in self._keys else None

    def enter(self, key: str) -> bool:
        """Enter the slot of an adapter that has one; False while it is promised to another."""
        slot = self._keys.index(key)
        if self._promised.get(slot, key) != key:
            return False
        self._clock += 1
        self._users[slot] += 1
        self._entered[slot] = self._clock
        return True

    def leave(self, key: str) -> None:
        """Reverse one `enter`, or the one of `claim`."""
        self._users[self._keys.index(key)] -= 1

    def claim(self, key: str) -> tuple[int, str | None] | None:
        """Give a slot to an adapter that has none, and enter it: the slot, and the adapter that had it.

        None, and perhaps a promise, if all are in use."""
        free = [slot for slot, users in enumerate(self._users) if not users]
        mine = [slot for slot in free if self._promised.get(slot, key) == key]
        if mine:
            slot = min(mine, key=lambda slot: (self._keys[slot] is not None, self._entered[slot]))
            self._promised = {other: to for other, to in self._promised.items() if to != key}
            before, self._keys[slot] = self._keys[slot], key
            self.enter(key)
            return slot, before
        if key not in self._promised.values():
            left = [slot for slot in range(len(self._keys)) if slot not in self._promised]
            if left:
                self._promised[min(left, key=self._entered.__getitem__)] = key
        return None

    def drop(self, key: str) -> None:
        """Empty the slot of an adapter that could not be loaded, and leave it."""
        slot = self._keys.index(key)
        self._users[slot] -= 1
        self._keys[slot] = None
