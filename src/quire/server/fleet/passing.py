"""One request on its way to models: to the first, to others after a failure, and a copy to a shadow."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from quire.engine.api import OverloadedError
from quire.routing.traffic import Failure, TrafficRoute, failure_of
from quire.server.dialects.keep_alive import HEEDED
from quire.server.errors import DEGRADED, ApiError
from quire.server.exchange import Receive, Scope, Send
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.member import Member
from quire.server.fleet.shadows import SeenAnswer
from quire.server.request_memory import Held
from quire.types import QuireError

_VERSION = b"x-quire-deployment"


class Passing:
    """Passes a request, whose body was read, to the models of its route. The first answer that is no failure counts, or
    the failure of the last one. An answer comes from one version, which it names.
    """

    def __init__(
        self, fleet: Fleet, route: TrafficRoute, scope: Scope, body: bytes, receive: Receive
    ) -> None:
        self._fleet, self._route, self._scope = fleet, route, scope
        self._body, self._receive = body, receive
        self._tried: set[str] = set()
        self._degraded = ""  # the step by which another model answers
        self.seen = SeenAnswer() if route.shadow is not None else None  # what the client got, to be compared

    async def answer(self, send: Send, *, administrative: bool) -> None:
        """Answer the request. Raises ApiError and QuireError if no model could take it."""
        target: str | None = self._route.target
        if not administrative and (lighter := self._fleet.lighter(self._route.target)) is not None:
            target, self._degraded = lighter
        while target is not None:
            self._tried.add(target)
            member = self._fleet.members[target]
            with (
                member.serving()
            ):  # one that is with a request, or that a request waits for, is not taken away
                target = await self._try(member, send, administrative=administrative)

    async def _try(self, member: Member, send: Send, *, administrative: bool) -> str | None:
        """Try a model: the next one after a failure, None once there is an answer."""
        try:
            if not administrative:  # those for administrators also concern models that sleep
                await self._fleet.ready(member)
        except (ApiError, QuireError) as error:
            overloaded = isinstance(error, OverloadedError)
            following = self._after(Failure.OVERLOAD if overloaded else Failure.ERROR)
            if following is None:
                raise
            return following
        return await self._ask(member, send, administrative=administrative)

    async def _ask(self, member: Member, send: Send, *, administrative: bool) -> str | None:
        following: str | None = None
        began = time.monotonic()

        async def forward(message: MutableMapping[str, Any]) -> None:
            nonlocal following
            if message["type"] == "http.response.start":
                failure = failure_of(message["status"])
                following = None if failure is None else self._after(failure)
                if following is None:
                    headers = [*message.get("headers", ()), (_VERSION, member.id.encode())]
                    if self._degraded:
                        headers.append((DEGRADED, self._degraded.encode("latin-1", "replace")))
                    message = {**message, "headers": headers}
                    if self.seen is not None:
                        self.seen.status = message["status"]
            if following is None:
                if self.seen is not None:
                    self.seen.takes(message.get("body", b""))
                await send(message)

        scope = self._scope
        if not administrative:
            member.keep = scope.get(HEEDED)
        if self._route.fallbacks or self.seen is not None:
            # an attempt that fails must not give back what the next one needs, and a copy sees every piece
            scope = {key: value for key, value in scope.items() if key != "quire.writer"} | {
                "quire.held": Held()
            }
        await member.service.app(scope, again(self._body, self._receive), forward)
        if self.seen is not None:
            self.seen.seconds = time.monotonic() - began
        return following

    def _after(self, failure: Failure) -> str | None:
        gone = {each.target for each in self._route.fallbacks} - self._fleet.members.keys()
        found = self._route.after(failure, self._tried | gone)
        return None if found is None else found.target


def again(body: bytes | None, receive: Receive) -> Receive:
    """The messages of a request whose body was read already."""
    pending = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return first
