"""Idempotency-Key: a request sent again gets the answer it got, without being computed again."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.server.errors import ApiError, bad_request, retry_headers
from quire.server.exchange import Exchange

KEEP_SECONDS = 600.0
MAX_ANSWERS = 1024
MAX_BYTES = 64 * 2**20
MAX_ANSWER_BYTES = 2**20
MAX_KEY_CHARS = 255


@dataclass(slots=True)
class _Answer:
    """What a request got; `parts` is None while it is being made."""

    digest: bytes
    since: float
    content_type: bytes = b""
    parts: list[bytes] | None = None
    size: int = 0


@dataclass(slots=True)
class Replays:
    """Answers of the last minutes by API key, path and Idempotency-Key; the oldest go when there are too many.

    Successes of up to MAX_ANSWER_BYTES are kept, streams as well as whole answers; a failure may be tried again.
    """

    _answers: OrderedDict[tuple[str, str, str], _Answer] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def find(self, exchange: Exchange, body: bytes) -> _Answer | None:
        """The answer to repeat, or None after noting that this request makes it; then call `finish`.

        Raises ApiError: 409 while the first request is still being answered, 400 for another body under the
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
            raise bad_request("idempotency-key", "idempotency-key: was used with another body")
        if found.parts is None:
            message = "idempotency-key: the first request with this key is still being answered"
            raise ApiError(409, message, code="idempotency_key_in_use", headers=retry_headers(1.0))
        return found

    async def repeat(self, exchange: Exchange, answer: _Answer) -> None:
        """Send an answer again."""
        headers = [(b"idempotency-replayed", b"true")]
        body = b"".join(answer.parts or ())
        await exchange.respond(200, body, content_type=answer.content_type, headers=headers)

    def finish(self, exchange: Exchange, *, complete: bool) -> None:
        """Keep what was sent, or forget the request when that was no success."""
        name, parts = self._name(exchange), exchange.recorded or []
        size = sum(map(len, parts))
        answer = self._answers[name]
        if not complete or exchange.status != 200 or size > MAX_ANSWER_BYTES:
            del self._answers[name]
            return
        answer.parts, answer.content_type, answer.size = parts, exchange.sent_type, size
        self._bytes += size
        self._forget_old()

    def _forget_old(self) -> None:
        """Drop answers that are too old or too many; requests under way stay."""
        oldest = time.monotonic() - KEEP_SECONDS
        for name, answer in list(self._answers.items()):
            full = len(self._answers) > MAX_ANSWERS or self._bytes > MAX_BYTES
            if not full and answer.since > oldest:
                return
            if answer.parts is not None:
                self._bytes -= answer.size
                del self._answers[name]

    @staticmethod
    def _name(exchange: Exchange) -> tuple[str, str, str]:
        key = exchange.header(b"idempotency-key")
        if len(key) > MAX_KEY_CHARS:
            raise bad_request("idempotency-key", f"idempotency-key: longer than {MAX_KEY_CHARS} characters")
        return exchange.tenant, exchange.path, key
