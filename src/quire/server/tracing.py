"""One OpenTelemetry span per generation, sent as OTLP over HTTP in JSON by a separate thread.

Names follow the semantic conventions for generative AI (status: development); all of them are in this file. A caller's
W3C traceparent is continued, and its decision not to sample is respected.
"""

from __future__ import annotations

import contextlib
import queue
import re
import secrets
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire import __version__
from quire.answers import Timings
from quire.records import dataclass
from quire.server.errors import shorten
from quire.server.exchange import Exchange
from quire.server.logs import log

MAX_WAITING_SPANS = 4096
BATCH = 512
_BATCH_SECONDS = 1.0
_POST_SECONDS = 5.0
_QUIET_SECONDS = 60.0  # between warnings about a collector that does not answer
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_SERVER = 2  # SPAN_KIND_SERVER
_ERROR = 2  # STATUS_CODE_ERROR
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span."""

    trace_id: str
    span_id: str
    sampled: bool


def parse_traceparent(header: str) -> Parent | None:
    """The caller's span, or None when there is none or the header is malformed."""
    match = _TRACEPARENT.fullmatch(header.strip())
    return None if match is None else Parent(match[1], match[2], bool(int(match[3], 16) & 1))


class Tracer:
    """Collects spans and posts them in batches; spans are dropped rather than block requests."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the address of a collector; without a path the standard path is used. Raises ValueError."""
        parts = urlsplit(endpoint)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ValueError(f"otlp_traces_endpoint: {endpoint!r} is not an http or https address")
        self._url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._spans: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING_SPANS)
        self._complained = -_QUIET_SECONDS
        self._thread = threading.Thread(target=self._run, name="quire-traces", daemon=True)
        self._thread.start()

    def record(self, exchange: Exchange) -> None:
        """Record the span of a request that has ended; only generations have one."""
        operation = _OPERATIONS.get(exchange.path)
        parent = parse_traceparent(exchange.header(b"traceparent"))
        if operation is None or exchange.method != "POST" or (parent is not None and not parent.sampled):
            return
        with contextlib.suppress(queue.Full):  # the collector is slow; requests do not wait for it
            self._spans.put_nowait(make_span(exchange, operation, parent))

    def close(self) -> None:
        """Post the remaining spans, within seconds."""
        try:
            self._spans.put(None, timeout=_POST_SECONDS)
        except queue.Full:
            return
        self._thread.join(2 * _POST_SECONDS)

    def _run(self) -> None:
        going = True
        while going:
            batch: list[dict[str, Any]] = []
            end = 0.0
            while len(batch) < BATCH:
                try:
                    span = self._spans.get(timeout=max(0.0, end - time.monotonic()) if batch else None)
                except queue.Empty:
                    break
                if span is None:
                    going = False
                    break
                end = end or time.monotonic() + _BATCH_SECONDS
                batch.append(span)
            if batch:
                self._post(batch)

    def _post(self, batch: list[dict[str, Any]]) -> None:
        resource = {"attributes": [_text("service.name", "quire"), _text("service.version", __version__)]}
        scope = {"scope": {"name": "quire.server", "version": __version__}, "spans": batch}
        body = msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})
        request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_POST_SECONDS):
                return
        except Exception as error:
            # For a collector that answers garbage http.client raises errors without a common base class.
            if time.monotonic() - self._complained > _QUIET_SECONDS:
                self._complained = time.monotonic()
                reason = shorten(str(error) or type(error).__name__, 200)
                log.warning("the trace collector did not accept %d spans: %r", len(batch), reason)


def make_span(exchange: Exchange, operation: str, parent: Parent | None) -> dict[str, Any]:
    """A span in OTLP's JSON form."""
    now, offset = time.monotonic(), time.time_ns() - time.monotonic_ns()
    details = exchange.details
    model = str(details.get("model", ""))
    attributes = [
        _text("gen_ai.operation.name", operation), _text("gen_ai.provider.name", "quire"),
        _text("gen_ai.request.model", model), _text("http.request.method", exchange.method),
        _text("url.path", exchange.path), _text("quire.request_id", exchange.request_id),
        _number("http.response.status_code", exchange.status or 499),
    ]  # fmt: skip
    for name, key in (
        ("gen_ai.usage.input_tokens", "prompt_tokens"), ("gen_ai.usage.output_tokens", "completion_tokens"),
        ("gen_ai.usage.cache_read.input_tokens", "cached_tokens"),
    ):  # fmt: skip
        if key in details:
            attributes.append(_number(name, details[key]))
    failure = details.get("error") or details.get("ended")
    if failure:
        attributes.append(_text("error.type", str(failure)))
    span = {
        "traceId": parent.trace_id if parent else secrets.token_hex(16),
        "spanId": secrets.token_hex(8),
        "name": f"{operation} {model}".strip(),
        "kind": _SERVER,
        "startTimeUnixNano": _nanoseconds(exchange.arrival, offset),
        "endTimeUnixNano": _nanoseconds(now, offset),
        "attributes": attributes,
        "events": _events(exchange.timings, offset),
        "status": {"code": _ERROR, "message": str(failure)} if failure else {},
    }
    return span | ({"parentSpanId": parent.span_id} if parent else {})


def _events(timings: Timings | None, offset: int) -> list[dict[str, Any]]:
    """When the request was queued, was first scheduled, and gave its first and last token."""
    if timings is None:
        return []
    marks = (("queued", timings.arrival), ("scheduled", timings.scheduled), ("first_token", timings.first_token),
             ("last_token", timings.finished))  # fmt: skip
    return [{"name": f"quire.{name}", "timeUnixNano": _nanoseconds(at, offset)} for name, at in marks if at]


def _nanoseconds(monotonic: float, offset: int) -> str:
    """Wall-clock time as OTLP's JSON writes 64-bit numbers."""
    return str(int(monotonic * 1e9) + offset)


def _text(name: str, value: str) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value}}


def _number(name: str, value: int) -> dict[str, Any]:
    return {"key": name, "value": {"intValue": str(value)}}
