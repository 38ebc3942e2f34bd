"""A session with one tool server: the handshake, its list of tools, calls. Everything it sends is bounded."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quire.records import dataclass
from quire.types import QuireError

Message = dict[str, Any]
T = TypeVar("T")

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # of the protocol; the first is offered
MAX_RESULT_CHARS = 64 * 1024  # of a call, as the model gets it
MAX_PAGES = 64  # of the list of tools
MAX_PARTS = 20_000  # of a list of tools: schemas are objects here
MAX_STRAY = 1000  # messages that answer nothing, while one answer is awaited
# Codes of errors that the protocol's own clients use.
CLOSED, TIMED_OUT = -32000, -32001
_GIVE_UP_SECONDS = 2.0


class McpError(QuireError):
    """A tool server failed, or did not keep to the protocol or the limits.

    `code` is that of JSON-RPC; `status` that of HTTP, if the server answered with one. After one that is `lost` the
    session is of no use.
    """

    def __init__(self, message: str, *, code: int = CLOSED, status: int = 0, lost: bool = False) -> None:
        super().__init__(message)
        self.code, self.status, self.lost = code, status, lost


class RpcError(msgspec.Struct):
    """JSON-RPC's error of a request."""

    code: int = CLOSED
    message: str = ""


class Incoming(msgspec.Struct):
    """A message of a server: the `result` or `error` of the request `id`, or what it asks or tells: a `method`."""

    id: int | str | None = None
    method: str | None = None
    result: Raw | UnsetType = UNSET
    error: RpcError | None = None


class Cancellation:
    """Lets one thread end the request that another one waits for."""

    def __init__(self) -> None:
        self.cancelled = False
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def watch(self, end: Callable[[], None]) -> None:
        """Have `end` called by `cancel`, or now if that has been called."""
        with self._lock:
            self._ends.append(end)
            if not self.cancelled:
                return
        end()

    def cancel(self) -> None:
        """End the request."""
        with self._lock:
            self.cancelled, ends = True, list(self._ends)
        for end in ends:
            end()


class Transport(Protocol):
    """Carries JSON-RPC messages, for several threads. Raises McpError for a broken connection, and for a message that
    is too long.
    """

    @property
    def broken(self) -> bool:
        """Whether nothing can be sent any more."""

    def exchange(self, message: Message, deadline: float, stop: Cancellation, /) -> Iterator[Incoming]:
        """Send a request; yields its answer, and what else the server sends until then. Raises TimeoutError at
        `deadline`, a time of time.monotonic(), McpError after a cancellation.
        """

    def notify(self, message: Message, deadline: float, /) -> None:
        """Send a message that has no answer."""

    def agreed(self, version: str, /) -> None:
        """The version of the protocol that both sides speak."""

    def close(self) -> None:
        """End the connection, and the server if it was started for it."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that a server offers; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    annotations: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call gave, as text for the model."""

    text: str
    failed: bool = False


class _Begun(msgspec.Struct, rename="camel"):
    protocol_version: Any = None


class _Listed(msgspec.Struct, rename="camel"):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}
    annotations: dict[str, Any] | None = None


class _List(msgspec.Struct, rename="camel"):
    tools: list[_Listed]
    next_cursor: str | None = None


class _Resource(msgspec.Struct):
    text: str | None = None


class _Content(msgspec.Struct):
    type: str = ""
    text: str | None = None
    resource: _Resource | None = None


class _Called(msgspec.Struct, rename="camel"):
    content: list[_Content] = []
    is_error: bool | None = None


class McpSession:
    """One server behind a transport. Each request ends after `timeout` seconds with McpError. Threads may share it."""

    def __init__(self, name: str, transport: Transport, timeout: float) -> None:
        self.name = name
        self._transport, self._timeout = transport, timeout
        self._numbers = itertools.count(1)

    @property
    def broken(self) -> bool:
        """Whether the server can be asked nothing any more."""
        return self._transport.broken

    def open(self, version: str, stop: Cancellation | None = None) -> None:
        """The handshake; `version` is Quire's."""
        asked = {
            "protocolVersion": VERSIONS[0],
            "capabilities": {},
            "clientInfo": {"name": "quire", "version": version},
        }
        spoken = self._ask("initialize", asked, _Begun, stop).protocol_version
        if spoken not in VERSIONS:
            raise self._error(f"speaks version {spoken!r:.50} of the protocol, not {', '.join(VERSIONS)}")
        self._transport.agreed(spoken)
        self._notify("notifications/initialized", {})

    def tools(self, stop: Cancellation | None = None) -> list[OfferedTool]:
        """All tools that the server offers."""
        found: list[OfferedTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = {} if cursor is None else {"cursor": cursor}
            listed = self._ask("tools/list", params, _List, stop)
            found += [
                OfferedTool(tool.name, tool.description or "", tool.input_schema, tool.annotations)
                for tool in listed.tools
            ]
            cursor = listed.next_cursor
            if cursor is None:
                return found
        raise self._error(f"has more than {MAX_PAGES} pages of tools")

    def call(self, tool: str, arguments: Mapping[str, Any], stop: Cancellation | None = None) -> CallResult:
        """Call a tool."""
        answer = self._ask("tools/call", {"name": tool, "arguments": arguments}, _Called, stop)
        text = "\n".join(map(_text_of, answer.content))
        return CallResult(cut(text, MAX_RESULT_CHARS), answer.is_error is True)

    def close(self) -> None:
        """End the session."""
        self._transport.close()

    def _ask(self, method: str, params: Mapping[str, Any], kind: type[T], stop: Cancellation | None) -> T:
        """The result of a request. Requests of the server are answered meanwhile; there is nothing that it may ask."""
        number, deadline = next(self._numbers), time.monotonic() + self._timeout
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}
        stop = stop or Cancellation()
        try:
            for stray, message in enumerate(self._transport.exchange(request, deadline, stop)):
                if message.method is not None:
                    self._answer(message, deadline)
                elif message.id == number:
                    return self._result(method, message, kind)
                if stray >= MAX_STRAY:
                    raise self._error(
                        f"sent {MAX_STRAY} messages in place of an answer to {method}", lost=True
                    )
        except TimeoutError:
            self._give_up(method, number, "timeout")
            raise self._error(
                f"did not answer {method} within {self._timeout:g} s", code=TIMED_OUT, lost=True
            ) from None
        except McpError:
            if stop.cancelled:
                self._give_up(method, number, "the request was cancelled")
            raise
        if stop.cancelled:
            self._give_up(method, number, "the request was cancelled")
        raise self._error(f"ended the connection without an answer to {method}", lost=True)

    def _give_up(self, method: str, number: int, reason: str) -> None:
        """Tell the server that nobody waits for an answer."""
        if method != "initialize":
            cancelled = {"requestId": number, "reason": reason}
            with contextlib.suppress(McpError):
                self._notify("notifications/cancelled", cancelled, min(_GIVE_UP_SECONDS, self._timeout))

    def _answer(self, request: Incoming, deadline: float) -> None:
        if request.id is None:
            return  # a notification
        reply: Message = {"jsonrpc": "2.0", "id": request.id}
        if request.method == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {"code": -32601, "message": "this client offers nothing to servers"}
        self._transport.notify(reply, deadline)

    def _result(self, method: str, message: Incoming, kind: type[T]) -> T:
        error = message.error
        if error is not None:
            raise self._error(f"refused {method}: {error.message[:500]}", code=error.code)
        if message.result is UNSET:
            raise self._error(f"sent no result for {method}")
        if kind is _List and sum(map(bytes(message.result).count, (b"{", b"[", b","))) > MAX_PARTS:
            raise self._error(f"lists tools with more than {MAX_PARTS} values")
        try:
            return msgspec.json.decode(message.result, type=kind)
        except (msgspec.MsgspecError, RecursionError) as wrong:
            raise self._error(f"sent a result for {method} that is none: {wrong}") from None

    def _notify(self, method: str, params: Mapping[str, Any], seconds: float | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": dict(params)}
        seconds = self._timeout if seconds is None else seconds
        try:
            self._transport.notify(message, time.monotonic() + seconds)
        except TimeoutError:
            raise self._error(
                f"did not take {method} within {seconds:g} s", code=TIMED_OUT, lost=True
            ) from None

    def _error(self, text: str, *, code: int = CLOSED, lost: bool = False) -> McpError:
        return McpError(f"MCP server {self.name!r} {text}", code=code, lost=lost)


def cut(text: str, chars: int) -> str:
    """A text of at most `chars` characters, and a note of what is left out."""
    if len(text) <= chars:
        return text
    return f"{text[:chars]}\n[{len(text) - chars} more characters were cut off]"


def read_message(name: str, data: bytes) -> Incoming:
    """A message of the server `name`. Raises McpError."""
    try:
        return msgspec.json.decode(data, type=Incoming)
    except (msgspec.MsgspecError, RecursionError):
        raise McpError(
            f"MCP server {name!r} sent a message that is not a JSON object: {data[:80]!r}",
            lost=True,
        ) from None


def _text_of(content: _Content) -> str:
    """One content of a result. What is not text cannot be shown to the model."""
    if content.type == "text":
        return content.text or ""
    if content.resource is not None and content.resource.text is not None:
        return content.resource.text
    return f"[{content.type[:50]} left out]"
