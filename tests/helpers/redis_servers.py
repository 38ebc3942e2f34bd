"""A Redis for tests: one that knows the script of shared counts, on a clock that can be set, and the commands of KV
blocks; or the real one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from helpers.process import until
from helpers.server import GUARD

DAY = 86_400 * 10**6


class ScriptedCounts:
    """What shared_counts.lua does, in the plainest words: all charges of all windows in lists."""

    def __init__(self) -> None:
        self.ahead = 0  # microseconds that its clock is ahead
        self._windows: dict[str, list[list[int | str]]] = {}  # when each charge ends, its member, its amount
        self._done: dict[
            str, set[int]
        ] = {}  # numbers of what may be sent twice, by process; none is forgotten

    def run(self, keys: list[str], values: list[str]) -> list[int]:
        """The script's answer."""
        now = time.time_ns() // 1000 + self.ahead
        what, member, today = values[0], values[1], now // DAY
        if len(keys) % 2:
            *keys, done = keys
            *values, number, _ = values
            if int(number) in self._done.setdefault(done, set()):
                return [0, 0, today]
            self._done[done].add(int(number))
        asked = list(zip(keys[::2], *(values[2 + n :: 4] for n in range(4)), strict=True))
        refused, wait = 0, 0
        for number, (key, _, limit, amount, length) in enumerate(asked, 1):
            window = self._windows.setdefault(key, [])
            window[:] = sorted(each for each in window if int(each[0]) > now)
            excess = sum(int(each[2]) for each in window) + int(amount) - int(limit)
            if what == "take" and not refused and int(limit) >= 0 and excess > 0:
                refused, wait = number, int(length)
                for ends, _, taken in window:
                    excess -= int(taken)
                    if excess <= 0:
                        wait = int(ends) - now
                        break
        for key, kind, _, amount, length in asked:
            window, name, ends = self._windows[key], member, now + int(length)
            if kind == "day":
                name, ends = f"day {(what == 'change' and member) or today}", (today + 1) * DAY
            there = next((each for each in window if each[1] == name), None)
            if what == "change":
                if there is not None:
                    there[2] = int(there[2]) + int(amount)
                    window[:] = [each for each in window if each[2] != 0]
            elif (what == "take" and not refused) or what == "put":
                if there is None:
                    window.append([ends, name, int(amount)])
                else:
                    there[0] = ends
                    there[2] = int(there[2]) + (int(amount) if kind == "day" or what == "take" else 0)
        counts = []
        for key in keys[::2]:
            window = self._windows[key]
            counts += [
                sum(int(each[2]) for each in window),
                max((int(each[0]) - now for each in window), default=0),
            ]
        return [refused, wait, today, *counts]


class KeptValues:
    """What Redis does with the commands of KV blocks. `room`: values that it takes; with no more, it makes none."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.streams: dict[bytes, list[tuple[bytes, bytes]]] = {}  # ids of equal length, and names
        self.room = 10**9
        self.maxmemory = 10**9
        self.nonsense: dict[bytes, bytes] = {}  # in place of the answers to some commands
        self._entries = 0

    def answer(self, words: list[bytes]) -> bytes:
        """To one command."""
        made = b"+OK\r\n"
        match words[0].upper():
            case b"INFO":
                made = _bulk(b"# Memory\r\nmaxmemory:%d\r\n" % self.maxmemory)
            case _ if words[0].upper() in self.nonsense:
                made = self.nonsense[words[0].upper()]
            case b"GETRANGE":
                made = _bulk(self.values.get(words[1], b"")[int(words[2]) : int(words[3]) + 1])
            case b"SET" if len(self.values) >= self.room:
                made = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
            case b"SET":
                self.values.setdefault(words[1], words[2])
            case b"UNLINK":
                made = b":%d\r\n" % (self.values.pop(words[1], None) is not None)
            case b"XADD":
                self._entries += 1
                self.streams.setdefault(words[1], []).append((b"%09d-0" % self._entries, words[-1]))
                made = _bulk(b"%09d-0" % self._entries)
            case b"XREVRANGE":
                made = _entries(self.streams.get(words[1], [])[-1:])
            case b"XRANGE":
                number, _, part = words[2].partition(b"-")
                first = int(number) + (part != b"0")
                found = [each for each in self.streams.get(words[1], []) if int(each[0][:9]) >= first]
                made = _entries(found[: int(words[5])])
        return made


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def _entries(found: list[tuple[bytes, bytes]]) -> bytes:
    parts = [b"*2\r\n" + _bulk(number) + b"*2\r\n" + _bulk(b"name") + _bulk(name) for number, name in found]
    return b"*%d\r\n%s" % (len(parts), b"".join(parts))


class FakeRedis:
    """Answers in the protocol of Redis. What is counted outlives `stop` and `start`; what is kept does not.

    `stalled`: it answers nothing. `mute`: it runs scripts, and does not say so. `slow`: seconds between two bytes of an
    answer. `password`: it is asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.counts = ScriptedCounts()
        self.kept = KeptValues()
        self.stalled = self.mute = False
        self.slow = 0.0
        self.password = b""
        self.connections = 0
        self._socket = folder / "redis.sock"
        self._loop = asyncio.new_event_loop()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Listen, on the same socket as before."""

        async def listen() -> None:
            self._socket.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.setblocking(False)
            listener.bind(str(self._socket))
            listener.listen()
            self._accepting = self._loop.create_task(self._accept(listener))

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(GUARD)

    def stop(self) -> None:
        """Hang up, and listen no more."""
        self.kept.values.clear()
        self.kept.streams.clear()

        async def leave() -> None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            for writer in self._connections:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(leave(), self._loop).result(GUARD)

    def close(self) -> None:
        """End it."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GUARD)
        self._loop.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Until cancelled. A closed server of asyncio neither serves nor closes what it had just accepted (3.11)."""
        with listener:
            while True:
                accepted, _ = await self._loop.sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=accepted)
                self.connections += 1
                self._connections[writer] = self._loop.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known = not self.password
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ValueError):
            while True:
                count = int((await reader.readline())[1:])
                words = []
                for _ in range(count):
                    size = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(size + 2))[:-2])
                if words[0] == b"AUTH":
                    known = words[-1] == self.password
                answer = self._answer(words) if known else b"-WRONGPASS invalid username-password pair\r\n"
                while self.slow and answer and not self.stalled:
                    writer.write(answer[:1])
                    answer = answer[1:]
                    await asyncio.sleep(self.slow)
                if not self.stalled:
                    writer.write(answer)
        del self._connections[writer]
        writer.close()

    def _answer(self, words: list[bytes]) -> bytes:
        match words[0].upper():
            case b"EVALSHA":
                size, given = int(words[2]), [word.decode() for word in words[3:]]
                found = self.counts.run(given[:size], given[size:])
                if self.mute:
                    return b""
                return b"*%d\r\n" % len(found) + b"".join(b":%d\r\n" % each for each in found)
            case b"PING":
                return b"+PONG\r\n"
            case b"SCRIPT":  # LOAD
                return b"$40\r\n%s\r\n" % hashlib.sha1(words[2]).hexdigest().encode()
            case b"HELLO":
                return (
                    b"-NOPROTO unsupported protocol version\r\n"
                    if words[1] != b"3"
                    else b"%1\r\n$5\r\nproto\r\n:3\r\n"
                )
            case _:
                return self.kept.answer(words)


class RealRedis:
    """A redis-server on a socket of its own, with further options; `stop` kills it, `start` begins with nothing."""

    def __init__(self, folder: Path, *options: str) -> None:
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        assert found is not None, "there is no redis-server on the path: `make test-redis` gets one"
        self._command, self._socket, self._folder = found, folder / "redis.sock", folder
        self._options = options
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._command, "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--dir",
             str(self._folder), *self._options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        until(self._socket.exists)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.unlink(missing_ok=True)

    close = stop


@contextlib.contextmanager
def redis_server(kind: str, folder: Path, *options: str) -> Iterator[FakeRedis | RealRedis]:
    """A running one: `fake` or `real`, which has options."""
    server: FakeRedis | RealRedis = FakeRedis(folder) if kind == "fake" else RealRedis(folder, *options)
    try:
        yield server
    finally:
        server.close()
