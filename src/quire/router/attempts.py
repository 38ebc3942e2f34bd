"""A request at one server, or at two if the first one is late: the first that begins to answer is taken."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from quire.config.routing import RouterConfig
from quire.router.backend_server import BackendServer
from quire.router.relay import Relay
from quire.server.errors import ApiError, retry_headers
from quire.util.http_client import ClientError, UnreachedError

# Answers after which another server is asked: this one is busy, ends, or is not there. An internal error is none of
# them: what brought one server down might bring down all.
ELSEWHERE = frozenset((429, 502, 503))


class NotSentError(ApiError):
    """A server could not be reached: it knows nothing of the request."""


class Tries:
    """The servers that did not answer a request. `retries` more are asked than one, not counting those that know
    nothing of it; and once more as many when it has waited for a server, since those that were there have gone."""

    def __init__(self, retries: int) -> None:
        self._asked = self._left = retries + 1
        self._ended: dict[BackendServer, float] = {}  # when
        self._waited = False

    @property
    def servers(self) -> list[BackendServer]:
        """Those that were asked."""
        return [*self._ended]

    @property
    def as_before(self) -> list[BackendServer]:
        """Those of which nothing new is known: no check has begun since they were asked."""
        return [each for each, at in self._ended.items() if each.checked <= at]

    @property
    def may_go_on(self) -> bool:
        """Whether one more may be asked."""
        return self._left > 0

    @property
    def may_wait(self) -> bool:
        """Whether one more may be asked that comes."""
        return self._left > 0 or not self._waited

    def failed(self, server: BackendServer, *, counts: bool = True) -> None:
        """A server did not answer."""
        self._ended[server] = time.monotonic()
        self._left -= counts

    def waited(self) -> None:
        """The request has waited for a server."""
        if not self._waited:
            self._waited, self._left = True, self._asked


class Attempt:
    """A request that was sent to a server, and its answer. `own` tokens of its prompt are computed there, `ahead` are
    these and those that waited before them, `outstanding` all the work that the server has. They are work until it
    begins; what is `held` for it, the work of its answer, ends with it."""

    def __init__(
        self,
        backend: BackendServer,
        relay: Relay,
        request: asyncio.Task[None],
        own: float,
        held: contextlib.ExitStack,
    ) -> None:
        self.backend, self.relay, self.request = backend, relay, request
        self._computing = contextlib.ExitStack()  # until it begins
        self._computing.enter_context(backend.computing(own))
        self.ahead, self.outstanding = backend.waiting, backend.work
        self.sent = time.monotonic()
        self._held = held
        backend.reading.add(relay)
        relay.follow(request)

    def close(self) -> None:
        """Whatever is left of it ends."""
        self.request.cancel()
        self.backend.reading.discard(self.relay)
        self.relay.forget()
        self._computing.close()
        self._held.close()

    async def begins(self, config: RouterConfig) -> ApiError | None:
        """Wait until the answer begins; an error if it does not."""
        relay, backend = self.relay, self.backend
        try:
            with self._computing:
                begun = await relay.begins(self.request, config.first_byte_timeout)
        except TimeoutError:
            backend.failed("did not begin to answer in time", time.monotonic())
            return ApiError(504, f"no answer within {config.first_byte_timeout:g} s", code="backend_timeout")
        if begun:
            return None
        error = self.request.exception()
        assert error is not None
        if not isinstance(error, ClientError):
            raise error
        backend.failed(str(error), time.monotonic(), gone=error.refused)
        kind = NotSentError if isinstance(error, UnreachedError) else ApiError
        return kind(502, "the server could not be reached", code="backend_failed", headers=retry_headers(1.0))


async def first_of(
    attempt: Attempt, delay: float, second: Callable[[], Attempt | None], config: RouterConfig
) -> tuple[Attempt, ApiError | None]:
    """The attempt that begins to answer first, `second` being made if the other one has not after `delay` seconds; the
    one that is not taken is closed. If neither can be, the first one with its error, or with its refusal.
    """
    begins = {asyncio.create_task(attempt.begins(config)): attempt}
    left = [attempt]
    try:
        done, _ = await asyncio.wait(begins, timeout=delay)
        if not done and (other := second()) is not None:
            begins[asyncio.create_task(other.begins(config))] = other
            left.append(other)
        failure: ApiError | None = None
        while begins:
            done, _ = await asyncio.wait(begins, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                one, error = begins.pop(task), task.result()
                if error is None and one.relay.status not in ELSEWHERE:
                    left.remove(one)
                    return one, None
                if one is attempt:
                    failure = error
        left.remove(attempt)
        return attempt, failure
    finally:
        for task in begins:
            task.cancel()
        for one in left:
            one.close()
