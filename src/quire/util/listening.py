"""Sockets that listen on a path, and TLS of those that listen."""

from __future__ import annotations

import os
import socket
import ssl
import stat

from quire.types import QuireError

BACKLOG = 1024


class BindError(QuireError):
    """A server cannot listen on an address."""


def bind_path(path: str, send_buffer: int) -> socket.socket:
    """A Unix socket that listens, for this user alone, with so many bytes to send at once. That of a server which is
    gone is replaced. Raises BindError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    try:
        if os.path.exists(path):
            _remove_stale(path)
        sock.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        sock.listen(BACKLOG)
    except BindError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise BindError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise BindError(f"cannot listen on {path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise BindError(f"cannot listen on {path}: another server is listening on it")


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """TLS by the files of a certificate and its key. Raises BindError when they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise BindError(f"ssl_certfile and ssl_keyfile: cannot be used: {error}") from None
    return context
