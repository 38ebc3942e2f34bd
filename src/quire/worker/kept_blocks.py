"""What tiers outside of memory have in common: threads that read and write, and bounds on what they hold meanwhile.

A step only hands contents over, and takes what has arrived. So a block is not kept when a tier is slower than blocks
come, and a content that is read waits until the step takes it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from quire.core.tier import Name
from quire.worker.kv_file import U8

ENTRY_BYTES = 320  # of an index, for a block
_WRITE_BYTES, _READ_BYTES = 64 * 2**20, 8 * 2**20  # that contents take while they wait, or two of them
_LOOK_SECONDS = 2.0  # between two looks at what others have kept
_RECENT = 0.1  # of the latest read in the mean
READERS = 2
_LOOK = "look"  # in place of a content


def buffers_of(block_bytes: int) -> tuple[int, int]:
    """Contents that may wait to be written, and those that may have been read."""
    writes, reads = (max(2, min(64, size // block_bytes)) for size in (_WRITE_BYTES, _READ_BYTES))
    return writes, reads


class KeptBlocks(ABC):
    """A tier of blocks of `block_bytes` bytes. `begin` starts its threads."""

    kind = ""  # in metrics

    def __init__(self, block_bytes: int, fingerprint: bytes) -> None:
        self.block_bytes, self.fingerprint = block_bytes, fingerprint
        self._lock = threading.Lock()
        self._writing: dict[Name, str] = {}  # reserved, and not written yet; the tenant of each
        self._awaited: set[Name] = set()  # of these: not handed over
        self._most_writes, self._most_reads = buffers_of(block_bytes)
        self._buffers: queue.SimpleQueue[U8] = queue.SimpleQueue()
        for _ in range(self._most_reads):
            self._buffers.put(np.empty(block_bytes, np.uint8))
        self._lent: list[U8] = []  # contents of the last `arrived`
        # Contents to write, and blocks to forget: where they are, or None if that is not known yet.
        self._writes: queue.SimpleQueue[tuple[Name, U8 | int | None] | str | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[int, Name] | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[int, U8 | None]] = queue.SimpleQueue()
        self.copy_seconds = 0.0  # moving mean of reading a block
        self.work_seconds = 0.0  # of these, of a core
        self.blocks_in = self.blocks_out = 0
        self.refused = 0  # blocks that came faster than they could be kept
        self.damaged = 0  # contents that were not as they were written
        self._threads: list[threading.Thread] = []
        self._worked = [0.0] * READERS  # seconds of a core, by reader, since it began
        self._told = 0.0  # of these, to `spent`
        self._asked = False  # to look at what others have kept

    def begin(self) -> None:
        """Start."""
        self._threads = [threading.Thread(target=self._write_all, name=f"kv writer {self.kind}", daemon=True)]
        for number in range(READERS):
            self._threads.append(
                threading.Thread(
                    target=self._read_all, args=(number,), name=f"kv reader {self.kind}", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    # -- for the step -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def works(self) -> bool:
        """Whether blocks can be kept and read now."""

    @abstractmethod
    def holds(self, name: Name) -> bool:
        """Whether a block can be read, as far as is known."""

    @property
    def room(self) -> int:
        """Contents that can be handed over now."""
        return self._most_writes - len(self._writing) if self.works else 0

    @property
    def writes(self) -> bool:
        """Whether contents are still to be written."""
        return bool(self._writing)

    def reserve(self, name: Name, tenant: str = "") -> bool:
        """Whether `write` should follow for a block of a tenant: not if it is there or on its way, or there is no
        room."""
        if not self.works or self.holds(name) or name in self._writing:
            return False
        if len(self._writing) >= self._most_writes:
            self.refused += 1
            return False
        self._writing[name] = tenant
        self._awaited.add(name)
        return True

    def awaits(self, name: Name) -> bool:
        """Whether a content was reserved and has not been handed over."""
        return name in self._awaited

    def write(self, name: Name, content: U8) -> None:
        """Keep a content that was reserved; nobody changes it from now on."""
        self._awaited.discard(name)
        self._writes.put((name, content))

    def forget(self, name: Name) -> None:
        """Never serve a block again: it may be damaged."""
        if name in self._awaited:
            self._awaited.discard(name)
            self._writing.pop(name, None)
        self._writes.put((name, self._lose(name)))

    @abstractmethod
    def clear(self) -> None:
        """Forget every block."""

    def look(self) -> None:
        """See what others have kept, as soon as what was handed over before is written."""
        if not self._asked:
            self._asked = True
            self._writes.put(_LOOK)

    def read(self, block: int, name: Name) -> None:
        """Begin to read a content for a block of the cache; `arrived` says when it is there."""
        self._reads.put((block, name))

    def arrived(self, most: int) -> Sequence[tuple[int, U8 | None]]:
        """Blocks whose content has come, at most so many, or None for those that were lost. Valid until the next
        call."""
        for content in self._lent:
            self._buffers.put(content)
        found: list[tuple[int, U8 | None]] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < min(most, self._most_reads):
                found.append(self._arrived.get_nowait())
        self._lent = [content for _, content in found if content is not None]
        return found

    def spent(self) -> float:
        """Seconds of a core that readers took since the last call."""
        before, self._told = self._told, sum(self._worked)
        return self._told - before

    @abstractmethod
    def __len__(self) -> int:
        """Blocks that can be read."""

    def counts(self) -> dict[str, int]:
        """What metrics show."""
        return {
            "blocks": len(self), "saved": self.blocks_out, "loaded": self.blocks_in, "refused": self.refused,
            "damaged": self.damaged, "failed": int(not self.works), "loaded_bytes": self.blocks_in * self.block_bytes,
        }  # fmt: skip

    def close(self) -> None:
        """Write what was handed over, and end."""
        self._writes.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        for thread in self._threads:
            while thread.is_alive():
                self.arrived(self._most_reads)  # a reader may wait for a buffer
                thread.join(0.01)
        self._closed()

    # -- for the threads ----------------------------------------------------------------------------------

    @abstractmethod
    def _load(self) -> None:
        """Find what there is at the start. Raises OSError."""

    @abstractmethod
    def _look(self) -> None:
        """See what others have kept since. Raises OSError."""

    @abstractmethod
    def _lose(self, name: Name) -> int | None:
        """Find a block no more; returns where it is, if that is known. Called by the step."""

    @abstractmethod
    def _keep(self, name: Name, content: U8, tenant: str) -> None:
        """Write a content. Raises OSError."""

    @abstractmethod
    def _erase(self, name: Name, place: int | None) -> None:
        """Have nobody find a block again. Raises OSError."""

    @abstractmethod
    def _fetch(self, name: Name, into: U8, reader: int) -> bool:
        """Read a content; whether it is there, and as it was written. Raises OSError."""

    @abstractmethod
    def _failed(self, error: OSError) -> None:
        """A call of these has failed."""

    @abstractmethod
    def _closed(self) -> None:
        """All threads have ended."""

    def _write_all(self) -> None:
        try:
            self._load()
        except OSError as error:
            self._failed(error)
        due = time.monotonic()
        while True:
            try:
                if time.monotonic() >= due:
                    self._look()
                    due = time.monotonic() + _LOOK_SECONDS
                asked = self._writes.get(timeout=max(0.01, due - time.monotonic()))
            except queue.Empty:
                continue
            except OSError as error:
                self._failed(error)
                due = time.monotonic() + _LOOK_SECONDS
                continue
            if asked is None:
                return
            if isinstance(asked, str):
                self._asked, due = False, 0.0
                continue
            name, content = asked
            try:
                if not isinstance(content, np.ndarray):
                    self._erase(name, content)
                elif self.works:
                    self._keep(name, content, self._writing.get(name, ""))
            except OSError as error:
                self._failed(error)
            finally:
                if isinstance(content, np.ndarray):
                    self._writing.pop(name, None)

    def _read_all(self, reader: int) -> None:
        while (asked := self._reads.get()) is not None:
            block, name = asked
            into = self._buffers.get()
            came, start, before = False, time.perf_counter(), time.thread_time()
            try:
                came = self.works and self._fetch(name, into, reader)
            except OSError as error:
                self._failed(error)
            seconds, work = time.perf_counter() - start, time.thread_time() - before
            self._worked[reader] += work
            if came:
                share = _RECENT if self.copy_seconds else 1.0
                self.copy_seconds += (seconds - self.copy_seconds) * share
                self.work_seconds += (work - self.work_seconds) * share
                self.blocks_in += 1
            else:
                self._buffers.put(into)
            self._arrived.put((block, into if came else None))
