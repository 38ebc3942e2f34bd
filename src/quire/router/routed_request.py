"""What a router reads of a request: the model, the session, the beginning of the prompt, and how long it may get."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from quire.routing.difficulty import AskedFeatures, features_of
from quire.server.exchange import Exchange
from quire.util.http_client import SentBody

_NO_RAW = msgspec.Raw(b"")
_ID = re.compile(rb'"id":\s*"(resp_[\w-]{1,128})"')
_USAGE = re.compile(
    rb'"(prompt_tokens|completion_tokens|input_tokens|output_tokens|cached_tokens)":\s*(\d{1,9})'
)
_NOTICED = 0.01  # seconds: less of a time need not be told
_TAIL = 4096  # bytes at the end of an answer in which its usage stands


class _NamedInPack(msgspec.Struct):
    """What a body of MessagePack names; raw parts of it are not the text that a prompt in JSON would have."""

    model: str | None = None
    name: str | None = None
    session_id: str | None = None
    user: str | None = None


class AskedOfServers(msgspec.Struct):
    """The fields of all APIs that matter for the choice of a server; a body with other types in them has none."""

    model: str | None = None
    name: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    previous_response_id: str | None = None
    tools: msgspec.Raw = _NO_RAW
    system: msgspec.Raw = _NO_RAW
    instructions: msgspec.Raw = _NO_RAW
    messages: msgspec.Raw = _NO_RAW
    prompt: msgspec.Raw = _NO_RAW
    prompt_embeds: msgspec.Raw = _NO_RAW
    input: msgspec.Raw = _NO_RAW
    inputs: msgspec.Raw = _NO_RAW
    text: msgspec.Raw = _NO_RAW
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n_predict: Any = None
    stream: Any = None
    seed: Any = msgspec.UNSET
    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    return_token_ids: Any = None
    return_accepted_drafts: Any = None
    deadline_ms: Any = None
    max_queue_ms: Any = None
    kv_transfer_params: Any = msgspec.UNSET
    resumed_output: Any = msgspec.UNSET

    def parts(self) -> list[bytes]:
        """The prompt in the order in which chat templates write it."""
        raw = (
            self.tools,
            self.system,
            self.instructions,
            self.messages,
            self.prompt,
            self.input,
            self.inputs,
            self.text,
        )
        return [bytes(each) for each in raw if memoryview(each)]

    @property
    def samples(self) -> int:
        """How many answers to a prompt."""
        return self.n if isinstance(self.n, int) and self.n > 0 else 1

    def most_tokens(self) -> int | None:
        """The limit of the answer's tokens, if there is one."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens, self.n_predict)
        return next((each for each in given if isinstance(each, int) and each > 0), None)

    def times(self) -> dict[str, float]:
        """Milliseconds from its arrival within which the request is to begin or to end, by field."""
        given = {"deadline_ms": self.deadline_ms, "max_queue_ms": self.max_queue_ms}
        return {name: each for name, each in given.items() if type(each) in {int, float} and each > 0}

    def seconds_left(self, passed: float) -> float:
        """Until the first of these times, so many seconds after the arrival; infinite without one."""
        return min(self.times().values(), default=math.inf) / 1e3 - passed

    def features(self) -> AskedFeatures | None:
        """By what a request's difficulty is seen; None if that is not known."""
        raw = {
            "messages": self.messages, "input": self.input, "prompt": self.prompt, "instructions": self.instructions,
            "system": self.system, "tools": self.tools,
        }  # fmt: skip
        try:
            return features_of(
                {name: msgspec.json.decode(part) for name, part in raw.items() if memoryview(part)}
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def session(self, exchange: Exchange) -> str:
        """What stays the same over the turns of a conversation, as far as the client says."""
        return exchange.header(b"x-session-id") or self.session_id or self.prompt_cache_key or self.user or ""


def asked_of(exchange: Exchange, body: bytes) -> AskedOfServers:
    """What a body asks for; nothing for one that is wrong, which the server refuses."""
    try:
        if "msgpack" in exchange.header(b"content-type"):
            found = msgspec.msgpack.decode(body, type=_NamedInPack)
            return AskedOfServers(found.model, found.name, found.session_id, user=found.user)
        return msgspec.json.decode(body, type=AskedOfServers) if body else AskedOfServers()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return AskedOfServers()


def named(
    exchange: Exchange, body: SentBody, asked: AskedOfServers, model: str
) -> tuple[AskedOfServers, SentBody]:
    """A request for another model, under the name of its field; the same one if it asks for that model already."""
    field = "name" if asked.model is None and asked.name is not None else "model"
    if not model or getattr(asked, field) == model:
        return asked, body
    coding = msgspec.msgpack if "msgpack" in exchange.header(b"content-type") else msgspec.json
    whole = body if isinstance(body, bytes) else b"".join(body)
    fields = coding.decode(whole, type=dict[str, msgspec.Raw])
    made = coding.encode(fields | {field: msgspec.Raw(coding.encode(model))})
    return msgspec.structs.replace(asked, **{field: model}), made


def with_field(body: SentBody, name: str, value: bytes, *, replaces: bool) -> SentBody:
    """A body with a field more, behind what there is, or with another value of one: servers refuse repeated ones."""
    parts = (body,) if isinstance(body, bytes) else body
    if replaces:
        fields = msgspec.json.decode(b"".join(parts), type=dict[str, msgspec.Raw])
        return msgspec.json.encode(fields | {name: msgspec.Raw(value)})
    last = parts[-1]
    assert isinstance(last, bytes)  # the client's body, or the end of what was put behind it
    return (*parts[:-1], memoryview(last)[: last.rindex(b"}")], b',"%b":%b}' % (name.encode(), value))


def with_time_left(body: SentBody, asked: AskedOfServers, passed: float) -> SentBody:
    """A body whose times are what is left of them after so many seconds: servers count from the arrival there."""
    for name, milliseconds in asked.times().items() if passed >= _NOTICED else ():
        left = max(milliseconds - 1e3 * passed, 1.0)
        body = with_field(body, name, b"%.3f" % left, replaces=True)
    return body


def without_field(body: SentBody, name: str) -> SentBody:
    """A body without one of its fields."""
    fields = msgspec.json.decode(
        body if isinstance(body, bytes) else b"".join(body), type=dict[str, msgspec.Raw]
    )
    fields.pop(name, None)
    return msgspec.json.encode(fields)


def response_id(beginning: bytes) -> bytes | None:
    """The id of a stored response at the beginning of an answer."""
    found = _ID.search(beginning)
    return None if found is None else found[1]


def usage_of(end: bytes) -> dict[str, int]:
    """Tokens of the prompt, of it cached, and of the answer, from the end of an answer; empty if it does not say."""
    end = end[-_TAIL:]
    if b'_tokens"' not in end:  # as in most streams, which is seen four times as fast so
        return {}
    found = {name.decode(): int(value) for name, value in _USAGE.findall(end)}
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    return {names.get(name, name): value for name, value in found.items()}
