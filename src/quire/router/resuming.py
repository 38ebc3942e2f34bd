"""A stream whose server is lost goes on with another server.

Text does not depend on load, so a server with the same weights gives the same text for the same request and seed. The
request is sent again, with the ids of the output so far where both servers have the router's key (routing.continued).
What the client has is dropped from the beginning of the new stream, and the rest follows under the id of the first one.
If the new text differs from what the client has, or the servers' fingerprints differ, the stream ends with an error
instead: nothing is ever glued together.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.router.routed_request import AskedOfServers, with_field
from quire.routing.continued import take_ids
from quire.server.exchange import Exchange
from quire.types import QuireError
from quire.util.http_client import SentBody

# Paths whose streams can go on, and the text fields of a delta there.
RESUMABLE = ("/v1/chat/completions", "/v1/completions")
_TEXTS = ("content", "reasoning_content", "reasoning", "text")
_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_SEEDS = 2**31


class CannotResumeError(QuireError):
    """A stream cannot go on elsewhere."""


def is_resumable(path: str, asked: AskedOfServers) -> bool:
    """Whether the stream of a request could go on with another server: one sample, of whose tokens nothing but text is
    told."""
    one = asked.n in (None, 1) and asked.best_of in (None, 1)
    scored = asked.logprobs is not None and asked.logprobs is not False
    told = scored or asked.return_token_ids or asked.return_accepted_drafts
    return path in RESUMABLE and asked.stream is True and one and not told


def is_seeded(exchange: Exchange, asked: AskedOfServers) -> bool:
    """Whether a request has a field for a seed."""
    return (
        exchange.path in RESUMABLE
        and "msgpack" not in exchange.header(b"content-type")
        and asked.model is not None
    )


def with_seed(body: SentBody, asked: AskedOfServers) -> SentBody:
    """The body with a seed, drawn here if the client has given none: another server must draw the same tokens."""
    if asked.seed is not None and asked.seed is not msgspec.UNSET:
        return body
    return with_field(body, "seed", b"%d" % secrets.randbelow(_SEEDS), replaces=asked.seed is None)


def events_of(data: bytes) -> Iterator[bytes]:
    """The payloads of server-sent events; comments and other fields are left out."""
    for event in data.split(_END):
        for line in event.split(b"\n"):
            if line.startswith(_DATA):
                yield line[len(_DATA) :]


class _Call:
    """A call of a function, as far as it has been sent."""

    def __init__(self) -> None:
        self.name = self.arguments = ""


def calls_of(delta: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The parts of calls in a delta, with their numbers; the older form has one call without a number."""
    for call in delta.get("tool_calls") or ():
        yield call.get("index", 0), call.get("function") or {}
    if delta.get("function_call"):
        yield -1, delta["function_call"]


class DeliveredStream:
    """What a client has got of a stream, read from the bytes that were sent.

    Raises CannotResumeError if it cannot go on: something else than text and calls has been sent, or all of it.
    """

    def __init__(self, data: bytes) -> None:
        self.id, self.created, self.fingerprint = "", 0, None
        self.texts = dict.fromkeys(_TEXTS, "")
        self.calls: dict[int, _Call] = {}
        self.begun = self.finished = False
        for payload in events_of(data):
            if payload == _DONE:
                raise CannotResumeError("the stream was complete")
            event = _decoded(payload)
            self.id, self.created = event.get("id", ""), event.get("created", 0)
            self.fingerprint = event.get("system_fingerprint")
            for choice in event.get("choices", ()):
                self._take(choice)

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", choice)
        self.begun = True
        for name in _TEXTS:
            self.texts[name] += delta.get(name) or ""
        for number, part in calls_of(delta):
            call = self.calls.setdefault(number, _Call())
            call.name += part.get("name") or ""
            call.arguments += part.get("arguments") or ""
        if choice.get("logprobs"):
            raise CannotResumeError("more than text has been sent")
        self.finished = self.finished or choice.get("finish_reason") is not None


class ResumedStream:
    """The events of a new stream without what a client has got already. Bytes go in, bytes come out. `ids` are those
    that the server has named."""

    def __init__(self, delivered: DeliveredStream) -> None:
        self._delivered, self._left = delivered, dict(delivered.texts)
        self._names = {number: call.name for number, call in delivered.calls.items()}
        self._arguments = {number: call.arguments for number, call in delivered.calls.items()}
        self._rest, self.ids = b"", array("i")

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the new stream; returns what the client lacks of them. Raises CannotResumeError."""
        events, found, self._rest = (self._rest + data).rpartition(_END)
        if not found:
            return b""
        events = take_ids(events + found, self.ids)
        return b"".join(
            _DATA + each + _END for payload in events_of(events) if (each := self._missing(payload))
        )

    def end(self) -> None:
        """The new stream has ended. Raises CannotResumeError if it was shorter than what the client has."""
        if self._lacks:
            raise CannotResumeError("the text of the other server is shorter")

    @property
    def _lacks(self) -> bool:
        """Whether the new stream has not come to where the client is."""
        left = (self._left, self._names, self._arguments)
        return any(text for texts in left for text in texts.values())

    def _missing(self, payload: bytes) -> bytes | None:
        """What the client lacks of an event; None: nothing."""
        if payload == _DONE:
            return payload
        event, delivered = _decoded(payload), self._delivered
        if "error" in event:
            return payload
        if delivered.id:
            if event.get("system_fingerprint") != delivered.fingerprint:
                raise CannotResumeError("the other server has other weights")
            event |= {"id": delivered.id, "created": delivered.created}
        choices = event.get("choices", [])
        kept = [choice for choice in choices if self._trim(choice)]
        return None if choices and not kept else msgspec.json.encode(event | {"choices": kept})

    def _trim(self, choice: dict[str, Any]) -> bool:
        """Drop what was delivered from a choice; false if nothing is left of it."""
        if not self._delivered.begun:
            return True
        delta = choice.get("delta", choice)
        delta.pop("role", None)
        more = False
        for name in _TEXTS:
            if delta.get(name):
                delta[name] = self._behind(self._left, name, delta[name])
                more = more or bool(delta[name])
        if delta.get("tool_calls"):
            calls = [call for call in delta.pop("tool_calls") if self._trim_call(call)]
            if calls:
                delta["tool_calls"], more = calls, True
        if delta.get("function_call"):
            more = self._trim_function(-1, delta["function_call"]) or more
        more = more or choice.get("finish_reason") is not None
        if more and self._lacks:
            raise CannotResumeError("the parts of the answer differ")
        return more and not self._delivered.finished

    def _trim_call(self, call: dict[str, Any]) -> bool:
        """Drop what was delivered from a part of a call, whose id the client may know; false if nothing is left."""
        number = call.get("index", 0)
        if number in self._names:
            call.pop("id", None)
            call.pop("type", None)
        return self._trim_function(number, call.get("function") or {})

    def _trim_function(self, number: int, function: dict[str, Any]) -> bool:
        if number not in self._names:
            return True
        for name, left in (("name", self._names), ("arguments", self._arguments)):
            if function.get(name):
                function[name] = self._behind(left, number, function[name])
            if not function.get(name):
                function.pop(name, None)
        return bool(function)

    @staticmethod
    def _behind(left: dict[Any, str], key: Any, text: str) -> str:
        """What is new of a text, of which the client may have had a part. Raises CannotResumeError."""
        had = left[key]
        common = min(len(text), len(had))
        if text[:common] != had[:common]:
            raise CannotResumeError("the text of the other server differs")
        left[key] = had[common:]
        return text[common:]


def _decoded(payload: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise CannotResumeError("an event is not JSON") from None
