"""One request on its way to servers of its model, and to other models while none has begun to answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.router.aimed_request import AimedRequest
from quire.router.asking_servers import AskingServers
from quire.router.attempts import ELSEWHERE, NotSentError, Tries
from quire.router.backend_server import BackendServer
from quire.router.choosing import Choosing
from quire.router.delivering import Delivering
from quire.router.relay import Relay
from quire.router.routed_request import AskedOfServers
from quire.router.router_context import RouterContext
from quire.router.shadowing import Shadowing
from quire.routing.traffic import Failure, failure_of
from quire.server.errors import ApiError
from quire.server.exchange import Exchange
from quire.server.fleet.shadows import MAX_COMPARED_BYTES, SeenAnswer

_GONE = frozenset((502, 503))


def _is_gone(refusal: ApiError | Relay | None) -> bool:
    """Whether there was no server that could take a request."""
    return refusal is None or refusal.status in _GONE


class Forwarding:
    """Passes a request, whose body was read, to servers one after the other until one answers."""

    def __init__(
        self,
        context: RouterContext,
        exchange: Exchange,
        body: bytes,
        asked: AskedOfServers,
        collected: int = 0,
    ) -> None:
        """`collected`: bytes that an answer may have which is looked at afterwards, as `seen`."""
        self._context, self._collected = context, collected
        self._request = AimedRequest(context, exchange, body, asked)
        self._choosing = Choosing(self._request)
        self._delivering = Delivering(self._request, self._choosing)

    @property
    def seen(self) -> SeenAnswer | None:
        """What the client got, for those who look at it."""
        return self._delivering.seen

    async def answer(self) -> None:
        """Answer the request. Raises ApiError if no server could take it, and ClientGoneError."""
        shadowing, began = Shadowing(self._request), time.monotonic()
        try:
            sees = MAX_COMPARED_BYTES if shadowing.begun else self._collected
            await self._answer_by_route(
                AskingServers(self._request, self._choosing, self._delivering, self._passes_over, sees)
            )
            if self.seen is not None and shadowing.begun:
                shadowing.compare(self.seen, time.monotonic() - began)
        finally:
            shadowing.end()

    async def _answer_by_route(self, asking: AskingServers) -> None:
        targets = [self._request.route.target]
        while True:
            refusal, last = await self._answer_by_model(asking)
            if refusal is None:
                return
            following = self._following(refusal.status, targets)
            if following is None:
                break
            self._context.metrics.fallbacks[targets[-1], following] += 1
            targets.append(following)
            self._request.aim(following)
        if isinstance(refusal, Relay):
            assert last is not None
            await self._delivering.send_whole(refusal, last)
            return
        raise refusal

    def _following(self, status: int, tried: Sequence[str]) -> str | None:
        """The model that is asked after a failure of the one that was asked last."""
        failure = Failure.ERROR if status == 404 else failure_of(status)
        found = None if failure is None else self._request.route.after(failure, tried)
        return None if found is None else found.target

    def _passes_over(self, status: int) -> bool:
        """Whether another server or another model is asked after such an answer."""
        return status in ELSEWHERE or (
            status >= 500 and self._following(status, [self._request.route.target]) is not None
        )

    async def _answer_by_model(
        self, asking: AskingServers
    ) -> tuple[ApiError | Relay | None, BackendServer | None]:
        """Ask servers of a model one after the other; None once the client has its answer, else what to answer if no
        other model can, and the server that said so."""
        tries, last = Tries(self._context.backends.config.retries), None
        refusal: ApiError | Relay | None = None
        while (backend := await self._choosing.next(tries, gone=_is_gone(refusal))) is not None:
            refusal, last = await asking.ask(backend), backend
            if refusal is None:
                break
            tries.failed(backend, counts=not isinstance(refusal, NotSentError))
            if isinstance(refusal, Relay) and refusal.status not in ELSEWHERE:
                break
            self._context.metrics.retried += 1
        return refusal if last is not None else self._choosing.unavailable(), last
