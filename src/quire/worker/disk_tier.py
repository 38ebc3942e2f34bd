"""KV blocks in a file: they outlive the process, and processes of a host that have the same folder share them.

Each process writes a file of its own (worker.kv_file) and reads those of the others. After an error of the disk the
tier is off: nothing is found or kept any more, and the server goes on without it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from quire.core.tier import Name
from quire.worker.kept_blocks import ENTRY_BYTES, KeptBlocks, buffers_of
from quire.worker.kv_file import U8, KvFile, KvLayout, places_in


def tier_bytes(size: int, block_bytes: int) -> int:
    """Memory that a tier of a file of `size` bytes takes."""
    return sum(buffers_of(block_bytes)) * block_bytes + 2 * ENTRY_BYTES * places_in(size, block_bytes)


class DiskTier(KeptBlocks):
    """Blocks of `block_bytes` bytes in a file of at most `size` bytes in `folder`.

    `fingerprint` (64 bytes) determines the content of blocks together with their names. Raises KvFileError if the file
    cannot be made, and ValueError if it has room for no block.
    """

    kind = "disk"

    def __init__(self, folder: Path, size: int, block_bytes: int, fingerprint: bytes) -> None:
        layout = KvLayout(fingerprint, block_bytes, places_in(size, block_bytes))
        if layout.places < 1:
            raise ValueError(f"kv_tiers: disk has no room for a block of {block_bytes} bytes")
        super().__init__(block_bytes, fingerprint)
        self._folder, self._layout = folder, layout
        self._file = KvFile.own(folder, layout)
        self._places: dict[Name, int] = {}  # in the own file; used longest ago first
        self._free: list[int] = []
        self._order = 0
        self._loaded = threading.Event()
        self._others: dict[Path, tuple[KvFile, int]] = {}  # with the order of the newest record that was seen
        self._shared: dict[Name, tuple[KvFile, int]] = {}  # blocks of other files
        self.error = ""  # that has ended the tier
        self.begin()

    def __len__(self) -> int:
        """Blocks in the own file."""
        return len(self._places)

    @property
    def path(self) -> Path:
        """The own file."""
        return self._file.path

    @property
    def works(self) -> bool:
        return not self.error

    def is_loaded(self) -> bool:
        """Whether what an earlier process has left was found, or there was nothing."""
        return self._loaded.is_set()

    def holds(self, name: Name) -> bool:
        return name in self._places or name in self._shared

    def clear(self) -> None:
        """Forget every block of the own file."""
        with self._lock:
            names = [*self._places, *self._writing]
            self._shared.clear()
        for name in names:
            self.forget(name)

    # -- the threads --------------------------------------------------------------------------------------

    def _lose(self, name: Name) -> int | None:
        with self._lock:
            self._shared.pop(name, None)
            return self._places.pop(name, None)

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

    def _keep(self, name: Name, content: U8) -> None:
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

    def _fetch(self, name: Name, into: U8, reader: int) -> bool:  # noqa: ARG002
        with self._lock:
            place = self._places.get(name)
            if place is not None:  # used last
                del self._places[name]
                self._places[name] = place
        file, at = (self._file, place) if place is not None else self._shared.get(name, (None, 0))
        if file is None:
            return False
        if file.read(at, *name, into):
            return True
        if file is self._file:
            if self._places.get(name) == at:  # else it was written over meanwhile
                self.damaged += 1
                self.forget(name)
        else:
            with self._lock:
                self._shared.pop(name, None)
        return False

    def _failed(self, error: OSError) -> None:
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

    def _closed(self) -> None:
        self._file.close()
        for file, _ in self._others.values():
            file.close()
