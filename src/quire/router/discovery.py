"""Servers that Kubernetes knows: the endpoints of a Service, followed through the API server.

The pod's own account is used: its token, which is read again for each request since it changes, and the certificate of
the API server. A list gives all slices of endpoints and a version; a watch from there tells each change. When the watch
ends it is begun again where it was, and with a new list when that version is too old. As long as nothing can be
learned, what was known last holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from quire.config.routing import DiscoveredService
from quire.types import QuireError
from quire.util.http_client import Client, ClientError, Whole, host_of_url, target

logger = logging.getLogger("quire.server")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAUSES = (0.5, 30.0)  # seconds before the API server is asked again: first, and at most
_WATCH = 240  # seconds after which the API server ends a watch
_SILENCE = 60.0  # seconds for which a watch may go on beyond that
_SHORTEST = 1.0  # seconds of a watch that is one
_LINE = 4 * 2**20  # bytes of the longest event
_MOST = 1000  # servers


class DiscoveryError(QuireError):
    """The API server did not answer as expected."""


class _Meta(msgspec.Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""  # noqa: N815


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Ref(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    targetRef: _Ref | None = None  # noqa: N815


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class Slice(msgspec.Struct):
    """A part of the endpoints of a service, as far as it matters here."""

    metadata: _Meta = _Meta()
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[Slice] | None = None


class _Status(msgspec.Struct):
    code: int = 0


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


def servers_of(slices: Mapping[str, Slice], service: DiscoveredService) -> dict[str, str]:
    """The addresses of the servers of all slices: of ready endpoints, by the names of their pods."""
    found: dict[str, str] = {}
    for each in slices.values():
        port = _port(each.ports or [], service.port)
        for endpoint in each.endpoints or ():
            if port is None or endpoint.conditions.ready is False or not endpoint.addresses:
                continue
            address = endpoint.addresses[0]
            name = (endpoint.targetRef and endpoint.targetRef.name) or f"{address}:{port}"
            if len(found) < _MOST:
                found.setdefault(name, f"http://{host_of_url(address)}:{port}")
    return dict(sorted(found.items()))


def _port(ports: list[_Port], wanted: str) -> int | None:
    """The port of a name or number; without one that of the name http, or the first."""
    named = [each.port for each in ports if each.port and (wanted or "http") in {each.name, str(each.port)}]
    any_port = [] if wanted else [each.port for each in ports if each.port]
    return next(iter(named + any_port), None)


class ServiceWatch:
    """Follows the endpoints of a service. `changed` gets its servers, address by name, whenever they are others."""

    def __init__(
        self,
        service: DiscoveredService,
        changed: Callable[[dict[str, str]], None],
        account: Path = ACCOUNT,
    ) -> None:
        """Raises ValueError where this is no pod of Kubernetes."""
        self._service, self._changed, self._account = service, changed, account
        host, port = (
            os.environ.get("KUBERNETES_SERVICE_HOST"),
            os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if not host:
            raise ValueError("discover: KUBERNETES_SERVICE_HOST is not set: this is no pod of Kubernetes")
        at = target(f"https://{host_of_url(host)}:{port}")
        try:
            self._client = Client(at, connect_timeout=5.0, authorities=account / "ca.crt")
            namespace = service.namespace or (account / "namespace").read_text("ascii").strip()
        except OSError as error:
            raise ValueError(f"discover: {error.filename}: {error.strerror}") from None
        self._path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices?labelSelector="
            f"kubernetes.io%2Fservice-name%3D{quote(service.name)}"
        )
        self._slices: dict[str, Slice] = {}
        self._version = ""  # from which the next watch goes on; "" for a list first
        self._told: dict[str, str] | None = None
        self._wrong = ""  # with the watch
        self.known = asyncio.Event()  # the first list has come

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = _PAUSES[0]
        try:
            while True:
                try:
                    if not self._version:
                        await self._list()
                    await self._watch()
                    pause = _PAUSES[0]
                except (ClientError, DiscoveryError, TimeoutError, OSError) as error:
                    logger.warning("endpoints of %s cannot be followed: %s", self._service.name, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _PAUSES[1])
        finally:
            await self._client.close()

    async def _list(self) -> None:
        answer = Whole()
        async with asyncio.timeout(30.0):
            await self._client.request(self._head(""), b"", answer)
        if answer.status != 200:
            raise DiscoveryError(f"HTTP {answer.status}")
        try:
            found = msgspec.json.decode(answer.body, type=_List)
        except msgspec.MsgspecError as error:
            raise DiscoveryError(f"not a list of slices: {error}") from None
        if not found.metadata.resourceVersion:
            raise DiscoveryError("a list without a version")
        self._slices = {each.metadata.name: each for each in found.items or ()}
        self._version = found.metadata.resourceVersion
        self._tell()

    async def _watch(self) -> None:
        """Take changes until the API server ends the watch. Raises ClientError, DiscoveryError and TimeoutError."""
        query = f"&watch=1&allowWatchBookmarks=true&timeoutSeconds={_WATCH}&resourceVersion={quote(self._version)}"
        events, began, self._wrong = _Events(self._take), time.monotonic(), ""
        try:
            async with asyncio.timeout(_WATCH + _SILENCE):
                await self._client.request(self._head(query), b"", events)
        except ClientError:
            if not events.some:
                raise  # else it was cut off, and goes on where it was
        if events.status == 410:
            self._version = ""
        if self._wrong or events.status != 200:
            raise DiscoveryError(self._wrong or f"HTTP {events.status}")
        if time.monotonic() - began < _SHORTEST:
            raise DiscoveryError("a watch ended at once")

    def _take(self, line: bytes) -> None:
        """One event."""
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                self._wrong = f"the watch failed with {msgspec.json.decode(event.object, type=_Status).code}"
                self._version = ""  # whatever it is, a list says how things are
                return
            found = msgspec.json.decode(event.object, type=Slice)
        except msgspec.MsgspecError as error:
            self._version, self._wrong = "", f"not an event: {error}"
            return
        if event.type in {"ADDED", "MODIFIED"}:
            self._slices[found.metadata.name] = found
        elif event.type == "DELETED":
            self._slices.pop(found.metadata.name, None)
        if not self._wrong and found.metadata.resourceVersion:
            self._version = found.metadata.resourceVersion
        self._tell()

    def _tell(self) -> None:
        servers = servers_of(self._slices, self._service)
        if servers != self._told:
            self._told = servers
            self._changed(servers)
        self.known.set()

    def _head(self, query: str) -> bytes:
        """The head of a request. Raises OSError without a token."""
        token = (self._account / "token").read_text("ascii").strip()
        if not token.isprintable() or len(token.split()) != 1:
            raise DiscoveryError("the token of the account is not one word")
        lines = (
            f"GET {self._path}{query} HTTP/1.1", f"host: {self._client.server.authority}",
            f"authorization: Bearer {token}", "accept: application/json", "user-agent: quire-router",
        )  # fmt: skip
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class _Events:
    """The lines of a watch, each given to `take` as it is complete."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take, self._rest = take, b""
        self.status, self.some = 0, False

    def start(self, status: int, headers: dict[str, str]) -> None:  # noqa: ARG002
        """Take the status."""
        self.status = status

    def data(self, chunk: bytes, at: float) -> None:  # noqa: ARG002
        """Take a part of the events. Raises ClientError for one that has no end."""
        if self.status != 200:
            return
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LINE:
            raise ClientError("bad answer: an event without end")
        for line in lines:
            if line.strip():
                self.some = True
                self._take(line)


async def first_known(watches: list[ServiceWatch], seconds: float) -> None:
    """Wait until all have been listed once, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for each in watches:
                await each.known.wait()
