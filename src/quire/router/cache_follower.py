"""Follows what a server has cached by its events, again and again: after a loss it begins with a snapshot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.routing.followed_cache import FollowedCache, FollowedChange, SnapshotPart
from quire.routing.reported_prefixes import ReportedPrefixes
from quire.util.http_client import Client, ClientError

logger = logging.getLogger("quire.server")

PATH = "/kv/events"
_SILENCE = 20.0  # seconds without any event, of which a server sends one every five
_PAUSES = (0.1, 30.0)  # seconds before the next try: after a loss, and at most
_LONGEST = 8 * 2**20  # bytes of an event


class _Snapshot(msgspec.Struct):
    epoch: str
    number: int
    part: int
    parts: int
    space: str
    block_size: int
    blocks: list[tuple[str, str]]


class _Batch(msgspec.Struct):
    number: int
    events: list[tuple[str, list[Any]]]


class _Number(msgspec.Struct):
    number: int


class _Prompt(msgspec.Struct):
    request: str
    block: str
    blocks: int
    prompt_tokens: int


class EventLines:
    """Splits a stream of server-sent events into the kind and the data of each, wherever its pieces end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """The events that are complete. Raises ClientError for one that is too long."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > _LONGEST:
            raise ClientError("bad answer: an event without end")
        for event in whole:
            lines = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
            if b"data" in lines:
                yield lines.get(b"event", b"").decode("latin-1"), lines[b"data"]


def take_event(reports: ReportedPrefixes, server: str, kind: str, data: bytes) -> bool:
    """Take an event of a server; false if a snapshot is needed. Raises ClientError for one that is wrong."""
    cache: FollowedCache = reports.cache(server)
    try:
        if kind == "snapshot":
            part = msgspec.json.decode(data, type=_Snapshot)
            blocks = [(int(name, 16), int(before, 16)) for name, before in part.blocks]
            cache.snapshot(
                SnapshotPart(
                    part.epoch, part.number, part.part, part.parts, part.space, part.block_size, blocks
                )
            )
        elif kind == "batch":
            batch = msgspec.json.decode(data, type=_Batch)
            return cache.batch(batch.number, [_change(name, given) for name, given in batch.events])
        elif kind == "number":
            return cache.check(msgspec.json.decode(data, type=_Number).number)
        elif kind == "prompt":
            said = msgspec.json.decode(data, type=_Prompt)
            if cache.current:
                reports.computed(server, said.request, int(said.block, 16), said.blocks, said.prompt_tokens)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ClientError(f"bad answer: {error}") from None
    return True


def _change(name: str, given: list[Any]) -> FollowedChange:
    if name == "stored":
        return FollowedChange(stored=[(int(block, 16), int(before, 16)) for block, before in given])
    if name == "removed":
        return FollowedChange(removed=[int(block, 16) for block in given])
    if name == "cleared":
        return FollowedChange()
    raise ValueError(f"{name!r} is no change")


class CacheFollower:
    """Follows one server whose administrators' routes `client` has. `resyncs`: how often its events were lost."""

    def __init__(self, server: str, client: Client, reports: ReportedPrefixes) -> None:
        self._server, self._client, self._reports = server, client, reports
        self._lines = EventLines()
        self._heard = 0.0
        self._was_current = False
        self.offered = True  # the server has such events, as far as is known
        self.resyncs = 0

    @property
    def current(self) -> bool:
        """Whether it is known what the server has."""
        return self._reports.is_current(self._server)

    async def run(self) -> None:
        """Follow until cancelled."""
        pause = _PAUSES[0]
        try:
            while True:
                self._lines, self._was_current = EventLines(), False
                try:
                    await self._follow()
                    why = "the stream of events has ended"
                except ClientError as error:
                    why = str(error)
                self._reports.cache(self._server).lose()
                if self._was_current:
                    self.resyncs += 1
                    pause = _PAUSES[0]
                    logger.warning(
                        "%s: events of its cache were lost: %s", self._server, why.partition(":")[0]
                    )
                await asyncio.sleep(pause if self.offered else _PAUSES[1])
                pause = min(2 * pause, _PAUSES[1])
        finally:
            self._reports.forget(self._server)
            await self._client.close()

    async def _follow(self) -> None:
        lines = [f"GET {self._client.server.base}{PATH} HTTP/1.1", f"host: {self._client.server.authority}"]
        lines += [f"{name}: {value}" for name, value in self._client.server.headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._heard = time.monotonic()
        request = asyncio.create_task(self._client.request(head, b"", self))
        try:
            while not request.done():
                await asyncio.wait((request,), timeout=_SILENCE / 4)
                if time.monotonic() - self._heard > _SILENCE:
                    raise ClientError("no event came for long")
            request.result()
        finally:
            request.cancel()

    def start(self, status: int, headers: dict[str, str]) -> None:
        """Take status and headers. Raises ClientError unless events follow, of all that the server has."""
        self.offered = status == 200 and headers.get("x-quire-replicas", "1") == "1"
        if not self.offered:
            raise ClientError(f"no events: HTTP {status}")

    def data(self, chunk: bytes, at: float) -> None:  # noqa: ARG002
        """Take a part of the events. Raises ClientError after a loss."""
        self._heard = time.monotonic()
        for kind, data in self._lines.feed(chunk):
            if not take_event(self._reports, self._server, kind, data):
                raise ClientError("events are missing")
        self._was_current = self._was_current or self.current
