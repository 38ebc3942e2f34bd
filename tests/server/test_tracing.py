"""Spans: what a collector is sent, whose trace they continue, and that a dead collector costs nothing."""

from __future__ import annotations

import http.server
import json
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.pooling_folders import pooling_folder
from helpers.server import GUARD, serving
from quire.server import tracing
from quire.server.tracing import Tracer, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, queue.Queue[Any]]]:
    """A collector's address and what it was sent, however long that takes."""
    monkeypatch.setattr(tracing, "_POST_SECONDS", GUARD)
    seen: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            seen.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()
    thread.join()


def spans(batch: Any) -> list[Any]:
    (resource,) = batch["resourceSpans"]
    return resource["scopeSpans"][0]["spans"]


def attributes(span: Any) -> dict[str, Any]:
    return {a["key"]: next(iter(a["value"].values())) for a in span["attributes"]}


def test_spans_of_generations(folder: Path, collector: tuple[str, queue.Queue[Any]]) -> None:
    url, seen = collector
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "ignore_eos": True,
        "stop": "\0\0",
    }
    caller = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    with serving(folder, otlp_traces_endpoint=url, served_model_name=("tiny",)) as live:
        live.post("/v1/chat/completions", body, caller)
        live.post("/v1/chat/completions", body, {"traceparent": f"00-{TRACE}-{SPAN}-00"})  # not sampled
        live.post("/v1/chat/completions", body | {"stream": True, "n": 2})
        live.get("/health")
        live.complete("x", temperature=-1)
    found = []
    while not seen.empty():
        found += spans(seen.get())
    chat, *stages = found[:8]
    assert (chat["traceId"], chat["parentSpanId"], chat["name"]) == (TRACE, SPAN, "chat tiny")
    assert chat["traceState"] == "vendor=1"
    values = attributes(chat)
    assert values["gen_ai.usage.output_tokens"] == values["gen_ai.request.max_tokens"] == "5"
    assert values["http.response.status_code"] == "200"
    assert values["gen_ai.request.temperature"] == 1.0
    for name, wanted in (("request.stop_sequences", "\0\0"), ("response.finish_reasons", "length")):
        assert values[f"gen_ai.{name}"] == {"values": [{"stringValue": wanted}]}
    assert chat["status"] == {}
    check_stages(chat, stages)
    streamed, *stages = found[8:16]
    assert attributes(streamed)["gen_ai.request.choice.count"] == "2"
    check_stages(streamed, stages)
    (refused,) = found[16:]
    assert refused["status"] == {"code": 2, "message": "invalid_value"}
    assert "parentSpanId" not in refused
    assert "traceState" not in refused


def test_spans_of_steps_while_a_profile_runs(
    folder: Path, tmp_path: Path, collector: tuple[str, queue.Queue[Any]]
) -> None:
    url, seen = collector
    admin = {"authorization": "Bearer root"}
    options: dict[str, Any] = {
        "otlp_traces_endpoint": url,
        "profile_dir": str(tmp_path),
        "admin_api_key": ("root",),
    }
    with serving(folder, **options) as live:
        assert live.request("POST", "/start_profile", b"", admin).status == 200
        for tokens in (5, 100):
            assert live.chat(max_tokens=tokens, ignore_eos=True).status == 200
        assert live.request("POST", "/stop_profile", b"", admin).status == 200
        live.chat(max_tokens=1)
    found = []
    while not seen.empty():
        found += spans(seen.get())
    short, long, plain = (span for span in found if span["kind"] == 2)
    for whole, steps in ((short, 5), (long, 64), (plain, 0)):
        mine = [span for span in found if span["traceId"] == whole["traceId"]][1:]
        check_stages(whole, mine[:7])
        phases = {span["spanId"]: span for span in mine[:7]}
        assert [span["name"] for span in mine[7:]] == ["embed", "layers", "project", "sample"] * steps
        times = [int(span[end]) for span in mine[7:] for end in ("startTimeUnixNano", "endTimeUnixNano")]
        assert times == sorted(times)
        assert [phases[span["parentSpanId"]]["name"] for span in mine[7:]][:4] == ["prefill"] * 4 * bool(
            steps
        )
        for span in mine[7:]:
            phase = phases[span["parentSpanId"]]
            assert phase["name"] in {"prefill", "decode"}
            assert int(span["endTimeUnixNano"]) <= int(phase["endTimeUnixNano"]) + 10**8
            assert attributes(span)["quire.step.rows"] == "1"
        numbers = [int(attributes(span)["quire.step"]) for span in mine[7::4]]
        assert numbers == list(range(numbers[0], numbers[0] + steps)) if steps else not numbers


def check_stages(whole: Any, stages: list[Any]) -> None:
    """They are under the span of the request, and each begins where the one before it ends."""
    names = ["receive", "tokenize", "queue", "prefill", "decode", "respond", "detokenize"]
    assert [span["name"] for span in stages] == names
    for span in stages:
        assert (span["traceId"], span["parentSpanId"]) == (whole["traceId"], whole["spanId"])
    *parts, beside = stages
    times = [int(span[end]) for span in parts for end in ("startTimeUnixNano", "endTimeUnixNano")]
    assert times[0] == int(whole["startTimeUnixNano"])
    assert times[-1] == int(whole["endTimeUnixNano"])
    assert times == sorted(times)
    assert times[1:-1:2] == times[2::2]
    assert (beside["startTimeUnixNano"], beside["endTimeUnixNano"]) == (
        parts[4]["startTimeUnixNano"], parts[4]["endTimeUnixNano"],
    )  # fmt: skip
    taken = int(beside["endTimeUnixNano"]) - int(beside["startTimeUnixNano"])
    assert 0 < attributes(beside)["quire.detokenize.seconds"] <= taken / 1e9 + 1.0


def test_spans_of_embeddings(tmp_path: Path, collector: tuple[str, queue.Queue[Any]]) -> None:
    url, seen = collector
    folder, _ = pooling_folder("bert", tmp_path)
    with serving(folder, engine={"max_model_len": 48}, otlp_traces_endpoint=url) as live:
        assert live.post("/v1/embeddings", {"input": ["a b", "c"]}).status == 200
    whole, *stages = spans(seen.get())
    assert attributes(whole)["gen_ai.operation.name"] == "embeddings"
    assert attributes(whole)["gen_ai.usage.input_tokens"] == "7"
    assert [span["name"] for span in stages] == ["receive", "tokenize", "queue", "prefill", "respond"]


def test_nothing_is_imported_without_a_collector() -> None:
    code = "import quire.server.run, sys; sys.exit('quire.server.tracing' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_headers_that_are_no_traceparent(header: str) -> None:
    assert parse_traceparent(header) is None


def test_a_collector_that_is_not_there(folder: Path) -> None:
    with serving(folder, otlp_traces_endpoint="http://127.0.0.1:9") as live:
        for _ in range(3):
            assert live.chat(max_tokens=1).status == 200


def test_a_collector_that_answers_garbage() -> None:
    """What it says ends neither the thread nor the spans after it."""
    garbage = (
        b"\0\xff no HTTP\r\n\r\n",
        b"",
        b"HTTP/1.1 9999 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200,
        b"HTTP/1.1 302 \r\nlocation: ftp://[\r\n\r\n",
    )
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        tracer = Tracer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        for answer in (*garbage, good):
            tracer._spans.put([{}])
            connection, _ = listening.accept()
            with connection:
                assert connection.recv(2**16).startswith(b"POST /v1/traces")
                connection.sendall(answer)
        tracer.close()
        assert not tracer._thread.is_alive()


def test_an_address_that_is_none() -> None:
    for wrong in ("file:///etc/passwd", "collector:4318", "http://"):
        with pytest.raises(ValueError, match="otlp_traces_endpoint"):
            Tracer(wrong)
