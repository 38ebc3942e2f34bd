"""Finds requests that kill the engine: those being computed when it died are remembered by their content."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable

import msgspec

from quire.engine.api import RequestBlockedError
from quire.engine.front.stream import LiveRequest
from quire.records import dataclass
from quire.types import Request

logger = logging.getLogger("quire.engine")

KEEP_SECONDS = 600.0
ENOUGH_DEATHS = 2


@dataclass(slots=True)
class _Record:
    deaths: int
    since: float  # time of the last one


class Suspects:
    """Requests that were being computed when the engine died, by digest, because clients retry what failed.

    One death proves little: when the process is killed from outside, every running request was present. A request
    present at two deaths is a suspect. Suspects run one at a time (`careful`) until one completes, which clears it, or
    the engine dies again. The request that was present most often, and at least twice, is to blame: it is refused from
    then on. Everything is forgotten after KEEP_SECONDS. All times are of one monotonic clock.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, _Record] = {}
        self._blamed: dict[bytes, _Record] = {}

    def __bool__(self) -> bool:
        """False when there are no suspects, which is nearly always."""
        return bool(self._seen or self._blamed)

    def died(self, present: Collection[bytes], now: float) -> bytes | None:
        """The engine died while computing these requests; returns the digest of the one to blame, if known by now."""
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
        """The number of deaths that a request is to blame for; 0 for any other request."""
        self._forget_old(now)
        record = self._blamed.get(digest)
        return record.deaths if record else 0

    def careful(self, digest: bytes) -> bool:
        """Whether a request is a suspect, which must not run together with another suspect."""
        record = self._seen.get(digest)
        return record is not None and record.deaths >= ENOUGH_DEATHS

    def clear(self, digest: bytes) -> None:
        """A request has completed, so it is not to blame."""
        self._seen.pop(digest, None)

    def _forget_old(self, now: float) -> None:
        for records in (self._seen, self._blamed):
            for digest in [d for d, record in records.items() if record.since < now - KEEP_SECONDS]:
                del records[digest]


class SuspectLane:
    """Runs suspects one at a time and refuses requests to blame; all others pass."""

    def __init__(self) -> None:
        self.waiting: list[LiveRequest] = []
        self._suspects = Suspects()
        self._running: LiveRequest | None = None

    def check(self, request: Request, now: float) -> bytes | None:
        """The digest of a request, None without suspects. Raises RequestBlockedError for the one to blame."""
        if not self._suspects:
            return None
        digest = digest_of(request)
        deaths = self._suspects.deaths(digest, now)
        if deaths:
            raise _blocked(deaths)
        return digest

    def enter(self, live: LiveRequest) -> bool:
        """Whether a request may run now; otherwise it waits."""
        if live.digest is None or not self._suspects.careful(live.digest):
            return True
        if self._running is not None:
            self.waiting.append(live)
            return False
        self._running = live
        return True

    def leave(self, live: LiveRequest) -> list[LiveRequest]:
        """A request has ended. Returns those that should enter again, in order."""
        if live in self.waiting:
            self.waiting.remove(live)
        if live is not self._running:
            return []
        self._running = None
        waiting, self.waiting = self.waiting, []
        return waiting

    def completed(self, live: LiveRequest) -> None:
        """A request has completed, so it is not to blame."""
        if live.digest is not None:
            self._suspects.clear(live.digest)

    def died(
        self, lives: Iterable[LiveRequest], now: float
    ) -> tuple[int, dict[LiveRequest, RequestBlockedError]]:
        """The engine died with these requests. How many deaths the request to blame explains, and those that are it."""
        present = {live: digest_of(live.request) for live in lives if live not in self.waiting}
        blamed = self._suspects.died(set(present.values()), now)
        deaths = self._suspects.deaths(blamed, now) if blamed else 0
        guilty = {live: _blocked(deaths) for live, digest in present.items() if digest == blamed}
        for live in guilty:
            logger.error("the engine died %d times while computing request %s, which is refused from now on",
                         deaths, live.request_id)  # fmt: skip
        return deaths, guilty

    def clear(self) -> None:
        """Forget everything: all requests end."""
        self.waiting.clear()


def _blocked(deaths: int) -> RequestBlockedError:
    return RequestBlockedError(
        f"the engine died {deaths} times while computing this request; it is refused for"
        f" {KEEP_SECONDS / 60:g} minutes"
    )


def digest_of(request: Request) -> bytes:
    """The content of a request without its id: equal when a request is sent again."""
    grammar = request.grammar.digest if request.grammar else b""
    negative = request.negative_prompt.tobytes() if request.negative_prompt else b""
    beside = grammar, negative, [span.digest for span in request.soft_tokens]
    asked = msgspec.msgpack.encode(
        (request.namespace, request.adapter, request.params, beside, request.regions)
    )
    return hashlib.sha256(request.prompt_token_ids.tobytes() + asked).digest()
