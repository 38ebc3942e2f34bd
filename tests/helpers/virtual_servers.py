"""Servers in memory, on a virtual clock, that fail in all ways in which servers and networks do.

The text of an answer is determined by weights, prompt and seed, as Quire's is. A place may be killed and come back,
with other weights too. It may fall silent, for a while or for good: then nothing arrives there and nothing comes from
there, and no connection is closed, as of a process that is stopped and of a network that is cut.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from helpers.raw_server import answer
from helpers.virtual_time import VirtualLoop
from quire.routing.continued import FIELD, STREAM, ids_event, is_resume_code, is_stream_proof, unpacked
from quire.routing.tickets import PEER, is_peer

MODEL = "m"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
# What may become of a request, and how often in a hundred; the rest is answered.
FAULTS = {"busy": 6, "breaks": 3, "hangs": 4, "garbage": 3, "cut": 14, "late": 8}


@dataclass(frozen=True)
class Asked:
    """A request that a place got."""

    at: float
    name: str
    body: dict[str, Any]


def tokens_of(weights: str, body: dict[str, Any]) -> list[str]:
    """The answer to a request."""
    drawn = random.Random(f"{weights} {body['messages']} {body.get('seed')}")
    return [f" {drawn.randrange(40)}" for _ in range(body["max_tokens"])]


def ticket_of(weights: str, body: dict[str, Any]) -> str:
    """What stands for a prompt that was computed elsewhere."""
    return f"{weights} {zlib.crc32(str(body['messages']).encode())}"


class Network(VirtualLoop):
    """A loop whose connections lead to places, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}

    async def create_connection(self, factory: Any, host: str, port: int, **_: Any) -> Any:  # type: ignore[override]
        return await self.places[host].connected(factory)


class Link(asyncio.Transport):
    """A connection to a place; `left` bytes of what it sends arrive, then it is cut."""

    def __init__(self, place: Place, client: Any) -> None:
        super().__init__({"socket": SimpleNamespace(setsockopt=lambda *_: None)})  # whatever options are set
        self._place, self._client = place, client
        self._came = bytearray()
        self._readable = asyncio.Event()
        self._readable.set()
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.left: int | None = None

    # ---- the client's side

    def write(self, data: Any) -> None:
        if self._closed:
            return
        self._came += data
        head, found, body = bytes(self._came).partition(b"\r\n\r\n")
        if found:
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            if len(body) >= int(headers.get("content-length", 0)):
                self._came.clear()
                self._task = asyncio.create_task(self._place.serve(self, first.split(" "), headers, body))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None:
        self._readable.clear()

    def resume_reading(self) -> None:
        self._readable.set()

    def close(self) -> None:
        self._end(None)

    # ---- the place's side

    def lost(self) -> None:
        """The place is gone, or has hung up."""
        self._end(self._place.rng.choice((None, ConnectionResetError(errno.ECONNRESET, "reset"))))

    def _end(self, error: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._place.links.pop(self, None)
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()
            asyncio.get_running_loop().call_soon(self._client.connection_lost, error)

    async def send(self, data: bytes) -> None:
        """Send some bytes, in pieces. Raises ConnectionError if there is no connection any more."""
        rng = self._place.rng
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            await self._place.reachable.wait()
            await self._readable.wait()
            part = data[start:end]
            if self.left is not None:
                part, self.left = part[: self.left], self.left - len(part)
            if part and not self._closed:
                self._client.data_received(part)
            if self._closed or (self.left is not None and self.left <= 0):
                self.lost()
                raise ConnectionError
        await asyncio.sleep(0)


class Place:
    """A server. `weights` determine its text and are what it says of itself, unless it `lies`."""

    def __init__(self, name: str, key: bytes, rng: random.Random, weights: str) -> None:
        self.name, self.key, self.rng, self.weights = name, key, rng, weights
        self.vanished = False
        self.up, self.lies, self.way = True, rng.random() < 0.1, rng.choice((0.0001, 0.0001, 0.02))
        self._takes_tickets = rng.random() < 0.8
        self._pause = rng.choice((0.02, 0.3))  # between events
        self._line = b"\n" if key else rng.choice((b"\n", b"\r\n"))  # how its lines end
        self.reachable = asyncio.Event()
        self.reachable.set()
        self.links: dict[Link, None] = {}  # in the order in which they came
        self.asked: list[Asked] = []
        self.faults = FAULTS

    def kill(self) -> None:
        """The process has ended; who is cut off from it does not hear of that."""
        self.up = False
        if self.reachable.is_set():
            self._hang_up()

    def start(self, weights: str) -> None:
        """It is there, with new connections."""
        if not self.vanished:
            self._hang_up()
            self.up, self.weights = True, weights

    def fall_silent(self) -> None:
        self.reachable.clear()

    def speak(self) -> None:
        if not self.vanished:
            self.reachable.set()
            if not self.up:
                self._hang_up()

    def _hang_up(self) -> None:
        for link in [*self.links]:
            link.lost()

    async def connected(self, factory: Any) -> tuple[Link, Any]:
        await asyncio.sleep(self.way)
        await self.reachable.wait()
        if not self.up:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        client = factory()
        link = Link(self, client)
        self.links[link] = None
        client.connection_made(link)
        return link, client

    async def serve(self, link: Link, first: list[str], headers: dict[str, str], body: bytes) -> None:
        try:
            await asyncio.sleep(self.way)
            await self.reachable.wait()
            if first[0] == "GET":
                said = {"data": [{"id": MODEL, "version": self.weights}]} if "models" in first[1] else {}
                await link.send(answer(200, json.dumps(said).encode()))
            else:
                await self._answer(link, headers, json.loads(body))
        except ConnectionError:
            return

    async def _answer(self, link: Link, headers: dict[str, str], body: dict[str, Any]) -> None:
        rng, name = self.rng, headers["x-request-id"]
        self.asked.append(Asked(asyncio.get_running_loop().time(), name, body))
        (fault,) = rng.choices([*self.faults, ""], [*self.faults.values(), 100 - sum(self.faults.values())])
        await asyncio.sleep(rng.expovariate(20.0) + 2.0 * (fault == "late"))
        if fault == "busy":
            await link.send(answer(rng.choice((429, 502, 503)), b'{"error": {}}'))
        elif fault == "breaks":
            await link.send(answer(500, b'{"error": {}}'))
        elif fault == "hangs":
            await asyncio.get_running_loop().create_future()
        elif fault == "garbage":
            await link.send(b"HTTP/9 what\r\n\r\n")
            link.lost()
        else:
            if fault == "cut":
                link.left = rng.randrange(1, 200 + 220 * body["max_tokens"])
            await self._say(link, name, headers, body)

    async def _say(self, link: Link, name: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        given, params = body.pop(FIELD, None), body.pop("kv_transfer_params", None)
        if params is not None and not is_peer(self.key, name, headers.get(PEER, "")):
            await link.send(answer(400, b'{"error": {}}'))
            return
        if params is not None and params.get("do_remote_decode"):
            ticket = self.rng.choice((ticket_of(self.weights, body), ticket_of(self.weights, body), None))
            said = {"kv_transfer_params": {"remote_request_id": ticket}, "usage": {"prompt_tokens": 100}}
            await link.send(answer(200, json.dumps(said).encode()))
            return
        known = ticket_of(self.weights, body) if self._takes_tickets else ""
        if params is not None and params["remote_request_id"] != known:
            await link.send(answer(422, b'{"error": {}}'))
            return
        tokens = tokens_of(self.weights + "?" * self.lies, body)
        if not body.get("stream"):
            choice = {"index": 0, "message": {"content": "".join(tokens)}, "finish_reason": "stop"}
            made = {"id": f"{name} {self.name}", "system_fingerprint": self.weights, "choices": [choice]}
            await link.send(answer(200, json.dumps(made).encode()))
            return
        mark, shown = f"{self.weights}{zlib.crc32(json.dumps(body).encode())}", headers.get(STREAM, "")
        says_ids = bool(self.key) and is_stream_proof(self.key, name, shown)
        begun = 0
        if given is not None:
            right = is_resume_code(self.key, name, given["mark"], given["ids"], given["code"])
            if not right or given["mark"] != mark:
                await link.send(answer(409, b'{"error": {}}'))
                return
            begun = len((unpacked(given["ids"]) or [[]])[0])
        await link.send(HEAD + (f"{STREAM}: {mark}\r\n".encode() if says_ids else b"") + b"\r\n")
        for event in self._events(name, tokens, begun, says_ids=says_ids):
            said = event.replace(b"\n", self._line)
            await link.send(b"%x\r\n%b\r\n" % (len(said), said))
            await asyncio.sleep(self._pause)
        await link.send(b"0\r\n\r\n")

    def _events(self, name: str, tokens: list[str], begun: int, *, says_ids: bool) -> Iterator[bytes]:
        at = 0
        while at < len(tokens):
            end = min(begun or at + self.rng.choice((1, 1, 2, 3)), len(tokens))
            said = tokens[at:end]
            yield self._event(name, "".join(said), None) + (ids_event([*map(int, said)]) if says_ids else b"")
            at, begun = end, 0
        yield self._event(name, "", "stop")
        yield b"data: [DONE]\n\n"

    def _event(self, name: str, text: str, reason: str | None) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        event = {
            "id": f"{name} {self.name}",
            "created": 1,
            "system_fingerprint": self.weights,
            "choices": [choice],
        }
        return b"data: " + json.dumps(event).encode() + b"\n\n"
