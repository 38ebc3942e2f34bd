"""The response for each kind of failure, and the form in which an API writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import msgspec

from quire.engine.api import (
    DeadlineError,
    EngineUnavailableError,
    OverloadedError,
    RequestBlockedError,
    RequestCancelledError,
    WouldBeLateError,
)
from quire.records import dataclass
from quire.types import CheckpointError, ContextLengthError, QuireError, RequestError

MAX_ERROR_BYTES = 4096
# Long quoted values are cut so that the whole body stays below MAX_ERROR_BYTES in any encoding.
_MAX_MESSAGE_CHARS = 1000

Header = tuple[bytes, bytes]


class ErrorDetail(msgspec.Struct):
    """What went wrong: text for people, a class, the name of the wrong field, and a stable code for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's body of an error response, and of an error event within a stream."""

    error: ErrorDetail


class ApiError(Exception):
    """An error response. `headers` are added to it; `close` ends the connection after it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Sequence[Header] = (),
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = list(headers)
        self.close = close


@dataclass(frozen=True, slots=True, eq=False)
class ErrorForm:
    """How an API writes errors: `make` returns the body for an error, given its message and the name of the wrong field
    cut to a length; `schema` is its type. `event` is a body as the last event of a stream. `id_header` repeats the
    request id in every response. `statuses` are those that the API has in place of others.
    """

    make: Callable[[ApiError, str, str | None], msgspec.Struct]
    schema: type[Any]
    event: Callable[[bytes], bytes]
    id_header: bytes | None = None
    statuses: Mapping[int, int] = field(default_factory=dict)

    def status(self, error: ApiError) -> int:
        """The HTTP status of an error."""
        return self.statuses.get(error.status, error.status)

    def body(self, error: ApiError) -> bytes:
        """The JSON body, at most MAX_ERROR_BYTES long."""
        message, param = shorten(str(error)), error.param and shorten(error.param, 200)
        while True:
            body = msgspec.json.encode(self.make(error, message, param))
            if len(body) <= MAX_ERROR_BYTES:
                return body
            message = shorten(message, len(message) * 3 // 4)  # escapes made it longer


def event_of(body: bytes) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + body + b"\n\n"


class ClientGoneError(Exception):
    """The client hung up or stopped reading; no answer can be delivered."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def shorten(text: str, limit: int = _MAX_MESSAGE_CHARS) -> str:
    """Text of at most `limit` characters, its end replaced by an ellipsis when it is longer."""
    return text if len(text) <= limit else text[: max(0, limit - 1)] + "…"


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the wrong field."""
    return ApiError(400, message, code=code, param=param)


def retry_headers(seconds: float) -> list[Header]:
    """When to retry: whole seconds for all clients, milliseconds for those that understand them."""
    wait = max(0.001, seconds)
    return [
        (b"retry-after", str(max(1, math.ceil(wait))).encode()),
        (b"retry-after-ms", str(math.ceil(wait * 1000)).encode()),
    ]


DEGRADED = b"x-quire-degraded"
PREDICTED_TTFT = b"x-quire-predicted-ttft-ms"


def predicted_ttft(seconds: float) -> bytes:
    """The value of that header."""
    return str(round(seconds * 1000)).encode()


def api_error(error: Exception) -> ApiError:
    """The response for an expected failure; any other becomes a 500 without details."""
    match error:
        case ApiError():
            found = error
        case ContextLengthError(field=name):
            found = ApiError(400, str(error), code="context_length_exceeded", param=name)
        case RequestError(field=name):
            found = ApiError(400, str(error), code="invalid_value", param=name)
        case WouldBeLateError(retry_after=seconds, predicted_ttft=ttft):
            known = [(PREDICTED_TTFT, predicted_ttft(ttft))] if math.isfinite(ttft) else []
            headers = [*retry_headers(seconds), *known]
            found = ApiError(429, str(error), code="would_be_late", headers=headers)
        case OverloadedError(retry_after=seconds, code=code):
            found = ApiError(429, str(error), code=code, headers=retry_headers(seconds))
        case EngineUnavailableError(retry_after=seconds):
            found = ApiError(503, str(error), code="engine_unavailable", headers=retry_headers(seconds))
        case RequestBlockedError():
            found = ApiError(400, str(error), code="request_blocked")
        case RequestCancelledError():
            found = ApiError(409, str(error), code="request_cancelled")
        case DeadlineError():
            found = ApiError(504, str(error), code="deadline_exceeded")
        case CheckpointError():  # the model's chat template failed on these messages
            found = ApiError(400, str(error), code="chat_template_error", param="messages")
        case QuireError():
            found = ApiError(500, str(error), code="engine_error")
        case _:
            message = "internal error; the log has the details under this request id"
            found = ApiError(500, message, code="internal_error")
    return found


def _type_of(status: int) -> str:
    """OpenAI's classes of errors."""
    names = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    if status in names:
        return names[status]
    return "invalid_request_error" if status < 500 else "server_error"


def _openai(error: ApiError, message: str, param: str | None) -> ErrorBody:
    return ErrorBody(ErrorDetail(message, _type_of(error.status), param, error.code))


OPENAI_ERRORS = ErrorForm(_openai, ErrorBody, event_of)
