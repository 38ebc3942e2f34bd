"""A request at the server that was chosen, and at others that help: one that computes its prompt, one if it is late."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from quire.router.aimed_request import AimedRequest
from quire.router.attempts import Attempt, first_of
from quire.router.backend_server import BackendServer
from quire.router.choosing import Choosing
from quire.router.delivering import Delivering
from quire.router.dividing import PREFILL, leave_alone, with_params
from quire.router.relay import Relay
from quire.router.resuming import RESUMABLE
from quire.routing.router_policies import RoutedPrompt
from quire.routing.settled_weights import VERSION
from quire.routing.tickets import TICKET
from quire.server.errors import ApiError, retry_headers
from quire.server.fleet.shadows import SeenAnswer
from quire.util.http_client import ClientError, SentBody, body_size

# Answers that a server may give for the ticket, which the client knows nothing of: it has no role, or another key.
_OF_TICKET = frozenset((400, 401, 403, 422))


class AskingServers:
    """Asks servers, and has the answer of one delivered. `passes_over` tells whether another server or model is asked
    after an answer; `sees`: bytes of it that are looked at afterwards."""

    def __init__(
        self,
        request: AimedRequest,
        choosing: Choosing,
        delivering: Delivering,
        passes_over: Callable[[int], bool],
        sees: int,
    ) -> None:
        self._request, self._context = request, request.context
        self._config = self._context.backends.config
        self._choosing, self._delivering = choosing, delivering
        self._passes_over, self._sees = passes_over, sees
        self._predicted = 0.0  # tokens that the chosen server has probably cached
        self._counted = False  # as work that came

    async def ask(self, backend: BackendServer) -> ApiError | Relay | None:
        """Ask a server; None once the client has its answer, else what to answer if no other server can."""
        request, prompt, began = self._request, self._request.prompt(), time.monotonic()
        request.pass_time()
        self._predicted = prompt.cached(backend.name)
        if not self._counted:
            self._counted = True
            self._context.backends.need(backend).arrived(prompt.work(backend.name), began)
        busy = partial(self._context.backends.busy, backend, prompt.answer_work)
        with contextlib.ExitStack() as held:
            held.enter_context(busy())
            body = await self._divided(backend, prompt)
            refusal = await self._ask(self._send(backend, prompt, body, held), prompt, body, began)
            if body is not request.body and isinstance(refusal, Relay) and refusal.status in _OF_TICKET:
                request.ticket, self._predicted = None, prompt.cached(backend.name)
                self._context.dividing.fallbacks["ticket"] += 1
                held.enter_context(busy())
                refusal = await self._ask(
                    self._send(backend, prompt, request.body, held), prompt, request.body, began
                )
        return refusal

    async def _divided(self, backend: BackendServer, prompt: RoutedPrompt) -> SentBody:
        """The body for the server that answers, once another one has computed the prompt if that pays."""
        dividing, request = self._context.dividing, self._request
        if request.ticket is None and request.divisible:
            other = dividing.server_for(backend, prompt, request.model)
            if other is not None:
                request.divisible = False  # once
                request.ticket = await dividing.ticket(
                    other, prompt, lambda size: request.head(other, size, peer=True),
                    with_params(request.body, request.asked, PREFILL),
                )  # fmt: skip
                if request.ticket is not None:
                    request.is_sent(other)
        if request.ticket is None:
            return request.body
        self._predicted = prompt.prompt_tokens
        return with_params(request.body, request.asked, request.ticket)

    def _send(
        self, backend: BackendServer, prompt: RoutedPrompt, body: SentBody, held: contextlib.ExitStack
    ) -> Attempt:
        """Send a server the request; what is held for it ends with the attempt."""
        request = self._request
        relay = Relay(request.exchange, self._context.keep if request.resumable else None)
        if self._sees:
            relay.seen = SeenAnswer(self._sees)
        request.is_sent(backend)
        head = request.head(backend, body_size(body), peer=body is not request.body)
        sent = backend.client.requested(head, body, relay, relay.take)
        return Attempt(backend, relay, sent, max(prompt.prompt_tokens - self._predicted, 1.0), held)

    async def _ask(
        self, first: Attempt, prompt: RoutedPrompt, body: SentBody, began: float
    ) -> ApiError | Relay | None:
        """Send the answer of a server to the client, whose request began then; see ask."""
        attempt, failure = first, None
        try:
            delay = self._hedge_delay(first, prompt, body)
            if delay is None:
                failure = await first.begins(self._config)
            else:
                second = partial(self._second, first.backend, prompt)
                attempt, failure = await first_of(first, delay, second, self._config)
            if failure is not None:
                return failure
            if attempt is not first:
                self._context.metrics.hedges_won += 1
                self._predicted = prompt.cached(attempt.backend.name)
            return await self._take(attempt, prompt, began, divided=body is not self._request.body)
        except ClientError as error:
            attempt.backend.failed(str(error), time.monotonic(), gone=error.refused)
            return ApiError(502, "the server failed while it answered", code="backend_failed")
        finally:
            attempt.close()

    def _hedge_delay(self, attempt: Attempt, prompt: RoutedPrompt, body: SentBody) -> float | None:
        """Seconds after which the request is late; None if it is sent to one server only."""
        hedging, exchange = self._context.hedging, self._request.exchange
        hedging.came(prompt.work(attempt.backend.name))
        divided = body is not self._request.body
        once = divided or exchange.path not in RESUMABLE or exchange.header(b"idempotency-key")
        need = self._context.backends.need(attempt.backend)
        return None if once else hedging.delay(need.expected(attempt.ahead))

    def _second(self, first: BackendServer, prompt: RoutedPrompt) -> Attempt | None:
        """Send a late request to a second server, if there is one, and enough was done once."""
        backends, able = self._context.backends, self._choosing.able([first])
        if not able or self._choosing.picked is not None:
            return None
        other = self._context.policy.choose(prompt, able)
        if not self._context.hedging.take(prompt.work(other.name)):
            return None
        self._context.metrics.hedged += 1
        busy = contextlib.ExitStack()
        busy.enter_context(backends.busy(other, prompt.answer_work))
        return self._send(other, prompt, self._request.body, busy)

    async def _take(
        self, attempt: Attempt, prompt: RoutedPrompt, began: float, *, divided: bool
    ) -> ApiError | Relay | None:
        """Send an answer that has begun to the client; see ask. Raises ClientError."""
        context, backend, relay = self._context, attempt.backend, attempt.relay
        if divided and TICKET in relay.headers:
            leave_alone(backend)
        if (divided and relay.status in _OF_TICKET) or (relay.is_whole and self._passes_over(relay.status)):
            if relay.is_whole:
                await attempt.request
            backend.refused(relay.status)
            return relay
        if relay.status == 200 and not self._is_of_version(backend, relay.headers.get(VERSION, "")):
            context.metrics.other_weights += 1
            return ApiError(
                503, "the weights are being changed", code="other_weights", headers=retry_headers(1.0)
            )
        now = time.monotonic()
        context.metrics.first_byte.observe(now - began)
        seconds, expected = max(now - attempt.sent - backend.round_trip, 0.0), None
        if relay.status == 200 and not divided:
            tokens = attempt.ahead if relay.is_stream else attempt.outstanding
            need = context.backends.need(backend)
            expected = need.expected(tokens)
            context.hedging.began(seconds, expected)
            need.answered(tokens, seconds)
        if relay.status < 500:
            context.backends.began(backend, seconds, expected)
        if divided and relay.is_stream:
            context.dividing.costs.moved(prompt.prompt_tokens, seconds)
        await self._delivering.deliver(backend, relay, attempt.request, self._predicted)
        return None

    def _is_of_version(self, backend: BackendServer, version: str) -> bool:
        """Whether an answer has the weights that it has to have; that it has others is noted."""
        model, wanted = self._request.model, self._request.version
        if version and version != backend.version(model):
            backend.has_version(model, version)
        return not (wanted and version) or version == wanted
