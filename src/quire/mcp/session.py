"""A session with one tool server: the handshake, its list of tools, calls. Everything it sends is bounded."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from quire.records import dataclass
from quire.types import QuireError

Message = dict[str, Any]

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # of the protocol; the first is offered
MAX_MESSAGE_BYTES = 4 * 2**20
MAX_RESULT_CHARS = 64 * 1024  # of a call, as the model gets it
MAX_PAGES = 64  # of the list of tools
MAX_STRAY = 1000  # messages that answer nothing, while one answer is awaited


class McpError(QuireError):
    """A tool server failed, or did not keep to the protocol or the limits."""


class Transport(Protocol):
    """Carries JSON-RPC messages. Raises McpError for a broken connection, and for what exceeds MAX_MESSAGE_BYTES."""

    def exchange(self, message: Message, deadline: float, /) -> Iterator[Message]:
        """Send a message; yields what the server sends from then on, until `deadline`, a time of time.monotonic()."""

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


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a call gave, as text for the model."""

    text: str
    failed: bool = False


class McpSession:
    """One server behind a transport. Each request ends after `timeout` seconds with McpError."""

    def __init__(self, name: str, transport: Transport, timeout: float) -> None:
        self.name = name
        self._transport, self._timeout = transport, timeout
        self._numbers = itertools.count(1)

    def open(self, version: str) -> None:
        """The handshake; `version` is Quire's."""
        answer = self._ask(
            "initialize",
            {
                "protocolVersion": VERSIONS[0],
                "capabilities": {},
                "clientInfo": {"name": "quire", "version": version},
            },
        )
        spoken = answer.get("protocolVersion")
        if spoken not in VERSIONS:
            raise self._error(f"speaks version {spoken!r:.50} of the protocol, not {', '.join(VERSIONS)}")
        self._transport.agreed(spoken)
        self._notify("notifications/initialized", {})

    def tools(self) -> list[OfferedTool]:
        """All tools that the server offers."""
        found: list[OfferedTool] = []
        cursor: Any = None
        for _ in range(MAX_PAGES):
            answer = self._ask("tools/list", {} if cursor is None else {"cursor": cursor})
            listed = answer.get("tools")
            if not isinstance(listed, list):
                raise self._error("sent no list of tools")
            found += map(self._tool, listed)
            cursor = answer.get("nextCursor")
            if cursor is None:
                return found
        raise self._error(f"has more than {MAX_PAGES} pages of tools")

    def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Call a tool."""
        answer = self._ask("tools/call", {"name": tool, "arguments": arguments})
        content = answer.get("content", [])
        if not isinstance(content, list):
            raise self._error("sent a result without a list of contents")
        text = "\n".join(map(_text_of, content))
        if len(text) > MAX_RESULT_CHARS:
            left = len(text) - MAX_RESULT_CHARS
            text = f"{text[:MAX_RESULT_CHARS]}\n[{left} more characters were cut off]"
        return CallResult(text, answer.get("isError") is True)

    def close(self) -> None:
        """End the session."""
        self._transport.close()

    def _tool(self, listed: Any) -> OfferedTool:
        name = listed.get("name") if isinstance(listed, dict) else None
        if not isinstance(name, str):
            raise self._error("listed a tool without a name")
        schema = listed.get("inputSchema")
        return OfferedTool(
            name, str(listed.get("description") or ""), schema if isinstance(schema, dict) else {}
        )

    def _ask(self, method: str, params: Mapping[str, Any]) -> Message:
        """The result of a request. Requests of the server are answered meanwhile; there is nothing that it may ask."""
        number, deadline = next(self._numbers), time.monotonic() + self._timeout
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}
        try:
            for stray, message in enumerate(self._transport.exchange(request, deadline)):
                if "method" in message:
                    self._answer(message, deadline)
                elif message.get("id") == number:
                    return self._result(method, message)
                if stray >= MAX_STRAY:
                    raise self._error(f"sent {MAX_STRAY} messages in place of an answer to {method}")
        except TimeoutError:
            if method != "initialize":
                with contextlib.suppress(McpError):
                    self._notify("notifications/cancelled", {"requestId": number, "reason": "timeout"})
            raise self._error(f"did not answer {method} within {self._timeout:g} s") from None
        raise self._error(f"ended the connection without an answer to {method}")

    def _answer(self, request: Message, deadline: float) -> None:
        if request.get("id") is None:
            return  # a notification
        reply: Message = {"jsonrpc": "2.0", "id": request["id"]}
        if request["method"] == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {"code": -32601, "message": "this client offers nothing to servers"}
        self._transport.notify(reply, deadline)

    def _result(self, method: str, message: Message) -> Message:
        error = message.get("error")
        if isinstance(error, dict):
            raise self._error(f"refused {method}: {str(error.get('message'))[:500]}")
        result = message.get("result")
        if not isinstance(result, dict):
            raise self._error(f"sent no result for {method}")
        return result

    def _notify(self, method: str, params: Mapping[str, Any]) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": dict(params)}
        try:
            self._transport.notify(message, time.monotonic() + self._timeout)
        except TimeoutError:
            raise self._error(f"did not take {method} within {self._timeout:g} s") from None

    def _error(self, text: str) -> McpError:
        return McpError(f"MCP server {self.name!r} {text}")


def _text_of(content: Any) -> str:
    """One content of a result. What is not text cannot be shown to the model."""
    if not isinstance(content, dict):
        return ""
    if content.get("type") == "text":
        return str(content.get("text") or "")
    resource = content.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    return f"[{str(content.get('type'))[:50]} left out]"
