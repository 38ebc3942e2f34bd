"""All servers behind a router: which of them may answer a request, and how they come and go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from quire.config.routing import (
    BackendEntry,
    RouterConfig,
    backend_entries,
    discovered_services,
    keys_of,
    traffic_rules,
)
from quire.router.backend_server import NEAR, BackendServer
from quire.router.cache_follower import CacheFollower
from quire.router.discovery import ServiceWatch, first_known
from quire.routing.announcing import AnnouncedServers, FoundServer
from quire.routing.outliers import ServerRecord, outliers
from quire.routing.prefix_index import PIECE_BYTES, PrefixIndex
from quire.routing.reported_prefixes import ReportedPrefixes
from quire.routing.servers_needed import ServersNeeded
from quire.routing.settled_weights import SettledWeights
from quire.routing.tickets import read_key
from quire.util.http_client import Client, target

logger = logging.getLogger("quire.server")

_HELD_INTERVAL = 0.05  # seconds between two checks while a request waits for a server
_ROUND = 0.25  # seconds until the next checks, while some have not ended
_FIRST_LIST = 10.0  # seconds for what is discovered, before the first checks
_ANNOUNCED = "announced"  # in place of a service's name


def _shared_key(path: str) -> bytes:
    try:
        return read_key(path)
    except ValueError as error:
        raise ValueError(f"kv_key_file: {error}") from None


def _alike(server: BackendServer) -> tuple[bool, frozenset[str]]:
    """What servers have in common that could answer for each other."""
    return server.entry.role == "prefill", frozenset(str(each.get("id")) for each in server.models)


def _group(server: BackendServer) -> tuple[str, bool]:
    """Servers whose number follows one load."""
    return server.entry.group, server.entry.role == "prefill"


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
        self.settled = SettledWeights()
        self._nameless: set[tuple[str, str]] = (
            set()
        )  # servers that were said to name no version, and the model
        self._needs: dict[
            tuple[str, bool], ServersNeeded
        ] = {}  # by group, and whether it computes prompts for others
        self.held = 0  # requests that wait for a server
        self._held_by: Counter[tuple[str, bool]] = Counter()
        self._held_tokens: defaultdict[tuple[str, bool], float] = defaultdict(float)
        self._held = asyncio.Event()
        self._checking: dict[BackendServer, asyncio.Task[None]] = {}
        self._checked = asyncio.Event()  # once; another one for each check
        self._following: dict[BackendServer, asyncio.Task[None]] = {}
        self.draining = False  # the router itself ends
        self._checks: asyncio.Task[None] | None = None
        self._leaving: set[BackendServer] = set()  # taken out of the file while requests are with them
        self._idle = asyncio.Event()

    def available(
        self,
        model: str | None,
        without: Sequence[BackendServer] = (),
        *,
        spilled: bool = False,
        version: str = "",
    ) -> list[BackendServer]:
        """The servers that may answer a request for a model: those that compute prompts for others only if there is no
        other. One that a peer has `spilled` goes to no other peer. `version`: that the weights must have."""
        now = time.monotonic()
        known = [each for each in self.all if each.serves(model) and not (spilled and each.entry.peer)]
        if version:
            known = [each for each in known if each.version(model) == version]
        able = [each for each in known if each.takes(now) and each not in without]
        able = able or [each for each in known if each.could_answer(now) and each not in without]
        return [each for each in able if each.entry.role != "prefill"] or able

    def settled_version(self, model: str | None) -> str:
        """The version of a model that clients get; "" for any."""
        if self.config.weights == "any":
            return ""
        if model is not None and not any(each.lists(model) for each in self.all):
            return ""  # of names that clients make up nothing is kept
        now, capacity = time.monotonic(), defaultdict[str, float](float)
        for each in self.all:
            if each.serves(model) and each.entry.role != "prefill" and each.could_answer(now):
                capacity[each.version(model)] += each.weight
        if len(capacity) > 1 and "" in capacity:  # of servers that do not say what they have, where others do
            del capacity[""]
            self._tell_nameless(model, now)
        before = self.settled.of(model or "")
        found = self.settled.settle(model or "", capacity)
        if before and found != before:
            logger.warning("%s: clients get answers of %s from now on, not of %s", model, found, before)
        return found or ""

    def _tell_nameless(self, model: str | None, now: float) -> None:
        """Say once of each server that gets no requests, because others name the version of their weights."""
        for each in self.all:
            known, named = (each.name, model or ""), each.entry.role == "prefill" or each.version(model)
            if named:
                self._nameless.discard(known)
            elif each.serves(model) and each.could_answer(now) and known not in self._nameless:
                self._nameless.add(known)
                logger.warning(
                    "%s gets no requests for %s: with --weights one a server must name the version of its weights in "
                    "/v1/models, as the others do", each.name, model or "its model",
                )  # fmt: skip

    def skewed(self) -> dict[str, list[str]]:
        """The models that servers have in several versions of their weights, and these versions."""
        versions: dict[str, set[str]] = {}
        for each in self.all:
            for model in each.models if each.healthy else ():
                name = str(model.get("id"))
                versions.setdefault(name, set()).add(each.version(name))
        return {name: sorted(found) for name, found in versions.items() if len(found) > 1}

    def capacity(self) -> float:
        """The servers of this place that may answer, by weight."""
        return sum(each.weight for each in self.available(None, spilled=True) if each.entry.role != "prefill")

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

    async def hold(
        self, tokens: float, model: str | None, look: Callable[[], BackendServer | None], until: float
    ) -> BackendServer | None:
        """Wait until `look` finds a server for a prompt of so many tokens for a model; None at that time of the loop,
        or when the router ends."""
        waits_for = {_group(each) for each in self.all if each.entry.role != "prefill" and each.serves(model)}
        waits_for = waits_for or {("", False)}
        self.held += 1
        for group in waits_for:
            self._held_by[group] += 1
            self._held_tokens[group] += tokens
        self._held.set()
        try:
            async with asyncio.timeout_at(until):
                while (found := look()) is None and not self.draining:
                    await self._checked.wait()
        except TimeoutError:
            return None
        else:
            return found
        finally:
            self.held -= 1
            self._idle.set()
            for group in waits_for:
                self._held_by[group] -= 1
                self._held_tokens[group] = self._held_tokens[group] - tokens if self._held_by[group] else 0.0

    def need(self, server: BackendServer) -> ServersNeeded:
        """What is known of the load of a server's group, and what its servers take."""
        return self._need(_group(server))

    def _need(self, group: tuple[str, bool]) -> ServersNeeded:
        if group not in self._needs:
            self._needs[group] = ServersNeeded(self.config.level_seconds, self.config.start_seconds)
        return self._needs[group]

    def needed_by_group(self, now: float) -> dict[tuple[str, bool], float]:
        """The servers of each group that the load needs; not rounded. The second part of a name: they compute prompts
        for others."""
        groups: dict[tuple[str, bool], list[BackendServer]] = {("", False): []}
        for each in (*self.all, *self._leaving):
            groups.setdefault(_group(each), []).append(each)
        return {
            group: self._need(group).servers(
                sum(each.waiting for each in servers) + self._held_tokens[group],
                sum(each.requests for each in servers) + self._held_by[group],
                sum(each.is_available(now) for each in servers), now,
            )
            for group, servers in groups.items()
        }  # fmt: skip

    def replicas_needed(self, now: float) -> float:
        """The servers that answer, of which the load needs so many; not rounded."""
        return sum(needed for (_, computes), needed in self.needed_by_group(now).items() if not computes)

    def backlog_seconds(self) -> float:
        """Until the prompts that wait are computed."""
        now = time.monotonic()
        able = sum(each.is_available(now) for each in self.all)
        held = sum(tokens * self._need(group).token_seconds for group, tokens in self._held_tokens.items())
        waiting = sum(each.waiting * self.need(each).token_seconds for each in self.all)
        return (waiting + held) / max(able, 1)

    async def start(self) -> None:
        """Check all servers once, and go on checking them."""
        self._watching = [asyncio.create_task(each.run()) for each in self._watches]
        await first_known(self._watches, _FIRST_LIST)
        await asyncio.gather(*(self._check(each) for each in self.all))
        self._measure()
        self._follow()
        self._checks = asyncio.create_task(self._keep_checking())

    async def failed(self) -> None:
        """A router goes on whatever happens to its servers, but not without looking at them: this ends if the checks
        do, by a mistake of this program."""
        assert self._checks is not None
        await asyncio.wait([self._checks])
        if not self._checks.cancelled():
            logger.error("the checks of servers have ended", exc_info=self._checks.exception())

    async def stop(self, drain_seconds: float) -> None:
        """Take no more requests, and wait for those that run, at most so long. Those that wait for a server end."""
        self.draining = True
        self._look_again()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while self.running or self.held:
                    self._idle.clear()
                    await self._idle.wait()
        if self._checks is not None:
            self._checks.cancel()
        beside = [*self._following.values(), *self._watching, *self._checking.values()]
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
            for each in self.all:  # one that hangs holds up no other
                if each not in self._checking:
                    self._checking[each] = asyncio.create_task(self._check(each))
            if self._checking:
                await asyncio.wait([*self._checking.values()], timeout=_ROUND)
            self._measure()
            self.judge(time.monotonic())
            if not self.held:
                self._held.clear()

    def _measure(self) -> None:
        """How far servers are beside the nearest one, and what else waits there, in tokens of prompts."""
        nearest = min((each.round_trip for each in self.all if each.healthy), default=0.0)
        for each in self.all:
            token, further = self.need(each).token_seconds, each.round_trip - nearest
            each.distance = further / token if further >= NEAR else 0.0
            own = each.waiting * token / each.weight
            each.queued = each.queued_seconds(own) / token * each.weight

    async def _check(self, server: BackendServer) -> None:
        was = server.healthy
        try:
            await server.check()
        finally:
            self._checking.pop(server, None)
        if server.healthy and not was:
            self.prefixes.forget(server.name)  # it may have been started again, with an empty cache
        self._look_again()

    def _look_again(self) -> None:
        """Have requests that wait for a server look for one."""
        self._checked.set()
        self._checked = asyncio.Event()
