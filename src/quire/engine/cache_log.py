"""Which blocks an engine has cached, as it reports them: a table, numbered batches of changes, and who follows them.

    engine ── CacheChanged ──▶ CacheLog ──▶ table of blocks ──▶ snapshot ─┐
                                  │                                       ├──▶ followers
                                  ├── batch 7, 8, 9, … ───────────────────┘
                                  └── batch 7, 8, 9, … ──▶ a publisher (ZeroMQ)

A follower gets a snapshot, which says as of which batch it is, and every batch after that. One that does not read for
so long that its batches would take too much memory loses them, and gets a snapshot again. So the memory is bounded, and
whoever has seen a snapshot and all batches after it knows the table.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import chain as joined
from typing import Protocol

import msgspec

from quire.core.cache_changes import CacheChange
from quire.core.cached_prefix import TOKEN_BYTES
from quire.core.tier import chain, root_digest, space_of
from quire.types import QuireError, Request

MOST_BLOCKS = 2**16  # of the table: the rest is in batches, and in no snapshot
ENTRY_BYTES = 208  # of the table, for a block
MOST_FOLLOWERS = 8
FOLLOWER_BYTES = 2**20  # of batches that wait for one
LOG_BYTES = MOST_BLOCKS * ENTRY_BYTES + MOST_FOLLOWERS * (FOLLOWER_BYTES + 16 * MOST_BLOCKS)
# Of a publisher: batches that are kept for subscribers that missed some, and what its library takes for itself and for
# what is on its way.
KEPT_BYTES, ZMQ_BYTES = 8 * 2**20, 14 * 2**20
_PART = 1024  # blocks of a snapshot in one event
_encode = msgspec.json.Encoder().encode


def event_bytes(*, publishes: bool) -> int:
    """Bytes that a server holds for the events of one engine."""
    return LOG_BYTES + (KEPT_BYTES + ZMQ_BYTES if publishes else 0)


class TooManyFollowersError(QuireError):
    """No further follower of a cache can be served."""


class Publisher(Protocol):
    """Where batches go besides to followers."""

    def publish(self, number: int, changes: Sequence[CacheChange], block_size: int) -> None:
        """A batch of changes; none means that all blocks are gone."""

    def close(self) -> None: ...


def block_hash(digest: bytes) -> int:
    """What a block is called outside: 64 bits of its digest."""
    return int.from_bytes(digest[-8:], "big")


class Follower:
    """One that follows a log, until that is closed. It gets events of the text/event-stream format."""

    def __init__(self, log: CacheLog) -> None:
        self._log = log
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._behind = True  # it needs a snapshot
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Have it look at the log."""
        self._news.set()

    def put(self, event: bytes) -> None:
        """Add an event, if the follower is to have it."""
        if self._behind:
            return
        if self._bytes + len(event) > FOLLOWER_BYTES:
            self._waiting.clear()
            self._bytes, self._behind = 0, True
        else:
            self._waiting.append(event)
            self._bytes += len(event)
        self._news.set()

    async def events(self, pause: float) -> AsyncIterator[bytes]:
        """Snapshots and batches, as they come; the number of the last batch after `pause` seconds without any."""
        while not self._log.closed:
            if self._behind:
                self._behind = False
                for part in self._log.snapshot():
                    yield part
            elif self._waiting:
                found = b"".join(self._waiting)
                self._waiting.clear()
                self._bytes = 0
                yield found
            else:
                self._news.clear()
                try:
                    async with asyncio.timeout(pause):
                        await self._news.wait()
                except TimeoutError:
                    yield self._log.pulse()


class CacheLog:
    """The log of one engine, the replica `rank`. Belongs to an event loop. `named` gives the name of a request that its
    client knows.
    """

    def __init__(self, rank: int = 0, publisher: Publisher | None = None) -> None:
        self.rank, self.publisher = rank, publisher
        self.named: Callable[[str], str] = str
        self.number = -1  # of the last batch
        self.blocks: dict[int, int] = {}  # hash -> that of the block before, 0 for none; parents first
        self.block_size = 0
        self.closed = False
        self._epoch = secrets.token_hex(8)
        self._fingerprint: bytes | None = None
        self._followers: set[Follower] = set()

    @property
    def is_followed(self) -> bool:
        """Whether there are followers."""
        return bool(self._followers)

    def began(self, fingerprint: bytes) -> None:
        """An engine has started whose digests begin with a fingerprint. Its cache is empty."""
        self._fingerprint = fingerprint
        self.cleared()

    def cleared(self) -> None:
        """All blocks are gone, with their engine."""
        if self.blocks or self.number < 0:
            self.blocks.clear()
            self._send([], [["cleared", []]])

    def changed(self, changes: Sequence[CacheChange]) -> None:
        """The engine has reported a batch of changes."""
        blocks, told = self.blocks, self._followers
        runs: list[list[object]] = []
        for digest, parent, tokens, _ in changes:
            name = block_hash(digest)
            if tokens:
                before = block_hash(parent) if parent else 0
                if len(blocks) < MOST_BLOCKS:
                    blocks[name] = before
                entry: object = [f"{name:016x}", f"{before:016x}"]
            else:
                blocks.pop(name, None)
                entry = f"{name:016x}"
            if told:
                kind = "stored" if tokens else "removed"
                if not runs or runs[-1][0] != kind:
                    runs.append([kind, []])
                runs[-1][1].append(entry)  # type: ignore[attr-defined]
        self._send(changes, runs)

    def computed(self, requests: Iterable[Request]) -> None:
        """The prompts of requests are in the cache: tell followers which blocks each has, by the last one."""
        for request in requests:
            self._computed(request)

    def _computed(self, request: Request) -> None:
        if self._fingerprint is None or request.soft_tokens or request.prompt_embeds:
            return
        tokens, size = request.prompt_token_ids.tobytes(), self.block_size * TOKEN_BYTES
        digest = root_digest(self._fingerprint, request.tenant, space_of(request.adapter, request.namespace))
        last, count = 0, 0
        for start in range(0, len(tokens) - size + 1, size):
            digest = chain(digest, tokens[start : start + size])
            name = block_hash(digest)
            if name not in self.blocks:
                break
            last, count = name, count + 1
        if count:
            said = {
                "request": self.named(request.request_id), "block": f"{last:016x}", "blocks": count,
                "prompt_tokens": len(request.prompt_token_ids),
            }  # fmt: skip
            self._tell(b"prompt", said)

    def follow(self) -> Follower:
        """A new follower, until `leave`. Raises TooManyFollowersError."""
        if len(self._followers) >= MOST_FOLLOWERS:
            raise TooManyFollowersError(f"{MOST_FOLLOWERS} clients follow this cache already")
        made = Follower(self)
        self._followers.add(made)
        return made

    def leave(self, follower: Follower) -> None:
        """Its client is gone."""
        self._followers.discard(follower)

    def snapshot(self) -> Iterator[bytes]:
        """The events of all blocks as of the last batch, which has its number in each of them."""
        flat = array("Q", joined.from_iterable(self.blocks.items()))
        said = {
            "epoch": self._epoch, "number": self.number, "rank": self.rank, "block_size": self.block_size,
            "space": "" if self._fingerprint is None else block_space(self._fingerprint),
        }  # fmt: skip
        parts = max(1, -(-len(flat) // (2 * _PART)))
        for number in range(parts):
            part = flat[2 * _PART * number : 2 * _PART * (number + 1)]
            pairs = [
                [f"{name:016x}", f"{before:016x}"] for name, before in zip(part[::2], part[1::2], strict=True)
            ]
            yield _event(b"snapshot", {**said, "part": number, "parts": parts, "blocks": pairs})

    def pulse(self) -> bytes:
        """The event by which a follower sees that it has all batches."""
        return _event(b"number", {"number": self.number})

    def close(self) -> None:
        """End the publisher, and what followers read."""
        self.closed = True
        for follower in self._followers:
            follower.wake()
        if self.publisher is not None:
            self.publisher.close()

    def _send(self, changes: Sequence[CacheChange], runs: list[list[object]]) -> None:
        self.number += 1
        if self.publisher is not None:
            self.publisher.publish(self.number, changes, self.block_size)
        self._tell(b"batch", {"number": self.number, "events": runs})

    def _tell(self, kind: bytes, said: object) -> None:
        if self._followers:
            event = _event(kind, said)
            for follower in self._followers:
                follower.put(event)


def block_space(fingerprint: bytes) -> str:
    """A name of all that determines hashes besides tenants and tokens: those of two spaces have nothing in common."""
    return root_digest(fingerprint, "", "").hex()


def _event(kind: bytes, said: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, _encode(said))
