"""The tenants of a server: who a key belongs to, what is left of its limits, and what it may use.

A key of --api-key is a tenant without limits, named by its hash. Those of --tenants have their names. The file can be
read again while the server runs; one with errors changes nothing.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.tenants import Tenant, Tenants, TenantsFileError, key_digest, read_tenants
from quire.server.day_counts import read_counts, write_counts
from quire.server.errors import ApiError, bad_request, retry_headers, shorten
from quire.server.logs import log
from quire.server.rate_limits import DAY, NANO, Refusal, TenantLimits, TokenCharge

if TYPE_CHECKING:
    from quire.config.serving import ServingConfig
    from quire.engine.api import GenerateAsk
    from quire.server.exchange import Exchange
    from quire.server.served import Served
    from quire.server.shared_limits import SharedLimits

TAG = b"x-quire-tag"
MAX_TAGS = 64  # of a tenant; requests with others are counted together
OTHER_TAGS = "other"
_SAVE = 10 * NANO  # between two times that the day's counts are written
_TAG = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ENTERED = "quire.entered"
_NO_TENANT = Tenant(name="")


class TenantDirectory:
    """All tenants of a server. Counts are by name: they survive a change of the file. `clock` is monotonic, in
    nanoseconds; `wall`, in seconds since 1970, is read once, to let days begin at midnight UTC.
    """

    def __init__(
        self,
        config: ServingConfig,
        keys: Sequence[bytes] = (),
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], float] = time.time,
        place: str = "server",
    ) -> None:
        """`keys` are those that the options name; processes of one `place` may count together.

        Raises TenantsFileError.
        """
        self.path = config.tenants
        self.refused: Counter[tuple[str, str]] = Counter()  # by tenant and limit
        self.changed: list[Callable[[], None]] = []  # called after the file was read again
        self._sharing = config.prefix_cache_sharing
        self._taken = {key_digest(key): number for number, key in enumerate(keys, 1)}
        self._numbers = {hashlib.sha256(key).hexdigest(): number for number, key in enumerate(keys, 1)}
        self._clock = clock
        self._day, passed = divmod(int(wall() * NANO), DAY)  # since 1970
        self._midnight = clock() + DAY - passed
        self._saved, self._unsaved = (
            clock(),
            False,
        )  # when counts were written; whether the last attempt failed
        self._limits: dict[str, TenantLimits] = {}
        self._tags: dict[str, set[str]] = {}
        self._shares: dict[str, float] = {}  # in place of the file's, by an administrator
        self.shared: SharedLimits | None = None
        found = Tenants() if self.path is None else self._read(self.path)
        if found.shared is not None and self.path is not None:
            from quire.server.shared_limits import SharedLimits

            self.shared = SharedLimits(found.shared, Path(self.path).parent, place, clock)
        self._set(found)
        if (counts := self._counts) is not None:
            for name, used in read_counts(counts, self._day).items():
                if name in self._limits:
                    self._limits[name].day.used = used

    @property
    def all(self) -> Tenants:
        """Those of the file."""
        return self._tenants

    def reload(self) -> int:
        """Read the file again; returns the number of its tenants. Raises TenantsFileError, and changes nothing, if it
        is wrong. Shares that an administrator set give way to the file's.
        """
        if self.path is None:
            raise TenantsFileError(
                "tenants: this server has no file of tenants: start it with --tenants FILE"
            )
        found, old = self._read(self.path), None if self.shared is None else self.shared.options
        if self.shared is not None and found.shared is not None and old is not None:
            old = replace(old, instances=found.shared.instances)
        if found.shared != old:
            raise TenantsFileError(f"tenants: {self.path}: shared: only instances change without a restart")
        if self.shared is not None and old is not None:
            self.shared.options = old
        self._set(found)
        self._shares = {}
        for tell in self.changed:
            tell()
        return len(self._tenants.by_name)

    def reload_or_log(self) -> None:
        """The same at a signal: an error goes to the log."""
        try:
            log.info("tenants: %d read from %s", self.reload(), self.path)
        except TenantsFileError as error:
            log.error("the file of tenants was not reloaded, still using the old one: %s", error)

    def _read(self, path: str) -> Tenants:
        found = read_tenants(path)
        for tenant in found.by_name.values():
            if not tenant.keys.isdisjoint(self._taken):
                raise TenantsFileError(
                    f"tenants: {path}: tenants.{tenant.name}.keys: one of them is also a key of the options"
                )
            if self._sharing == "all" and (tenant.cache_share or tenant.cache_domain):
                raise TenantsFileError(
                    f"tenants: {path}: tenants.{tenant.name}: cache_share and cache_domain need "
                    "--prefix-cache-sharing key: with all there is one cache"
                )
        return found

    def _set(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._by_key = {digest: tenant for tenant in tenants.by_name.values() for digest in tenant.keys}
        for name in self._limits:
            self._limit(tenants.by_name.get(name, Tenant(name=name)))
        for tenant in tenants.by_name.values():
            self._limit(tenant)

    def _limit(self, tenant: Tenant) -> None:
        limits = (
            tenant.requests_per_minute, tenant.tokens_per_minute, tenant.concurrent_requests, tenant.tokens_per_day,
        )  # fmt: skip
        if self.shared is not None:  # what this process has alone
            limits = tuple(map(self.shared.part, limits))  # type: ignore[assignment]
        if tenant.name in self._limits:
            self._limits[tenant.name].change(*limits)
        else:
            self._limits[tenant.name] = TenantLimits(*limits, day_ends=self._midnight)

    @property
    def _counts(self) -> Path | None:
        """The file of the day's counts. A relative path is one from the folder of the tenants file."""
        counts = self._tenants.counts
        return None if counts is None or self.path is None else Path(self.path).parent / counts

    def save(self, *, now: bool = True) -> None:
        """Write the day's counts to their file, if there is one; without `now` only if it is time. Where that fails,
        the log says so once, and counts go on in memory."""
        at, path = self._clock(), self._counts
        if path is None or (not now and at - self._saved < _SAVE):
            return
        self._saved, tokens = at, {}
        for name, limits in self._limits.items():
            limits.day.turn(at)
            if limits.day.used > 0:
                tokens[name] = limits.day.used
        try:
            write_counts(path, self._day + max(0, at - self._midnight + DAY) // DAY, tokens)
        except OSError as error:
            if not self._unsaved:
                log.error("tenants: counts: %s: cannot be written: %s", path, error)
            self._unsaved = True
        else:
            self._unsaved = False

    # -- who ------------------------------------------------------------------------------------------------------

    def of_key(self, presented: bytes) -> Tenant | None:
        """Whose key this is, by its hash: the time of the lookup says nothing of other keys."""
        return self._by_key.get(key_digest(presented)) if self._by_key else None

    def get(self, name: str) -> Tenant:
        """What is known of a tenant; one without limits for a name that is in no file."""
        return self._tenants.by_name.get(name, _NO_TENANT)

    def label(self, name: str) -> str:
        """A tenant's name in metrics and lists: keys of the options are numbered, as a hash may be guessed from."""
        number = self._numbers.get(name)
        return name if number is None else f"api-key-{number}"

    def domain(self, name: str) -> str:
        """The name of a tenant's prefix cache."""
        if self._sharing == "all":
            return ""
        tenant = self._tenants.by_name.get(name)
        return name if tenant is None else tenant.domain

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the KV cache by tenant, as they are in force."""
        found = {name: one.cache_share for name, one in self._tenants.by_name.items() if one.cache_share}
        return {name: share for name, share in (found | self._shares).items() if share}

    def floors(self, shares: Mapping[str, float] | None = None) -> dict[str, float]:
        """Shares by cache domain: those in force, or with these in place of some. Raises ValueError naming one."""
        found: dict[str, float] = {}
        for name, share in (self.shares | dict(shares or {})).items():
            if name not in self._tenants.by_name:
                raise ValueError(f"cache_shares: {name[:64]!r} is not a tenant of the file")
            domain = self.domain(name)
            found[domain] = found.get(domain, 0.0) + share
        if (total := sum(found.values())) > 1 + 1e-9:
            raise ValueError(f"cache_shares: they add up to {total:g}, above 1")
        return {domain: share for domain, share in found.items() if share}

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Shares in place of the file's, until it is read again."""
        self._shares |= shares

    def tag(self, exchange: Exchange) -> str:
        """The tag of a request, under which its use is counted. Raises ApiError 400."""
        given = exchange.header(TAG)
        if not given:
            return ""
        if not _TAG.fullmatch(given):
            raise bad_request("x-quire-tag", "x-quire-tag: up to 64 letters, digits and _.:-")
        tags = self._tags.setdefault(exchange.tenant, set())
        if given not in tags and len(tags) >= MAX_TAGS:
            return OTHER_TAGS
        tags.add(given)
        return given

    # -- what is left ---------------------------------------------------------------------------------------------

    async def enter(self, exchange: Exchange) -> None:
        """Count a request that begins, once, and until its memory is given back. Raises ApiError 429.

        Requests in the background (lines of batches) count for the daily quota alone.
        """
        limits, shared = self._limits.get(exchange.tenant), self.shared
        if limits is None:
            return
        if shared is None:
            exchange.limits = limits_headers(limits, self._clock)
        if exchange.background or _ENTERED in exchange.scope:
            exchange.add_headers(exchange.scope.get(_ENTERED, ()))
            return
        headers: list[tuple[bytes, bytes]] = []
        if shared is None:
            refusal = limits.enter(self._clock())
            leave = limits.leave
        else:
            made = await shared.enter(self.get(exchange.tenant), limits)
            refusal = made if isinstance(made, Refusal) else None
            if not isinstance(made, Refusal):
                headers = made[1]
                leave = partial(shared.leave, made[0], limits)
        if refusal is not None:
            raise self._refused(exchange, refusal)
        exchange.scope[_ENTERED] = headers
        exchange.add_headers(headers)
        exchange.held.keep(leave)

    async def charge(self, exchange: Exchange, asks: Sequence[GenerateAsk]) -> TokenCharge | None:
        """Count the tokens that requests may use. Raises ApiError 429, or 400 if they never fit a limit."""
        limits = self._limits.get(exchange.tenant)
        if limits is None:
            return None
        tokens = 0
        for ask in asks:
            params = ask.request.params
            output = 0 if ask.request.pooling else (params.max_tokens or 0)
            tokens += len(ask.request.prompt_token_ids) + params.n * output
        made: TokenCharge | Refusal
        if self.shared is None:
            made = limits.charge(tokens, self._clock(), background=exchange.background)
        else:
            found = await self.shared.charge(
                self.get(exchange.tenant), limits, tokens, background=exchange.background
            )
            made = found if isinstance(found, Refusal) else found[0]
            if not isinstance(found, Refusal):
                exchange.add_headers(found[1])
        if isinstance(made, Refusal):
            raise self._refused(exchange, made)
        return made

    def settle(self, exchange: Exchange, charge: TokenCharge | None, tokens: int) -> None:
        """Requests that were charged have ended, and used so many tokens."""
        if charge is None:
            return
        limits = self._limits[exchange.tenant]
        if self.shared is None:
            limits.settle(charge, tokens, self._clock())
        else:
            self.shared.settle(self.get(exchange.tenant), limits, charge, tokens)
        self.save(now=False)

    async def stop(self) -> None:
        """Write what was counted."""
        self.save()
        if self.shared is not None:
            await self.shared.stop()

    def _refused(self, exchange: Exchange, refusal: Refusal) -> ApiError:
        self.refused[exchange.tenant, refusal.limit] += 1
        message = f"{refusal.limit}: {refusal.message}"
        if refusal.wait is None:
            text = f"{message}; ask for fewer max_tokens, or send a shorter prompt"
            return ApiError(400, text, code="over_rate_limit", param="max_tokens")
        seconds = refusal.wait / NANO
        headers = retry_headers(seconds)
        return ApiError(
            429, f"{message}; try again in {seconds:.3g} s", code="rate_limit_exceeded", headers=headers
        )

    def check_model(self, name: str, served: Served) -> None:
        """Raise ApiError 403 for a model or adapter that a tenant may not use."""
        if not self.may_use(name, served):
            kind = "adapter" if served.adapter is not None else "model"
            message = f"model: this tenant may not use the {kind} {shorten(served.name, 200)!r}"
            raise ApiError(403, message, code="model_not_allowed", param="model")

    def may_use(self, name: str, served: Served) -> bool:
        """Whether a tenant may use what a name stands for."""
        tenant = self.get(name)
        allowed = tenant.models if served.adapter is None else tenant.adapters
        return allowed is None or served.name in allowed


def limits_headers(limits: TenantLimits, clock: Callable[[], int]) -> Callable[[], list[tuple[bytes, bytes]]]:
    """What makes the headers about a tenant's limits, when a response starts."""
    return lambda: limits.headers(clock())
