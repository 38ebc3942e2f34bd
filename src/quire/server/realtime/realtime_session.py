"""One socket: a session with a conversation, and the responses that run in it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from quire.server import json_input
from quire.server.access import AccessControl
from quire.server.context import ServerContext
from quire.server.dialects.asking import renamed
from quire.server.errors import ApiError, api_error, bad_request
from quire.server.exchange import TEXT_END, ChunkPiece, Exchange, Receive, Scope, Send, off_loop
from quire.server.fields import Unsupported
from quire.server.inner_request import Application, stream_inner
from quire.server.logs import log_access
from quire.server.query import query_of
from quire.server.realtime.conversation import RealtimeConversation
from quire.server.realtime.realtime_events import RealtimeAnswer, RealtimeEvent
from quire.server.realtime.realtime_types import REFUSED, ClientMessage, ResponseConfig, SessionConfig
from quire.server.realtime.websocket import MAX_MESSAGE_BYTES, SUBPROTOCOL
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.server.realtime.websocket_protocol import WebSocketConnection

# Responses of a socket at a time: one in its conversation, and others beside it.
MAX_RESPONSES = 4
_KEY_PROTOCOL = "openai-insecure-api-key."  # how browsers, which cannot set headers, send a key
_encode = msgspec.json.Encoder().encode
_session_fields = Unsupported(SessionConfig, REFUSED)
_response_fields = Unsupported(ResponseConfig, REFUSED)
C = TypeVar("C", bound=SessionConfig)


async def serve_socket(
    context: ServerContext, access: AccessControl, application: Application, scope: Scope, receive: Receive,
    send: Send,
) -> None:  # fmt: skip
    """Check the handshake, and serve the session until the client leaves. A refusal is an ordinary response."""

    async def refuse(message: Any) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    exchange = Exchange({**scope, "method": "GET"}, receive, refuse, context.memory)
    await receive()  # the wish to connect
    try:
        try:
            access.check_source(exchange)
            _take_key(exchange)
            access.check_key(exchange)
            context.card()
            session = RealtimeSession(context, exchange, application, send, receive)
            context.memory.take_head(exchange.held, 2 * MAX_MESSAGE_BYTES, 0)
        except (ApiError, QuireError) as error:
            refused = api_error(error)
            exchange.details["error"] = refused.code
            body = exchange.errors.body(refused)
            await exchange.respond(refused.status, body, headers=refused.headers)
            return
        exchange.status = 101
        chosen = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await send({"type": "websocket.accept", "subprotocol": chosen, "headers": []})
        await session.run()
    finally:
        exchange.held.close()
        if context.config.access_log:
            log_access(exchange)


def _take_key(exchange: Exchange) -> None:
    """A key among the subprotocols counts as one in the header."""
    for name in exchange.scope["subprotocols"]:
        if name.startswith(_KEY_PROTOCOL):
            key = name.removeprefix(_KEY_PROTOCOL)
            exchange.headers.setdefault(b"authorization", f"Bearer {key}".encode("latin-1", "replace"))


class RealtimeSession:
    """Reads messages of the client one after the other; responses run beside that, and end with the session."""

    def __init__(
        self,
        context: ServerContext,
        exchange: Exchange,
        application: Application,
        send: Send,
        receive: Receive,
    ) -> None:
        self._context, self._exchange, self._application = context, exchange, application
        self._send_message, self._receive = send, receive
        self._connection: WebSocketConnection | None = exchange.scope.get("quire.writer")
        self.numbers = itertools.count(1)  # of messages to the client
        self._conversation = RealtimeConversation(context.memory, exchange.held)
        self._running: dict[str, asyncio.Task[None]] = {}  # responses, by id
        self._main = ""  # the one in the conversation
        self._ending = False
        model = context.model(query_of(exchange.scope["query_string"]).get("model"), exchange)
        self._config: dict[str, Any] = {
            "type": "realtime", "model": model, "output_modalities": ["text"], "instructions": "", "tools": [],
            "tool_choice": "auto", "max_output_tokens": "inf",
        }  # fmt: skip
        self._fixed = {
            "object": "realtime.session", "id": f"sess_{uuid.uuid4().hex}", "truncation": "disabled",
        }  # fmt: skip
        exchange.details["model"] = model

    async def run(self) -> None:
        """Serve until the client leaves or is idle for too long. Nothing runs afterwards."""
        try:
            await self._send({"type": "session.created", "session": self._config | self._fixed})
            while (text := await self._next()) is not None:
                await self._obey(text)
        finally:
            self._ending = True
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next(self) -> str | None:
        """The next message; None at the end of the session."""
        seconds = self._context.config.websocket_idle_timeout
        while True:
            try:
                async with asyncio.timeout(seconds):
                    message = await self._receive()
            except TimeoutError:
                if self._running:
                    continue
                await self._send_message(
                    {"type": "websocket.close", "code": 1001, "reason": f"idle for {seconds:g} s"}
                )
                return None
            if message["type"] == "websocket.disconnect":
                return None
            if (text := message.get("text")) is not None:
                self._exchange.bytes_in += len(text)
                return str(text)
            await self._fail(bad_request(None, "messages are text, in JSON", "invalid_message"), None)

    async def _obey(self, text: str) -> None:
        name: str | None = None
        try:
            message, _ = await self._decode(text.encode(), ClientMessage)
            name = message.event_id
            match message.type:
                case "session.update":
                    await self._update(message)
                case "conversation.item.create":
                    await self._create_item(message)
                case "conversation.item.retrieve":
                    item = self._conversation.find(message.item_id)
                    await self._send({"type": "conversation.item.retrieved", "item": item})
                case "conversation.item.delete":
                    self._conversation.delete(message.item_id)
                    await self._send({"type": "conversation.item.deleted", "item_id": message.item_id})
                case "response.create":
                    await self._respond(message)
                case "response.cancel":
                    self._cancel(message.response_id or self._main)
                case kind:
                    raise bad_request(
                        "type", f"type: {kind!r:.80} is not supported; sessions are of text alone"
                    )
        except (ApiError, QuireError) as error:
            await self._fail(api_error(error), name)

    async def _decode(self, data: bytes, kind: type[Any]) -> tuple[Any, set[str]]:
        return await off_loop(len(data), lambda: json_input.decode(data, kind))

    async def _read_config(self, raw: Any, kind: type[C], fields: Unsupported, name: str) -> C:
        """A part of a message, whose errors name their fields with it in front."""
        if raw is UNSET:
            raise bad_request(name, f"{name}: missing")
        with renamed({"": f"{name}."}):
            read, names = await self._decode(bytes(raw), kind)
            fields.check(names, bytes(raw), refuse_unknown=self._context.config.unknown_fields == "refuse")
            if read.model is not None:
                self._context.model(read.model, self._exchange)
        found: C = read
        return found

    async def _update(self, message: ClientMessage) -> None:
        given = await self._read_config(message.session, SessionConfig, _session_fields, "session")
        self._config |= _set_fields(given)
        await self._send({"type": "session.updated", "session": self._config | self._fixed})

    async def _create_item(self, message: ClientMessage) -> None:
        if message.item is UNSET:
            raise bad_request("item", "item: missing")
        given, _ = await self._decode(bytes(message.item), dict)
        item, before = self._conversation.add(given, message.previous_item_id)
        for kind in ("added", "done"):
            await self._send({"type": f"conversation.item.{kind}", "previous_item_id": before, "item": item})

    # ---- responses

    async def _respond(self, message: ClientMessage) -> None:
        """Start a response."""
        given = ResponseConfig()
        if message.response is not UNSET:
            given = await self._read_config(message.response, ResponseConfig, _response_fields, "response")
        beside = given.conversation == "none"
        if not beside and self._main in self._running:
            text = f"response: {self._main} runs in the conversation; cancel it or wait for its end"
            raise bad_request("response", text, "conversation_already_has_active_response")
        if len(self._running) >= MAX_RESPONSES:
            raise bad_request("response", f"response: {MAX_RESPONSES} are running, the limit of a session")
        conversation = self._conversation
        items = conversation.items if given.input is None else conversation.resolved(given.input)
        if not items:
            raise bad_request("response.input", "response.input: there are no items to answer")
        answer = RealtimeAnswer(None if beside else conversation, given.metadata, self.numbers)
        asked = {**self._config, **_set_fields(given), "input": items, "stream": True, "store": False}
        if asked["max_output_tokens"] == "inf":
            asked["max_output_tokens"] = None
        for name in ("type", "output_modalities", "conversation"):
            asked.pop(name, None)
        run = self._run_response(answer, _encode(asked), message.event_id)
        self._running[answer.id] = task = asyncio.create_task(run)
        task.add_done_callback(functools.partial(self._ended, answer.id))
        if not beside:
            self._main = answer.id

    def _ended(self, name: str, _: asyncio.Task[None]) -> None:
        self._running.pop(name, None)

    def _cancel(self, name: str) -> None:
        task = self._running.get(name)
        if task is None:
            raise bad_request(
                "response_id", "response_id: no such response runs", "response_cancel_not_active"
            )
        task.cancel()

    async def _run_response(self, answer: RealtimeAnswer, body: bytes, event_id: str | None) -> None:
        """Ask /v1/responses, and pass on what it streams."""
        refusal = b""
        writer = None if self._connection is None else _ResponseWriter(self, self._connection, answer)

        async def take(status: int, data: bytes) -> None:
            nonlocal refusal
            if writer is not None and writer.failure is not None:
                raise writer.failure
            if status == 200:
                await self._publish(answer.feed(data))
            else:
                refusal += data

        try:
            await stream_inner(
                self._application, self._context.memory, "/v1/responses", body, self._exchange.tenant, take,
                writer, answer,
            )  # fmt: skip
            if refusal:
                error = msgspec.json.decode(refusal)["error"]
                await self._send({"type": "error", "error": error | {"event_id": event_id}})
        except asyncio.CancelledError:
            if self._ending or answer.ended:
                raise
            await self._publish(answer.cancelled())
        except ApiError as error:  # no memory
            if not answer.ended:
                body = self._exchange.errors.body(error)
                await self._publish(answer.failed(msgspec.json.decode(body)["error"]))

    # ---- sending

    async def _publish(self, events: Iterable[RealtimeEvent]) -> None:
        for event in events:
            await self._send(event)

    async def _fail(self, error: ApiError, event_id: str | None) -> None:
        """Tell the client what was wrong with a message; the session goes on."""
        body = msgspec.json.decode(self._exchange.errors.body(error))["error"]
        await self._send({"type": "error", "error": body | {"event_id": event_id}})

    async def _send(self, event: RealtimeEvent) -> None:
        text = self.encoded(event)
        self._exchange.bytes_out += len(text)
        if self._connection is not None and self._connection.queues:
            self._connection.write_text(text)  # with all others of this callback
            return
        with contextlib.suppress(OSError):  # the client has left: `_next` says so
            await self._send_message({"type": "websocket.send", "text": text.decode()})

    def encoded(self, event: RealtimeEvent) -> bytes:
        """The next message to the client."""
        return _encode({"event_id": f"event_{next(self.numbers)}", **event})


class _ResponseWriter:
    """Takes the events of a streamed response while the client reads: most are made as messages already."""

    __slots__ = ("_answer", "_connection", "_session", "failure")

    def __init__(
        self, session: RealtimeSession, connection: WebSocketConnection, answer: RealtimeAnswer
    ) -> None:
        self._session, self._connection, self._answer = session, connection, answer
        self.failure: ApiError | None = None  # why nothing more can be taken

    @property
    def paused(self) -> bool:
        """Whether the client does not read."""
        return self._connection.paused or self.failure is not None

    def write_chunk(self, before: ChunkPiece, text: ChunkPiece, after: ChunkPiece) -> int:
        """See ChunkWriter."""
        size = len(before) + len(text) + len(after)
        if after is TEXT_END:
            self._answer.grow(text)
            self._connection.write_text(before, text, after)
            return size
        try:
            for event in self._answer.feed(b"".join((before, text, after))):
                self._connection.write_text(self._session.encoded(event))
        except ApiError as error:  # no memory
            self.failure = error
        return size


def _set_fields(given: SessionConfig) -> dict[str, Any]:
    """The fields that are not null, as plain values."""
    return {name: value for name, value in msgspec.to_builtins(given).items() if value is not None}
