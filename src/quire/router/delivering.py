"""An answer on its way to the client, and what is learned from it."""

from __future__ import annotations

import asyncio
import time

from quire.router.aimed_request import AimedRequest
from quire.router.backend_server import ROUTED, BackendServer
from quire.router.choosing import Choosing
from quire.router.going_on import GoingOn
from quire.router.picked import SERVED, address_of
from quire.router.relay import Relay
from quire.router.request_heads import BACKEND, MODEL, OWN, SUFFICES
from quire.router.routed_request import response_id, usage_of
from quire.server.errors import ApiError
from quire.server.fleet.shadows import SeenAnswer
from quire.util.http_client import ClientError


class Delivering:
    """Sends the client of a request its answer. `seen`: what it got, for those who look at it."""

    def __init__(self, request: AimedRequest, choosing: Choosing) -> None:
        self._request, self._context, self._exchange = request, request.context, request.exchange
        self._gateway = choosing.picked is not None
        self._going_on = GoingOn(request, choosing)
        self.seen: SeenAnswer | None = None

    async def deliver(
        self, backend: BackendServer, relay: Relay, request: asyncio.Task[None], predicted: float
    ) -> None:
        """Send an answer that has begun. So many tokens of its prompt were probably cached. Raises ClientError."""
        if relay.is_whole:
            await request
            await self.send_whole(relay, backend)
        elif not await self._stream(backend, relay, request):
            self.seen = relay.seen
            return
        if relay.status >= 500:
            backend.failed(f"HTTP {relay.status}", time.monotonic())
        else:
            backend.succeeded()
        self._learn(backend, relay, predicted)
        self.seen = relay.seen

    async def send_whole(self, relay: Relay, backend: BackendServer) -> None:
        """Send an answer that is complete."""
        body, headers = relay.body, self._headers(relay, backend, "application/json")
        await self._exchange.start(relay.status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._exchange.write(body)
        await self._exchange.write(b"", more=False)

    async def _stream(self, backend: BackendServer, relay: Relay, request: asyncio.Task[None]) -> bool:
        """Send an answer as it comes; false if its server was lost."""
        await self._exchange.start(relay.status, self._headers(relay, backend, "application/octet-stream"))
        try:
            await relay.stream(request)
        except ClientError as error:
            backend.failed(str(error), time.monotonic())
            if not await self._going_on.goes_on(relay, backend):
                await self._cut_off(relay)
            return False
        await self._exchange.write(b"", more=False)
        return True

    async def _cut_off(self, relay: Relay) -> None:
        """End a response whose server is gone, so that the client sees that it is not complete."""
        exchange = self._exchange
        exchange.details["ended"] = "its server was lost"
        self._context.metrics.cut_off += 1
        if relay.is_stream and not exchange.header(ROUTED.encode()):
            error = ApiError(
                502, "the server was lost while it answered; send the request again", code="backend_lost"
            )
            await exchange.write(exchange.errors.event(exchange.errors.body(error)))
        if exchange.abort is not None:
            await asyncio.sleep(0.05)  # what was written is sent first
            exchange.abort()

    def _headers(self, relay: Relay, backend: BackendServer, kind_else: str) -> list[tuple[bytes, bytes]]:
        request, kind = self._request, relay.headers.get("content-type", kind_else).encode("latin-1")
        passed = [
            each for each in relay.passed_headers() if each[0] not in OWN
        ]  # a server may be a router, too
        headers = [(b"content-type", kind), *passed, (BACKEND, backend.name.encode())]
        if self._gateway:
            headers.append((SERVED, address_of(backend).encode()))
        if request.renamed:
            headers.append((MODEL, (request.model or "").encode("latin-1", "replace")))
        if request.route.judged is not None:
            headers.append((SUFFICES, b"%.4f" % request.route.judged.suffices))
        return headers

    def _learn(self, backend: BackendServer, relay: Relay, predicted: float) -> None:
        """Keep what the answer says: where a stored response is, how long texts are in tokens, what was cached."""
        if relay.status != 200:
            return
        if (found := response_id(relay.beginning)) is not None:
            self._context.stored(found.decode(), backend, self._request.asked.model or "")
        usage = usage_of(relay.end)
        self._context.rates.learn(self._request.size, usage)
        if "prompt_tokens" in usage:
            self._context.metrics.compare(predicted, usage)
