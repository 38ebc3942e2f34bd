"""A request that the server makes of itself, answered as if it had come over HTTP: a line of a batch, or what a socket
asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from quire.records import dataclass
from quire.server.errors import OPENAI_ERRORS, ApiError
from quire.server.exchange import ChunkWriter, Receive, Scope, Send, TextForm
from quire.server.request_memory import Held, RequestMemory

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
# Takes the status of an answer, and a piece of it.
Take = Callable[[int, bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """A complete answer. `retry_after` is the wait in seconds that it asks for, if it does."""

    status: int
    request_id: str
    content_type: str
    body: bytes
    retry_after: float | None = None


async def ask_inner(
    application: Application, memory: RequestMemory, path: str, body: bytes, tenant: str
) -> InnerAnswer:
    """Post a JSON body to a route, as a request of `tenant` in the background.

    It holds memory as any request does, but as a tenant of its own: the requests of clients do not wait behind it.
    """
    collected = _Collected(body)
    try:
        scope = _scope(memory, path, body, tenant, f"batch {tenant}") | {"quire.background": True}
    except ApiError as error:
        return InnerAnswer(
            error.status,
            "",
            "application/json",
            OPENAI_ERRORS.body(error),
            1.0 if error.status == 429 else None,
        )
    await application(scope, collected.receive, collected.send)
    return collected.answer()


async def stream_inner(
    application: Application,
    memory: RequestMemory,
    path: str,
    body: bytes,
    tenant: str,
    take: Take,
    writer: ChunkWriter | None = None,
    form: TextForm | None = None,
) -> None:
    """Post a JSON body to a route, as a request of `tenant`; `take` gets each piece of the answer but those of a stream
    that `writer` accepts, where texts may have a `form` of their own. Cancelling this ends the request.
    Raises ApiError if there is no memory for it.
    """
    collected, status = _Collected(body), 0

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            await take(status, message.get("body", b""))

    scope = _scope(memory, path, body, tenant, tenant) | {"quire.writer": writer, "quire.text_form": form}
    await application(scope, collected.receive, send)


def _scope(memory: RequestMemory, path: str, body: bytes, tenant: str, payer: str) -> dict[str, Any]:
    """The scope of a request whose memory `payer` holds. Raises ApiError if there is none."""
    held = Held()
    held.assign(payer)
    try:
        memory.take_head(held, 0, 0)
        memory.take_body(held, len(body))
    except ApiError:
        held.close()
        raise
    return {
        "type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1", "client": None,
        "headers": [(b"content-type", b"application/json")], "quire.held": held, "quire.tenant": tenant,
    }  # fmt: skip


class _Collected:
    """The ends of a connection that is none: gives the body once, and keeps what is sent."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []

    async def receive(self) -> MutableMapping[str, Any]:
        """The body, then nothing: nobody hangs up."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Keep a part of the answer."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            self._pieces.append(message.get("body", b""))

    def answer(self) -> InnerAnswer:
        """The whole answer."""
        text = {name: value.decode("latin-1") for name, value in self._headers.items()}
        wait = text.get(b"retry-after-ms")
        return InnerAnswer(
            self._status, text.get(b"x-request-id", ""), text.get(b"content-type", ""), b"".join(self._pieces),
            None if wait is None else int(wait) / 1000,
        )  # fmt: skip
