"""An API server of Kubernetes, as far as it lists and watches slices of endpoints."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from helpers.server import GUARD

TOKEN = "a-token"


def endpoint_slice(name: str, pods: dict[str, str], port: int, **more: Any) -> dict[str, Any]:
    """A slice of pods, address by name."""
    endpoints = [
        {"addresses": [address], "conditions": {"ready": True}, "targetRef": {"kind": "Pod", "name": pod}}
        for pod, address in pods.items()
    ]
    ports = [{"name": "metrics", "port": 9}, {"name": "http", "port": port, "protocol": "TCP"}]
    return {"metadata": {"name": name}, "endpoints": endpoints, "ports": ports, "addressType": "IPv4"} | more


class KubeApi:
    """Its loop runs in a thread. `set` and `remove` change slices; versions before `oldest` are gone."""

    def __init__(self, folder: Path) -> None:
        """Writes the account of a pod into a folder."""
        self.account = folder
        key, certificate = folder / "key.pem", folder / "ca.crt"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kube",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
            check=True, capture_output=True,
        )  # fmt: skip
        (folder / "token").write_text(TOKEN + "\n")
        (folder / "namespace").write_text("models")
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate, key)
        self.slices: dict[str, dict[str, Any]] = {}
        self.version, self.oldest = 1, 0
        self.refuse = 0  # requests answered with 500
        self.lists = self.watches = 0
        self.seen: list[str] = []
        self.events: list[tuple[int, bytes]] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self.do(self._listen())

    def do(self, work: Any) -> Any:
        """Run a coroutine in its loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(GUARD)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """End it."""

        async def end() -> None:
            self._server.close()
            for writer in self._writers:
                writer.close()

        self.do(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(GUARD)

    def set(self, name: str, made: dict[str, Any]) -> None:
        """A slice is like this from now on."""
        self.do(self._change(name, made))

    def remove(self, name: str) -> None:
        """A slice is gone."""
        self.do(self._change(name, None))

    async def _change(self, name: str, made: dict[str, Any] | None) -> None:
        kind = "DELETED" if made is None else "MODIFIED" if name in self.slices else "ADDED"
        found = self.slices.pop(name) if made is None else made
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        if made is not None:
            self.slices[name] = made
        self.say({"type": kind, "object": found})

    def say(self, event: Any) -> None:
        """Send an event to all who watch; in its loop."""
        line = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
        self.events.append((self.version, line))
        for writer in self._writers:
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    def cut(self) -> None:
        """Cut off all who watch, in the middle of an event."""

        async def end() -> None:
            for writer in self._writers:
                writer.write(b'40\r\n{"type": "MOD')
                writer.transport.abort()

        self.do(end())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        path = urlsplit(head.split()[1])
        query = {name: values[0] for name, values in parse_qs(path.query).items()}
        self.seen.append(path.path)
        body = b"{}"
        if self.refuse:
            self.refuse -= 1
            status = "500 Broken"
        elif f"authorization: Bearer {TOKEN}\r\n" not in head:
            status = "401 Unauthorized"
        elif "watch" in query:
            await self._watch(int(query["resourceVersion"]), writer)
            return
        else:
            self.lists += 1
            status = "200 OK"
            assert query["labelSelector"] == "kubernetes.io/service-name=servers"
            meta = {"resourceVersion": str(self.version)}
            body = json.dumps({"metadata": meta, "items": [*self.slices.values()]}).encode()
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def _watch(self, since: int, writer: asyncio.StreamWriter) -> None:
        self.watches += 1
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if since < self.oldest:
            line = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410}}\n'
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(line), line))
            return
        for version, line in self.events:
            if version > since:
                writer.write(b"%x\r\n%b\r\n" % (len(line), line))
        self._writers.add(writer)
