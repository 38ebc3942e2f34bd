"""The copy of a request for a shadow: another model, whose answer is compared with what the client got."""

from __future__ import annotations

import asyncio

from quire.router.aimed_request import AimedRequest
from quire.server.fleet.shadows import MAX_COMPARED_BYTES, SeenAnswer
from quire.util.http_client import Whole, body_size

_SHADOW_SECONDS = 120.0  # for the answer of a shadow


class Shadowing:
    """Has a shadow answer a request, if its route has one. `begun`: what the client gets is for a comparison."""

    def __init__(self, request: AimedRequest) -> None:
        """`end` has to follow."""
        self._request, self._context, self._route = request, request.context, request.route
        shadow = self._route.shadow
        self.begun = shadow is not None and self._context.begin_shadow(
            (self._route.target, shadow), body_size(request.given)
        )

    def compare(self, seen: SeenAnswer, seconds: float) -> None:
        """Let the shadow answer the same request, and compare what the client got after so many seconds; nobody waits
        for it."""
        shadow, exchange = self._route.shadow, self._request.exchange
        assert shadow is not None
        seen.status, seen.seconds = exchange.status, seconds
        pair = self._route.target, shadow
        if self._context.shadows.compare(pair, lambda: self._ask(shadow), exchange.request_id, seen):
            self.begun = False  # it ends with the comparison

    def end(self) -> None:
        """The request has ended."""
        if self.begun:
            self._context.end_shadow()

    async def _ask(self, shadow: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(_SHADOW_SECONDS):
                return await self._answer(shadow)
        except TimeoutError:
            return 504, b""
        finally:
            self._context.end_shadow()

    async def _answer(self, shadow: str) -> tuple[int, bytes]:
        request, backends, answer = self._request, self._context.backends, Whole(MAX_COMPARED_BYTES)
        request.aim(shadow)
        able = backends.available(shadow, spilled=request.spilled)
        if not able:
            return 503, b""
        prompt = request.prompt()
        chosen = self._context.policy.choose(prompt, able)
        with backends.busy(chosen, prompt.work(chosen.name)):
            await chosen.client.request(request.head(chosen, body_size(request.body)), request.body, answer)
        return answer.status, answer.body
