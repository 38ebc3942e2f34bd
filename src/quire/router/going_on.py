"""A stream whose server was lost, at the servers that go on with it."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec

from quire.router.aimed_request import AimedRequest
from quire.router.attempts import Tries
from quire.router.backend_server import BackendServer
from quire.router.choosing import Choosing
from quire.router.relay import Relay, StreamPieces
from quire.router.resuming import CannotResumeError, DeliveredStream, ResumedStream
from quire.router.routed_request import with_field
from quire.routing.continued import FIELD, packed, resume_code
from quire.routing.settled_weights import VERSION
from quire.server.logs import log
from quire.util.http_client import ClientError, SentBody, UnreachedError, body_size

# Answers that a server may give for the output so far: it has no role, another key, or it is another engine.
_OF_OUTPUT = frozenset((400, 401, 403, 409, 422))


class GoingOn:
    """Lets other servers go on with the stream of a request."""

    def __init__(self, request: AimedRequest, choosing: Choosing) -> None:
        self._request, self._context, self._choosing = request, request.context, choosing

    async def goes_on(self, relay: Relay, lost: BackendServer) -> bool:
        """Let other servers go on with a stream whose server is lost; false if none could."""
        tries = Tries(self._context.backends.config.retries)
        tries.failed(lost)
        while relay.is_kept and (other := await self._choosing.next(tries, gone=True)) is not None:
            try:
                await self._resume(relay, other)
            except ClientError as error:
                other.failed(str(error), time.monotonic(), gone=error.refused)
                tries.failed(other, counts=not isinstance(error, UnreachedError))
            except CannotResumeError as error:
                name = self._request.exchange.request_id
                log.warning("request %s: %s cannot go on: %s", name, other.name, error)
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
        delivered = DeliveredStream(relay.delivered)
        self._request.pass_time()
        behind = self._behind_output(relay)
        if behind is None or not await self._follow(relay, other, delivered, behind):
            await self._follow(relay, other, delivered, self._request.body)
        elif behind is not None:
            self._context.metrics.resumed_by_ids += 1
        other.succeeded()
        await self._request.exchange.write(b"", more=False)

    def _behind_output(self, relay: Relay) -> SentBody | None:
        """The body with the output so far; None if its ids are not known."""
        given, key = relay.ids.given(self._request.asked.samples), self._context.dividing.key
        if not (relay.mark and any(given) and key):
            return None
        ids = packed(given)
        code = resume_code(key, self._request.exchange.request_id, relay.mark, ids)
        value = msgspec.json.encode({"ids": ids, "mark": relay.mark, "code": code})
        return with_field(self._request.body, FIELD, value, replaces=False)

    async def _follow(
        self, relay: Relay, other: BackendServer, delivered: DeliveredStream, body: SentBody
    ) -> bool:
        """Send a body to another server, and the client what it lacks of the stream; false if the server refused the
        output so far. Raises as _resume does."""
        request, prompt = self._request, self._request.prompt()
        behind = body is not request.body
        given = [*map(len, relay.ids.given(request.asked.samples))] if behind else []
        resumed, sink = ResumedStream(delivered, given), StreamPieces()
        with self._context.backends.busy(other, prompt.answer_work), contextlib.ExitStack() as computing:
            computing.enter_context(other.computing(prompt.uncached(other.name) + sum(given)))
            sent = other.client.requested(request.head(other, body_size(body)), body, sink, sink.take)
            other.reading.add(sink)
            try:
                async with asyncio.timeout(self._context.backends.config.first_byte_timeout) as begins:
                    async for piece in sink.pieces(sent):
                        begins.reschedule(None)
                        computing.close()
                        if sink.version and sink.version != relay.headers.get(VERSION, sink.version):
                            raise CannotResumeError("the other server has other weights")
                        known = resumed.ids.size
                        rest = resumed.feed(piece)
                        relay.follows(sink.mark, resumed.ids, resumed.ids.size - known)
                        if rest:
                            relay.add(rest)
                            await request.exchange.write(rest)
            except TimeoutError:
                raise ClientError("did not begin to answer in time") from None
            except ClientError:
                if behind and sink.status in _OF_OUTPUT:
                    return False
                raise
            finally:
                sent.cancel()
                other.reading.discard(sink)
        resumed.end()
        return True
