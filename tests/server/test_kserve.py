"""KServe's protocol over gRPC, with grpcio's client: the same answers as over HTTP, errors, limits, leaving."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_memory_bound import MIB, bounded, completions
from test_serve import subject

from helpers.certificates import make_certificate
from helpers.patience import with_patience
from helpers.server import ENDLESS, GUARD, PATIENT, LiveServer, serving
from quire.config.serving import ServingConfig
from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.engine.host.held import GRPC_CALLS
from quire.server.kserve.kserve_messages import CLASSES, SERVICE
from quire.server.kserve.kserve_server import MAX_MESSAGE_BYTES, MAX_RUNNING
from quire.server.run import BindError, bind_grpc

KEY = (("authorization", "Bearer client-key"),)
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = {"api_key": ("client-key", "other-key"), "served_model_name": ("tiny",), "grpc_port": 0}
    with serving(folder, ENDLESS | {"max_num_seqs": 4}, **options, **PATIENT) as live:
        yield live


@pytest.fixture(scope="module")
def channel(server: LiveServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{port(server)}") as opened:
        yield opened


def port(server: LiveServer) -> int:
    assert server.http.grpc is not None
    return server.http.grpc.port


def call(channel: grpc.Channel, name: str, key: Any = KEY, /, **fields: Any) -> Any:
    method = channel.unary_unary(
        f"/{SERVICE}/{name}", lambda m: m.SerializeToString(), CLASSES[f"{name}Response"].FromString
    )
    return method(CLASSES[f"{name}Request"](**fields), metadata=key, timeout=GUARD)


def stream(channel: grpc.Channel, requests: Iterator[Any] | list[Any], **options: Any) -> Any:
    method = channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer", lambda m: m.SerializeToString(),
        CLASSES["ModelStreamInferResponse"].FromString,
    )  # fmt: skip
    return method(iter(requests), metadata=KEY, **options)


def ask(text: str = "Hello", *, raw: bool = True, name: str = "", **inputs: Any) -> Any:
    """A ModelInferRequest as Triton's clients make it, or with typed contents."""
    made = CLASSES["ModelInferRequest"](model_name="tiny", id=name)
    for title, value in {"text_input": text, **inputs}.items():
        kind = "BOOL" if isinstance(value, bool) else "BYTES"
        tensor = made.inputs.add(name=title, datatype=kind, shape=[1])
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        if raw:
            sent = bytes([value]) if kind == "BOOL" else struct.pack("<I", len(data)) + data
            made.raw_input_contents.append(sent)
        elif kind == "BOOL":
            tensor.contents.bool.append(value)
        else:
            tensor.contents.bytes.append(data)
    return made


def infer(channel: grpc.Channel, request: Any, **options: Any) -> Any:
    method = channel.unary_unary(
        f"/{SERVICE}/ModelInfer", lambda m: m.SerializeToString(), CLASSES["ModelInferResponse"].FromString
    )
    return method(request, **({"metadata": KEY, "timeout": GUARD} | options))


def texts(response: Any, name: str = "text_output") -> list[str]:
    """The elements of an output, in whichever form they came."""
    for number, tensor in enumerate(response.outputs):
        if tensor.name == name:
            if not response.raw_output_contents:
                return [value.decode() for value in tensor.contents.bytes]
            data, found = response.raw_output_contents[number], []
            while data:
                (size,) = struct.unpack_from("<I", data)
                found.append(data[4 : 4 + size].decode())
                data = data[4 + size :]
            return found
    raise AssertionError(f"no output {name}")


def expected(server: LiveServer, **fields: Any) -> Any:
    reply = server.post(
        "/v1/completions", {"prompt": "Hello", **GREEDY, **fields}, {"authorization": "Bearer client-key"}
    )
    assert reply.status == 200, reply.text
    return reply.json


def refused(call: Any, code: grpc.StatusCode, text: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    assert failed.value.code() is code, failed.value
    assert text in failed.value.details()


def test_the_server_and_its_model(server: LiveServer, channel: grpc.Channel) -> None:
    assert call(channel, "ServerLive", ()).live
    assert call(channel, "ServerReady", ()).ready
    assert call(channel, "ModelReady", name="tiny").ready
    assert call(channel, "ServerMetadata").name == "quire"
    model = call(channel, "ModelMetadata", name="tiny")
    assert (model.name, list(model.versions)) == ("tiny", ["1"])
    assert {t.name: t.datatype for t in model.inputs}["text_input"] == "BYTES"
    assert {t.name: list(t.shape) for t in model.outputs}["text_output"] == [-1]
    refused(lambda: call(channel, "ModelReady", name="x"), grpc.StatusCode.NOT_FOUND, "available: tiny")
    refused(lambda: call(channel, "ModelReady", ()), grpc.StatusCode.UNAUTHENTICATED, "API key")
    counted = server.http.context.metrics.http
    assert counted[f"/{SERVICE}/ServerLive", "POST", "200"] == 1
    assert counted[f"/{SERVICE}/ModelReady", "POST", "404"] == 1


@pytest.mark.parametrize("raw", [True, False])
def test_an_inference_is_the_same_completion(server: LiveServer, channel: grpc.Channel, raw: bool) -> None:
    """With the prompt in front unless that is declined, as Triton's vLLM backend does."""
    given = {name: str(value).lower() for name, value in GREEDY.items()}  # numbers as texts
    want = expected(server)
    response = infer(channel, ask(raw=raw, name="7", sampling_parameters=given))
    assert texts(response) == ["Hello" + want["choices"][0]["text"]]
    assert (response.id, response.model_name, bool(response.raw_output_contents)) == ("7", "tiny", raw)
    more = dict.fromkeys(
        ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True
    )
    request = ask(raw=raw, sampling_parameters={**GREEDY, "n": 2}, exclude_input_in_output=True, **more)
    response = infer(channel, request)
    assert texts(response) == [want["choices"][0]["text"]] * 2
    assert texts(response, "finish_reason") == ["length", "length"]
    count = response.outputs[3]
    found = struct.unpack("<I", response.raw_output_contents[3])[0] if raw else count.contents.uint[0]
    assert (count.name, found) == ("num_output_tokens", 24)


def test_parameters_of_the_request_and_chosen_outputs(server: LiveServer, channel: grpc.Channel) -> None:
    request = ask(exclude_input_in_output=True, return_finish_reason=True)
    request.parameters.add(key="temperature").value.double = 0.0
    request.parameters.add(key="max_tokens").value.int64 = 12
    request.parameters.add(key="ignore_eos").value.bool = True
    request.outputs.add(name="text_output")
    response = infer(channel, request)
    assert texts(response) == [expected(server)["choices"][0]["text"]]
    assert [tensor.name for tensor in response.outputs] == ["text_output"]


def test_a_stream_has_the_text_of_the_whole_answer(server: LiveServer, channel: grpc.Channel) -> None:
    """Several on one call, and what is wrong with one leaves the others alone."""
    good = {"stream": True, "sampling_parameters": GREEDY, "return_finish_reason": True}
    requests = [ask(name="a", **good), ask(name="b", wrong=True), ask("on and on", name="c", **good)]
    requests += [ask(name=f"w{i}", sampling_parameters=GREEDY, exclude_input_in_output=True)
                 for i in range(2 * MAX_RUNNING)]  # fmt: skip
    said: dict[str, list[Any]] = {}
    errors = {}
    for response in stream(channel, requests):
        name = response.infer_response.id
        if response.error_message:
            errors[name] = response.error_message
        else:
            said.setdefault(name, []).append(response.infer_response)
    assert list(errors) == ["b"]
    assert "'wrong' is not one of text_input" in errors["b"]
    text = expected(server)["choices"][0]["text"]
    assert "".join(texts(r)[0] for r in said["a"]) == text
    assert [r.parameters[0].value.bool for r in said["a"]] == [False] * (len(said["a"]) - 1) + [True]
    assert texts(said["a"][-1], "finish_reason") == ["length"]
    assert (
        "".join(texts(r)[0] for r in said["c"]) == expected(server, prompt="on and on")["choices"][0]["text"]
    )
    assert all([texts(r) for r in said[f"w{i}"]] == [[text]] for i in range(2 * MAX_RUNNING))


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ask(""), "text_input: missing or empty"),
        (ask(stream=True), "stream: needs the call ModelStreamInfer"),
        (ask(sampling_parameters="x"), "sampling_parameters: not a JSON object"),
        (ask(sampling_parameters={"prompt": "x"}), "prompt is not a sampling parameter"),
        (ask(sampling_parameters={"temperature": -1}), "temperature"),
        (ask(sampling_parameters={"n": 65}), "n: 65 is not in [1, 64]"),
        (ask("x" * 200_000), "text_input"),
        (ask(return_logprobs=True), "return_logprobs: not implemented"),
        (CLASSES["ModelInferRequest"](model_name="tiny", raw_input_contents=[b"x"]), "raw_input_contents: 1 for 0"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_requests_name_their_field(channel: grpc.Channel, request_: Any, text: str) -> None:
    refused(lambda: infer(channel, request_), grpc.StatusCode.INVALID_ARGUMENT, text)


def test_wrong_tensors(channel: grpc.Channel) -> None:
    for change, text in (
        (lambda t: setattr(t, "datatype", "FP32"), "datatype 'FP32' is not BYTES"),
        (lambda t: t.shape.append(2), "does not have one element"),
    ):
        request = ask()
        change(request.inputs[0])
        refused(lambda r=request: infer(channel, r), grpc.StatusCode.INVALID_ARGUMENT, text)
    for data in (b"", b"\x01", struct.pack("<I", 9) + b"Hello", struct.pack("<I", 2) + b"\xff\xff"):
        request = ask()
        request.raw_input_contents[0] = data
        refused(lambda r=request: infer(channel, r), grpc.StatusCode.INVALID_ARGUMENT, "text_input: ")
    named = ask()
    named.model_name = "x"
    refused(lambda: infer(channel, named), grpc.StatusCode.NOT_FOUND, "available: tiny")
    send = channel.unary_unary(f"/{SERVICE}/ModelInfer")
    refused(
        lambda: send(b"\xff\xff", metadata=KEY),
        grpc.StatusCode.INVALID_ARGUMENT,
        "is not a ModelInferRequest",
    )
    refused(
        lambda: send(bytes(MAX_MESSAGE_BYTES + 1), metadata=KEY), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger"
    )
    unknown = channel.unary_unary(f"/{SERVICE}/ModelConfig")
    refused(lambda: unknown(b"", metadata=KEY), grpc.StatusCode.UNIMPLEMENTED, "")


def test_keys_are_needed(channel: grpc.Channel) -> None:
    for key in ((), (("authorization", "Bearer wrong"),)):
        refused(lambda k=key: infer(channel, ask(), metadata=k), grpc.StatusCode.UNAUTHENTICATED, "API key")
    response = infer(channel, ask(sampling_parameters=GREEDY), metadata=(("x-api-key", "other-key"),))
    assert texts(response)[0].startswith("Hello")


LONG = {"max_tokens": 60_000, "ignore_eos": True}


def test_a_deadline_ends_the_request(server: LiveServer, channel: grpc.Channel) -> None:
    request = ask(sampling_parameters=LONG)
    refused(lambda: infer(channel, request, timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED, "")
    server.wait(server.idle)  # a server that has others to answer would refuse the next one at once

    def whole(seconds: float) -> None:
        limited = ask(sampling_parameters=LONG | {"deadline_ms": 1000 * seconds})
        refused(lambda: infer(channel, limited), grpc.StatusCode.DEADLINE_EXCEEDED, "not finished within")

    def streamed(seconds: float) -> None:
        limited = ask(stream=True, sampling_parameters=LONG | {"deadline_ms": 1000 * seconds})
        *_, last = stream(channel, [limited])
        assert "not finished within" in last.error_message

    for check in (whole, streamed):
        with_patience(check, 0.1, 1.0, 10.0)  # until it is enough for a beginning
        server.wait(server.idle)


def test_leaving_ends_the_request(server: LiveServer, channel: grpc.Channel) -> None:
    answers = stream(channel, [ask(stream=True, sampling_parameters=LONG), ask(sampling_parameters=LONG)])
    for _ in range(5):
        next(answers)
    server.wait(lambda: server.engine.stats.running == 2)
    answers.cancel()
    server.wait(server.idle)
    future = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
        ask(sampling_parameters=LONG).SerializeToString(), metadata=KEY
    )
    server.wait(lambda: server.engine.stats.running == 1)
    future.cancel()
    server.wait(server.idle)
    assert server.http.context.memory.bodies.used == 0


def test_idle_streams_end(folder: Path) -> None:
    with (
        serving(folder, grpc_port=0, websocket_idle_timeout=0.2, body_timeout=0.2) as server,
        grpc.insecure_channel(f"127.0.0.1:{port(server)}") as channel,
    ):
        method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        blocked = _Silent()
        refused(
            lambda: list(method(blocked)), grpc.StatusCode.DEADLINE_EXCEEDED, "no message has come for 0.2 s"
        )
        blocked.end()


def test_a_client_that_does_not_read_is_left(folder: Path) -> None:
    limits = {"reader_timeout": 0.3, "reader_tokens": 10**6}
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
    with (
        serving(folder, ENDLESS, grpc_port=0, **limits) as server,
        grpc.insecure_channel(f"127.0.0.1:{port(server)}", small) as channel,
    ):
        many = ask(stream=True, sampling_parameters=LONG | {"n": 2})
        many.model_name = ""
        answers = stream(channel, [many])
        next(answers)
        server.wait(lambda: server.engine.stats.running == 0)
        answers.cancel()
        server.wait(server.idle)


class _Silent:
    """An iterator of requests that never come."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __iter__(self) -> _Silent:
        return self

    def __next__(self) -> Any:
        self._over.wait(GUARD)
        raise StopIteration

    def end(self) -> None:
        self._over.set()


def test_a_port_in_use_and_options(server: LiveServer) -> None:
    with pytest.raises(BindError, match="choose another --grpc-port"):
        bind_grpc(ServingConfig(grpc_port=port(server)))
    with pytest.raises(ValueError, match=r"grpc_port: 70000 is not in \[0, 65535\]"):
        ServingConfig(grpc_port=70000)
    with pytest.raises(ValueError, match="grpc_port: needs openai"):
        ServingConfig(grpc_port=1, api=("tgi",))


def test_tls_and_a_new_certificate(folder: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate, "localhost")
    options = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate), "grpc_port": 0}
    with serving(folder, **options) as server:
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(
            f"127.0.0.1:{port(server)}", trusted, [("grpc.ssl_target_name_override", "localhost")]
        ) as channel:
            assert call(channel, "ServerLive", ()).live
        make_certificate(key, certificate, "renewed")
        assert subject(port(server)) == "localhost"
        assert server.http.grpc is not None
        server.http.grpc.reload()
        assert subject(port(server)) == "renewed"


def test_calls_that_wait_stay_under_the_bound() -> None:
    """As many connections and calls as there may be, with messages near the limit, most of which have no memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    options = ("--max-model-len", "512", "--request-memory", "12MiB", "--max-connections", "400")
    with bounded(shipped_models()[DEFAULT_MODEL], 200 * MIB, *options, "--grpc-port", str(number)) as server:
        assert server.memory()["planned"]["grpc"] > 3 * GRPC_CALLS * 32 * 1024
        server.ask(*completions(prompt="x", max_tokens=2))
        with contextlib.ExitStack() as stack:
            apart = [("grpc.use_local_subchannel_pool", 1)]
            channels = [
                stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{number}", apart)) for _ in range(3)
            ]
            seen = Counter[grpc.StatusCode]()
            for size in (200_000, 250_000, 250_000):
                request = ask("a" * size)
                request.model_name = ""
                calls = [infer_later(channel, request) for channel in channels for _ in range(GRPC_CALLS)]
                seen.update(call.code() for call in calls)
        assert set(seen) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}, seen


def infer_later(channel: grpc.Channel, request: Any) -> Any:
    method = channel.unary_unary(f"/{SERVICE}/ModelInfer", lambda m: m.SerializeToString(), bytes)
    return method.future(request, timeout=GUARD)
