"""The servers behind a router: whether each can be asked, what it has to do, and the checks of its health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.config.routing import (
    BackendEntry,
    RouterConfig,
    backend_entries,
    discovered_services,
    keys_of,
    traffic_rules,
)
from quire.router.cache_follower import CacheFollower
from quire.router.discovery import ServiceWatch, first_known
from quire.routing.announcing import AnnouncedServers, FoundServer
from quire.routing.outliers import Rest, ServerRecord, is_late, outliers
from quire.routing.prefix_index import PIECE_BYTES, PrefixIndex
from quire.routing.reported_prefixes import ReportedPrefixes
from quire.routing.servers_needed import ServersNeeded
from quire.routing.tickets import read_key
from quire.util.http_client import Client, ClientError, target

logger = logging.getLogger("quire.server")

_MODELS_EVERY = 30.0  # seconds between two looks at the models of a server
_HELD_INTERVAL = 0.05  # seconds between two checks while a request waits for a server
_FIRST_LIST = 10.0  # seconds for what is discovered, before the first checks
_ANNOUNCED = "announced"  # in place of a service's name
_HEALTH_PATHS = ("/health", "/v1/models")


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]] = []


class BackendServer:
    """A server. `requests` were sent to it and have not ended; `work` is what they cost, in prompt tokens;
    `waiting` are the tokens of those prompts that it has not begun to answer."""

    def __init__(self, entry: BackendEntry, config: RouterConfig) -> None:
        """Raises ValueError for an address that is none."""
        self.entry, self._config = entry, config
        self.name, self.weight = entry.name, entry.weight
        headers = {"authorization": f"Bearer {entry.api_key}"} if entry.api_key else {}
        self.client = Client(target(entry.url, headers), connect_timeout=config.connect_timeout)
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

    @contextlib.contextmanager
    def computing(self, tokens: float) -> Iterator[None]:
        """While it computes so many tokens of a prompt."""
        self.waiting += tokens
        try:
            yield
        finally:
            self.waiting = max(self.waiting - tokens, 0.0)

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

    def failed(self, why: str, now: float) -> None:
        """A request failed on it; after some in a row it gets none for a while, each time twice as long."""
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
        was = self.healthy
        try:
            async with asyncio.timeout(self._config.health_timeout):
                status = await self._ask_health()
                if status == 200 and (not was or time.monotonic() - self._looked > _MODELS_EVERY):
                    await self._look_at_models()
            self.healthy, self.why = status == 200, f"its health is HTTP {status}"
        except TimeoutError:
            self.healthy, self.why = False, "did not answer in time"
        except ClientError as error:
            self.healthy, self.why = False, str(error).partition(":")[0]
        if (
            self.healthy and not was
        ):  # it may have been started again: its failures were those of the one before
            self.rest.clear()
            self.record = ServerRecord()
        if self.healthy != was:
            logger.warning("%s is %s", self.name, "ready" if self.healthy else f"down: {self.why}")

    async def _ask_health(self) -> int:
        paths = (self._health,) if self._health else _HEALTH_PATHS
        status = 0
        for path in paths:
            status, _ = await self.client.get(path)
            if status != 404:
                self._health = path
                break
        return status

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


def _shared_key(path: str) -> bytes:
    try:
        return read_key(path)
    except ValueError as error:
        raise ValueError(f"kv_key_file: {error}") from None


def _alike(server: BackendServer) -> tuple[bool, frozenset[str]]:
    """What servers have in common that could answer for each other."""
    return server.entry.role == "prefill", frozenset(str(each.get("id")) for each in server.models)


class Backends:
    """All servers of a router, their checks, and what they have probably cached."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ValueError for entries that are wrong."""
        self.config = config
        self._named = backend_entries(config)
        self.all = [BackendServer(entry, config) for entry in self._named]
        self.rules, self._keys = traffic_rules(config), keys_of(config)
        self.key = b"" if config.kv_key_file is None else _shared_key(config.kv_key_file)
        self.announced = AnnouncedServers(self.key)
        self._found: dict[str, Mapping[str, FoundServer]] = {}  # by name, of each service that is discovered
        self._watches = [
            ServiceWatch(service, partial(self._discovered, text))
            for text, service in zip(config.discover, discovered_services(config), strict=True)
        ]
        self._watching: list[asyncio.Task[None]] = []
        self.prefixes = PrefixIndex(config.prefix_index_size)
        self.reports = ReportedPrefixes(config.prefix_index_size)
        self.needed = ServersNeeded(config.level_seconds, config.start_seconds)
        self.held = 0  # requests that wait for a server
        self._held_tokens = 0.0
        self._held = asyncio.Event()
        self._checked = asyncio.Event()  # once; another one for each round of checks
        self._following: dict[BackendServer, asyncio.Task[None]] = {}
        self.draining = False  # the router itself ends
        self._checks: asyncio.Task[None] | None = None
        self._leaving: set[BackendServer] = set()  # taken out of the file while requests are with them
        self._idle = asyncio.Event()

    def available(self, model: str | None, without: Sequence[BackendServer] = ()) -> list[BackendServer]:
        """The servers that may answer a request for a model: those that compute prompts for others only if there is no
        other."""
        now = time.monotonic()
        known = [each for each in self.all if each not in without and each.serves(model)]
        able = [each for each in known if each.takes(now)]
        able = able or [each for each in known if each.could_answer(now)]
        return [each for each in able if each.entry.role != "prefill"] or able

    def began(self, backend: BackendServer, seconds: float, expected: float | None) -> None:
        """A server has begun an answer after so many seconds, where so many were expected of one of weight 1."""
        others: list[ServerRecord] = []
        if backend.rest.probes:
            kind = _alike(backend)
            others = [each.record for each in self.all if each is not backend and _alike(each) == kind]
        expected = None if expected is None else expected / backend.weight
        backend.began(seconds, expected, others, time.monotonic())

    def judge(self, now: float) -> None:
        """Eject servers that are far worse than the others of the same models."""
        groups: dict[tuple[bool, frozenset[str]], list[BackendServer]] = {}
        for each in self.all:
            groups.setdefault(_alike(each), []).append(each)
        for group in groups.values():
            there = {each.name: each for each in group if each.is_available(now) and not each.rest.probes}
            most = int(self.config.max_ejected * len(group)) - (len(group) - len(there))
            for name, why in outliers({name: each.record for name, each in there.items()}, most):
                there[name].eject(why, now)

    def may_serve(self, model: str) -> bool:
        """Whether a server has a model, or may come that has it: what a service without endpoints has nobody knows."""
        answering = [each for each in self.all if each.entry.role != "prefill"]
        comes = bool(self.config.discover or self.key)
        return (comes and not answering) or any(each.serves(model) for each in self.all)

    def computing(self, model: str | None, answering: BackendServer) -> list[BackendServer]:
        """The servers that may compute a prompt for one that answers."""
        now = time.monotonic()
        return [
            each for each in self.all
            if each.entry.role in {"prefill", "both"} and each is not answering and each.is_available(now)
            and each.serves(model) and now >= each.alone_until
        ]  # fmt: skip

    def cached_tokens(
        self, server: str, digests: Sequence[bytes], tokens_of: Callable[[int], float]
    ) -> float:
        """The tokens at the beginning of a prompt that a server has cached, or soon will. `tokens_of` is of bytes."""
        source, reports = self.config.prefix_source, self.reports
        if source != "predicted" and reports.is_current(server):
            coming = tokens_of(reports.coming(server, digests) * PIECE_BYTES) if source == "hybrid" else 0.0
            return max(float(reports.tokens(server, digests)), coming)
        if source == "reported":
            return 0.0
        return tokens_of(self.prefixes.matched(server, digests) * PIECE_BYTES)

    def sent(self, server: str, request: str, digests: Sequence[bytes], size: int) -> None:
        """A server gets a prompt of `size` bytes."""
        self.prefixes.add(server, digests)
        self.reports.sent(server, request, digests, size)

    @property
    def reporting(self) -> float:
        """The share of the servers with events, among those that can be asked, whose events are not lost; 1 if there
        are none."""
        followed = [each.follower for each in self.all if each.healthy and each.follower is not None]
        offered = [each for each in followed if each.offered]
        return sum(each.current for each in offered) / len(offered) if offered else 1.0

    @contextlib.contextmanager
    def busy(self, backend: BackendServer, work: float) -> Iterator[None]:
        """While a server has a request that costs so much."""
        backend.requests += 1
        backend.work += work
        try:
            yield
        finally:
            backend.requests -= 1
            backend.work = backend.work - work if backend.requests else 0.0
            self._idle.set()

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return sum(each.requests for each in (*self.all, *self._leaving))

    async def hold(self, tokens: float, look: Callable[[], BackendServer | None]) -> BackendServer | None:
        """Wait until `look` finds a server for a prompt of so many tokens; None after the time for which requests are
        held, or when the router ends."""
        self.held, self._held_tokens = self.held + 1, self._held_tokens + tokens
        self._held.set()
        try:
            async with asyncio.timeout(self.config.hold_seconds):
                while (found := look()) is None and not self.draining:
                    await self._checked.wait()
        except TimeoutError:
            return None
        else:
            return found
        finally:
            self.held -= 1
            self._held_tokens = self._held_tokens - tokens if self.held else 0.0

    def replicas_needed(self, now: float) -> float:
        """The servers that answer, of which the load needs so many; not rounded."""
        waiting = sum(each.waiting for each in self.all if each.entry.role != "prefill") + self._held_tokens
        return self.needed.servers(waiting, self.running + self.held, len(self.available(None)), now)

    def backlog_seconds(self) -> float:
        """Until the prompts that wait are computed."""
        now = time.monotonic()
        able = sum(each.is_available(now) for each in self.all)
        return self.needed.backlog(sum(each.waiting for each in self.all) + self._held_tokens, able)

    async def start(self) -> None:
        """Check all servers once, and go on checking them."""
        self._watching = [asyncio.create_task(each.run()) for each in self._watches]
        await first_known(self._watches, _FIRST_LIST)
        await asyncio.gather(*(each.check() for each in self.all))
        self._follow()
        self._checks = asyncio.create_task(self._keep_checking())

    async def failed(self) -> None:
        """A router goes on whatever happens to its servers."""
        await asyncio.get_running_loop().create_future()

    async def stop(self, drain_seconds: float) -> None:
        """Take no more requests, and wait for those that run, at most so long."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while self.running:
                    self._idle.clear()
                    await self._idle.wait()
        if self._checks is not None:
            self._checks.cancel()
        beside = [*self._following.values(), *self._watching]
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await asyncio.gather(*(each.client.close() for each in (*self.all, *self._leaving)))

    def _discovered(self, service: str, servers: dict[str, str]) -> None:
        """A service has these servers from now on."""
        self._found[service] = {name: FoundServer(url) for name, url in servers.items()}
        self._replace()
        logger.warning("%s: %s", service, ", ".join(servers) or "no server")

    def announce(self, body: bytes, code: str) -> str | None:
        """Take what a server says of itself; the nonce of its next announcement, None if this one's does not hold.
        Raises as AnnouncedServers.take."""
        now = time.monotonic()
        changed = self.announced.take(body, code, now)
        if changed:
            self._announced_others()
        return None if changed is None else self.announced.nonce(now)

    def _announced_others(self) -> None:
        self._found[_ANNOUNCED] = self.announced.servers
        self._replace()
        logger.warning("announced: %s", ", ".join(self.announced.servers) or "no server")

    def reload(self) -> None:
        """Read the file of servers again. Those that stay keep what is known of them; those that are gone get no more
        requests. Raises ValueError, and changes nothing, for a file that is wrong.
        """
        named, rules, keys = backend_entries(self.config), traffic_rules(self.config), keys_of(self.config)
        for entry in named:
            BackendServer(entry, self.config)  # raises for an address that is none
        self._named, self.rules, self._keys = named, rules, keys
        self._replace()

    def _replace(self) -> None:
        """The servers are those that are named, and those that are discovered and have no other's name."""
        known, key_and_admin = {each.entry: each for each in self.all}, self._keys
        found = {each.name: each for each in self._named}
        for servers in self._found.values():
            for name, server in servers.items():
                entry = BackendEntry(
                    server.url, name, server.weight, api_key=key_and_admin[0], admin_key=key_and_admin[1],
                    role=server.role,
                )  # fmt: skip
                found.setdefault(name, entry)
        entries = [*found.values()]
        made = [known.get(entry) or BackendServer(entry, self.config) for entry in entries]
        for each in self.all:
            if each not in made:
                each.draining = True
                self.prefixes.forget(each.name)
                self._leaving.add(each)
        self.all = made
        self._follow()

    def _follow(self) -> None:
        """Follow the caches of the servers that say what they have, and no others."""
        for gone in [each for each in self._following if each not in self.all]:
            self._following.pop(gone).cancel()
        for each in self.all:
            entry = each.entry
            if self.config.prefix_source == "predicted" or not entry.admin_key or each in self._following:
                continue
            headers = {"authorization": f"Bearer {entry.admin_key}"}
            client = Client(
                target(entry.admin_url or entry.url, headers), connect_timeout=self.config.connect_timeout
            )
            each.follower = CacheFollower(each.name, client, self.reports)
            self._following[each] = asyncio.create_task(each.follower.run())

    async def _keep_checking(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.health_interval):
                    await self._held.wait()
                    await asyncio.sleep(_HELD_INTERVAL)
            for gone in [each for each in self._leaving if not each.requests]:
                self._leaving.discard(gone)
                await gone.client.close()
            if self.announced.expire(time.monotonic()):
                self._announced_others()
            was = {each.name for each in self.all if each.healthy}
            await asyncio.gather(*(each.check() for each in self.all))
            for each in self.all:
                if each.healthy and each.name not in was:
                    self.prefixes.forget(each.name)  # it may have been started again, with an empty cache
            self.judge(time.monotonic())
            if not self.held:
                self._held.clear()
            self._checked.set()
            self._checked = asyncio.Event()
