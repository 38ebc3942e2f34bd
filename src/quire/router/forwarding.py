"""One request on its way to a server, and to others while none has begun to answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import cache, partial

import msgspec

from quire.config.routing import RouterConfig
from quire.router.attempts import ELSEWHERE, Attempt, NotSentError, Tries, first_of
from quire.router.backend_server import ROUTED, SPILLED, BackendServer
from quire.router.dividing import PREFILL, divisible, leave_alone, with_params
from quire.router.picked import SERVED, address_of, picked_servers
from quire.router.relay import Relay, StreamPieces
from quire.router.request_heads import BACKEND, MODEL, OWN, SUFFICES, request_head
from quire.router.resuming import (
    RESUMABLE,
    CannotResumeError,
    DeliveredStream,
    ResumedStream,
    is_resumable,
    is_seeded,
    with_seed,
)
from quire.router.routed_request import (
    AskedOfServers,
    named,
    response_id,
    usage_of,
    with_field,
    with_time_left,
    without_field,
)
from quire.router.router_context import RouterContext
from quire.routing.continued import FIELD, STREAM, packed, resume_code, stream_proof
from quire.routing.prefix_index import prompt_digests
from quire.routing.router_policies import RoutedPrompt
from quire.routing.settled_weights import VERSION
from quire.routing.tickets import PEER, TICKET, peer_proof
from quire.routing.traffic import Failure, TrafficRoute, failure_of
from quire.server.errors import ApiError, retry_headers
from quire.server.exchange import Exchange
from quire.server.fleet.shadows import MAX_COMPARED_BYTES, SeenAnswer
from quire.server.logs import log
from quire.util.http_client import ClientError, SentBody, UnreachedError, Whole, body_size

_GONE = frozenset((502, 503))
# Answers that a server may give for the ticket, which the client knows nothing of: it has no role, or another key.
_OF_TICKET = frozenset((400, 401, 403, 422))
_OF_OUTPUT = _OF_TICKET | {409}  # likewise for the output so far: it is another engine
_SHADOW_SECONDS = 120.0  # for the answer of a shadow


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
        self._collected = collected
        self._context, self._exchange, self._asked = context, exchange, asked
        self._config: RouterConfig = context.backends.config
        self._parts = asked.parts()
        self._bytes = sum(map(len, self._parts))
        name, rules = asked.model or asked.name or "", context.backends.rules
        self._renamed = name in rules.names
        before = context.model_of(asked.previous_response_id)
        if self._renamed and rules.leads_to(
            name, before
        ):  # what goes on from a stored response stays with its model
            self._route = TrafficRoute(before)
        elif name in rules:
            self._route = rules.route(name, asked.session(exchange), asked.features)
        else:
            self._route = TrafficRoute(name)
        if self._route.judged is not None:
            context.metrics.judge(self._route.judged)
        several = len(context.backends.all) > 1 or self._config.hold_seconds > 0
        self._resumable = self._config.resume and several and is_resumable(exchange.path, asked)
        again = self._resumable or (self._route.shadow is not None and is_seeded(exchange, asked))
        own: SentBody = body  # what is between a router and its servers is dropped
        if asked.resumed_output is not msgspec.UNSET:
            own = without_field(body, FIELD)
        self._given = with_seed(own, asked) if again else own  # the same tokens are drawn each time
        self.seen: SeenAnswer | None = None  # what the client got, for those who look at it
        self._shadowed = False  # what it gets is compared with the answer of a shadow
        self._predicted = 0.0  # tokens that the chosen server has probably cached
        self._aim(self._route.target)
        self._picked = picked_servers(exchange, context.backends.key)
        self._spilled = bool(exchange.header(SPILLED.encode()))
        self._of_router = bool(exchange.header(ROUTED.encode()))
        self._pinned, self._version = (
            exchange.header(VERSION.encode()),
            "",
        )  # of the weights, asked for and chosen
        self._hold_until: float | None = None  # time of the loop, once the request has waited for a server
        self._counted = False  # as work that came

    def _aim(self, target: str) -> None:
        """Ask for a model from now on."""
        self._asked, self._body = named(self._exchange, self._given, self._asked, target)
        self._digests = prompt_digests(self._domain(), self._parts)
        self._ticket: bytes | None = None  # of the prompt, once another server has computed it
        self._divisible = divisible(self._exchange, self._asked)

    async def answer(self) -> None:
        """Answer the request. Raises ApiError if no server could take it, and ClientGoneError."""
        shadow = self._route.shadow
        if shadow is not None:
            self._shadowed = self._context.begin_shadow((self._route.target, shadow), body_size(self._given))
        try:
            await self._answer_by_route()
        finally:
            if self._shadowed:
                self._context.end_shadow()

    async def _answer_by_route(self) -> None:
        began, targets = time.monotonic(), [self._route.target]
        while True:
            refusal, last = await self._answer_by_model()
            if refusal is None:
                self._shadow(time.monotonic() - began)
                return
            following = self._following(refusal.status, targets)
            if following is None:
                break
            self._context.metrics.fallbacks[targets[-1], following] += 1
            targets.append(following)
            self._aim(following)
        if isinstance(refusal, Relay):
            assert last is not None
            await self._send_whole(refusal, last)
            return
        raise refusal

    def _following(self, status: int, tried: Sequence[str]) -> str | None:
        """The model that is asked after a failure of the one that was asked last."""
        failure = Failure.ERROR if status == 404 else failure_of(status)
        found = None if failure is None else self._route.after(failure, tried)
        return None if found is None else found.target

    async def _answer_by_model(self) -> tuple[ApiError | Relay | None, BackendServer | None]:
        """Ask servers of a model one after the other; None once the client has its answer, else what to answer if no
        other model can, and the server that said so."""
        tries, last = Tries(self._config.retries), None
        refusal: ApiError | Relay | None = None
        while (backend := await self._next(tries, gone=_is_gone(refusal))) is not None:
            refusal, last = await self._try(backend), backend
            if refusal is None:
                break
            tries.failed(backend, counts=not isinstance(refusal, NotSentError))
            if isinstance(refusal, Relay) and refusal.status not in ELSEWHERE:
                break
            self._context.metrics.retried += 1
        return refusal if last is not None else self._unavailable(), last

    async def _next(self, tries: Tries, *, gone: bool) -> BackendServer | None:
        """The server that is asked next, None for no other one. If those that there were are gone, the request waits
        until there is one, also one of them that is back."""
        found = self._choose(tries.servers) if tries.may_go_on else None
        if found is None and gone and tries.may_wait and self._may_hold():
            now = asyncio.get_running_loop().time()
            left = self._asked.seconds_left(time.monotonic() - self._exchange.arrival)
            self._hold_until = self._hold_until or now + min(self._config.hold_seconds, left)
            found = await self._context.backends.hold(
                self._prompt().prompt_tokens,
                self._asked.model or self._asked.name,
                lambda: self._choose(tries.as_before),
                self._hold_until,
            )
            tries.waited()
        return found

    def _may_hold(self) -> bool:
        """Whether the request may wait for a server."""
        settled = self._context.owner(self._asked.previous_response_id) is not None
        return self._config.hold_seconds > 0 and not settled and self._is_served()

    def _is_served(self) -> bool:
        model = self._asked.model or self._asked.name
        return model is None or self._context.backends.may_serve(model)

    def _choose(self, tried: list[BackendServer]) -> BackendServer | None:
        backends = self._context.backends
        settled = self._context.owner(self._asked.previous_response_id)
        if settled is not None:
            return settled if settled not in tried and settled.could_answer(time.monotonic()) else None
        self._version = self._pinned or backends.settled_version(self._asked.model or self._asked.name)
        able = self._able(tried)
        if self._picked is not None:
            able = self._picked.among(able)
        return self._context.policy.choose(self._prompt(), able) if able else None

    def _able(self, without: Sequence[BackendServer]) -> list[BackendServer]:
        return self._context.backends.available(
            self._asked.model or self._asked.name, without, spilled=self._spilled, version=self._version
        )

    def _prompt(self) -> RoutedPrompt:
        """The prompt as policies see it; what is cached of it stays what it was before it was sent."""
        rates = self._context.rates
        return RoutedPrompt(
            self._asked.session(self._exchange), rates.prompt_tokens(self._bytes),
            rates.answer_tokens(self._asked.most_tokens()), cache(self._cached),
        )  # fmt: skip

    def _cached(self, name: str) -> float:
        return self._context.backends.cached_tokens(name, self._digests, self._context.rates.prompt_tokens)

    def _domain(self) -> bytes:
        """What separates prompts that share no cache: the model, and the client's key where servers see it."""
        key = b"" if self._context.presents_key else self._exchange.header(b"authorization").encode("latin-1")
        return f"{self._asked.model} ".encode() + key

    def _unavailable(self) -> ApiError:
        model = self._asked.model or self._asked.name
        if model is not None and not self._is_served():
            return ApiError(
                404,
                f"model: {model[:200]!r} is served by no server of this router",
                code="model_not_found",
                param="model",
            )
        if self._pinned and not any(
            each.version(model) == self._pinned for each in self._context.backends.all
        ):
            text = f"{VERSION}: no server has these weights now"
            return ApiError(409, text, code="version_not_available", param=VERSION)
        if self._asked.seconds_left(time.monotonic() - self._exchange.arrival) <= 0:
            return ApiError(504, "no server could take this request in time", code="deadline_exceeded")
        return ApiError(
            503, "no server can take this request now", code="no_backend", headers=retry_headers(1.0)
        )

    async def _try(self, backend: BackendServer) -> ApiError | Relay | None:
        """Ask a server; None once the client has its answer, else what to answer if no other server can."""
        prompt, began = self._prompt(), time.monotonic()
        self._body = with_time_left(self._body, self._asked, began - self._exchange.arrival)
        self._predicted = prompt.cached(backend.name)
        if not self._counted:
            self._counted = True
            self._context.backends.need(backend).arrived(prompt.work(backend.name), began)
        busy = partial(self._context.backends.busy, backend, prompt.answer_work)
        with contextlib.ExitStack() as held:
            held.enter_context(busy())
            body = await self._divided(backend, prompt)
            refusal = await self._ask(self._send(backend, prompt, body, held), prompt, body, began)
            if body is not self._body and isinstance(refusal, Relay) and refusal.status in _OF_TICKET:
                self._ticket, self._predicted = None, prompt.cached(backend.name)
                self._context.dividing.fallbacks["ticket"] += 1
                held.enter_context(busy())
                refusal = await self._ask(
                    self._send(backend, prompt, self._body, held), prompt, self._body, began
                )
        return refusal

    async def _ask(
        self, first: Attempt, prompt: RoutedPrompt, body: SentBody, began: float
    ) -> ApiError | Relay | None:
        """Send the answer of a server to the client, whose request began then; see _try."""
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
            return await self._take(attempt, prompt, began, divided=body is not self._body)
        except ClientError as error:
            attempt.backend.failed(str(error), time.monotonic(), gone=error.refused)
            return ApiError(502, "the server failed while it answered", code="backend_failed")
        finally:
            attempt.close()

    def _send(
        self, backend: BackendServer, prompt: RoutedPrompt, body: SentBody, held: contextlib.ExitStack
    ) -> Attempt:
        """Send a server the request; what is held for it ends with the attempt."""
        context = self._context
        relay = Relay(self._exchange, context.keep if self._resumable else None)
        if self._shadowed or self._collected:
            relay.seen = SeenAnswer() if self._shadowed else SeenAnswer(self._collected)
        context.backends.sent(backend.name, self._exchange.request_id, self._digests, self._bytes)
        head = self._head(backend, body_size(body), peer=body is not self._body)
        request = backend.client.requested(head, body, relay, relay.take)
        return Attempt(backend, relay, request, max(prompt.prompt_tokens - self._predicted, 1.0), held)

    def _hedge_delay(self, attempt: Attempt, prompt: RoutedPrompt, body: SentBody) -> float | None:
        """Seconds after which the request is late; None if it is sent to one server only."""
        hedging, exchange = self._context.hedging, self._exchange
        hedging.came(prompt.work(attempt.backend.name))
        once = body is not self._body or exchange.path not in RESUMABLE or exchange.header(b"idempotency-key")
        return (
            None
            if once
            else hedging.delay(self._context.backends.need(attempt.backend).expected(attempt.ahead))
        )

    def _second(self, first: BackendServer, prompt: RoutedPrompt) -> Attempt | None:
        """Send a late request to a second server, if there is one, and enough was done once."""
        backends, able = self._context.backends, self._able([first])
        if not able or self._picked is not None:
            return None
        other = self._context.policy.choose(prompt, able)
        if not self._context.hedging.take(prompt.work(other.name)):
            return None
        self._context.metrics.hedged += 1
        busy = contextlib.ExitStack()
        busy.enter_context(backends.busy(other, prompt.answer_work))
        return self._send(other, prompt, self._body, busy)

    async def _take(
        self, attempt: Attempt, prompt: RoutedPrompt, began: float, *, divided: bool
    ) -> ApiError | Relay | None:
        """Send an answer that has begun to the client; see _try. Raises ClientError."""
        context, backend, relay = self._context, attempt.backend, attempt.relay
        if divided and TICKET in relay.headers:
            leave_alone(backend)
        if (divided and relay.status in _OF_TICKET) or (
            relay.is_whole and self._is_passed_over(relay.status)
        ):
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
        await self._pass_on(backend, relay, attempt.request)
        self.seen = relay.seen
        return None

    def _is_of_version(self, backend: BackendServer, version: str) -> bool:
        """Whether an answer has the weights that it has to have; that it has others is noted."""
        model = self._asked.model or self._asked.name
        if version and version != backend.version(model):
            backend.has_version(model, version)
        return not (self._version and version) or version == self._version

    def _is_passed_over(self, status: int) -> bool:
        """Whether another server or another model is asked after such an answer."""
        return status in ELSEWHERE or (
            status >= 500 and self._following(status, [self._route.target]) is not None
        )

    def _shadow(self, seconds: float) -> None:
        """Let a shadow answer the same request, and compare; nobody waits for it."""
        shadow, seen, exchange = self._route.shadow, self.seen, self._exchange
        if shadow is not None and seen is not None:
            seen.status, seen.seconds = exchange.status, seconds
            pair = self._route.target, shadow
            if self._context.shadows.compare(
                pair, lambda: self._ask_shadow(shadow), exchange.request_id, seen
            ):
                self._shadowed = False  # it ends with the comparison

    async def _ask_shadow(self, shadow: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(_SHADOW_SECONDS):
                return await self._answer_of_shadow(shadow)
        except TimeoutError:
            return 504, b""
        finally:
            self._context.end_shadow()

    async def _answer_of_shadow(self, shadow: str) -> tuple[int, bytes]:
        self._aim(shadow)
        backends, prompt, answer = self._context.backends, self._prompt(), Whole(MAX_COMPARED_BYTES)
        able = backends.available(shadow, spilled=self._spilled)
        if not able:
            return 503, b""
        chosen = self._context.policy.choose(prompt, able)
        with backends.busy(chosen, prompt.work(chosen.name)):
            head = self._head(chosen, body_size(self._body))
            await chosen.client.request(head, self._body, answer)
        return answer.status, answer.body

    async def _divided(self, backend: BackendServer, prompt: RoutedPrompt) -> SentBody:
        """The body for the server that answers, once another one has computed the prompt if that pays."""
        dividing, model = self._context.dividing, self._asked.model or self._asked.name
        if self._ticket is None and self._divisible:
            other = dividing.server_for(backend, prompt, model)
            if other is not None:
                self._divisible = False  # once
                self._ticket = await dividing.ticket(
                    other, prompt, lambda size: self._head(other, size, peer=True),
                    with_params(self._body, self._asked, PREFILL),
                )  # fmt: skip
                if self._ticket is not None:
                    self._context.backends.sent(
                        other.name, self._exchange.request_id, self._digests, self._bytes
                    )
        if self._ticket is None:
            return self._body
        self._predicted = prompt.prompt_tokens
        return with_params(self._body, self._asked, self._ticket)

    async def _pass_on(self, backend: BackendServer, relay: Relay, request: asyncio.Task[None]) -> None:
        if relay.is_whole:
            await request
            await self._send_whole(relay, backend)
        else:
            await self._exchange.start(
                relay.status, self._headers(relay, backend, "application/octet-stream")
            )
            try:
                await relay.stream(request)
            except ClientError as error:
                backend.failed(str(error), time.monotonic())
                if not await self._goes_on(relay, backend):
                    await self._cut_off(relay)
                return
            await self._exchange.write(b"", more=False)
        if relay.status >= 500:
            backend.failed(f"HTTP {relay.status}", time.monotonic())
        else:
            backend.succeeded()
        self._learn(backend, relay)

    async def _goes_on(self, relay: Relay, lost: BackendServer) -> bool:
        """Let other servers go on with a stream whose server is lost; false if none could."""
        tries = Tries(self._config.retries)
        tries.failed(lost)
        while relay.is_kept and (other := await self._next(tries, gone=True)) is not None:
            try:
                await self._resume(relay, other)
            except ClientError as error:
                other.failed(str(error), time.monotonic(), gone=error.refused)
                tries.failed(other, counts=not isinstance(error, UnreachedError))
            except CannotResumeError as error:
                log.warning("request %s: %s cannot go on: %s", self._exchange.request_id, other.name, error)
                return False
            else:
                self._context.metrics.resumed += 1
                relay.seen = None  # it has a part of the answer alone
                return True
        return False

    async def _resume(self, relay: Relay, other: BackendServer) -> None:
        """Send the request to another server, and the rest of its stream to the client: behind the ids of the output
        so far if it takes them, else from the first token on.

        Raises ClientError if it fails too, and CannotResumeError.
        """
        delivered = DeliveredStream(b"".join(relay.sent))
        self._body = with_time_left(self._body, self._asked, time.monotonic() - self._exchange.arrival)
        behind = self._behind_output(relay)
        if behind is None or not await self._follow(relay, other, delivered, behind):
            await self._follow(relay, other, delivered, self._body)
        elif behind is not None:
            self._context.metrics.resumed_by_ids += 1
        other.succeeded()
        await self._exchange.write(b"", more=False)

    def _behind_output(self, relay: Relay) -> SentBody | None:
        """The body with the output so far; None if its ids are not known."""
        given, key = relay.ids.given(self._asked.samples), self._context.dividing.key
        if not (relay.mark and any(given) and key):
            return None
        ids = packed(given)
        code = resume_code(key, self._exchange.request_id, relay.mark, ids)
        value = msgspec.json.encode({"ids": ids, "mark": relay.mark, "code": code})
        return with_field(self._body, FIELD, value, replaces=False)

    async def _follow(
        self, relay: Relay, other: BackendServer, delivered: DeliveredStream, body: SentBody
    ) -> bool:
        """Send a body to another server, and the client what it lacks of the stream; false if the server refused the
        output so far. Raises as _resume does."""
        given = [] if body is self._body else [*map(len, relay.ids.given(self._asked.samples))]
        resumed, sink = ResumedStream(delivered, given), StreamPieces()
        with self._context.backends.busy(other, self._prompt().work(other.name)):
            head = self._head(other, body_size(body))
            request = other.client.requested(head, body, sink, sink.take)
            other.reading.add(sink)
            try:
                async with asyncio.timeout(self._config.first_byte_timeout) as begins:
                    async for piece in sink.pieces(request):
                        begins.reschedule(None)
                        if sink.version and sink.version != relay.headers.get(VERSION, sink.version):
                            raise CannotResumeError("the other server has other weights")
                        known = resumed.ids.size
                        rest = resumed.feed(piece)
                        relay.follows(sink.mark, resumed.ids, resumed.ids.size - known)
                        if rest:
                            relay.add(rest)
                            await self._exchange.write(rest)
            except TimeoutError:
                raise ClientError("did not begin to answer in time") from None
            except ClientError:
                if body is not self._body and sink.status in _OF_OUTPUT:
                    return False
                raise
            finally:
                request.cancel()
                other.reading.discard(sink)
        resumed.end()
        return True

    async def _cut_off(self, relay: Relay) -> None:
        """End a response whose server is gone, so that the client sees that it is not complete."""
        exchange = self._exchange
        exchange.details["ended"] = "its server was lost"
        self._context.metrics.cut_off += 1
        if relay.is_stream and not self._of_router:
            error = ApiError(
                502, "the server was lost while it answered; send the request again", code="backend_lost"
            )
            await exchange.write(exchange.errors.event(exchange.errors.body(error)))
        if exchange.abort is not None:
            await asyncio.sleep(0.05)  # what was written is sent first
            exchange.abort()

    async def _send_whole(self, relay: Relay, backend: BackendServer) -> None:
        body, headers = relay.body, self._headers(relay, backend, "application/json")
        await self._exchange.start(relay.status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._exchange.write(body)
        await self._exchange.write(b"", more=False)

    def _headers(self, relay: Relay, backend: BackendServer, kind_else: str) -> list[tuple[bytes, bytes]]:
        kind = relay.headers.get("content-type", kind_else).encode("latin-1")
        passed = [
            each for each in relay.passed_headers() if each[0] not in OWN
        ]  # a server may be a router, too
        headers = [(b"content-type", kind), *passed, (BACKEND, backend.name.encode())]
        if self._picked is not None:
            headers.append((SERVED, address_of(backend).encode()))
        if self._renamed:
            headers.append(
                (MODEL, (self._asked.model or self._asked.name or "").encode("latin-1", "replace"))
            )
        if self._route.judged is not None:
            headers.append((SUFFICES, b"%.4f" % self._route.judged.suffices))
        return headers

    def _learn(self, backend: BackendServer, relay: Relay) -> None:
        """Keep what the answer says: where a stored response is, how long texts are in tokens, what was cached."""
        if relay.status != 200:
            return
        if (found := response_id(relay.beginning)) is not None:
            self._context.stored(found.decode(), backend, self._asked.model or "")
        usage = usage_of(relay.end)
        self._context.rates.learn(self._bytes, usage)
        if "prompt_tokens" in usage:
            self._context.metrics.compare(self._predicted, usage)

    def _head(self, backend: BackendServer, size: int, *, peer: bool = False) -> bytes:
        """The head of a request whose body has so many bytes. To a `peer` the router shows that it has the key."""
        exchange, own = self._exchange, list[str]()
        key = self._context.dividing.key
        if peer:
            own.append(f"{PEER}: {peer_proof(key, exchange.request_id)}")
        if key and self._resumable:
            own.append(f"{STREAM}: {stream_proof(key, exchange.request_id)}")
        if backend.is_router:
            own += [f"{ROUTED}: 1", *([f"{VERSION}: {self._version}"] if self._version else [])]
        has_body = self._body or exchange.method in {"POST", "PUT", "PATCH"}
        return request_head(
            exchange, backend, own, size if has_body else None, passes_key=not self._context.has_keys
        )
