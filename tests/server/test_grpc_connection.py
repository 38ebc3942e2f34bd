"""HTTP/2 below gRPC, with h2 as a client that does what grpcio's never would."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import StreamClosedError
from h2.settings import SettingCodes

from helpers.server import ENDLESS, GUARD, PATIENT, LiveServer, serving
from quire.server.kserve.grpc_call import GrpcStatus
from quire.server.kserve.kserve_inference import InferenceAnswer, InferenceAsk
from quire.server.kserve.kserve_messages import CLASSES, SERVICE
from quire.server.kserve.kserve_server import MAX_MESSAGE_BYTES

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = {"max_tokens": 60_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, ENDLESS, grpc_port=0, **PATIENT) as live:
        yield live


def port(server: LiveServer) -> int:
    assert server.http.grpc is not None
    return server.http.grpc.port


class Client:
    """A connection. `grant`: whether what was read may be sent again."""

    def __init__(self, number: int, window: int = 65535, *, grant: bool = True) -> None:
        self.sock = socket.create_connection(("127.0.0.1", number), GUARD)
        self.h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.grant, self.closed = grant, False
        self.data: dict[int, bytearray] = {}
        self.ended: dict[int, dict[str, str]] = {}  # the headers of calls that are over
        self._headers: dict[int, dict[str, str]] = {}
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(self.h2.data_to_send())

    def begin(
        self, name: str = "ModelStreamInfer", *more: tuple[str, str], kind: str = "application/grpc"
    ) -> int:
        stream = self.h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{name}"), (":authority", "x"),
                  ("te", "trailers"), ("content-type", kind)]  # fmt: skip
        self.h2.send_headers(stream, [*fields, *more])
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = True) -> None:
        """Send data as the windows allow, then the end."""
        while data:
            if (room := min(self.h2.local_flow_control_window(stream), 16384)) > 0:
                self.h2.send_data(stream, data[:room])
                self.flush()
                data = data[room:]
            elif not self.read():
                return
        if end:
            with contextlib.suppress(StreamClosedError):  # it has been answered meanwhile
                self.h2.end_stream(stream)
            self.flush()

    def read(self) -> bool:
        """Take what has come; false at the end of the connection."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.sock.recv(65536)
        if not data:
            self.closed = True
            return False
        for event in self.h2.receive_data(data):
            if isinstance(event, events.DataReceived):
                self.data.setdefault(event.stream_id, bytearray()).extend(event.data)
                if self.grant:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, events.ResponseReceived | events.TrailersReceived):
                self._headers.setdefault(event.stream_id, {}).update(event.headers)
            elif isinstance(event, events.StreamEnded):
                self.ended[event.stream_id] = self._headers[event.stream_id]
            elif isinstance(event, events.ConnectionTerminated):
                self.closed = True
        self.flush()
        return True

    def result(self, stream: int) -> tuple[int, str]:
        """Status and message of a call, once it has ended."""
        while stream not in self.ended:
            assert self.read()
        found = self.ended[stream]
        assert found[":status"] == "200"
        return int(found["grpc-status"]), found.get("grpc-message", "")

    def messages(self, stream: int) -> list[Any]:
        """The inferences that have come."""
        data, found = bytes(self.data.get(stream, b"")), []
        while data:
            size = struct.unpack(">xI", data[:5])[0]
            found.append(CLASSES["ModelStreamInferResponse"].FromString(data[5 : 5 + size]))
            data = data[5 + size :]
        return found


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def ask(text: str = "Hello", **fields: Any) -> bytes:
    made = CLASSES["ModelInferRequest"]()
    values = {"text_input": text.encode(), "sampling_parameters": json.dumps(fields).encode()}
    for name, value in values.items():
        made.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes.append(value)
    made.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool.append(True)
    return framed(made)


def text(messages: list[Any]) -> str:
    return b"".join(m.infer_response.outputs[0].contents.bytes[0] for m in messages).decode()


def expected(server: LiveServer) -> str:
    found: str = server.post("/v1/completions", {"prompt": "Hello", **GREEDY}).json["choices"][0]["text"]
    return found


def answered(server: LiveServer) -> None:
    """The server goes on: a new connection gets its answer, once there is room for it."""
    found: list[bool] = []

    def ask_once() -> bool:
        client = Client(port(server))
        stream = client.begin()
        client.send(stream, ask(**GREEDY))
        while stream not in client.ended:
            if not client.read():
                return False
        assert client.result(stream) == (GrpcStatus.OK, "")
        found.append(text(client.messages(stream)) == expected(server))
        return True

    server.wait(ask_once)
    assert found == [True]


@pytest.mark.parametrize("window", [1, 7, 40, 65535])
def test_a_stream_in_any_window_has_the_same_text(server: LiveServer, window: int) -> None:
    client = Client(port(server), window)
    stream = client.begin()
    data = ask(**GREEDY)
    for byte in data[:40]:
        client.send(stream, bytes([byte]), end=False)
    client.send(stream, data[40:])
    assert client.result(stream) == (GrpcStatus.OK, "")
    assert text(client.messages(stream)) == expected(server)
    assert server.http.context.memory.bodies.used == 0


def test_a_full_window_waits_and_others_go_on(server: LiveServer) -> None:
    client = Client(port(server), 300, grant=False)
    slow, quick = client.begin(), client.begin("ServerLive")
    client.send(slow, ask(**LONG))
    client.send(quick, framed(CLASSES["ServerLiveRequest"]()))
    assert client.result(quick) == (GrpcStatus.OK, "")
    while len(client.data.get(slow, b"")) < 300:
        client.read()
    client.h2.increment_flow_control_window(200, slow)
    client.flush()
    while len(client.data[slow]) < 500:
        client.read()
    client.h2.reset_stream(slow)
    client.flush()
    server.wait(server.idle)
    answered(server)


def test_what_is_no_call_gets_a_status(server: LiveServer) -> None:
    client = Client(port(server))
    for stream, sent, status, message in (
        (client.begin("Nothing"), b"", GrpcStatus.UNIMPLEMENTED, "Nothing is not implemented"),
        (client.begin(kind="text/html"), b"", GrpcStatus.UNIMPLEMENTED, "content-type"),
        (client.begin("ModelInfer"), b"", GrpcStatus.INVALID_ARGUMENT, "no message arrived"),
        (client.begin("ModelInfer"), b"\0\0\0\0\x09abc", GrpcStatus.INVALID_ARGUMENT, "incomplete"),
        (client.begin("ModelInfer"), b"\1\0\0\0\0", GrpcStatus.UNIMPLEMENTED, "compressed"),
        (client.begin("ModelInfer"), struct.pack(">BI", 0, MAX_MESSAGE_BYTES + 1), GrpcStatus.RESOURCE_EXHAUSTED,
         "larger"),
        (client.begin("ModelInfer", ("grpc-timeout", "1m")), None, GrpcStatus.DEADLINE_EXCEEDED, "deadline"),
    ):  # fmt: skip
        if sent is not None:
            client.send(stream, sent)
        found = client.result(stream)
        assert found[0] == status
        assert message in found[1]
    answered(server)


def test_connections_that_ask_for_nothing_end(folder: Path) -> None:
    with serving(folder, grpc_port=0, keep_alive_timeout=0.2, header_timeout=30.0) as live:
        client = Client(port(live))
        assert client.result(stream := client.begin("Nothing"))[0] == GrpcStatus.UNIMPLEMENTED, stream
        while not client.closed:
            client.read()
    with serving(folder, grpc_port=0, header_timeout=0.2) as live:
        silent = socket.create_connection(("127.0.0.1", port(live)), GUARD)
        while silent.recv(1024):
            pass


def flood_pings(client: Client) -> None:
    client.h2.ping(b"12345678")


def flood_settings(client: Client) -> None:
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65535})


def flood_resets(client: Client) -> None:
    client.h2.reset_stream(client.begin())


@pytest.mark.parametrize("flood", [flood_pings, flood_settings, flood_resets])
def test_floods_of_frames_end_the_connection(server: LiveServer, flood: Any) -> None:
    client = Client(port(server))
    end = time.monotonic() + GUARD
    while not client.closed:
        assert time.monotonic() < end
        for _ in range(100):
            flood(client)
        client.flush()
        if select.select([client.sock], [], [], 0.01)[0]:  # resets have no answer
            client.read()
    server.wait(server.idle)
    answered(server)


def test_hostile_bytes(server: LiveServer) -> None:
    """Bytes that are no HTTP/2, frames that are cut, changed and repeated: neither a failure nor a leak."""
    draw = random.Random(5)
    good = Client(port(server))
    good.send(good.begin(), ask(**GREEDY))
    recorded = H2Connection(H2Configuration(header_encoding="utf-8"))
    recorded.initiate_connection()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/ModelStreamInfer"), (":authority", "x"),
              ("content-type", "application/grpc")]  # fmt: skip
    recorded.send_headers(1, fields)
    recorded.send_data(1, ask(**GREEDY), end_stream=True)
    whole = recorded.data_to_send()
    for number in range(150):
        data = bytearray(whole)
        for _ in range(draw.randint(0, 8)):
            data[draw.randrange(24, len(data))] = draw.randrange(256)
        if number % 3 == 0:
            data[draw.randrange(24, len(data)) :] = draw.randbytes(draw.randint(0, 400))
        if number % 10 == 0:
            data[:24] = draw.randbytes(24)
        sock = socket.create_connection(("127.0.0.1", port(server)), GUARD)
        with contextlib.suppress(OSError):
            sock.sendall(data)
        sock.close()
    answered(server)
    server.wait(server.idle)
    server.wait(lambda: server.http.context.memory.bodies.used == 0)  # once the last connections have ended


def test_a_new_connection_takes_the_place_of_an_idle_one(folder: Path) -> None:
    with serving(folder, ENDLESS, grpc_port=0, max_connections=256) as server:  # two over gRPC
        first, second = Client(port(server)), Client(port(server))
        for client in (first, second):
            client.send(stream := client.begin(), ask(**LONG))
            while not client.data.get(stream):
                client.read()
        third = Client(port(server))
        while third.read():
            pass
        first.h2.reset_stream(1)
        first.flush()
        server.wait(lambda: server.engine.stats.running == 1)
        answered(server)
        while not first.closed:
            first.read()
        assert second.read()


def test_stopping_says_so(folder: Path) -> None:
    with serving(folder, ENDLESS, grpc_port=0) as server:
        client = Client(port(server))
        stream, other = client.begin(), client.begin("Nothing")
        assert client.result(other)[0] == GrpcStatus.UNIMPLEMENTED
    assert client.result(stream) == (GrpcStatus.UNAVAILABLE, "the server is shutting down")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "outputs", [("text_output",), ("finish_reason", "text_output"), ("text_output", "finish_reason")]
)
def test_messages_made_of_bytes_are_those_of_protobuf(raw: bool, outputs: tuple[str, ...]) -> None:
    asked = InferenceAsk("id", "m", stream=True, body=b"", outputs=outputs, raw=raw, samples=1)
    quick, plain = InferenceAnswer(asked, "m"), InferenceAnswer(asked, "m")
    before, after = b'data: {"choices":[{"index":0,"text":', b',"logprobs":null,"finish_reason":null}]}\n\n'
    for said in ("", "a", 'say "no"\n\\', "é💥", "x" * 127, "y" * 128, "z" * 20_000):
        data = json.dumps(said, ensure_ascii=False).encode()
        (want,) = plain.feed(before + data + after)
        message = quick.continued(before, data, after)
        assert message is not None
        found = CLASSES["ModelStreamInferResponse"].FromString(message)
        assert found.infer_response == want
    ending = b',"logprobs":null,"finish_reason":"stop"}]}\n\n'
    assert quick.continued(before, b'"a"', ending) is None
    assert quick.continued(b"", before + b'"a"' + after, b"") is None


def test_grpcio_shares_a_connection(server: LiveServer) -> None:
    """Many streams on one connection of grpcio's, each with the text that it has alone."""
    with grpc.insecure_channel(f"127.0.0.1:{port(server)}") as channel:
        method = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", None, CLASSES["ModelStreamInferResponse"].FromString
        )
        calls = [method(iter([ask(**GREEDY)[5:]]), timeout=GUARD) for _ in range(20)]
        want = expected(server)
        assert [text(list(call)) for call in calls] == [want] * 20
