"""Routes: a path, its handler, and the types of request and response. OpenAPI is generated from these alone.

An endpoint is a handler, its types and a route in one file; `app.ROUTES` collects the routes of all files.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from quire.server.context import ServerContext
from quire.server.errors import OPENAI_ERRORS, ErrorForm
from quire.server.exchange import JSON, Body, Exchange
from quire.server.fields import IGNORED, RefusedFields, Unsupported

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A")

PLAIN = b"text/plain; charset=utf-8"
NOTHING = b""  # an answer that says with its status that something is done

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True, eq=False)
class HttpRoute(ABC):
    """A path and method of an `api` (see config.serving.APIS; "" is always there), and of others that have it `also`.

    {} in a path matches any text, which OpenAPI calls `rest`; `open` ones need no key, `admin` ones that of an
    administrator (see admin.AdminAccess); `either` takes both a client's and that.
    """

    method: ClassVar[str]
    path: str
    response: type[Any]
    summary: str
    tag: str
    open: bool = False
    admin: bool = False
    either: bool = False
    rest: str = ""
    media: bytes = JSON  # type of the response
    api: str = "openai"
    also: tuple[str, ...] = ()
    errors: ErrorForm = OPENAI_ERRORS
    further: Mapping[int, str] = field(default_factory=dict)  # statuses of errors that other routes have not

    def belongs(self, apis: Collection[str]) -> bool:
        """Whether a server that offers these APIs has the route."""
        return not self.api or any(api in apis for api in (self.api, *self.also))

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
class Act(HttpRoute, Generic[A]):
    """A route without a JSON body, or with one that its handler reads: it returns a `response` or its bytes, or sends
    it and returns None. `verb` is the method, `query` names the parameters behind the path, and `form` has the JSON
    schema of each part of a multipart body.
    """

    handler: Callable[[ServerContext, Exchange], Awaitable[A | bytes | None]]
    response: type[A]
    verb: str
    query: tuple[str, ...] = ()
    form: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def method(self) -> str:  # type: ignore[override]
        return self.verb

    async def answer(self, context: ServerContext, exchange: Exchange) -> None:
        """Answer with what the handler returns."""
        made = await self.handler(context, exchange)
        if made is not None:
            await exchange.respond(200, _bytes(made), content_type=self.media)


@dataclass(frozen=True, kw_only=True, eq=False)
class Post(HttpRoute, Generic[Q, A]):
    """A route whose handler gets a `request` and returns a `response` or its bytes, or sends it and returns None.

    It may stream `chunk`s, of the type `stream_media`. `refused` and `ignored`: see `fields`.
    """

    method = "POST"
    handler: Callable[[ServerContext, Exchange, Body[Q]], Awaitable[A | bytes | None]]
    request: type[Q]
    response: type[A]
    chunk: type[Any] | None = None
    refused: RefusedFields = field(default_factory=dict)
    ignored: frozenset[str] = IGNORED
    stream_media: str = "text/event-stream"

    async def answer(self, context: ServerContext, exchange: Exchange) -> None:
        """Read the request, check that its fields are known and supported, and answer with what the handler returns."""
        config = context.config
        context.check_ready()  # do not read a body for an engine that is not ready
        check = functools.partial(self._unsupported.check, refuse_unknown=config.unknown_fields == "refuse")
        body = await exchange.json(self.request, config.max_body_bytes, config.body_timeout, check)
        made = await self.handler(context, exchange, body)
        if made is not None:
            await exchange.respond(200, _bytes(made), content_type=self.media)

    @functools.cached_property
    def _unsupported(self) -> Unsupported:
        return Unsupported(self.request, self.refused, self.ignored)


class RouteTable:
    """Routes by path."""

    def __init__(self, routes: Iterable[HttpRoute]) -> None:
        self._exact: dict[str, dict[str, HttpRoute]] = {}
        self._patterns: dict[tuple[str, str], dict[str, HttpRoute]] = {}
        for route in routes:
            before, hole, behind = route.path.partition("{}")
            if hole:
                self._patterns.setdefault((before, behind), {})[route.method] = route
            else:
                self._exact.setdefault(before, {})[route.method] = route

    def find(self, path: str) -> dict[str, HttpRoute] | None:
        """The routes of a path by method; None without one. Of patterns the one with the longest end applies."""
        found = self._exact.get(path)
        if found is not None:
            return found
        matching = [
            (len(behind), methods)
            for (before, behind), methods in self._patterns.items()
            if path.startswith(before) and path.endswith(behind) and len(path) > len(before) + len(behind)
        ]
        return max(matching, key=lambda match: match[0])[1] if matching else None


def _bytes(made: object) -> bytes:
    return made if isinstance(made, bytes) else _encode(made)
