"""An OpenTelemetry span per request with one per stage under it, sent as OTLP over HTTP in JSON by a separate thread.
While a profile runs, the stages of the steps that a request waited for are under `prefill` and `decode`.

Names follow the semantic conventions for generative AI (status: development); all of them are in this file. A caller's
W3C traceparent and tracestate are continued, and its decision not to sample is respected.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import secrets
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from quire import __version__
from quire.answers import Timings
from quire.records import dataclass
from quire.server.errors import shorten
from quire.server.exchange import Exchange
from quire.server.logs import log
from quire.steplog.explain import STAGES

if TYPE_CHECKING:
    from quire.server.step_profile import StepProfile

MAX_WAITING_SPANS = 4096
BATCH = 512
_STEPS = 64  # of a request whose stages have spans
_BATCH_SECONDS = 1.0
_POST_SECONDS = 5.0
_QUIET_SECONDS = 60.0  # between warnings about a collector that does not answer
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_INTERNAL, _SERVER = 1, 2  # SPAN_KIND_INTERNAL, SPAN_KIND_SERVER
_ERROR = 2  # STATUS_CODE_ERROR
MAX_TRACESTATE = 512  # bytes, the least that W3C asks to pass on
# gen_ai.operation.name of the routes that have spans
_OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat", "/api/chat": "chat",
    "/v1/completions": "text_completion", "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings", "/api/embed": "embeddings", "/api/embeddings": "embeddings",
}  # fmt: skip
# Parameters of requests that have an attribute, gen_ai.request.…, if they are set.
_PARAMETERS = (
    "max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed",
)  # fmt: skip


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
    """Collects the spans of requests and posts them in batches; they are dropped rather than block requests."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the address of a collector; without a path the standard path is used. Raises ValueError."""
        parts = urlsplit(endpoint)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ValueError(f"otlp_traces_endpoint: {endpoint!r} is not an http or https address")
        self._url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        self._spans: queue.Queue[list[dict[str, Any]] | None] = queue.Queue(MAX_WAITING_SPANS)
        self._complained = -_QUIET_SECONDS
        self._thread = threading.Thread(target=self._run, name="quire-traces", daemon=True)
        self._thread.start()

    def record(self, exchange: Exchange, profile: StepProfile) -> None:
        """Record the spans of a request that has ended; only generations and embeddings have them."""
        operation = _OPERATIONS.get(exchange.handler)
        parent = parse_traceparent(exchange.header(b"traceparent"))
        if operation is None or exchange.method != "POST" or (parent is not None and not parent.sampled):
            return
        spans = make_spans(exchange, operation, parent)
        if exchange.timings is None or not profile.after_next(partial(self._put, spans, exchange.timings)):
            self._put(spans)

    def _put(
        self,
        spans: list[dict[str, Any]],
        times: Timings | None = None,
        steps: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if times is not None:
            spans = [*spans, *step_spans(spans, times, steps)]
        with contextlib.suppress(queue.Full):  # the collector is slow; requests do not wait for it
            self._spans.put_nowait(spans)

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
                    spans = self._spans.get(timeout=max(0.0, end - time.monotonic()) if batch else None)
                except queue.Empty:
                    break
                if spans is None:
                    going = False
                    break
                end = end or time.monotonic() + _BATCH_SECONDS
                batch += spans
            if batch:
                self._post(batch)

    def _post(self, batch: list[dict[str, Any]]) -> None:
        resource = {
            "attributes": [_attribute("service.name", "quire"), _attribute("service.version", __version__)]
        }
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


def make_spans(exchange: Exchange, operation: str, parent: Parent | None) -> list[dict[str, Any]]:
    """The span of a request and those of its stages, in OTLP's JSON form."""
    now, offset = time.monotonic(), time.time_ns() - time.monotonic_ns()
    details = exchange.details
    model = str(details.get("model", ""))
    failure = details.get("error") or details.get("ended")
    trace = {"traceId": parent.trace_id if parent else secrets.token_hex(16)}
    state = exchange.header(b"tracestate")
    if parent is not None and 0 < len(state) <= MAX_TRACESTATE:
        trace["traceState"] = state
    whole = trace | {
        "spanId": secrets.token_hex(8),
        "name": f"{operation} {model}".strip(),
        "kind": _SERVER,
        "startTimeUnixNano": _nanoseconds(exchange.arrival, offset),
        "endTimeUnixNano": _nanoseconds(now, offset),
        "attributes": [*_attributes(exchange, operation, model), *_outcome(exchange, failure)],
        "status": {"code": _ERROR, "message": str(failure)} if failure else {},
    }
    stages = [
        _under(whole, name, (start, end), offset, attributes)
        for name, start, end, attributes in _stages(exchange, now)
    ]
    return [whole | ({"parentSpanId": parent.span_id} if parent else {}), *stages]


def step_spans(
    spans: Sequence[dict[str, Any]], times: Timings, steps: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The measured stages of the steps that ran from the first to the last one of a request, of _STEPS steps at most:
    under `prefill` those of steps that ended by the first token, under `decode` the others. `spans` are those of the
    request, `steps` records of steps in their order.
    """
    offset, own = time.time_ns() - time.monotonic_ns(), list[tuple[float, Mapping[str, Any]]]()
    phases = {span["name"]: span for span in spans}
    for step in reversed(steps):
        end = step["start"] + step["schedule_seconds"] + step["execute_seconds"]
        if end <= times.scheduled:
            break
        if end <= times.finished:
            own.append((end, step))
    for end, step in own[: -_STEPS - 1 : -1]:
        phase = phases["decode" if 0 < times.first_token < end else "prefill"]
        facts = [_attribute("quire.step", step["step"]), _attribute("quire.step.rows", step["rows"])]
        at = end - sum(step["stage_seconds"])
        for name, length in zip(STAGES, step["stage_seconds"], strict=False):
            yield _under(phase, name, (at, at + length), offset, facts)
            at += length


def _under(
    parent: dict[str, Any],
    name: str,
    times: tuple[float, float],
    offset: int,
    attributes: list[dict[str, Any]],
) -> dict[str, Any]:
    """A span inside of another one, from a time to a time."""
    return {key: parent[key] for key in ("traceId", "traceState") if key in parent} | {
        "spanId": secrets.token_hex(8),
        "parentSpanId": parent["spanId"],
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": _nanoseconds(times[0], offset),
        "endTimeUnixNano": _nanoseconds(times[1], offset),
        "attributes": attributes,
    }


def _attributes(exchange: Exchange, operation: str, model: str) -> Iterator[dict[str, Any]]:
    """What was asked for."""
    yield _attribute("gen_ai.operation.name", operation)
    yield _attribute("gen_ai.provider.name", "quire")
    yield _attribute("gen_ai.request.model", model)
    yield _attribute("http.request.method", exchange.method)
    yield _attribute("http.route", exchange.handler)
    yield _attribute("url.path", exchange.path)
    yield _attribute("quire.request_id", exchange.request_id)
    params = exchange.params
    if params is None:
        return
    for name in _PARAMETERS:
        value = getattr(params, name)
        if value is not None:
            yield _attribute(f"gen_ai.request.{name}", value)
    if params.stop:
        yield _attribute("gen_ai.request.stop_sequences", params.stop)
    if params.n > 1:
        yield _attribute("gen_ai.request.choice.count", params.n)


def _outcome(exchange: Exchange, failure: object) -> Iterator[dict[str, Any]]:
    """What became of it."""
    yield _attribute("http.response.status_code", exchange.status or 499)
    for name, key in (
        ("gen_ai.usage.input_tokens", "prompt_tokens"), ("gen_ai.usage.output_tokens", "completion_tokens"),
        ("gen_ai.usage.cache_read.input_tokens", "cached_tokens"),
    ):  # fmt: skip
        if key in exchange.details:
            yield _attribute(name, int(exchange.details[key]))
    if exchange.finish_reasons:
        yield _attribute("gen_ai.response.model", str(exchange.details.get("model", "")))
        yield _attribute("gen_ai.response.finish_reasons", exchange.finish_reasons)
    if failure:
        yield _attribute("error.type", str(failure))


def _stages(exchange: Exchange, now: float) -> Iterator[tuple[str, float, float, list[dict[str, Any]]]]:
    """The stages that a request has reached, one after the other: name, start, end, attributes.

    `detokenize` runs beside `decode`, token by token: its attribute has the seconds that it took.
    """
    times = exchange.timings
    if times is None:
        return
    embeds = not times.first_token
    marks = {
        "receive": exchange.received, "tokenize": times.arrival, "queue": times.scheduled,
        "prefill": times.finished if embeds else times.first_token, "decode": 0.0 if embeds else times.finished,
        "respond": now,
    }  # fmt: skip
    reached = {name: end for name, end in marks.items() if end}
    starts = itertools.accumulate((exchange.arrival, *reached.values()), max)
    for (name, end), start in zip(reached.items(), starts, strict=False):
        yield name, start, max(start, end), []
    if times.text:
        busy = [_attribute("quire.detokenize.seconds", times.text)]
        yield "detokenize", times.first_token, max(times.first_token, times.finished), busy


def _nanoseconds(monotonic: float, offset: int) -> str:
    """Wall-clock time as OTLP's JSON writes 64-bit numbers."""
    return str(int(monotonic * 1e9) + offset)


def _attribute(name: str, value: str | float | Sequence[str]) -> dict[str, Any]:
    """An attribute in OTLP's JSON form, which writes 64-bit integers as texts."""
    if isinstance(value, str):
        return {"key": name, "value": {"stringValue": value}}
    if isinstance(value, int):
        return {"key": name, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": name, "value": {"doubleValue": value}}
    return {"key": name, "value": {"arrayValue": {"values": [{"stringValue": text} for text in value]}}}
