"""Limits of tenants that several servers, or several routers, count together in Redis.

Each decision is one script in Redis, which is atomic there (shared_counts.lua). While Redis is away, no request waits
for it: each process counts alone, up to its part of every limit, and what it admitted is told to Redis when that is
back. See docs/tenants.md and decisions/0182.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.tenants import SharedCounts, Tenant, TenantsFileError
from quire.records import dataclass
from quire.server.logs import log
from quire.server.rate_limits import (
    CONCURRENT,
    DAILY,
    DAY,
    MINUTE,
    NANO,
    REQUESTS,
    TOKENS,
    Refusal,
    TenantLimits,
    TokenCharge,
    headers_of,
    refusal_of,
    too_large,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

_LEASE = 30 * NANO  # after which a request counts as ended, unless its process says that it runs
_RENEWAL = 10 * NANO
_BEAT = 1.0  # seconds between two tries to reach Redis
_PART = (
    "the limit is counted apart at the moment, and the part of it that is here is too small for this request"
)
_BATCH, _MOST_LATE = 64, 100_000  # changes sent at a time, and those that wait while Redis is away


@dataclass(frozen=True, slots=True)
class CountWindow:
    """A count of one tenant: which one, its limit (None: none), what is put into it, and for how many nanoseconds."""

    name: str
    limit: int | None
    amount: int
    length: int


@dataclass(frozen=True, slots=True)
class LateCount:
    """What Redis is to know, as soon as it can be reached. `number`: of this process, later ones have higher ones.
    `since`: when it happened, in monotonic nanoseconds."""

    number: int
    what: str
    tenant: str
    member: str
    window: CountWindow
    since: int


@dataclass(frozen=True, slots=True)
class SharedTake:
    """What Redis said: which window has no room (None: all were taken from), and after how many nanoseconds it has; the
    day since 1970; and by window what is used, and when all of it is free."""

    refused: CountWindow | None
    wait: int
    day: int
    used: dict[str, tuple[int, int]]


class SharedLimits:
    """The counts of all tenants in a Redis. Raises TenantsFileError without redis-py, or for a file without a password.

    `place` is what counts together: routers do not count what servers count. `clock` is monotonic, in nanoseconds.
    """

    def __init__(self, options: SharedCounts, folder: Path, place: str, clock: Callable[[], int]) -> None:
        self.options = options
        self.up = True
        self.alone = 0  # decisions without Redis
        self.lost = 0  # changes that Redis was never told of: too many waited
        self._clock, self._keys = clock, f"{options.prefix}:{place}:"
        self._errors, self._redis = _client(options, folder)
        self._script = Path(__file__).with_name("shared_counts.lua").read_text("utf-8")
        self._run = self._redis.register_script(self._script)
        self._me, self._numbers = secrets.token_hex(8), itertools.count(1)
        self._running: dict[str, str] = {}  # requests that have a limit of those at once: member -> tenant
        self._late: deque[LateCount] = deque()  # in the order of their numbers
        self._lost_now = 0  # of `lost`, those of this outage
        self._wake = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._ending = False
        self._renewed = clock()

    def part(self, limit: int | None) -> int | None:
        """Of a limit, what this process has of it while Redis is away."""
        return None if limit is None else max(1, limit // self.options.instances)

    async def enter(
        self, tenant: Tenant, own: TenantLimits
    ) -> tuple[str, list[tuple[bytes, bytes]]] | Refusal:
        """Begin a request, or say which limit is in its way. `own` counts what this process admits. Returns the name
        under which it has to `leave`, and headers about limits."""
        member, running = self._member(), tenant.concurrent_requests
        windows = _limited(
            CountWindow("running", running, 1, _LEASE),
            CountWindow("requests", tenant.requests_per_minute, 1, MINUTE),
        )
        taken = await self._take(tenant.name, member, windows)
        if taken is None:
            if (refusal := own.enter(self._clock())) is not None:
                return refusal
            self._missed(tenant.name, member, windows)
        elif (full := taken.refused) is not None:
            name = CONCURRENT if full.name == "running" else REQUESTS
            wait = NANO if full.name == "running" else taken.wait
            return refusal_of(name, full.limit, taken.used[full.name][0], 1, wait)
        else:
            own.count_request(self._clock())
        if running is not None:
            self._running[member] = tenant.name
        if taken is None:
            return member, own.headers(self._clock())
        return member, _headers(windows, taken)

    def leave(self, member: str, own: TenantLimits) -> None:
        """A request has ended."""
        own.leave()
        if (tenant := self._running.pop(member, None)) is not None:
            self._tell("change", tenant, member, CountWindow("running", None, -1, _LEASE))

    async def charge(
        self, tenant: Tenant, own: TenantLimits, tokens: int, *, background: bool
    ) -> tuple[TokenCharge, list[tuple[bytes, bytes]]] | Refusal:
        """Take the tokens of a request, or say which limit is in its way; `headers` are about what is left."""
        minute, daily = None if background else tenant.tokens_per_minute, tenant.tokens_per_day
        if (refusal := too_large(tokens, minute, daily)) is not None:
            return refusal
        member = self._member()
        windows = _limited(
            CountWindow("tokens", minute, tokens, MINUTE), CountWindow("day", daily, tokens, DAY)
        )
        taken = await self._take(tenant.name, member, windows)
        if taken is None:
            made = own.charge(tokens, self._clock(), background=background)
            if isinstance(made, Refusal):
                return made if made.wait is not None else Refusal(made.limit, _PART, NANO)
            self._missed(tenant.name, member, windows)
            headers = own.headers(self._clock())
        elif (full := taken.refused) is not None:
            name = TOKENS if full.name == "tokens" else DAILY
            return refusal_of(name, full.limit, taken.used[full.name][0], tokens, taken.wait)
        else:
            made = own.count_tokens(tokens, self._clock(), background=background)
            headers = _headers(windows, taken)
        made.member = f"{member} {taken.day if taken is not None else ''}"
        return made, headers

    def settle(self, tenant: Tenant, own: TenantLimits, charge: TokenCharge, tokens: int) -> None:
        """A request has ended, and used so many tokens."""
        member, _, day = charge.member.partition(" ")
        own.settle(charge, tokens, self._clock())
        if not (more := tokens - charge.tokens):
            return
        if tenant.tokens_per_minute is not None:
            self._tell("change", tenant.name, member, CountWindow("tokens", None, more, MINUTE))
        if tenant.tokens_per_day is not None:
            self._tell("change", tenant.name, day, CountWindow("day", None, more, DAY))

    def _member(self) -> str:
        return f"{self._me}-{next(self._numbers)}"

    def _missed(self, tenant: str, member: str, windows: Sequence[CountWindow]) -> None:
        """Redis does not know of this request."""
        for window in windows:
            self._tell("put", tenant, member, window)

    def _undo(self, tenant: str, member: str, windows: Sequence[CountWindow]) -> None:
        """Redis may have counted what was not answered. The day keeps it: there is no telling whether it did."""
        for each in windows:
            if each.name != "day":
                self._tell("change", tenant, member, replace(each, amount=-each.amount))

    def _tell(self, what: str, tenant: str, member: str, window: CountWindow) -> None:
        """Let Redis know, now or when it is back."""
        if len(self._late) >= _MOST_LATE:
            self._late.popleft()
            if not self._lost_now:
                log.error("tenants: shared: %d changes wait for Redis: the oldest are lost", _MOST_LATE)
            self._lost_now += 1
            self.lost += 1
        self._late.append(self._change(what, tenant, member, window))
        self._wake.set()

    def _change(self, what: str, tenant: str, member: str, window: CountWindow) -> LateCount:
        return LateCount(next(self._numbers), what, tenant, member, window, self._clock())

    async def _take(self, tenant: str, member: str, windows: Sequence[CountWindow]) -> SharedTake | None:
        """Take from all windows or from none. None while Redis is away."""
        if not windows:
            return SharedTake(None, 0, 0, {})
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        if self.up:
            try:
                async with asyncio.timeout(self.options.timeout):
                    keys, values = self._asked("take", tenant, member, windows)
                    refused, wait, day, *counts = await self._run(keys, values)
            except self._errors as error:
                self._undo(tenant, member, windows)
                self._gone(error)
            except asyncio.CancelledError:
                self._undo(tenant, member, windows)
                raise
            else:
                pairs = zip(counts[::2], counts[1::2], strict=True)
                used = {each.name: (n, ends * 1000) for each, (n, ends) in zip(windows, pairs, strict=True)}
                return SharedTake(windows[refused - 1] if refused else None, wait * 1000, day, used)
        self.alone += 1
        return None

    def _asked(
        self, what: str, tenant: str, member: str, windows: Sequence[CountWindow], age: int = 0
    ) -> tuple[list[str], list[str | int]]:
        """Keys and values of the script. All keys of a tenant are on one node of a cluster."""
        keys, values = [], list[str | int]((what, member))
        for each in windows:
            keys += [f"{self._keys}{{{tenant}}}:{each.name}{end}" for end in (":ends", ":amounts")]
            kind = "day" if each.name == "day" else "window"
            limit = -1 if each.limit is None else each.limit
            values += [kind, limit, each.amount, max(1, (each.length - age) // 1000)]
        return keys, values

    def _gone(self, error: BaseException) -> None:
        """Redis cannot be reached, or answers an error: count alone from now on."""
        if self.up:
            why = str(error) or type(error).__name__
            log.error(
                "tenants: shared: Redis is away, each limit is 1/%d here: %s", self.options.instances, why
            )
        self.up = False
        self._wake.set()

    async def _beat(self) -> None:
        """Tell Redis what it has to know, and look whether it is back; runs until cancelled, and ends with `stop` also
        where redis-py has swallowed that."""
        while not self._ending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if not self.up:  # what answers this is there, and knows the script
                    async with asyncio.timeout(self.options.timeout):
                        await self._redis.script_load(self._script)
                await self._send_late()
                await self._renew()
            except self._errors as error:
                self._gone(error)
                await asyncio.sleep(_BEAT)
            else:
                if not self.up:
                    log.info(
                        "tenants: shared: Redis is back; changes that it is not told: %d", self._lost_now
                    )
                self.up, self._lost_now = True, 0

    async def _renew(self) -> None:
        """Say of requests that they still run, if it is time, or if Redis is back. What fails is not kept: it is said
        again."""
        now = self._clock()
        if self.up and now - self._renewed < _RENEWAL:
            return
        running = [
            self._change("put", tenant, member, CountWindow("running", None, 1, _LEASE))
            for member, tenant in self._running.items()
        ]
        for start in range(0, len(running), _BATCH):
            await self._send(running[start : start + _BATCH])
        self._renewed = now

    async def _send_late(self) -> None:
        """Tell Redis all that waits, oldest first; what fails is kept."""
        while self._late:
            some = list(itertools.islice(self._late, _BATCH))
            await self._send(some)
            while self._late and self._late[0].number <= some[-1].number:  # some may have been lost meanwhile
                self._late.popleft()

    async def _send(self, some: Sequence[LateCount]) -> None:
        """Tell Redis these changes, the oldest ones that may be sent again. One that it has done is not done again."""
        now = self._clock()
        async with asyncio.timeout(self.options.timeout), self._redis.pipeline(transaction=False) as pipe:
            for each in some:
                keys, values = self._asked(
                    each.what, each.tenant, each.member, [each.window], now - each.since
                )
                keys.append(f"{self._keys}{{{each.tenant}}}:done:{self._me}")
                values += [each.number, some[0].number]
                pipe.evalsha(self._run.sha, len(keys), *keys, *values)  # one turn, as a take has
            await pipe.execute()

    async def stop(self) -> None:
        """Tell what is left, if Redis is there, and hang up; to be called when nothing is counted any more."""
        self._ending = True
        if (beating := self._beating) is not None:
            beating.cancel()
            await asyncio.wait([beating])  # else both would send
            self._beating = None
        with contextlib.suppress(*self._errors):
            if self.up:
                await self._send_late()
        await self._redis.aclose()


def _limited(*windows: CountWindow) -> list[CountWindow]:
    """Those that have a limit."""
    return [each for each in windows if each.limit is not None]


def _headers(windows: Sequence[CountWindow], taken: SharedTake) -> list[tuple[bytes, bytes]]:
    return [
        header
        for each in windows
        if each.name in {"requests", "tokens"}
        for header in headers_of(each.name.encode(), each.limit or 0, *taken.used[each.name])
    ]


def _client(options: SharedCounts, folder: Path) -> tuple[tuple[type[Exception], ...], Redis]:
    """The errors that mean that a Redis is away, and its client. Raises TenantsFileError."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError
    except ImportError:
        raise TenantsFileError(
            "tenants: shared: needs the package redis: pip install 'quire-llm[redis]'"
        ) from None
    password = None
    if options.password_file:
        try:
            password = (folder / options.password_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TenantsFileError(f"tenants: shared: password_file: cannot be read: {error}") from None
    try:
        client = Redis.from_url(
            options.redis, password=password, decode_responses=True, retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=options.timeout, socket_timeout=options.timeout,
        )  # fmt: skip
    except ValueError as error:
        raise TenantsFileError(f"tenants: shared: redis: {error}") from None
    return (RedisError, OSError, TimeoutError), client
