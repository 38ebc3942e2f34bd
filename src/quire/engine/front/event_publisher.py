"""Batches of cache changes over ZeroMQ, in vLLM's format, so that routers made for vLLM can follow a Quire server.

A batch is three frames on a PUB socket: the topic, its number (8 bytes, big endian), and MessagePack:

    [seconds since 1970, [{"type": "BlockStored", "block_hashes": […], …}, …], number of the replica]

A subscriber that misses a number asks a ROUTER socket for all batches from that number on, and gets those that are
still there, then one with the number -1. Both sockets are used by the server's event loop alone; neither ever blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.config.kv_events import KvEventsConfig
from quire.core.cache_changes import CacheChange
from quire.core.tier import space_of
from quire.engine.cache_log import KEPT_BYTES, MOST_BLOCKS, CacheLog, block_hash
from quire.types import QuireError

logger = logging.getLogger("quire.engine")

_MEDIUM = "GPU"  # vLLM's name for the cache of the engine itself, wherever that is
_PLAIN = space_of("", "")
_END = (-1).to_bytes(8, "big", signed=True)


def make_cache_log(config: KvEventsConfig, rank: int, name_of: Callable[[str], str]) -> CacheLog | None:
    """The log of the engine `rank`, if its events are wanted; `name_of` names adapters. Raises QuireError if events
    cannot be published."""
    if not config.on:
        return None
    return CacheLog(rank, ZmqPublisher(config, rank, EventMaker(name_of)) if config.publishes else None)


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that follow each other can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks cannot be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be found any more."""


class EventMaker:
    """Makes events of batches. `name_of` gives the name of an adapter by the digest of its version."""

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        self._name_of = name_of
        self._spaces: dict[bytes, str] = {}  # of blocks with an adapter or a salt, by digest

    def events(self, changes: Sequence[CacheChange], block_size: int) -> list[Any]:
        """The events of a batch, in order; blocks that follow each other are one."""
        if not changes:
            self._spaces.clear()
            return [AllBlocksCleared()]
        found: list[Any] = []
        last = b""
        for change in changes:
            digest, event = change.digest, found[-1] if found else None
            if not change.tokens:
                self._spaces.pop(digest, None)
                if isinstance(event, BlockRemoved):
                    event.block_hashes.append(block_hash(digest))
                else:
                    found.append(BlockRemoved([block_hash(digest)], _MEDIUM))
                last = b""
                continue
            space = self._space(change)
            if isinstance(event, BlockStored) and change.parent == last != b"":
                event.block_hashes.append(block_hash(digest))
                event.token_ids += memoryview(change.tokens).cast("i").tolist()
                if event.extra_keys is not None:
                    event.extra_keys.append(None)
            else:
                found.append(self._stored(change, block_size, space))
            last = digest
        return found

    def _space(self, change: CacheChange) -> str:
        """The namespace of a block, which is that of the one before it."""
        space = self._spaces.get(change.parent, "") if change.parent else change.namespace
        if space not in {"", _PLAIN} and len(self._spaces) < MOST_BLOCKS:
            self._spaces[change.digest] = space
        return space

    def _stored(self, change: CacheChange, block_size: int, space: str) -> BlockStored:
        adapter, salt = "", space.removeprefix(_PLAIN)
        if space.startswith("adapter:"):
            adapter, _, salt = space.removeprefix("adapter:").partition(":")
        return BlockStored(
            [block_hash(change.digest)], block_hash(change.parent) if change.parent else None,
            memoryview(change.tokens).cast("i").tolist(), block_size, None, _MEDIUM,
            (self._name_of(adapter) or adapter) if adapter else None,
            [(salt,)] if salt and not change.parent else None,
        )  # fmt: skip


class ZmqPublisher:
    """A Publisher over ZeroMQ for the replica `rank`. Raises QuireError if that cannot be set up."""

    def __init__(self, config: KvEventsConfig, rank: int, maker: EventMaker) -> None:
        try:
            import zmq
        except ImportError:
            raise QuireError(
                "kv_events_config: the publisher zmq needs the package pyzmq: pip install 'quire-llm[kv-events]'"
            ) from None
        self._zmq: Any = zmq
        self._config, self._rank, self._maker = config, rank, maker
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: Any = zmq.Context()
        self._replay: Any = None
        try:
            self._publish = self._socket(zmq.PUB, config.hwm)
            self._open(self._publish, config.endpoint, binds=False)
            if config.replay_endpoint is not None:
                # All that is kept may be on its way to a subscriber; half of the limit may be read and not known to be.
                self._replay = self._socket(zmq.ROUTER, 2 * config.buffer_steps + 4)
                self._open(self._replay, config.replay_endpoint, binds=True)
                asyncio.get_running_loop().add_reader(self._replay.fileno(), self._answer)
        except (zmq.ZMQError, OSError, ValueError) as error:
            self.close()
            raise QuireError(f"kv_events_config: {error}") from None

    def _socket(self, kind: int, most: int) -> Any:
        zmq, made = self._zmq, self._context.socket(kind)
        made.linger = 0
        made.sndhwm = min(most, 2**31 - 1)
        if (path := self._config.curve_secret_key_file) is not None:
            secret = Path(path).read_bytes().strip()
            made.curve_server = True
            made.curve_secretkey, made.curve_publickey = secret, zmq.curve_public(secret)
        return made

    def _open(self, socket: Any, endpoint: str, *, binds: bool) -> None:
        address, bound = self._config.address(endpoint, self._rank)
        if not (binds or bound):
            socket.connect(address)
            return
        socket.bind(address)
        if "127.0.0.1" in address and "127.0.0.1" not in endpoint:
            logger.warning(
                "kv_events_config: %s is %s here, as events have tokens of prompts in them; curve_secret_key_file "
                "encrypts them, allow_unencrypted lets them leave this machine as they are",
                endpoint,
                address,
            )

    def publish(self, number: int, changes: Sequence[CacheChange], block_size: int) -> None:
        """See cache_log.Publisher. What a subscriber is too slow for is lost to it."""
        batch = (time.time(), self._maker.events(changes, block_size), self._rank)
        payload = self._encode(batch)
        self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        if self._replay is None:
            return
        self._kept.append((number, payload))
        self._bytes += len(payload)
        while len(self._kept) > self._config.buffer_steps or self._bytes > KEPT_BYTES:
            self._bytes -= len(self._kept.popleft()[1])
        self._answer()  # the reader tells of a request once only

    def _answer(self) -> None:
        """Answer the requests for batches that have come."""
        zmq = self._zmq
        while self._replay is not None and self._replay.events & zmq.POLLIN:
            frames = self._replay.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._kept:
                if number >= first:
                    self._replay.send_multipart(
                        (client, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK
                    )
            self._replay.send_multipart((client, b"", _END, b""), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets."""
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.fileno())
        self._replay = None
        self._context.destroy(linger=0)
