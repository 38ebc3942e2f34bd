"""KV blocks in a Redis that engines share: for who has one already and wants no `quire kv-server`.

    <prefix>:<digest, hexadecimal>:<group>   magic (4), nonce (12), check sum or tag (16), content
    <prefix>:names                           a stream of the names that were written, newest 65,536

The prefix has a digest of the engine's fingerprint. Redis checks nothing, so each engine does: a content that does not
fit its sum is removed and computed. With a key, contents are encrypted and names hashed (worker.sealing). The engine
knows names by the stream, which it reads every two seconds; they may be gone by then, for Redis makes room as its
`maxmemory-policy` says. Without a `maxmemory` it would grow until its host has no memory left, so it is not used.

Whoever may write to Redis decides how long its answers are, and how many names there are. So no more is read of an
answer than a right one has, and of names that come faster than they are read, those between are skipped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from quire.core.tier import Name
from quire.types import QuireError
from quire.worker.content_sums import SUM_BYTES, ContentSums
from quire.worker.kept_blocks import ENTRY_BYTES, READERS, KeptBlocks, buffers_of
from quire.worker.kv_file import U8
from quire.worker.kv_wire import HELLO_SECONDS, LISTED, NAME, OldConnectionError, WireError
from quire.worker.outages import Outages
from quire.worker.sealing import NONCE_BYTES, Sealing, sealing_bytes

MOST_NAMES = 2**16  # that are known to be in Redis, and in its stream
MOST_BLOCK = 2**29 - 64  # bytes; a string of Redis has 512 MiB
CALL_SECONDS = 1.0  # for a block
KEPT_SECONDS = 7 * 86_400  # so that blocks of an engine that is no more leave one day
_WRITER = -1
_MAGIC = b"QKV1"
_HEAD = len(_MAGIC) + NONCE_BYTES + SUM_BYTES
_READ = 2**18  # bytes that are read from a connection at once, at most
_SHORT = 2**16  # bytes of an answer without contents and names
_LIST = 128 * (
    LISTED + 1
)  # bytes of one with names: of each its id in the stream, the field's name, and itself
_PARSED = 16  # times the bytes of an answer that its parts take, at most
_MOST_LISTS = MOST_NAMES // LISTED + 2  # that are read in a row
_WATCH_SECONDS = 0.1
_Command = tuple[bytes | int | memoryview, ...]


def redis_bytes(block_bytes: int, *, sealed: bool = False) -> int:
    """Memory that the tier takes in an engine: what comes or goes is in the
    client's buffers, too."""
    blocks = sum(buffers_of(block_bytes)) + 2 * READERS + 2
    rooms = sealing_bytes(block_bytes, READERS + 1) if sealed else 0
    return blocks * block_bytes + rooms + MOST_NAMES * ENTRY_BYTES + (1 + _PARSED) * _LIST


class _FullError(WireError):
    """Redis has no room, and makes none."""


class RedisTier(KeptBlocks):
    """Blocks of `block_bytes` bytes in the Redis at `url`, encrypted if there is a `key`; `authority`: a file with that
    of its certificate. See KeptBlocks. Raises QuireError without redis-py or what encrypts, and ValueError for blocks
    that are too large."""

    kind = "remote"

    def __init__(
        self, url: str, block_bytes: int, fingerprint: bytes, key: bytes = b"", authority: str = ""
    ) -> None:
        if block_bytes > MOST_BLOCK:
            raise ValueError(
                f"kv_tiers: remote: a block of {block_bytes} bytes is over the {MOST_BLOCK} of Redis"
            )
        self._client = _Client(url, authority)
        self._outages = self._client.outages
        self._sealing = Sealing(key, fingerprint, block_bytes, "remote-key") if key else None
        super().__init__(block_bytes, fingerprint)
        self._sums = ContentSums(fingerprint)
        mark = fingerprint + (self._sealing.mark if self._sealing else b"")
        self._prefix = b"quire:kv:" + blake2b(mark, digest_size=16).hexdigest().encode()
        self._stream = self._prefix + b":names"
        self._names: OrderedDict[Name, None] = OrderedDict()  # as Redis has them
        self._listed = 0, 0  # id in the stream up to which it was read
        self._newest = 0, 0  # that was read or written
        self._value = bytearray(_HEAD + block_bytes)  # what is written
        self.begin()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def works(self) -> bool:
        return self._outages.up

    def holds(self, name: Name) -> bool:
        return self._outages.up and self._named(name) in self._names

    def clear(self) -> None:
        """Find nothing that is there now; others may."""
        with self._lock:
            self._names.clear()

    def _named(self, name: Name) -> Name:
        return name if self._sealing is None else (self._sealing.name(name[0]), name[1])

    def _key(self, name: Name) -> bytes:
        """Of a name as Redis has it."""
        return b"%s:%s:%d" % (self._prefix, name[0].hex().encode(), name[1])

    # -- the threads --------------------------------------------------------------------------------------

    def _lose(self, name: Name) -> None:
        with self._lock:
            self._names.pop(self._named(name), None)

    def _load(self) -> None:
        """Nothing is left from before."""

    def _look(self) -> None:
        if self._outages.pausing:
            return
        for _ in range(_MOST_LISTS):
            first = b"%d-%d" % (self._listed[0], self._listed[1] + 1)
            with self._understood(_WRITER):
                latest, found = self._client.call(
                    _WRITER, (b"XREVRANGE", self._stream, b"+", b"-", b"COUNT", 1),
                    (b"XRANGE", self._stream, first, b"+", b"COUNT", LISTED), most=_LIST,
                )  # fmt: skip
                if not self._listen(latest, found):
                    break
                last = _id_of(latest[0])
        else:  # they come faster than they are read, or there are far more than are kept
            self._listed = self._newest = last
        self._outages.answers()

    def _listen(self, latest: list[Any], found: list[Any]) -> bool:
        """Take in the last entry of the stream, if there is one, and those after the ones that were seen; whether
        there may be more."""
        with self._lock:
            if (_id_of(latest[0]) if latest else (0, 0)) < self._newest:  # it has lost its data
                self._names.clear()
                self._listed = self._newest = 0, 0
                return bool(latest)
            for entry in found:
                self._listed = _id_of(entry)
                self._newest = max(self._newest, self._listed)
                packed = entry[1][1]
                if len(packed) == NAME.size:
                    name: Name = NAME.unpack(packed)
                    self._names[name] = None
                    self._names.move_to_end(name)
            while len(self._names) > MOST_NAMES:
                self._names.popitem(last=False)
        return len(found) == LISTED

    def _keep(self, name: Name, content: U8, tenant: str) -> None:  # noqa: ARG002
        name = self._named(name)
        data, body, nonce = memoryview(content), memoryview(self._value)[_HEAD:], bytes(NONCE_BYTES)  # type: ignore[arg-type]
        if self._sealing is None:
            check = self._sums.of(NAME.pack(*name), data)
        else:
            nonce, data, check = self._sealing.seal(data, NAME.pack(*name))
        body[:], self._value[:_HEAD] = data, _MAGIC + nonce + check
        try:
            _, entry, _ = self._client.call(
                _WRITER,
                (b"SET", self._key(name), memoryview(self._value), b"EX", KEPT_SECONDS, b"NX"),
                (b"XADD", self._stream, b"MAXLEN", b"~", MOST_NAMES, b"*", b"name", NAME.pack(*name)),
                (b"EXPIRE", self._stream, KEPT_SECONDS),
            )
        except _FullError:
            self.refused += 1
            return
        with self._lock, self._understood(_WRITER):
            self._newest = _id_of([entry])
            self._names[name] = None
        self.blocks_out += 1

    def _erase(self, name: Name, place: int | None) -> None:  # noqa: ARG002
        if self._outages.up:
            self._client.call(_WRITER, (b"UNLINK", self._key(self._named(name))))

    def _fetch(self, name: Name, into: U8, reader: int) -> bool:
        asked, name = name, self._named(name)
        asked_for = (
            b"GETRANGE",
            self._key(name),
            0,
            _HEAD + self.block_bytes,
        )  # a byte more than it should have
        (value,) = self._client.call(reader, asked_for, most=_HEAD + self.block_bytes + _SHORT)
        if value != b"":
            with self._understood(reader):
                if self._opened(NAME.pack(*name), memoryview(value), memoryview(into)):  # type: ignore[arg-type]
                    return True
            self.damaged += 1
            self.forget(asked)
        self._lose(asked)
        return False

    @contextlib.contextmanager
    def _understood(self, thread: int) -> Iterator[None]:
        """An answer of another form than that of Redis is an error of the connection."""
        try:
            yield
        except (ValueError, TypeError, IndexError, AttributeError):
            self._client.drop(thread)
            raise WireError("an answer that is none of Redis") from None

    def _opened(self, name: bytes, value: memoryview, into: memoryview) -> bool:
        """Put the content of a value where it belongs; whether it is as an engine made it."""
        if len(value) != _HEAD + len(into) or value[: len(_MAGIC)] != _MAGIC:
            return False
        nonce, check = value[len(_MAGIC) :][:NONCE_BYTES], bytes(value[_HEAD - SUM_BYTES : _HEAD])
        if self._sealing is None:
            into[:] = value[_HEAD:]
            return self._sums.fits(name, into, check)
        self._sealing.room()[:] = value[_HEAD:]
        return self._sealing.open(bytes(nonce), check, name, into)

    def _failed(self, error: OSError) -> None:
        self._outages.failed(error)

    def _closed(self) -> None:
        self._client.close()


class _Client:
    """A connection of redis-py for each thread, and an end to calls that take too long. redis-py itself limits only the
    time between two pieces of an answer."""

    def __init__(self, url: str, authority: str) -> None:
        try:
            from redis.backoff import NoBackoff
            from redis.connection import ConnectionPool
            from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
            from redis.exceptions import TimeoutError as LateError
            from redis.retry import Retry
        except ImportError:
            raise QuireError(
                "kv_tiers: remote=redis:// needs the package redis: pip install 'quire-llm[redis]'"
            ) from None
        self._wrong, self._full, self._late = ResponseError, OutOfMemoryError, LateError
        self._errors: tuple[type[Exception], ...] = (
            RedisError, OSError, ValueError, TypeError, IndexError, AttributeError, RecursionError,
        )  # fmt: skip
        parts = urlsplit(url)
        self.shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password
        tls = {"ssl_check_hostname": True} if parts.scheme == "rediss" else {}
        if authority:
            tls["ssl_ca_certs"] = authority  # type: ignore[assignment]
        self._pool: Any = ConnectionPool.from_url(
            url, protocol=2, retry=Retry(NoBackoff(), 0), socket_connect_timeout=CALL_SECONDS,
            socket_timeout=CALL_SECONDS, socket_read_size=_READ, health_check_interval=0, **tls,
        )  # fmt: skip
        self._pool.connection_class = _bounded(self._pool.connection_class)
        self.outages = Outages(f"in {self.shown}")
        self._links: dict[int, Any] = {}  # by thread
        self._until: dict[int, float] = {}  # when the call of a thread has to be over
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_calls, name="kv redis watch", daemon=True)
        self._watch.start()

    def call(self, thread: int, *commands: _Command, most: int = _SHORT) -> list[Any]:
        """The answers to some commands, of `most` bytes together, on the connection of a thread. Raises _FullError if
        Redis has no room, and OSError for whatever else fails, after which the connection is a new one."""
        self._until[thread] = time.monotonic() + HELLO_SECONDS
        if self._is_old(thread):
            self.drop(thread)
        try:
            link = self._links.get(thread) or self._connected(thread)
            self._until[thread] = time.monotonic() + CALL_SECONDS
            link._sock.left = most
            return self._answers(link, commands)
        except _FullError:
            raise
        except self._errors as error:
            late = time.monotonic() >= self._until[thread] or isinstance(error, self._late)
            old = self._is_old(thread)
            self.drop(thread)
            if old:
                raise OldConnectionError("a connection from before an outage") from None
            if late:
                raise TimeoutError from None
            if isinstance(error, OSError):
                raise
            raise WireError(str(error)) from None
        finally:
            del self._until[thread]

    def _is_old(self, thread: int) -> bool:
        """Whether the connection of a thread is from before the last outage."""
        return thread in self._links and self.outages.is_old(thread)

    def drop(self, thread: int) -> None:
        """End the connection of a thread: the next call makes another one."""
        if (link := self._links.pop(thread, None)) is not None:
            with contextlib.suppress(*self._errors):
                link.disconnect()

    def close(self) -> None:
        """End all connections, when no call runs."""
        self._ended.set()
        self._watch.join()
        for link in self._links.values():
            link.disconnect()
        self._links.clear()

    def _answers(self, link: Any, commands: tuple[_Command, ...]) -> list[Any]:
        link.send_packed_command(link.pack_commands(commands))
        found: list[Any] = []
        for _ in commands:
            try:
                found.append(link.read_response(disable_decoding=True))
            except self._wrong as error:
                found.append(error)
        for each in found:
            if isinstance(each, self._full):
                raise _FullError
            if isinstance(each, Exception):
                raise each
        return found

    def _connected(self, thread: int) -> Any:
        self.outages.connecting(thread)
        link = self._links[thread] = self._pool.make_connection()
        link.connect()
        (info,) = self._answers(link, ((b"INFO", b"memory"),))
        if b"\nmaxmemory:0\r" in info:
            raise WireError("it has no maxmemory, and would take all the memory of its host")
        return link

    def _watch_calls(self) -> None:
        """Cut the connections of calls that are late."""
        while not self._ended.wait(_WATCH_SECONDS):
            now = time.monotonic()
            for thread, until in [*self._until.items()]:
                sock = getattr(self._links.get(thread), "_sock", None)
                if until < now and sock is not None:
                    sock.cut()


class _BoundedSocket:
    """A socket of redis-py from which at most `left` bytes are read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.left = sock, _SHORT

    def recv(self, size: int, *flags: int) -> bytes:
        found = self._sock.recv(min(size, self.left + 1), *flags)
        if not flags:  # else it looks only
            self._count(len(found))
        return found

    def recv_into(self, room: memoryview, *sizes: int) -> int:  # of its parser in C
        size = self._sock.recv_into(room, *sizes)
        self._count(size)
        return size

    def cut(self) -> None:
        """End the connection while another thread waits for it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # that of TLS is not for two threads

    def _count(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ConnectionError("an answer that is longer than it can be")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _bounded(kind: Any) -> Any:
    """A kind of connection of redis-py, on bounded sockets."""
    return type(kind.__name__, (kind,), {"_connect": lambda link: _BoundedSocket(kind._connect(link))})


def _id_of(entry: list[Any]) -> tuple[int, int]:
    """Of an entry of a stream."""
    first, _, second = entry[0].partition(b"-")
    return int(first), int(second)
