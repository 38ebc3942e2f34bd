"""A server of an API that answers with given bytes, and keeps what it was asked."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any


def answer(status: int, body: bytes) -> bytes:
    """An answer of a known length."""
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(*parts: bytes, headers: str = "", ends: bool = True) -> bytes:
    """An answer of events in chunks; one that does not end is cut off."""
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{headers}\r\n"
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head.encode() + chunks + (b"0\r\n\r\n" if ends else b"")


class RawServer:
    """Its health is good. It answers each POST with the next of some answers, the last one again and again, and hangs
    up, or hangs."""

    def __init__(self, *made: bytes, hangs: bool = False) -> None:
        self.answers(*made)
        self._hangs = hangs
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def answers(self, *made: bytes) -> None:
        """What it answers by the number of the request."""
        self._made = made

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self._open.append(sock)
            if self._closed:  # it was accepted just before the end
                sock.close()
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock, sock.makefile("rb") as file:
            while line := file.readline():
                headers = {}
                while (field := file.readline().strip()) != b"":
                    name, _, value = field.decode().partition(": ")
                    headers[name] = value
                body = file.read(int(headers.get("content-length", "0")))
                if line.startswith(b"GET"):
                    sock.sendall(answer(200, b'{"data": [{"id": "fake-model"}]}'))
                    continue
                number = len(self.asked)
                self.asked.append((headers, json.loads(body)))
                sock.sendall(self._made[min(number, len(self._made) - 1)])
                if not self._hangs:
                    return
                file.read(1)  # until the router has given up

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
