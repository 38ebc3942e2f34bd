"""A router and its servers over TLS, with an authority of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from helpers.certificates import make_certificate
from helpers.process import Process, until
from helpers.routed import routed
from quire.config.shipped import shipped_models

KEY = b"a key that all of them have"


def test_servers_are_asked_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose certificate is of the authority in SSL_CERT_FILE is used, and without it none; what it says of itself
    to routers is an https address. It says so when it is ready, and leaves before it drains."""
    certificate, own, shared = (str(tmp_path / name) for name in ("cert.pem", "own.pem", "router.key"))
    Path(shared).write_bytes(KEY)
    make_certificate(Path(own), Path(certificate), "here", "IP:127.0.0.1")
    secured = ("--ssl-certfile", certificate, "--ssl-keyfile", own)
    with routed(kv_key_file=shared) as blind:
        told = f"key={shared},announce=http://127.0.0.1:{blind.port},name=one"
        server = Process(
            shipped_models()["quire-mini"],
            "--port",
            "0",
            "--max-model-len",
            "2048",
            "--router",
            told,
            *secured,
        )
        try:
            until(lambda: [each.name for each in blind.backends.all] == ["one"])
            (backend,) = blind.backends.all
            url = f"https://127.0.0.1:{backend.client.server.port}"
            assert backend.client.server.tls
            until(lambda: bool(backend.why))
            assert blind.chat("hello").status == 503
            monkeypatch.setenv("SSL_CERT_FILE", certificate)
            with routed(urls=[url]) as router:
                until(lambda: [each.healthy for each in router.backends.all] == [True])
                assert router.chat("hello").status == 200
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not blind.backends.all)
            assert server.ended()[0] == 0
        finally:
            server.process.kill()
            server.process.wait()
