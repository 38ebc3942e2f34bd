"""Connections over which nothing is sent for long, and whose other side may be gone without a word."""

from __future__ import annotations

import socket


def end_when_gone(sock: socket.socket, after: int, every: int, times: int) -> None:
    """Have the kernel ask the other side after so many seconds of silence, and so many `times`: without an answer, or
    where the other side knows nothing of it any more, the connection ends (RFC 1122, 4.2.3.6)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, after),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, times),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
