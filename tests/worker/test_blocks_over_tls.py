"""Blocks over TLS: with the right authority alone, and nothing of them is to be read on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.certificates import make_certificate
from helpers.kv_servers import kv_server
from quire.cli.main import main
from quire.config.kv_tiers import parse_tiers
from quire.engine.build.disk_tiers import _tls
from quire.util.listening import server_tls
from quire.worker.kv_server import KvServer
from quire.worker.remote_tier import RemoteTier

from .keeping import BLOCK, MARK, content_of, fetch, keep, name_of, serving, wait

KEY = b"a key that both sides have"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Of a certificate and its key, by its common name."""
    folder, made = tmp_path_factory.mktemp("tls"), {}
    for name, of in (("here", "IP:127.0.0.1"), ("other", "IP:127.0.0.1"), ("elsewhere", "DNS:elsewhere")):
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        make_certificate(key, certificate, name, of)
        made[name] = str(certificate), str(key)
    return made


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("quire.worker.outages.PAUSES", (0.05, 0.1))


@contextlib.contextmanager
def tier_at(port: int, authority: str = "") -> Iterator[RemoteTier]:
    made = RemoteTier(("127.0.0.1", port), KEY, BLOCK, MARK, _tls(authority))
    try:
        yield made
    finally:
        made.close()


def port_of(server: KvServer) -> int:
    return int(server._listener.getsockname()[1])


class Wire:
    """Passes connections on to a port, and notes what goes over them."""

    def __init__(self, port: int) -> None:
        self.port_behind, self.seen = port, bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port_behind))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(2**16):
                self.seen += data
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("secured", [True, False])
def test_nothing_of_a_block_is_on_the_wire(files: dict[str, tuple[str, str]], secured: bool) -> None:
    authority = files["here"][0] if secured else ""
    with serving(KEY, server_tls(*files["here"]) if secured else None) as server:
        wire = Wire(port_of(server))
        with tier_at(wire.port, authority) as first, tier_at(wire.port, authority) as second:
            keep(first, 1, 2, 3)
            wait(lambda: second.holds(name_of(3)))
            assert fetch(second, 1, 2, 3) == [1, 2, 3]
        assert server.refused == 0
        wire.close()
        parts = [content_of(number).tobytes()[:64] for number in (1, 2, 3)]
        assert [part in wire.seen for part in parts] == [not secured] * 3


@pytest.mark.parametrize(
    ("certificate", "authority"),
    [("here", "other"), ("elsewhere", "elsewhere"), ("here", ""), ("", "here")],
    ids=["another authority", "another name", "a client without TLS", "a server without TLS"],
)
def test_who_is_not_certified_is_not_used(
    files: dict[str, tuple[str, str]],
    certificate: str,
    authority: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks are computed; nobody hangs, and the reason is told."""
    for module in ("kv_wire", "kv_server"):  # each side may wait for the other: the first to give up tells it
        monkeypatch.setattr(f"quire.worker.{module}.HELLO_SECONDS", 0.3)
    with serving(KEY, server_tls(*files[certificate]) if certificate else None) as server:
        with tier_at(port_of(server), files[authority][0] if authority else "") as tier:
            wait(lambda: tier._outages.was_up)
            assert not tier.works
            assert not tier.reserve(name_of(1))
            assert fetch(tier, 1) == []
        assert len(server.shelf) == 0
    assert "KV blocks are computed until it can be used" in capfd.readouterr().err


def test_the_command_and_the_option(files: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    certificate, own = files["here"]
    options = ("--ssl-certfile", certificate, "--ssl-keyfile", own)
    with kv_server(tmp_path / "key", 0, *options) as (_, port), tier_at(port, certificate) as tier:
        keep(tier, 1)
        assert fetch(tier, 1) == [1]
    for wrong in (
        ["--ssl-certfile", certificate],
        ["--ssl-certfile", own, "--ssl-keyfile", str(tmp_path / "key")],
    ):
        assert main(["kv-server", "--port", "0", "--key-file", str(tmp_path / "key"), *wrong]) == 2
    found = parse_tiers("remote=kv.example:7070:/etc/kv.key,ca=/etc/ca.pem")
    assert (found.remote, found.authority) == (("kv.example", 7070), "/etc/ca.pem")
    for text in (
        "ca=/etc/ca.pem",
        "remote=/run/kv.sock:/k,ca=/etc/ca.pem",
        "remote=a:1:k,ca=",
        "remote=a:1:k,ca=x,ca=y",
    ):
        with pytest.raises(ValueError, match="kv_tiers: "):
            parse_tiers(text)
    with pytest.raises(ValueError, match="kv_tiers: ca: "):
        _tls(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="kv_tiers: ca: "):
        _tls(own)
