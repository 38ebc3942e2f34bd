"""Bodies in MessagePack: the same values, limits and errors as in JSON."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.server import LiveServer, Reply
from quire.server.errors import ApiError
from quire.server.json_input import MAX_DEPTH, MAX_VALUES
from quire.server.msgpack_input import from_json, to_json

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}
PACKED = {"content-type": "application/msgpack"}
WANTED = {"accept": "application/msgpack"}
LIMIT = 2**20

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


def packed(server: LiveServer, body: Any, headers: dict[str, str] | None = None) -> Reply:
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return server.post("/v1/chat/completions", data, PACKED | (headers or {}))


@given(VALUES)
def test_values_are_the_same(value: Any) -> None:
    assert json.loads(to_json(msgspec.msgpack.encode(value), LIMIT)) == value
    assert msgspec.msgpack.decode(from_json(json.dumps(value).encode())) == value


@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_an_error(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        json.loads(to_json(body, LIMIT))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa1a",
        b"\xdb\xff\xff\xff\xffabc",
        b"\x91" * (MAX_DEPTH + 1) + b"\xc0",
        b"\xdd" + struct.pack(">I", MAX_VALUES) + b"\xc0" * MAX_VALUES,
        b"\xc4\x01x",
        b"\xd4\x00\x00",
        b"\xc1",
        b"\xcb" + struct.pack(">d", float("nan")),
        b"\x81\x01\x02",
        b"\xa1\xff",
        b"\xc0\xc0",
    ],
)
def test_what_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        to_json(body, 2**30)
    assert refused.value.code == "invalid_msgpack"


def test_a_body_that_is_long_as_json() -> None:
    with pytest.raises(ApiError) as refused:
        to_json(msgspec.msgpack.encode("\0" * 100), 500)
    assert refused.value.status == 413


def test_a_request_and_its_answer(server: LiveServer) -> None:
    plain = server.post("/v1/chat/completions", CHAT).json
    for body, headers in ((CHAT, WANTED), (CHAT, {"accept": "text/html, application/vnd.msgpack;q=0.5"})):
        reply = packed(server, body, headers)
        assert reply.headers["content-type"] == "application/msgpack"
        assert int(reply.headers["content-length"]) == len(reply.body)
        assert msgspec.msgpack.decode(reply.body)["choices"] == plain["choices"]
    assert packed(server, CHAT).json["choices"] == plain["choices"]
    assert (
        packed(server, CHAT, {"accept": "application/msgpack;q=0, */*"}).json["choices"] == plain["choices"]
    )
    streamed = packed(server, CHAT | {"stream": True}, WANTED)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    models = msgspec.msgpack.decode(server.get("/v1/models", WANTED).body)
    assert models == server.get("/v1/models").json


def test_a_long_answer(server: LiveServer) -> None:
    body = CHAT | {"max_tokens": 60, "logprobs": True, "top_logprobs": 5, "ignore_eos": True}
    reply = packed(server, body, WANTED)
    plain = server.post("/v1/chat/completions", body)
    assert len(plain.body) > 16 * 1024
    assert msgspec.msgpack.decode(reply.body)["choices"] == plain.json["choices"]


def test_errors_are_those_of_json(server: LiveServer) -> None:
    for change in ({"temperature": "hot"}, {"max_tokens": -1}, {"messages": []}, {"store": True}, {"n": [1]}):
        expected = server.post("/v1/chat/completions", CHAT | change)
        assert packed(server, CHAT | change).json == expected.json
        error = packed(server, CHAT | change, WANTED)
        assert (error.status, msgspec.msgpack.decode(error.body)) == (expected.status, expected.json)
    twice = b"\x82\xa1n\x01\xa1n\x02"
    assert "occurs twice" in packed(server, twice).error(400, "invalid_json")
    packed(server, b"\x81").error(400, "invalid_msgpack")
    server.post("/v1/chat/completions", b"{}", {"content-type": "text/plain"}).error(
        415, "unsupported_media_type"
    )
