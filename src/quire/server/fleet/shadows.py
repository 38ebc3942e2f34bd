"""Shadow traffic: copies of requests go to another version, and its answers are compared with what clients got."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from quire.server.errors import ApiError
from quire.types import QuireError

MAX_COMPARED_BYTES = 2**20  # of an answer; longer ones are counted as skipped
MAX_SHADOWS = 8  # copies on their way at a time; requests beyond that are counted as skipped
_TEXTS = frozenset(
    ("text", "content", "response", "generated_text", "output_text", "thinking", "reasoning_content")
)


class SeenAnswer:
    """An answer as a client got it, up to `most` bytes and the rest of a piece."""

    def __init__(self, most: int = MAX_COMPARED_BYTES) -> None:
        self.status, self.seconds, self._most = 0, 0.0, most
        self.body = bytearray()

    def takes(self, piece: bytes) -> None:
        """A piece of it; what is beyond the limit is left out."""
        if len(self.body) <= self._most:
            self.body += piece


class ShadowReport(msgspec.Struct):
    """What comparing has found. Latencies are sums in seconds, lengths sums in characters, of compared answers."""

    compared: int = 0
    equal: int = 0
    failed: int = 0  # the shadow answered with an error
    skipped: int = 0  # too many at a time, or an answer too long
    seconds: float = 0.0
    shadow_seconds: float = 0.0
    characters: int = 0
    shadow_characters: int = 0
    different: list[str] = []  # request ids of the latest that differ

    def add(self, text: str, other: str, seconds: float, shadow_seconds: float, request_id: str) -> None:
        """Count a pair of answers."""
        self.compared += 1
        self.equal += text == other
        self.seconds, self.shadow_seconds = self.seconds + seconds, self.shadow_seconds + shadow_seconds
        self.characters, self.shadow_characters = (
            self.characters + len(text),
            self.shadow_characters + len(other),
        )
        if text != other:
            self.different = [*self.different[-9:], request_id]


AskShadow = Callable[[], Awaitable[tuple[int, bytes]]]  # status and body of what it answers


class Shadows:
    """The copies on their way, and the reports by pair of versions."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, str], ShadowReport] = {}
        self._running: set[asyncio.Task[None]] = set()

    def skip(self, pair: tuple[str, str]) -> None:
        """A request is not for the shadow, since there are too many."""
        self.reports.setdefault(pair, ShadowReport()).skipped += 1

    def compare(self, pair: tuple[str, str], ask: AskShadow, request_id: str, seen: SeenAnswer) -> bool:
        """Ask a shadow what the client had asked the first of a pair, and compare; nobody waits for that. False if it
        is not asked."""
        report = self.reports.setdefault(pair, ShadowReport())
        if seen.status != 200 or len(seen.body) > MAX_COMPARED_BYTES or len(self._running) >= MAX_SHADOWS:
            report.skipped += 1
            return False
        task = asyncio.create_task(_compare(report, ask, request_id, seen))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def settled(self) -> None:
        """Wait for the copies on their way."""
        await asyncio.gather(*self._running, return_exceptions=True)


async def _compare(report: ShadowReport, ask: AskShadow, request_id: str, seen: SeenAnswer) -> None:
    began = time.monotonic()
    try:
        status, body = await ask()
    except (ApiError, QuireError):
        status, body = 0, b""
    if status != 200:
        report.failed += 1
        return
    seconds = time.monotonic() - began
    report.add(text_of(bytes(seen.body)), text_of(body), seen.seconds, seconds, request_id)


def text_of(body: bytes) -> str:
    """The generated text in an answer of any dialect: one object, lines of objects, or server-sent events."""
    return "".join(piece for made in _objects(body) for piece in _texts(made))


def _objects(body: bytes) -> Iterator[Any]:
    try:
        yield msgspec.json.decode(body)
        return
    except msgspec.MsgspecError:
        pass
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield msgspec.json.decode(data)


def _texts(made: Any) -> Iterator[str]:
    """The strings under names that hold text, in their order."""
    if isinstance(made, dict):
        for name, inner in made.items():
            if name in _TEXTS and isinstance(inner, str):
                yield inner
            elif isinstance(inner, dict | list):
                yield from _texts(inner)
    elif isinstance(made, list):
        for inner in made:
            yield from _texts(inner)
