"""Which adapters are in the pool: the least recently used make room, and nobody waits for ever.

A request enters its adapter before it is scheduled and leaves it when it has ended; at most so many adapters are in use
at once, and those that nobody is in give their pages up for others. Where there is no room, pages and a turn are kept
back for the request: adapters that were entered least recently are drained. Requests for them that arrive later wait
behind, those in them end, and nobody younger takes what becomes free. Requests for other adapters are not held up.
"""

from __future__ import annotations

from collections.abc import Iterable


class _Resident:
    """An adapter in the pool."""

    __slots__ = ("entered", "pages", "slot", "users")

    def __init__(self, slot: int, pages: int) -> None:
        self.slot, self.pages, self.users, self.entered = slot, pages, 0, 0


class PoolTurns:
    """`most` adapters in use, of those that are in `slots` and share `pages`. Keys are digests of adapters."""

    def __init__(self, most: int, slots: int, pages: int) -> None:
        self._most, self._pages = most, pages
        self._free = list(range(slots))[::-1]
        self._residents: dict[str, _Resident] = {}
        self._draining: set[str] = set()
        self._kept: dict[str, int] = {}  # pages that are kept back, by key
        self._clock = 0

    @property
    def used_pages(self) -> int:
        """Pages of the adapters in the pool."""
        return sum(each.pages for each in self._residents.values())

    def begin_round(self) -> None:
        """All requests that wait ask again, the oldest first: nothing is kept back for those that have gone."""
        self._draining.clear()
        self._kept.clear()

    def slot_of(self, key: str) -> int | None:
        """The slot that an adapter has, or None."""
        found = self._residents.get(key)
        return None if found is None else found.slot

    def enter(self, key: str) -> bool:
        """Enter an adapter in the pool; False while it must make room, or too many others are in use."""
        found = self._residents[key]
        if key in self._draining or not (found.users or self._has_room(key, found.pages)):
            return False
        self._kept.pop(key, None)
        self._clock += 1
        found.users += 1
        found.entered = self._clock
        return True

    def leave(self, key: str) -> None:
        """Reverse one `enter`, or the one of `claim`."""
        self._residents[key].users -= 1

    def claim(self, key: str, pages: int) -> tuple[int, list[tuple[str, int]]] | None:
        """Give a slot and pages to an adapter that has none, and enter it: the slot, and the adapters that made room
        with theirs. None if there is no room yet."""
        if not self._has_room(key, pages):
            return None
        gone = []
        idle = iter(sorted(self._idle(), key=lambda each: self._residents[each].entered))
        while not self._free or self._pages - self.used_pages < pages:
            victim = next(idle)
            slot = self._residents.pop(victim).slot
            self._draining.discard(victim)
            self._free.append(slot)
            gone.append((victim, slot))
        found = self._residents[key] = _Resident(self._free.pop(), pages)
        self.enter(key)
        return found.slot, gone

    def shrink(self, key: str, pages: int) -> None:
        """Have an adapter hold no more pages than it needs."""
        self._residents[key].pages = min(self._residents[key].pages, pages)

    def drop(self, key: str) -> None:
        """Take out an adapter that could not be loaded, and leave it."""
        self._free.append(self._residents.pop(key).slot)

    def _idle(self) -> list[str]:
        """Adapters that nobody is in, and that nobody waits for."""
        return [key for key, each in self._residents.items() if not each.users and key not in self._kept]

    def _has_room(self, key: str, pages: int) -> bool:
        """Whether an adapter that nobody is in may be entered now; if not, room is kept back if there can be some."""
        others = {each: kept for each, kept in self._kept.items() if each != key}
        wanted = {**others, key: pages}
        if self._suffices(wanted, ()):
            return True
        if key not in self._kept:
            drained = set(self._draining)
            users = (each for each, found in self._residents.items() if found.users)
            for each in sorted(users, key=lambda each: self._residents[each].entered):
                if self._suffices(wanted, drained):
                    break
                drained.add(each)
            if self._suffices(wanted, drained):
                self._draining, self._kept = drained, wanted
        return False

    def _suffices(self, wanted: dict[str, int], drained: Iterable[str]) -> bool:
        """Whether adapters that are to be used have room beside those in use, of which some are drained."""
        stay = [found for each, found in self._residents.items() if found.users and each not in drained]
        return (
            len(stay) + len(wanted) <= min(self._most, len(self._free) + len(self._residents))
            and sum(found.pages for found in stay) + sum(wanted.values()) <= self._pages
        )
