"""HTTP/2 through nginx and Envoy, with the configurations of the examples."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from helpers.certificates import make_certificate
from helpers.server import ENDLESS, PATIENT, LiveServer, serving, stream_text

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not shutil.which("curl"), reason="needs curl"),
]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, ENDLESS | {"max_num_seqs": 4}, sse_ping_interval=0.1, **PATIENT) as live:
        yield live


def nginx(folder: Path, port: int, server: int) -> list[str]:
    """Starts nginx with the configuration of the examples."""
    text = (EXAMPLES / "nginx/nginx.conf").read_text().replace("127.0.0.1:8000", f"127.0.0.1:{server}")
    (folder / "nginx.conf").write_text(text.replace("listen 8443", f"listen 127.0.0.1:{port}"))
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]


def envoy(folder: Path, port: int, server: int) -> list[str]:
    """Starts Envoy with the configuration of the examples."""
    text = (EXAMPLES / "envoy/envoy.yaml").read_text().replace("port_value: 8000", f"port_value: {server}")
    text = text.replace("address: 0.0.0.0, port_value: 8443", f"address: 127.0.0.1, port_value: {port}")
    (folder / "envoy.yaml").write_text(text)
    return ["envoy", "-c", "envoy.yaml", "--concurrency", "1", "--log-level", "warn", "--use-dynamic-base-id"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(made, marks=pytest.mark.skipif(not shutil.which(name), reason=f"needs {name}"), id=name)
        for name, made in (("nginx", nginx), ("envoy", envoy))
    ],
)
def proxy(
    request: pytest.FixtureRequest, server: LiveServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The port of a proxy in front of the server."""
    folder = tmp_path_factory.mktemp("proxy")
    make_certificate(folder / "key.pem", folder / "cert.pem", "localhost")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with subprocess.Popen(request.param(folder, port, server.port), cwd=folder) as running:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert running.poll() is None
            time.sleep(0.05)
        yield port
        running.terminate()


def curl(port: int, path: str, body: Any, *more: str) -> list[str]:
    return [
        "curl", "-sSNk", "--http2", f"https://localhost:{port}{path}", "-d", json.dumps(body), "-H",
        "content-type: application/json", *more,
    ]  # fmt: skip


def test_a_stream_over_http2_has_the_same_text(server: LiveServer, proxy: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "seed": 1, "stream": True}
    expected = stream_text(server.post("/v1/chat/completions", body))
    told = curl(proxy, "/v1/chat/completions", body, "-w", "%{http_version}")
    said, _, version = subprocess.run(told, check=True, capture_output=True, text=True).stdout.rpartition(
        "\n\n"
    )
    assert version == "2"
    events = [json.loads(line[6:]) for line in said.split("\n\n") if line[6:] != "[DONE]" and line[:1] != ":"]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == expected[0]


def test_events_come_one_by_one_and_leaving_ends_the_request(server: LiveServer, proxy: int) -> None:
    body = {"prompt": "on", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
    with subprocess.Popen(curl(proxy, "/v1/completions", body), stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        for _ in range(6):
            assert client.stdout.readline()
        assert server.engine.stats.running == 1
        client.kill()
    server.wait(server.idle)


def test_pings_come_through(server: LiveServer, proxy: int) -> None:
    body = {"prompt": "on", "max_tokens": 5, "stream": True}
    with (
        server.busy(4),
        subprocess.Popen(curl(proxy, "/v1/completions", body), stdout=subprocess.PIPE) as client,
    ):
        assert client.stdout is not None
        assert client.stdout.readline() == b": ping\n"
        client.kill()
    server.wait(server.idle)


def test_websockets_come_through(server: LiveServer, proxy: int) -> None:
    trusting = ssl._create_unverified_context()
    with connect(f"wss://localhost:{proxy}/v1/realtime", ssl=trusting) as link:
        assert json.loads(link.recv(60))["type"] == "session.created"
