"""Stored responses of /v1/responses, in SQLite: each belongs to the API key that made it, and expires."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from quire.types import QuireError

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")

MAX_CHAIN = 1024  # responses before one
_CACHE_KIB = 2048  # of pages that SQLite holds in memory
_DAY = 86_400.0
_UNFINISHED = ("queued", "in_progress")
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, status TEXT NOT NULL, previous TEXT,
    input BLOB NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE total SET bytes = bytes + length(new.input) + length(new.body); END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE total SET bytes = bytes - length(old.input) - length(old.body); END;
"""


class StoreError(QuireError):
    """The file of stored responses cannot be used."""


class StoredResponse(NamedTuple):
    """A response: JSON of the object, and of the list of its own input items. `previous` is the one before it."""

    id: str
    status: str
    previous: str | None
    input: bytes
    body: bytes


def prepare_file(path: str) -> None:
    """Create the file of a store, for its owner alone, unless it exists. Raises ValueError if it cannot be opened."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, stat.S_IRUSR | stat.S_IWUSR))
    except OSError as error:
        raise ValueError(f"response_store: {path} cannot be opened: {error.strerror or error}") from None


class ResponseStore:
    """Responses by id and owner, within `limit` bytes and `days` of age; the oldest go first.

    Without a `path` they are in a file without a name, which SQLite removes with the connection. All methods work off
    the event loop, one after the other, and raise StoreError.
    """

    def __init__(self, path: str | None, limit: int, days: float) -> None:
        self._path, self._limit, self._seconds = path, limit, days * _DAY
        self._lock = threading.Lock()
        self._open_one: sqlite3.Connection | None = None

    async def put(self, owner: str, response: StoredResponse) -> None:
        """Keep a response, in place of an earlier state of it. Raises StoreError for one over the limit."""
        size = len(response.input) + len(response.body)
        if size > self._limit:
            raise StoreError(
                f"the response has {size} bytes, over the limit of {self._limit} (--response-store-size)"
            )

        def work(db: sqlite3.Connection) -> None:
            row = db.execute("SELECT created FROM responses WHERE id = ?", (response.id,)).fetchone()
            created = row[0] if row else time.time()
            db.execute("DELETE FROM responses WHERE id = ?", (response.id,))
            values = (response.id, owner, created, *response[1:])
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            self._forget_old(db)

        await self._run(work)

    async def get(self, owner: str, name: str) -> StoredResponse | None:
        """A response of this owner; None if there is none."""
        return await self._run(lambda db: self._get(db, owner, name))

    async def chain(self, owner: str, name: str, limit: int) -> list[StoredResponse] | None:
        """The responses before and up to this one, the first first; None if one of them is missing.

        Raises StoreError for more than MAX_CHAIN, or more than `limit` bytes.
        """

        def work(db: sqlite3.Connection) -> list[StoredResponse] | None:
            found: list[StoredResponse] = []
            size, last = 0, name
            while True:
                one = self._get(db, owner, last)
                if one is None:
                    return None
                found.append(one)
                size += len(one.input) + len(one.body)
                if len(found) > MAX_CHAIN or size > limit:
                    raise StoreError(
                        f"the responses before it have more than {MAX_CHAIN} turns or {limit} bytes"
                    )
                if one.previous is None:
                    return found[::-1]
                last = one.previous

        return await self._run(work)

    async def delete(self, owner: str, name: str) -> bool:
        """Remove a response of this owner; false if there is none."""
        removed = "DELETE FROM responses WHERE id = ? AND owner = ?"
        return await self._run(lambda db: db.execute(removed, (name, owner)).rowcount > 0)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._open_one is not None:
                self._open_one.close()
                self._open_one = None

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def alone() -> T:
            import sqlite3

            with self._lock:
                try:
                    db = self._open_one = self._open_one or self._open()
                    with db:
                        return work(db)
                except sqlite3.Error as error:
                    raise StoreError(f"stored responses: {error}") from None

        return await asyncio.to_thread(alone)

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        db = sqlite3.connect(self._path or "", check_same_thread=False)
        db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        db.execute("PRAGMA auto_vacuum = FULL")
        db.execute(f"PRAGMA synchronous = {'NORMAL' if self._path else 'OFF'}")
        db.executescript(_TABLE)
        # what ran in the background when the server stopped will not be finished
        names = ", ".join("?" * len(_UNFINISHED))
        db.execute(f"DELETE FROM responses WHERE status IN ({names})", _UNFINISHED)
        return db

    def _get(self, db: sqlite3.Connection, owner: str, name: str) -> StoredResponse | None:
        select = "SELECT id, status, previous, input, body FROM responses WHERE id = ? AND owner = ? AND created > ?"
        row = db.execute(select, (name, owner, time.time() - self._seconds)).fetchone()
        return None if row is None else StoredResponse(*row)

    def _forget_old(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM responses WHERE created <= ?", (time.time() - self._seconds,))
        oldest = "DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY created LIMIT 1)"
        while db.execute("SELECT bytes FROM total").fetchone()[0] > self._limit:
            db.execute(oldest)
