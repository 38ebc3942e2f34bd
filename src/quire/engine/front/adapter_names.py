"""The names of adapters, and the versions that they stand for: those of requests that are not complete are kept."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping

from quire.engine.api import AdapterVersion, EngineUnavailableError
from quire.engine.host.messages import AdapterOpened, Command, ForgetAdapter, OpenAdapter
from quire.types import CheckpointError, RequestError

MAX_ADAPTERS = 2**16
MAX_NAME_CHARS = 256


class AdapterNames:
    """Belongs to one event loop. `send` passes a command to the engine; commands are obeyed in order."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._named: dict[str, AdapterVersion] = {}
        self._known: dict[str, AdapterVersion] = {}  # to the engine, by digest
        self._users: Counter[str] = Counter()  # by digest: requests, and callers that are about to make some
        self._opening: dict[int, tuple[OpenAdapter, asyncio.Future[AdapterVersion]]] = {}
        self._numbers = itertools.count(1)

    @property
    def named(self) -> Mapping[str, AdapterVersion]:
        """What the names stand for now."""
        return self._named

    def name(self, digest: str) -> str:
        """A name of a version, or the one that it had last; "" for one that is not known."""
        named = (version.name for version in self._named.values() if version.digest == digest)
        last = self._known.get(digest)
        return next(named, "" if last is None else last.name)

    async def load(self, name: str, path: str, root: str | None) -> AdapterVersion:
        """Have a name stand for an adapter; see api.Engine.load_adapter. Cancelled, it changes nothing."""
        if not name or not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise CheckpointError(f"the name of an adapter has 1 to {MAX_NAME_CHARS} printable characters")
        if name not in self._named and len(self._named) >= MAX_ADAPTERS:
            raise CheckpointError(f"{MAX_ADAPTERS} adapters are loaded, which is the limit; unload one")
        asked = OpenAdapter(next(self._numbers), name, path, root)
        answer: asyncio.Future[AdapterVersion] = asyncio.get_running_loop().create_future()
        self._opening[asked.number] = asked, answer
        self._send(asked)
        return await answer

    def unload(self, name: str) -> None:
        """Have a name stand for nothing. Raises RequestError for an unknown one."""
        if name not in self._named:
            raise RequestError("adapter", f"{name!r} is not loaded")
        del self._named[name]
        self._sweep()

    def version(self, name: str) -> AdapterVersion:
        """What a name stands for now. Raises RequestError for an unknown one."""
        found = self._named.get(name)
        if found is None:
            raise RequestError("adapter", f"{name!r} is not loaded; known: {shown(self._named)}")
        return found

    def check(self, digest: str) -> None:
        """Raise RequestError for a version that the engine does not know any more."""
        if digest not in self._known:
            raise RequestError("adapter", "this version is not loaded any more")

    def enter(self, digest: str) -> None:
        """A request of a version has begun, or will."""
        self._users[digest] += 1

    def leave(self, digest: str) -> None:
        """A request of a version has ended."""
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            self._sweep()

    def opened(self, report: AdapterOpened) -> None:
        """The engine has read an adapter, or refused it."""
        found = self._opening.pop(report.number, None)
        if found is None:
            return
        asked, answer = found
        if report.error and not answer.done():
            answer.set_exception(CheckpointError(report.error))
        if report.digest:
            version = AdapterVersion(
                asked.name, report.digest, report.rank, asked.path, asked.root, int(time.time())
            )
            self._known[version.digest] = version
            if not answer.done():
                self._named[asked.name] = version
                answer.set_result(version)
        self._sweep()

    def started(self) -> None:
        """An engine has started, again: it knows none of them."""
        self._sweep()
        for one in self._known.values():
            self._send(OpenAdapter(0, one.name, one.path, one.root, one.digest))

    def lost(self, reason: str) -> None:
        """The engine has ended."""
        opening, self._opening = self._opening, {}
        for _, answer in opening.values():
            if not answer.done():
                answer.set_exception(EngineUnavailableError(f"{reason}; the adapter was not loaded"))

    def _sweep(self) -> None:
        """Forget versions without a name and without requests; not while some are read, which may be the same ones."""
        if self._opening:
            return
        wanted = {version.digest for version in self._named.values()}
        for digest in [
            digest for digest in self._known if digest not in wanted and digest not in self._users
        ]:
            del self._known[digest]
            self._send(ForgetAdapter(digest))


def shown(names: Mapping[str, object], most: int = 20) -> str:
    """Names for a message, not all of many."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return (", ".join(listed[:most]) or "none") + more
