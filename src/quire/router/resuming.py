"""A stream whose server is lost goes on with another server.

Text does not depend on load, so a server with the same weights gives the same text for the same request and seed. The
request is sent again, with the ids of the output so far where both servers have the router's key (routing.continued).
What the client has is dropped from the beginning of the new stream, and the rest follows under the id of the first one.
If the new text differs from what the client has, or the servers' fingerprints differ, the stream ends with an error
instead: nothing is ever glued together.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.router.routed_request import AskedOfServers, with_field
from quire.routing.continued import OutputIds
from quire.server.exchange import Exchange
from quire.types import QuireError
from quire.util.http_client import SentBody

# Paths whose streams can go on, and the text fields of a delta there.
RESUMABLE = ("/v1/chat/completions", "/v1/completions")
_TEXTS = ("content", "reasoning_content", "reasoning", "text")
_SCORES = (
    "content",
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
)  # lists with an entry for each token
_END = b"\n\n"
EVENT_ENDS = (_END, b"\n\r\n")  # an empty line, with either end of lines
_DATA = b"data: "
_DONE = b"[DONE]"
_SEEDS = 2**31


class CannotResumeError(QuireError):
    """A stream cannot go on elsewhere."""


def is_resumable(path: str, asked: AskedOfServers) -> bool:
    """Whether the stream of a request could go on with another server: nothing but text, calls and log-probabilities is
    told of its samples."""
    all_of_them = asked.best_of in (None, asked.samples)
    told = asked.return_token_ids or asked.return_accepted_drafts
    return path in RESUMABLE and asked.stream is True and all_of_them and not told


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


def complete_events(data: bytes) -> tuple[bytes, bytes]:
    """The complete server-sent events at the beginning, and what is left."""
    end = max((data.rindex(end) + len(end) for end in EVENT_ENDS if end in data), default=0)
    return data[:end], data[end:]


def events_of(data: bytes) -> Iterator[bytes]:
    """The payloads of server-sent events; comments and other fields are left out."""
    for line in data.split(b"\n"):
        if line.startswith(_DATA):
            yield line[len(_DATA) :].removesuffix(b"\r")


def calls_of(delta: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The parts of calls in a delta, with their numbers; the older form has one call without a number."""
    for call in delta.get("tool_calls") or ():
        yield call.get("index", 0), call.get("function") or {}
    if delta.get("function_call"):
        yield -1, delta["function_call"]


class _Choice:
    """What of a choice a client has got, or lacks: texts and calls by name and number, and the log-probabilities of its
    tokens. `begun`: there was an event of it."""

    def __init__(self) -> None:
        self.texts = dict.fromkeys(_TEXTS, "")
        self.names: dict[int, str] = {}
        self.arguments: dict[int, str] = {}
        self.scores: list[Any] = []
        self.begun = self.finished = False

    def take(self, choice: dict[str, Any]) -> None:
        """Add what an event says."""
        delta = choice.get("delta", choice)
        self.begun = True
        for name in _TEXTS:
            self.texts[name] += delta.get(name) or ""
        for number, part in calls_of(delta):
            self.names[number] = self.names.get(number, "") + (part.get("name") or "")
            self.arguments[number] = self.arguments.get(number, "") + (part.get("arguments") or "")
        self.scores += _scores(choice)
        self.finished = self.finished or choice.get("finish_reason") is not None

    def behind(self, given: int) -> _Choice:
        """What is left of it in a stream behind so many tokens, whose log-probabilities do not come again."""
        left = _Choice()
        left.texts, left.names, left.arguments = dict(self.texts), dict(self.names), dict(self.arguments)
        left.scores, left.begun, left.finished = self.scores[given:], self.begun, self.finished
        return left

    @property
    def lacks(self) -> bool:
        """Whether the new stream has not come to where the client is."""
        return bool(self.scores) or self._lacks_text

    @property
    def _lacks_text(self) -> bool:
        left = (self.texts, self.names, self.arguments)
        return any(text for texts in left for text in texts.values())

    def trim(self, choice: dict[str, Any]) -> bool:
        """Drop what was delivered from an event's choice; false if nothing is left of that."""
        if not self.begun:
            return True
        delta = choice.get("delta", choice)
        delta.pop("role", None)
        scored, more = self._trim_scores(choice), False
        for name in _TEXTS:
            if delta.get(name):
                delta[name] = _behind(self.texts, name, delta[name])
                more = more or bool(delta[name])
        if delta.get("tool_calls"):
            calls = [call for call in delta.pop("tool_calls") if self._trim_call(call)]
            if calls:
                delta["tool_calls"], more = calls, True
        if delta.get("function_call"):
            more = self._trim_function(-1, delta["function_call"]) or more
        more = more or choice.get("finish_reason") is not None
        if more and self._lacks_text:  # log-probabilities may be new all the same: they may follow their text
            raise CannotResumeError("the parts of the answer differ")
        return (more or scored) and not self.finished

    def _trim_scores(self, choice: dict[str, Any]) -> bool:
        scores = _scores(choice)
        count = min(len(scores), len(self.scores))
        if scores[:count] != self.scores[:count]:
            raise CannotResumeError("the log-probabilities of the other server differ")
        self.scores = self.scores[count:]
        if count and count == len(scores):
            choice["logprobs"] = None
        elif count:
            said = choice["logprobs"]
            said |= {name: said[name][count:] for name in _SCORES if said.get(name)}
        return len(scores) > count

    def _trim_call(self, call: dict[str, Any]) -> bool:
        """Drop what was delivered from a part of a call, whose id the client may know; false if nothing is left."""
        number = call.get("index", 0)
        if number in self.names:
            call.pop("id", None)
            call.pop("type", None)
        return self._trim_function(number, call.get("function") or {})

    def _trim_function(self, number: int, function: dict[str, Any]) -> bool:
        if number not in self.names:
            return True
        for name, left in (("name", self.names), ("arguments", self.arguments)):
            if function.get(name):
                function[name] = _behind(left, number, function[name])
            if not function.get(name):
                function.pop(name, None)
        return bool(function)


class DeliveredStream:
    """What a client has got of a stream, read from the bytes that were sent.

    Raises CannotResumeError if it cannot go on: something else than text, calls and log-probabilities has been sent, or
    all of it.
    """

    def __init__(self, data: bytes) -> None:
        self.id, self.created, self.fingerprint = "", 0, None
        self.choices: dict[int, _Choice] = {}
        for payload in events_of(data):
            if payload == _DONE:
                raise CannotResumeError("the stream was complete")
            event = _decoded(payload)
            if "error" in event:  # of a router in front of the server
                raise CannotResumeError("the stream has ended with an error")
            self.id, self.created = event.get("id", ""), event.get("created", 0)
            self.fingerprint = event.get("system_fingerprint")
            for choice in event.get("choices", ()):
                self.choices.setdefault(choice.get("index", 0), _Choice()).take(choice)


class ResumedStream:
    """The events of a new stream without what a client has got already. Bytes go in, bytes come out. `ids` are those
    that the server has named. `given`: behind how many tokens of each sample it begins."""

    def __init__(self, delivered: DeliveredStream, given: Sequence[int] = ()) -> None:
        self._delivered = delivered
        self._left = {
            index: choice.behind(given[index] if index < len(given) else 0)
            for index, choice in delivered.choices.items()
        }
        self._rest, self.ids = b"", OutputIds()

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the new stream; returns what the client lacks of them. Raises CannotResumeError."""
        events, self._rest = complete_events(self._rest + data)
        events = self.ids.take(events)
        return b"".join(
            _DATA + each + _END for payload in events_of(events) if (each := self._missing(payload))
        )

    def end(self) -> None:
        """The new stream has ended. Raises CannotResumeError if it was shorter than what the client has."""
        if any(left.lacks for left in self._left.values()):
            raise CannotResumeError("the text of the other server is shorter")

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
        left = self._left.get(choice.get("index", 0))
        return left is None or left.trim(choice)


def _scores(choice: dict[str, Any]) -> list[Any]:
    """The log-probabilities in an event, an entry for each token. Raises CannotResumeError for an unknown form."""
    said = choice.get("logprobs")
    lists = [] if not said else [said[name] for name in _SCORES if said.get(name)]
    if said and (len({len(each) for each in lists}) > 1 or not said.keys() <= {*_SCORES, "refusal"}):
        raise CannotResumeError("log-probabilities have a form that is not known")
    return [*zip(*lists, strict=True)]


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
