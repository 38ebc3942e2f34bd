"""A server behind a router: whether it can be asked, what it has to do, how far it is, and the checks of its health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.config.routing import BackendEntry, RouterConfig
from quire.router.cache_follower import CacheFollower
from quire.router.passing_connection import PassingConnection
from quire.router.relay import FromServer
from quire.routing.outliers import Rest, ServerRecord, is_late
from quire.util.http_client import Client, ClientError, target

logger = logging.getLogger("quire.server")

_MODELS_EVERY = 30.0  # seconds between two looks at the models of a server
# A server is silent that has answered none of so many checks, and what has brought nothing for so many times as long as
# a check may take is lost.
_SILENT_CHECKS, _SILENT = 3, 2.0
_TRIPS = 60  # round trips of which the shortest one counts: others have the time of a busy server in them
_LONGER = 3  # checks in a row whose handshakes were longer than that: then the way has become longer
NEAR = 0.005  # seconds of a round trip: less says nothing about the way
_HEALTH_PATHS = ("/health", "/v1/models")
# Headers between routers: of what one asks a peer, which leaves its own peers out; of what one passes to another, which
# then ends a lost stream as if it were itself lost, so that the first one lets another place go on.
SPILLED, ROUTED = "x-quire-spilled", "x-quire-routed"


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] = []


class _Place(msgspec.Struct):
    """What a router says of the servers behind it: how many there are, by weight, and when they would have computed the
    prompts that wait."""

    capacity: float
    backlog_seconds: float = 0.0


class BackendServer:
    """A server. `requests` were sent to it and have not ended; `work` is what they cost, in prompt tokens;
    `waiting` are the tokens of those prompts that it has not begun to answer."""

    def __init__(self, entry: BackendEntry, config: RouterConfig) -> None:
        """Raises ValueError for an address that is none."""
        self.entry, self._config = entry, config
        self.name, self.weight = entry.name, entry.weight
        headers = {"authorization": f"Bearer {entry.api_key}"} if entry.api_key else {}
        headers |= {SPILLED: "1"} if entry.peer else {}
        self.client = Client(
            target(entry.url, headers), connect_timeout=config.connect_timeout, connected=PassingConnection
        )
        self.requests, self.work, self.waiting = 0, 0.0, 0.0
        self.healthy = self.draining = False
        self.why = "was not checked yet"  # it cannot be asked
        self.models: list[dict[str, Any]] = [{"id": name, "object": "model"} for name in entry.models or ()]
        self.answers: Counter[str] = Counter()  # by outcome
        self.rest, self.record = Rest(config.breaker_failures), ServerRecord()
        self.rested: Counter[str] = Counter()  # how often, by why
        self._health = entry.health
        self.follower: CacheFollower | None = None
        self._looked = 0.0
        self._round_trips: deque[float] = deque(maxlen=_TRIPS)  # seconds, of the last checks
        self._longer = 0  # handshakes in a row that took longer than the shortest of these
        self.distance = self.queued = 0.0  # see router_policies.Choosable
        self._place: _Place | None = None  # it is a router
        self.checked = self._gone = 0.0  # when the last check began, and when nobody listened at its address
        self._unanswered = 0  # checks, the last ones
        self.reading: set[FromServer] = set()  # answers that it has not ended
        self.alone_until = 0.0  # no request is divided with it before

    def is_available(self, now: float) -> bool:
        """Whether it may get requests."""
        return self.healthy and not self.draining and self.rest.is_over(now)

    def takes(self, now: float) -> bool:
        """Whether it may get one more: after a rest it gets one at a time."""
        return self.is_available(now) and self.rest.takes(now, self.waiting)

    def could_answer(self, now: float) -> bool:
        """Whether it answers, however late or however many of its answers fail."""
        return self.healthy and not self.draining and (self.rest.is_over(now) or self.rest.as_outlier)

    def state(self, now: float) -> str:
        """What it is doing, for people."""
        if self.draining:
            return "draining"
        if not self.healthy:
            return f"down: {self.why}"
        if not self.rest.is_over(now):
            return f"paused: {self.why}"
        return "on probation" if self.rest.probes else "ready"

    def serves(self, model: str | None) -> bool:
        """Whether it has a model; one that names none may have any."""
        return model is None or not self.models or any(each.get("id") == model for each in self.models)

    def lists(self, model: str) -> bool:
        """Whether it names a model as its own."""
        return any(each.get("id") == model for each in self.models)

    def version(self, model: str | None) -> str:
        """The version of the weights of a model that it serves, of its only one without a name; "" if it says none."""
        found = (each for each in self.models if model in {None, each.get("id")})
        return str(next(found, {}).get("version") or "")

    def has_version(self, model: str | None, version: str) -> None:
        """An answer was of that version."""
        for each in self.models:
            if each.get("id") == model or (model is None and len(self.models) == 1):
                each["version"] = version
        self._looked = 0.0  # the next check asks

    @property
    def is_router(self) -> bool:
        """Whether it has servers of its own, and no model."""
        return self._place is not None

    @property
    def round_trip(self) -> float:
        """Seconds that the way to it and back takes; 0 if it is near."""
        least = min(self._round_trips, default=0.0)
        return least if least >= NEAR else 0.0

    def queued_seconds(self, own: float) -> float:
        """Seconds for which prompts of others wait there, where those of this router wait for `own`."""
        return 0.0 if self._place is None else max(self._place.backlog_seconds - own, 0.0)

    @contextlib.contextmanager
    def computing(self, tokens: float) -> Iterator[None]:
        """While it computes so many tokens of a prompt. They are work as long as its answer has not begun: who streams
        for a minute has nothing left of its prompt to compute."""
        self.waiting += tokens
        self.work += tokens
        try:
            yield
        finally:
            self.waiting = max(self.waiting - tokens, 0.0)
            self.work = max(self.work - tokens, 0.0)

    def succeeded(self) -> None:
        """An answer came."""
        self.answers["answered"] += 1
        self.record.ended(failed=False)
        self.rest.succeeded()

    def refused(self, status: int) -> None:
        """An answer came that another server or model is asked after. That it has much to do is no failure."""
        self.answers["refused"] += 1
        if status >= 500:
            self.record.ended(failed=True)

    def failed(self, why: str, now: float, *, gone: bool = False) -> None:
        """A request failed on it; after some in a row it gets none for a while, each time twice as long. One that is
        gone is down until a check finds it again."""
        if gone:
            self._gone = now
            self._becomes(healthy=False, why="nobody listens at its address")
        self.answers["failed"] += 1
        self.record.ended(failed=True)
        self._rests(self.rest.failed(now), "failures", why)

    def began(self, seconds: float, expected: float | None, others: list[ServerRecord], now: float) -> None:
        """An answer began after so many seconds, where so many were expected, as far as that is known; `others` could
        have answered it, too."""
        late = expected is not None and is_late(seconds, expected, others)
        if expected is not None:
            self.record.began(seconds, expected)
        self._rests(
            self.rest.began(now, late=late), "slow", "its answers begin far later than those of others"
        )

    def eject(self, why: str, now: float) -> None:
        """It is far worse than the others: it gets no requests for a while."""
        text = "its answers begin far later" if why == "slow" else "its answers fail far more often"
        self._rests(self.rest.begin(now, as_outlier=True), why, f"{text} than those of others")
        self.record = ServerRecord()  # judged anew when it is back

    def _rests(self, seconds: float, why: str, text: str) -> None:
        if seconds:
            self.why = text
            self.rested[why] += 1
            logger.warning("%s gets no requests for %g s: %s", self.name, seconds, text)

    async def check(self) -> None:
        """Ask it whether it is well, and now and then for its models."""
        was, began, silent = self.healthy, time.monotonic(), False
        try:
            async with asyncio.timeout(self._config.health_timeout):
                status = await self._ask_health()
                if status == 200 and (not was or time.monotonic() - self._looked > _MODELS_EVERY):
                    await self._look_at_models()
            healthy, why = status == 200, f"its health is HTTP {status}"
        except TimeoutError:
            healthy, silent, why = False, True, "did not answer in time"
        except ClientError as error:
            healthy, silent, why = False, error.silent, str(error).partition(":")[0]
        self._unanswered = self._unanswered + 1 if silent else 0
        if self._unanswered >= _SILENT_CHECKS:
            for each in [*self.reading]:
                each.give_up(_SILENT * self._config.health_timeout)
        self.checked = began
        if not (healthy and self._gone > began):  # the one that answered has ended meanwhile
            self._becomes(healthy=healthy, why=why)
        if healthy:
            await self._look_at_way()

    def _becomes(self, *, healthy: bool, why: str) -> None:
        was, self.healthy, self.why = self.healthy, healthy, why
        if healthy and not was:  # it may have been started again: its failures were those of the one before
            self.rest.clear()
            self.record = ServerRecord()
        if healthy != was:
            logger.warning("%s is %s", self.name, "ready" if healthy else f"down: {why}")

    async def _ask_health(self) -> int:
        paths, sent = (self._health,) if self._health else _HEALTH_PATHS, list[float]()
        status, body = 0, b""
        for path in paths:
            status, body = await self.client.get(path, sent.append)
            if status != 404:
                self._health = path
                break
        self._round_trips.append(self.client.clock() - sent[-1])
        try:
            self._place = msgspec.json.decode(body, type=_Place)
        except msgspec.MsgspecError:
            self._place = None  # a server
        if self._place is not None and self._place.capacity > 0:
            self.weight = self.entry.weight * self._place.capacity
        return status

    async def _look_at_way(self) -> None:
        """After a late answer see whether the way has become longer: a handshake is the kernel's there, however busy
        the server is. One that is short says nothing, as it may be of something between that passes connections on."""
        least, took = min(self._round_trips), 0.0
        if self._round_trips[-1] > least + NEAR:
            with contextlib.suppress(ClientError):
                took = await self.client.handshake(self._config.health_timeout)
        self._longer = self._longer + 1 if took > least + NEAR else 0
        if self._longer >= _LONGER:
            latest = [*self._round_trips][-_LONGER:]
            self._round_trips.clear()
            self._round_trips.extend(latest)
            self._longer = 0

    async def _look_at_models(self) -> None:
        self._looked = time.monotonic()
        if self.entry.models is not None:
            return
        status, body = await self.client.get("/v1/models")
        if status == 200:
            try:
                self.models = [
                    each for each in msgspec.json.decode(body, type=_ModelList).data if "id" in each
                ]
            except msgspec.MsgspecError:
                logger.warning("%s: /v1/models is not a list of models", self.name)
