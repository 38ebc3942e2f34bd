"""`quire serve`: options, config files, start, signals, and what stops a start."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.certificates import make_certificate
from helpers.process import SMALL, children, running, until
from helpers.server import GUARD, read_all, request_bytes
from quire.cli.main import main
from quire.cli.serve import read_config, settings


def test_start_serve_and_drain(folder: Path) -> None:
    """Draining: running requests finish, new ones are refused, then nothing is left."""
    with running(folder, "--served-model-name", "small", "--log-format", "json", "--access-log") as server:
        assert any(line.split()[:1] == ["sum"] for line in server.lines)
        assert "  answers: no tool calls, no reasoning" in server.lines
        server.process.send_signal(signal.SIGHUP)  # there is no certificate to read again
        assert "KV blocks" in " ".join(server.lines)
        engines = children(server.process.pid)
        with server.standing():
            sock = server.ask(50)
            until(lambda: server.metric("quire_waiting_tokens") > 0)
            server.process.send_signal(signal.SIGTERM)
            server.said("SIGTERM: draining")
            ready = server.request("GET", "/health/ready")  # still answering, no longer ready
            assert (ready.status, ready.json["error"]["code"]) == (503, "draining")
            assert server.request("GET", "/health/live").status == 200
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            assert server.request("POST", "/v1/chat/completions", body).status == 503
        text = read_all(sock)
        assert b"[DONE]" in text
        status, log = server.ended()
        assert status == 0
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        answers = [line for line in lines if line["message"] == "POST /v1/chat/completions"]
        assert [(a["status"], a.get("completion_tokens")) for a in answers] == [(503, None), (200, 50)]
        assert not any(Path(f"/proc/{pid}").exists() for pid in engines)


def test_a_second_signal_ends_at_once(folder: Path) -> None:
    with running(folder, "--shutdown-timeout", "600") as server:
        engines = children(server.process.pid)
        sock = server.stream(60_000)
        server.process.send_signal(signal.SIGINT)
        server.said("SIGINT: draining")
        status, log = server.end(signal.SIGINT)
        assert status == 1
        assert "SIGINT: stopping at once" in log
        assert not any(Path(f"/proc/{pid}").exists() for pid in engines)
        sock.close()


def test_a_signal_while_loading_ends_the_start(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", "serve", str(folder), *SMALL, "--port", "0"],
        stderr=subprocess.PIPE,
    )
    time.sleep(0.5)  # somewhere on the way; wherever it is, nothing must stay behind
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in {0, 1, -signal.SIGTERM}


def test_unix_socket(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(path))
    left_behind.close()
    with running(folder, "--uds", str(path)) as server:
        assert server.lines[-1].endswith(f"unix:{path}")
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: anything\r\nconnection: close\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 200 ")
        assert main(["serve", str(folder), "--uds", str(path)]) == 1
        assert server.end()[0] == 0
    assert not path.exists()


def test_tls_and_a_new_certificate(folder: Path, tmp_path: Path) -> None:
    """SIGHUP loads a renewed certificate; a start with a broken one fails."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate, "first")
    options = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    with running(folder, *options) as server:
        assert "https://127.0.0.1" in server.lines[-1]
        assert subject(server.port) == "first"
        make_certificate(key, certificate, "second")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: subject(server.port) == "second")
        client = ssl.create_default_context(cafile=str(certificate))
        client.check_hostname = False
        with client.wrap_socket(socket.create_connection(("127.0.0.1", server.port))) as sock:
            sock.sendall(request_bytes("/tokenize", b" " * 20 * 2**20))  # refused before it is whole
            assert read_all(sock).startswith(b"HTTP/1.1 413 ")
        assert server.end()[0] == 0
    certificate.write_text("not a certificate")
    assert main(["serve", str(folder), "--port", "0", *options]) == 1


def subject(port: int) -> str:
    """The common name of the certificate that a server shows."""
    text = ssl.get_server_certificate(("127.0.0.1", port))
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-subject", "-nameopt", "multiline"],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return shown.stdout.rsplit("=", 1)[1].strip()


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The start fails and names the address and the option."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "--port" in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--prot", "1"], "did you mean --port?"),
        (["--max-model-length", "1"], "did you mean --max-model-len?"),
        (["--trust-remote-code"], "code in checkpoints is never run"),
        (["--port", "x"], "is not a whole number"),
        (["--unknown-fields", "maybe"], "invalid choice"),
        (["--max-model", "100"], "did you mean --max-model-len?"),
    ],
)
def test_unusable_options(
    folder: Path, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused with the name of the option."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder), *options])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.toml", "max_model_length = 3", "did you mean max_model_len?"),
        ("a.toml", 'port = "80"', "port: '80' has the wrong type"),
        ("a.toml", "port = true", "has the wrong type"),
        ("a.json", '{"port": 1, "port": 2}', "duplicate key"),
        ("a.toml", "max-model-len = 3\nmax_model_len = 4", "given twice"),
        ("a.toml", 'memory = "much"', "is not a size"),
        ("a.toml", "memory = 1\ngpu_memory_utilization = 0.5", "set only one"),
        ("a.toml", "port = 99999", "port: 99999"),
        ("a.toml", 'ssl_keyfile = "k"', "set both or neither"),
        ("a.toml", 'api_key_file = "/nonexistent"', "api_key_file"),
        ("a.toml", "model = 3", "model"),
        ("a.json", "[]", "expected a JSON object"),
        ("a.yaml", "port: eighty", "port: 'eighty' is not a whole number"),
        ("a.yaml", "port: 1\nport: 2", "line 2: a key must be a string and occur once"),
        ("a.yaml", "port: [1, 2]", "port: ['1', '2'] has the wrong type"),
        ("a.yaml", "access-log: maybe", "access-log: 'maybe' is not one of 1, true"),
        ("a.yaml", "- port", "expected a mapping"),
        ("a.yml", "port: {a: b}", "has the wrong type"),
        ("a.yml", "a: b: c", "not valid YAML"),
        ("a.yaml", "tensor-parallel-size: 0", "tensor_parallel_size"),
        ("a.yaml", "data-parallel-size: 0", "data_parallel_size"),
        ("a.yaml", "dtype: fp7", "dtype: 'fp7' is not one of"),
        ("a.yaml", "api-key: ' '", "api_key: a key must be printable ASCII, and not empty or blank"),
    ],
)
def test_unusable_config_files(
    tmp_path: Path, folder: Path, name: str, content: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused with the name of the file and the option."""
    file = tmp_path / name
    file.write_text(content)
    assert main(["serve", str(folder), "--config", str(file)]) == 2
    assert text in capsys.readouterr().err


def test_config_file_and_command_line(tmp_path: Path) -> None:
    toml, file = tmp_path / "c.toml", tmp_path / "c.json"
    values: dict[str, Any] = {
        "model": "m", "max-model-len": 300, "api_key": ["a", "b"], "memory": "2GiB", "reader-timeout": 3,
        "enable-prefix-caching": False, "served-model-name": "one",
    }  # fmt: skip
    file.write_text(json.dumps(values))
    toml.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    assert read_config(toml) == read_config(file)
    yaml = tmp_path / "c.yaml"
    yaml.write_text("# the same\n" + file.read_text())  # JSON is YAML
    assert read_config(yaml) == read_config(file)
    yaml.write_text(
        "model: org/name\nmax-model-len: 8k\napi-key:\n  - '0123'\n  - no\nweight-cache: off\naccess-log: on\n"
        "port: 0080\nstall_timeout: 1e1\nserved-model-name: 007\ntensor-parallel-size: 1\nenforce-eager: true\n"
    )
    assert read_config(yaml) == {
        "model": "org/name", "max_model_len": 8000, "api_key": ["0123", "no"], "weight_cache": "off",
        "access_log": True, "port": 80, "stall_timeout": 10.0, "served_model_name": ["007"],
        "tensor_parallel_size": 1,
    }  # fmt: skip
    model, engine, serving = settings({"max_model_len": 400, "port": 1234}, read_config(toml))
    assert (model, engine.limits.max_model_len, engine.limits.memory, serving.port) == (
        "m",
        400,
        2 << 30,
        1234,
    )
    assert (serving.api_key, serving.served_model_name, serving.reader_timeout) == (("a", "b"), ("one",), 3.0)
    assert not engine.cache.enable_prefix_caching
    shared = settings({"model": "m", "gpu_memory_utilization": 0.5}, {"memory": 5})[1].limits.memory
    assert shared is not None
    assert shared > 5
    with pytest.raises(ValueError, match="set only one"):
        settings({"model": "m", "gpu_memory_utilization": 0.5, "memory": 1}, {})
    assert settings({}, {})[0] == "quire-mini"


def test_a_closed_log_does_not_matter(folder: Path) -> None:
    """A server goes on when the reader of its log has gone."""
    with running(folder, "--access-log") as server:
        assert server.process.stderr is not None
        server.process.stderr.close()
        for _ in range(3):
            assert server.request("GET", "/health").status == 200
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_quiet_server(folder: Path, tmp_path: Path) -> None:
    """Not a word on standard error from its start to its end."""
    path = str(tmp_path / "s")
    words = [str(folder), *SMALL, "--quiet", "--uds", path]
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *words], stderr=subprocess.PIPE, text=True
    )

    def ready() -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(b"GET /health/ready HTTP/1.0\r\n\r\n")
            return b" 200 " in read_all(sock)
        return False

    try:
        until(ready)
        server.terminate()
        assert server.communicate(timeout=GUARD) == (None, "")
        assert server.returncode == 0
    finally:
        server.kill()


def test_a_log_that_is_not_read_does_not_stop_the_end(folder: Path) -> None:
    """Standard error is a full pipe: requests are answered, and SIGTERM ends the server."""
    with running(folder, "--access-log") as server:
        assert server.process.stderr is not None
        fcntl.fcntl(server.process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(100):
            assert server.request("GET", "/health").status == 200
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "/health" in server.process.stderr.read()


def test_a_server_whose_engine_is_given_up_ends(folder: Path, tmp_path: Path) -> None:
    """An orchestrator starts it anew; one that only answers 503 would stay so."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    with running(model, "--engine-restarts", "1") as server:
        (model / "model.safetensors").unlink()
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        assert server.process.wait(60) == 1


def test_the_http_process_imports_only_what_it_needs() -> None:
    """Weights, kernels and numpy belong to the engine's process, and what writes /metrics to the first scrape."""
    code = (
        "import sys, quire.cli.serve, quire.engine.front.async_engine, quire.server.run; print(*sys.modules)"
    )
    found = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert "quire.engine.build.opening" in found
    heavy = {
        "numpy",
        "torch",
        "prometheus_client",
        "quire._native",
        "quire.loader",
        "quire.program",
        "quire.executor",
    }
    assert not heavy & found
