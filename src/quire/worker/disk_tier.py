"""KV blocks in a file: they outlive the process, and processes of a host that have the same folder share them.

Each process writes a file of its own (worker.kv_file) and reads those of the others. All reading, writing and checking
is done by three threads: a step only hands contents over. What they hold meanwhile is bounded, so a block is not kept
when the disk is slower than blocks come, and a content that is read waits until the step takes it. After an error of
the disk the tier is off: nothing is found or kept any more, and the server goes on without it.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.core.tier import Name
from quire.worker.kv_file import U8, KvFile, KvLayout, places_in

ENTRY_BYTES = 320  # of the index, for a place
_WRITE_BYTES, _READ_BYTES = 64 * 2**20, 8 * 2**20  # that contents take while they wait, or two of them
_LOOK_SECONDS = 2.0  # between two looks at the files of other processes
_RECENT = 0.1  # of the latest read in the mean
_READERS = 2


def buffers_of(block_bytes: int) -> tuple[int, int]:
    """Contents that may wait to be written, and those that may have been read."""
    writes, reads = (max(2, min(64, size // block_bytes)) for size in (_WRITE_BYTES, _READ_BYTES))
    return writes, reads


def tier_bytes(size: int, block_bytes: int) -> int:
    """Memory that a tier of a file of `size` bytes takes."""
    return sum(buffers_of(block_bytes)) * block_bytes + 2 * ENTRY_BYTES * places_in(size, block_bytes)


class DiskTier:
    """Blocks of `block_bytes` bytes in a file of at most `size` bytes in `folder`.

    `fingerprint` (64 bytes) determines the content of blocks together with their names. Raises KvFileError if the file
    cannot be made, and ValueError if it has room for no block.
    """

    def __init__(self, folder: Path, size: int, block_bytes: int, fingerprint: bytes) -> None:
        layout = KvLayout(fingerprint, block_bytes, places_in(size, block_bytes))
        if layout.places < 1:
            raise ValueError(f"kv_tiers: disk has no room for a block of {block_bytes} bytes")
        self._folder, self._layout = folder, layout
        self._file = KvFile.own(folder, layout)
        self._lock = threading.Lock()
        self._places: dict[Name, int] = {}  # in the own file; used longest ago first
        self._free: list[int] = []
        self._order = 0
        self._loaded = threading.Event()
        self._others: dict[Path, tuple[KvFile, int]] = {}  # with the order of the newest record that was seen
        self._shared: dict[Name, tuple[KvFile, int]] = {}  # blocks of other files
        self._writing: set[Name] = set()  # reserved, and not written yet
        self._awaited: set[Name] = set()  # of these: not handed over
        self._most_writes, self._most_reads = buffers_of(block_bytes)
        self._buffers: queue.SimpleQueue[U8] = queue.SimpleQueue()
        for _ in range(self._most_reads):
            self._buffers.put(np.empty(block_bytes, np.uint8))
        self._lent: list[U8] = []  # contents of the last `arrived`
        # Contents to write, and places to erase, or None for that of a block that is still to be written.
        self._writes: queue.SimpleQueue[tuple[Name, U8 | int | None] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[int, Name] | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[int, U8 | None]] = queue.SimpleQueue()
        self.copy_seconds = 0.0  # moving mean of reading a block
        self.blocks_in = self.blocks_out = 0
        self.refused = 0  # blocks that came faster than the disk takes them
        self.damaged = 0  # contents that did not fit their records
        self.error = ""  # that has ended the tier
        self._threads = [threading.Thread(target=self._write_all, name="kv writer", daemon=True)]
        for _ in range(_READERS):
            self._threads.append(threading.Thread(target=self._read_all, name="kv reader", daemon=True))
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Blocks in the own file."""
        return len(self._places)

    @property
    def block_bytes(self) -> int:
        """Of a content."""
        return self._layout.block_bytes

    @property
    def fingerprint(self) -> bytes:
        """What determines contents together with their names."""
        return self._layout.fingerprint

    @property
    def path(self) -> Path:
        """The own file."""
        return self._file.path

    def is_loaded(self) -> bool:
        """Whether what an earlier process has left was found, or there was nothing."""
        return self._loaded.is_set()

    def holds(self, name: Name) -> bool:
        """Whether a block can be read, as far as the tables say."""
        return name in self._places or name in self._shared

    @property
    def room(self) -> int:
        """Contents that can be handed over now."""
        return 0 if self.error else self._most_writes - len(self._writing)

    @property
    def writes(self) -> bool:
        """Whether contents are still to be written."""
        return bool(self._writing)

    def reserve(self, name: Name) -> bool:
        """Whether `write` should follow: not for a block that is there or on its way, or if there is no room."""
        if self.error or self.holds(name) or name in self._writing:
            return False
        if len(self._writing) >= self._most_writes:
            self.refused += 1
            return False
        self._writing.add(name)
        self._awaited.add(name)
        return True

    def awaits(self, name: Name) -> bool:
        """Whether a content was reserved and has not been handed over."""
        return name in self._awaited

    def write(self, name: Name, content: U8) -> None:
        """Keep a content that was reserved; it belongs to the tier from now on."""
        self._awaited.discard(name)
        self._writes.put((name, content))

    def forget(self, name: Name) -> None:
        """Never serve a block again that is in the own file: it may be damaged."""
        if name in self._awaited:
            self._awaited.discard(name)
            self._writing.discard(name)
        with self._lock:
            self._shared.pop(name, None)
            place = self._places.pop(name, None)
        self._writes.put((name, place))

    def clear(self) -> None:
        """Forget every block of the own file."""
        with self._lock:
            names = [*self._places, *self._writing]
            self._shared.clear()
        for name in names:
            self.forget(name)

    def read(self, block: int, name: Name) -> None:
        """Begin to read a content for a block of the cache; `arrived` says when it is there."""
        self._reads.put((block, name))

    def arrived(self) -> Sequence[tuple[int, U8 | None]]:
        """Blocks whose content has come, or None for those that were lost. Valid until the next call."""
        for content in self._lent:
            self._buffers.put(content)
        found: list[tuple[int, U8 | None]] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < self._most_reads:
                found.append(self._arrived.get_nowait())
        self._lent = [content for _, content in found if content is not None]
        return found

    def counts(self) -> dict[str, int]:
        """What metrics show."""
        return {
            "blocks": len(self._places), "saved": self.blocks_out, "loaded": self.blocks_in, "refused": self.refused,
            "damaged": self.damaged, "failed": int(bool(self.error)),
        }  # fmt: skip

    def close(self) -> None:
        """Write what was handed over, and end."""
        self._writes.put(None)
        for _ in range(_READERS):
            self._reads.put(None)
        for thread in self._threads:
            while thread.is_alive():
                self.arrived()  # a reader may wait for a buffer
                thread.join(0.01)
        self._file.close()
        for file, _ in self._others.values():
            file.close()

    # -- the threads --------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            self._load()
        except OSError as error:
            self._end(error)
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
                self._end(error)
                continue
            if asked is None:
                return
            name, content = asked
            try:
                if isinstance(content, np.ndarray):
                    if not self.error:
                        self._write(name, content)
                    self._writing.discard(name)
                else:
                    self._erase(name, content)
            except OSError as error:
                self._end(error)
                self._writing.discard(name)

    def _load(self) -> None:
        """Find what an earlier process has left in the file."""
        places: dict[Name, int] = {}
        table, self._order = self._file.table()
        for place, digest, group in table:
            places.pop((digest, group), None)
            places[digest, group] = place
        self._free = sorted({*range(self._layout.places)} - {*places.values()}, reverse=True)
        self._places = places
        self._loaded.set()

    def _look(self) -> None:
        """See what other processes have written since."""
        for path in sorted(self._folder.glob("blocks-*.kv")):
            if path == self._file.path:
                continue
            file, seen = self._others.get(path, (None, 0))
            if file is None:
                file = KvFile.of_another(path, self._layout)
                if file is None:
                    continue
            table, newest = file.table(seen)
            with self._lock:  # what was written over meanwhile is noticed when it is read
                for place, digest, group in table:
                    self._shared.pop((digest, group), None)
                    self._shared[digest, group] = file, place
                while len(self._shared) > self._layout.places:
                    del self._shared[next(iter(self._shared))]
            self._others[path] = file, newest

    def _write(self, name: Name, content: U8) -> None:
        with self._lock:
            if name in self._places:
                return
            if self._free:
                place = self._free.pop()
            else:
                place = self._places.pop(next(iter(self._places)))
        self._order += 1
        self._file.write(place, *name, self._order, content)
        with self._lock:
            self._places[name] = place
        self.blocks_out += 1

    def _erase(self, name: Name, place: int | None) -> None:
        if place is None:  # it may have been on its way when it was forgotten
            with self._lock:
                place = self._places.pop(name, None)
        if place is not None:
            self._file.erase(place)
            with self._lock:
                self._free.append(place)

    def _read_all(self) -> None:
        while (asked := self._reads.get()) is not None:
            block, name = asked
            into = self._buffers.get()
            came = False
            try:
                came = not self.error and self._read(name, into)
            except OSError as error:
                self._end(error)
            if not came:
                self._buffers.put(into)
            self._arrived.put((block, into if came else None))

    def _read(self, name: Name, into: U8) -> bool:
        start = time.perf_counter()
        with self._lock:
            place = self._places.get(name)
            if place is not None:  # used last
                del self._places[name]
                self._places[name] = place
        file, at = (self._file, place) if place is not None else self._shared.get(name, (None, 0))
        if file is None:
            return False
        if file.read(at, *name, into):
            seconds = time.perf_counter() - start
            self.copy_seconds += (seconds - self.copy_seconds) * (_RECENT if self.copy_seconds else 1.0)
            self.blocks_in += 1
            return True
        if file is self._file:
            if self._places.get(name) == at:  # else it was written over meanwhile
                self.damaged += 1
                self.forget(name)
        else:
            with self._lock:
                self._shared.pop(name, None)
        return False

    def _end(self, error: OSError) -> None:
        if not self.error:
            self.error = error.strerror or str(error)
            print(
                f"quire: {self._file.path}: {self.error}; KV blocks are neither kept nor read any more",
                file=sys.stderr,
                flush=True,
            )
        with self._lock:
            self._places.clear()
            self._shared.clear()
