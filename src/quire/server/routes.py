"""Routes: a path, its handler, and the types of request and response. OpenAPI is generated from these alone.

An endpoint is a handler, its types and a route in one file; `app.ROUTES` collects the routes of all files.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from quire.server.context import ServerContext
from quire.server.exchange import JSON, Body, Exchange
from quire.server.fields import RefusedFields, Unsupported

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True, eq=False)
class HttpRoute(ABC):
    """A path and method. A path ending in {} matches any rest, which OpenAPI calls `rest`; `open` ones need no key."""

    method: ClassVar[str]
    path: str
    response: type[Any]
    summary: str
    tag: str
    open: bool = False
    rest: str = ""
    media: bytes = JSON  # type of the response

    @abstractmethod
    async def answer(self, context: ServerContext, exchange: Exchange) -> None:
        """Answer a request. Raises exceptions that become error responses."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Get(HttpRoute, Generic[A]):
    """A route whose handler returns a `response`, or its bytes."""

    method = "GET"
    handler: Callable[[ServerContext, Exchange], Awaitable[A | bytes]]
    response: type[A]

    async def answer(self, context: ServerContext, exchange: Exchange) -> None:
        """Answer with what the handler returns."""
        await exchange.respond(200, _bytes(await self.handler(context, exchange)), content_type=self.media)


@dataclass(frozen=True, kw_only=True, eq=False)
class Post(HttpRoute, Generic[Q, A]):
    """A route whose handler gets a `request` and returns a `response`, or sends it and returns None.

    It may stream `chunk`s. `refused` are fields of other servers, see `fields`.
    """

    method = "POST"
    handler: Callable[[ServerContext, Exchange, Body[Q]], Awaitable[A | None]]
    request: type[Q]
    response: type[A]
    chunk: type[Any] | None = None
    refused: RefusedFields = field(default_factory=dict)

    async def answer(self, context: ServerContext, exchange: Exchange) -> None:
        """Read the request, check that its fields are known and supported, and answer with what the handler returns."""
        config = context.config
        context.card()  # do not read a body for an engine that is not ready
        check = functools.partial(self._unsupported.check, refuse_unknown=config.unknown_fields == "refuse")
        body = await exchange.json(self.request, config.max_body_bytes, config.body_timeout, check)
        made = await self.handler(context, exchange, body)
        if made is not None:
            await exchange.respond(200, _bytes(made), content_type=self.media)

    @functools.cached_property
    def _unsupported(self) -> Unsupported:
        return Unsupported(self.request, self.refused)


def _bytes(made: object) -> bytes:
    return made if isinstance(made, bytes) else _encode(made)
