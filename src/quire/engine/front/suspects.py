"""Which request kills the engine? Those that were being computed when it died are remembered by what they ask."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from quire.engine.front.stream import Live
from quire.types import Request

KEEP_SECONDS = 600.0
ENOUGH_DEATHS = 2


@dataclass(slots=True)
class _Record:
    deaths: int
    since: float  # of the last one


class Suspects:
    """Requests seen at a death of the engine, by digest: clients send again what failed.

    One death says little: a kill from outside has every running request for a witness. Present at two it is a
    suspect: such requests are run one at a time (`careful`), until one completes, which clears it, or the engine
    dies again. The request that was there more often than any other, and at least twice, is to blame: it is
    refused from then on. Everything is forgotten after KEEP_SECONDS. Times are of one monotonic clock.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, _Record] = {}
        self._blamed: dict[bytes, _Record] = {}

    def __bool__(self) -> bool:
        """False when there is nobody to look for, as almost always."""
        return bool(self._seen or self._blamed)

    def died(self, present: Collection[bytes], now: float) -> bytes | None:
        """The engine died while these were being computed; the digest of the one to blame, if it is known now."""
        self._forget_old(now)
        for digest in present:
            record = self._seen.setdefault(digest, _Record(0, now))
            record.deaths, record.since = record.deaths + 1, now
        most = max((self._seen[digest].deaths for digest in present), default=0)
        worst = [digest for digest in present if self._seen[digest].deaths == most]
        if most < ENOUGH_DEATHS or len(worst) > 1:
            return None
        self._blamed[worst[0]] = self._seen.pop(worst[0])
        return worst[0]

    def deaths(self, digest: bytes, now: float) -> int:
        """At how many deaths a request was that is to blame for them; 0 for any other."""
        self._forget_old(now)
        record = self._blamed.get(digest)
        return record.deaths if record else 0

    def careful(self, digest: bytes) -> bool:
        """Whether a request is a suspect, to be run with no other suspect beside it."""
        record = self._seen.get(digest)
        return record is not None and record.deaths >= ENOUGH_DEATHS

    def clear(self, digest: bytes) -> None:
        """A request has completed: it is not what kills."""
        self._seen.pop(digest, None)

    def _forget_old(self, now: float) -> None:
        for records in (self._seen, self._blamed):
            for digest in [d for d, record in records.items() if record.since < now - KEEP_SECONDS]:
                del records[digest]


class Lane:
    """Runs suspects one at a time; all other requests pass."""

    def __init__(self, suspects: Suspects) -> None:
        self.waiting: list[Live] = []
        self._suspects = suspects
        self._running: Live | None = None

    def enter(self, live: Live) -> bool:
        """Whether a request may run now; else it waits."""
        if live.digest is None or not self._suspects.careful(live.digest):
            return True
        if self._running is not None:
            self.waiting.append(live)
            return False
        self._running = live
        return True

    def leave(self, live: Live) -> list[Live]:
        """A request has ended. Returns those that are to enter again, in order."""
        if live in self.waiting:
            self.waiting.remove(live)
        if live is not self._running:
            return []
        self._running = None
        waiting, self.waiting = self.waiting, []
        return waiting

    def clear(self) -> None:
        """Forget all: every request ends."""
        self.waiting.clear()


def digest_of(request: Request) -> bytes:
    """What a request asks, whatever it is called: equal for a request that is sent again."""
    asked = msgspec.msgpack.encode((request.namespace, request.params))
    return hashlib.sha256(request.prompt_token_ids.tobytes() + asked).digest()
