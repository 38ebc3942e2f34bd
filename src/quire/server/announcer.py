"""Tells the routers of a server that it is there, until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from quire.config.router_link import RouterLink, parse_router
from quire.config.serving import ServingConfig
from quire.routing.announcing import CODE, EVERY, PATH, Announcement, Noted, announcement_code
from quire.server.access import router_key
from quire.server.logs import log
from quire.util.http_client import Client, ClientError, Whole, host_of_url, target

_SECONDS = 5.0  # for one announcement
_LEAVING_SECONDS = 2.0  # for the last one, while the requests that run end
_BESIDE_SECONDS = 0.25  # for what is left of it when none runs any more
_ANYWHERE = frozenset(("0.0.0.0", "::"))


class Announcer:
    """Announces a server to one router."""

    def __init__(self, router: str, key: bytes, said: Announcement) -> None:
        """Raises ValueError for an address that is none."""
        self._router, self._key, self.said = router, key, said
        self._client = Client(target(router), connect_timeout=_SECONDS)
        self._nonce, self._wrong = "", ""

    async def run(self) -> None:
        """Announce until cancelled. What a router refuses is said again later: it may have been started again."""
        while True:
            await self._try(leaving=False, seconds=_SECONDS)
            await asyncio.sleep(EVERY)

    async def leave(self) -> None:
        """Say that no more requests are taken."""
        try:
            await self._try(leaving=True, seconds=_LEAVING_SECONDS)
        finally:
            await self._client.close()

    async def _try(self, *, leaving: bool, seconds: float) -> None:
        wrong = ""
        try:
            async with asyncio.timeout(seconds):
                status = await self._say(leaving=leaving)
                if status == 401:  # with a nonce that holds
                    status = await self._say(leaving=leaving)
            wrong = "" if status == 200 else f"HTTP {status}"
        except (ClientError, msgspec.MsgspecError, TimeoutError) as error:
            wrong = str(error) or "no answer"
        if wrong != self._wrong:
            log.warning("router %s: %s", self._router, wrong or "has noted this server")
        self._wrong = wrong

    async def _say(self, *, leaving: bool) -> int:
        said = msgspec.structs.replace(self.said, nonce=self._nonce, leaving=leaving)
        body, answer, at = msgspec.json.encode(said), Whole(4096), self._client.server
        lines = (
            f"POST {at.base}{PATH} HTTP/1.1", f"host: {at.authority}", "content-type: application/json",
            f"content-length: {len(body)}", f"{CODE}: {announcement_code(self._key, body)}",
        )  # fmt: skip
        await self._client.request(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), body, answer)
        if answer.status in {200, 401}:
            self._nonce = msgspec.json.decode(answer.body, type=Noted).nonce
        return answer.status


def announcers(config: ServingConfig, sock: socket.socket, role: str) -> list[Announcer]:
    """For each router of a server that listens on `sock`. Raises ValueError for an address or a key that is wrong."""
    link = parse_router(config.router)
    key = router_key(config)
    return [
        Announcer(router, key, _description(link, config, sock, router, role)) for router in link.announce
    ]


@contextlib.asynccontextmanager
async def announced(made: Sequence[Announcer]) -> AsyncIterator[Callable[[], None]]:
    """While a server runs. It gets what is called when no more requests are taken: that is said beside all else, and no
    router that is silent holds up the end."""
    running = [asyncio.create_task(each.run()) for each in made]
    leaving: list[asyncio.Task[None]] = []

    async def say(announcer: Announcer, before: asyncio.Task[None]) -> None:
        before.cancel()
        await asyncio.wait([before])
        await announcer.leave()

    def leave() -> None:
        leaving.extend(asyncio.create_task(say(*each)) for each in zip(made, running, strict=True))

    try:
        yield leave
    finally:
        if not leaving:
            leave()
        if leaving:
            await asyncio.wait(leaving, timeout=_BESIDE_SECONDS)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*running, *leaving, return_exceptions=True)


def _description(
    link: RouterLink, config: ServingConfig, sock: socket.socket, router: str, role: str
) -> Announcement:
    url = link.url
    if not url:
        if config.uds is not None:
            raise ValueError("router: url: missing: a Unix socket is no address for a router")
        host, port = sock.getsockname()[:2]
        if host in _ANYWHERE:
            host = _own_address(router)
        url = f"{'https' if config.ssl_certfile else 'http'}://{host_of_url(host)}:{port}"
    return Announcement(link.name or url.partition("://")[2], url, role=role, weight=link.weight)


def _own_address(router: str) -> str:
    """The address of this machine that a router sees. Nothing is sent for that."""
    at = target(router)
    try:
        family, kind, *_, address = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"router: announce: {router}: {error.strerror or error}") from None
