"""Which server a request is sent to, and to which one after that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from quire.router.aimed_request import AimedRequest
from quire.router.attempts import Tries
from quire.router.backend_server import BackendServer
from quire.router.picked import picked_servers
from quire.routing.settled_weights import VERSION
from quire.server.errors import ApiError, retry_headers


class Choosing:
    """Chooses the servers for a request. `picked`: what a gateway has said of them."""

    def __init__(self, request: AimedRequest) -> None:
        """Raises ApiError for what a gateway has said."""
        self._request, self._context = request, request.context
        self.picked = picked_servers(request.exchange, self._context.backends.key)
        self._pinned = request.exchange.header(VERSION.encode())  # of the weights
        self._hold_until: float | None = None  # time of the loop, once the request has waited for a server

    async def next(self, tries: Tries, *, gone: bool) -> BackendServer | None:
        """The server that is asked next, None for no other one. If those that there were are gone, the request waits
        until there is one, also one of them that is back."""
        found = self._choose(tries.servers) if tries.may_go_on else None
        if found is None and gone and tries.may_wait and self._may_hold():
            backends = self._context.backends
            now = asyncio.get_running_loop().time()
            left = self._request.asked.seconds_left(self._request.passed)
            self._hold_until = self._hold_until or now + min(backends.config.hold_seconds, left)
            found = await backends.hold(
                self._request.prompt().prompt_tokens,
                self._request.model,
                lambda: self._choose(tries.as_before),
                self._hold_until,
            )
            tries.waited()
        return found

    def able(self, without: Sequence[BackendServer]) -> list[BackendServer]:
        """The servers that may be asked."""
        request = self._request
        return self._context.backends.available(
            request.model, without, spilled=request.spilled, version=request.version
        )

    def unavailable(self) -> ApiError:
        """The answer if no server can be asked."""
        model = self._request.model
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
        if self._request.asked.seconds_left(self._request.passed) <= 0:
            return ApiError(504, "no server could take this request in time", code="deadline_exceeded")
        return ApiError(
            503, "no server can take this request now", code="no_backend", headers=retry_headers(1.0)
        )

    def _may_hold(self) -> bool:
        """Whether the request may wait for a server."""
        holds = self._context.backends.config.hold_seconds > 0
        return holds and self._settled() is None and self._is_served()

    def _is_served(self) -> bool:
        model = self._request.model
        return model is None or self._context.backends.may_serve(model)

    def _settled(self) -> BackendServer | None:
        """The server that has the response from which the request goes on."""
        return self._context.owner(self._request.asked.previous_response_id)

    def _choose(self, tried: list[BackendServer]) -> BackendServer | None:
        request, settled = self._request, self._settled()
        if settled is not None:
            return settled if settled not in tried and settled.could_answer(time.monotonic()) else None
        request.version = self._pinned or self._context.backends.settled_version(request.model)
        able = self.able(tried)
        if self.picked is not None:
            able = self.picked.among(able)
        return self._context.policy.choose(request.prompt(), able) if able else None
