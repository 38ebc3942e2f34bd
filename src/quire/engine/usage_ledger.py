"""What accounts have used, by hour: the engine's totals, added up over its restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from quire.records import dataclass

HOUR = 3600
HOURS_KEPT = 24 * 62
Key = tuple[str, str]  # account and tag


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """What an account has used under a tag; see core.usage_books. `seconds` are of steps."""

    account: str
    tag: str
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0


@dataclass(slots=True)
class Used:
    """Tokens, seconds of steps, and bytes of the KV cache times seconds."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    seconds: float = 0.0
    byte_seconds: float = 0.0

    def add(self, other: Used) -> None:
        """Add what another one has."""
        self.prompt += other.prompt
        self.cached += other.cached
        self.generated += other.generated
        self.seconds += other.seconds
        self.byte_seconds += other.byte_seconds


class UsageLedger:
    """Of all engines of a model; only the event loop uses it. `clock` gives the seconds since 1970, which name the
    hours: if the clock is set, later use is in other hours, and no sum changes."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.total: dict[Key, Used] = {}
        self._clock = clock
        self._hours: dict[int, dict[Key, Used]] = {}  # by the start of the hour

    def add(self, key: Key, new: Used) -> None:
        """Something was used now."""
        hour = int(self._clock()) // HOUR * HOUR
        if hour not in self._hours:
            self._hours[hour] = {}
            for old in sorted(self._hours)[:-HOURS_KEPT]:
                del self._hours[old]
        for book in (self.total, self._hours[hour]):
            book.setdefault(key, Used()).add(new)

    def periods(self, start: float, end: float, seconds: int) -> Iterator[tuple[int, Key, Used]]:
        """What was used in the hours that begin in [start, end), in periods of whole hours: the beginning of each, and
        what each account and tag used in it."""
        found: dict[tuple[int, Key], Used] = {}
        for hour, book in sorted(self._hours.items()):
            if start <= hour < end:
                for key, used in book.items():
                    found.setdefault((hour // seconds * seconds, key), Used()).add(used)
        for (begins, key), used in found.items():
            yield begins, key, used


class UsageMeter:
    """Adds what one engine reports to a ledger: its totals since its start, which may be taken again and again."""

    def __init__(self, ledger: UsageLedger) -> None:
        self._ledger = ledger
        self._block_bytes = 0
        self._last: dict[Key, UsageTotals] = {}  # of this life of the engine

    def engine_started(self, block_bytes: int) -> None:
        """An engine begins to count from nothing."""
        self._block_bytes = block_bytes
        self._last = {}

    def take(self, totals: Iterable[UsageTotals]) -> None:
        """The totals of the engine, as of now."""
        for now in totals:
            key = now.account, now.tag
            was = self._last.get(key, UsageTotals(*key))
            if was == now:
                continue
            self._last[key] = now
            new = Used(
                now.prompt - was.prompt,
                now.cached - was.cached,
                now.generated - was.generated,
                now.seconds - was.seconds,
                (now.block_seconds - was.block_seconds) * self._block_bytes,
            )
            self._ledger.add(key, new)
