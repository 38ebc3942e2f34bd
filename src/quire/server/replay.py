"""Idempotency-Key: a repeated request gets the recorded answer, without being computed again."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import field

from quire.records import dataclass
from quire.server.errors import ApiError, bad_request, retry_headers
from quire.server.exchange import Exchange
from quire.server.request_memory import MAX_RECORDED_BYTES

KEEP_SECONDS = 600.0
MAX_ANSWERS = 1024
MAX_KEY_CHARS = 255


@dataclass(slots=True)
class _Answer:
    """A recorded answer; `body` is None while it is being made."""

    digest: bytes
    since: float
    content_type: bytes = b""
    body: bytes | None = None


@dataclass(slots=True)
class Replays:
    """Recent answers by API key, path and Idempotency-Key; the oldest are dropped when there are too many.

    Successes of up to MAX_RECORDED_BYTES, streamed or not, are kept within `limit()` bytes; a failed request may be
    tried again.
    """

    limit: Callable[[], int]
    _answers: OrderedDict[tuple[str, str, str], _Answer] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def find(self, exchange: Exchange, body: bytes) -> _Answer | None:
        """The answer to repeat, or None after registering this request as the one that makes it; then call `finish`.

        Raises ApiError: 409 while the first request is still being answered, 400 for a different body with the
        same key.
        """
        name = self._name(exchange)
        digest = hashlib.sha256(body).digest()
        self._forget_old()
        found = self._answers.get(name)
        if found is None:
            self._answers[name] = _Answer(digest, time.monotonic())
            exchange.recorded = []
            return None
        if found.digest != digest:
            raise bad_request("idempotency-key", "idempotency-key: was used before with a different body")
        if found.body is None:
            message = "idempotency-key: the first request with this key is still being answered"
            raise ApiError(409, message, code="idempotency_key_in_use", headers=retry_headers(1.0))
        return found

    async def repeat(self, exchange: Exchange, answer: _Answer) -> None:
        """Send a recorded answer."""
        headers = [(b"idempotency-replayed", b"true")]
        await exchange.respond(200, answer.body or b"", content_type=answer.content_type, headers=headers)

    def finish(self, exchange: Exchange, *, complete: bool) -> None:
        """Keep the answer, or forget the request if it failed."""
        name = self._name(exchange)
        answer = self._answers[name]
        if not complete or exchange.status != 200 or exchange.recorded_bytes > MAX_RECORDED_BYTES:
            del self._answers[name]
            return
        answer.body, answer.content_type = b"".join(exchange.recorded or ()), exchange.sent_type
        self._bytes += len(answer.body)
        self._forget_old()

    def _forget_old(self) -> None:
        """Drop answers beyond the limits of age or size; requests in progress stay."""
        oldest = time.monotonic() - KEEP_SECONDS
        for name, answer in list(self._answers.items()):
            full = len(self._answers) > MAX_ANSWERS or self._bytes > self.limit()
            if not full and answer.since > oldest:
                return
            if answer.body is not None:
                self._bytes -= len(answer.body)
                del self._answers[name]

    @staticmethod
    def _name(exchange: Exchange) -> tuple[str, str, str]:
        key = exchange.header(b"idempotency-key")
        if len(key) > MAX_KEY_CHARS:
            raise bad_request("idempotency-key", f"idempotency-key: longer than {MAX_KEY_CHARS} characters")
        return exchange.tenant, exchange.path, key
