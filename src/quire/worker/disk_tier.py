"""KV blocks in a file: they outlive the process, and processes of a host that have the same folder share them.

Each process writes a file of its own (worker.kv_file) and reads those of the others. When its file is full, the tenant
with the most blocks in it loses the one that was used longest ago, so that no tenant loses more than it has above an
equal share. After an error of the disk the tier is off: nothing is found or kept any more, and the server goes on
without it.
"""

from __future__ import annotations

import sys
import threading
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from quire.core.tier import Name
from quire.worker.kept_blocks import ENTRY_BYTES, READERS, KeptBlocks, buffers_of
from quire.worker.kv_file import OWNER_BYTES, U8, KvFile, KvLayout, places_in
from quire.worker.sealing import Sealing, sealing_bytes


def tier_bytes(size: int, block_bytes: int, *, sealed: bool = False) -> int:
    """Memory that a tier of a file of `size` bytes takes, which is encrypted if `sealed`."""
    buffers = sum(buffers_of(block_bytes)) * block_bytes
    rooms = sealing_bytes(block_bytes, READERS + 1) if sealed else 0
    return buffers + rooms + 2 * ENTRY_BYTES * places_in(size, block_bytes)


class DiskTier(KeptBlocks):
    """Blocks of `block_bytes` bytes in a file of at most `size` bytes in `folder`, encrypted if there is a `key`.

    `fingerprint` (64 bytes) determines the content of blocks together with their names. Raises KvFileError if the file
    cannot be made, ValueError if it has room for no block, and QuireError if it cannot be encrypted.
    """

    kind = "disk"

    def __init__(
        self, folder: Path, size: int, block_bytes: int, fingerprint: bytes, key: bytes = b""
    ) -> None:
        self._sealing = Sealing(key, fingerprint, block_bytes) if key else None
        mark = bytes(16) if self._sealing is None else self._sealing.mark
        layout = KvLayout(fingerprint, block_bytes, places_in(size, block_bytes), mark)
        if layout.places < 1:
            raise ValueError(f"kv_tiers: disk has no room for a block of {block_bytes} bytes")
        super().__init__(block_bytes, fingerprint)
        self._folder, self._layout = folder, layout
        self._file = KvFile.own(folder, layout, self._sealing)
        # Names here are those of the file.
        self._places: dict[Name, tuple[int, bytes]] = {}  # in the own file, and whose they are
        self._owned: dict[bytes, dict[Name, None]] = {}  # by tenant; used longest ago first
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
        name = self._named(name)
        return name in self._places or name in self._shared

    def clear(self) -> None:
        """Forget every block of the own file."""
        for name in [*self._writing]:
            self.forget(name)
        with self._lock:
            places = [place for place, _ in self._places.values()]
            self._places.clear()
            self._owned.clear()
            self._shared.clear()
        for place in places:
            self._writes.put(((b"", 0), place))

    def _named(self, name: Name) -> Name:
        return name if self._sealing is None else (self._sealing.name(name[0]), name[1])

    # -- the threads --------------------------------------------------------------------------------------

    def _lose(self, name: Name) -> int | None:
        name = self._named(name)
        with self._lock:
            self._shared.pop(name, None)
            return self._take(name)

    def _take(self, name: Name) -> int | None:
        """Have nothing in the own file under a name of its; returns the place. With the lock."""
        place, owner = self._places.pop(name, (None, b""))
        if place is not None:
            del self._owned[owner][name]
            if not self._owned[owner]:
                del self._owned[owner]
        return place

    def _put(self, name: Name, place: int, owner: bytes) -> None:
        self._places[name] = place, owner
        self._owned.setdefault(owner, {})[name] = None

    def _load(self) -> None:
        """Find what an earlier process has left in the file."""
        table, self._order = self._file.table()
        used = set()
        with self._lock:
            for place, digest, group, owner in table:
                self._take((digest, group))
                self._put((digest, group), place, owner)
            used = {place for place, _ in self._places.values()}
        self._free = sorted({*range(self._layout.places)} - used, reverse=True)
        self._loaded.set()

    def _look(self) -> None:
        """See what other processes have written since."""
        for path in sorted(self._folder.glob("blocks-*.kv")):
            if path == self._file.path:
                continue
            file, seen = self._others.get(path, (None, 0))
            if file is None:
                file = KvFile.of_another(path, self._layout, self._sealing)
                if file is None:
                    continue
            table, newest = file.table(seen)
            with self._lock:  # what was written over meanwhile is noticed when it is read
                for place, digest, group, _ in table:
                    self._shared.pop((digest, group), None)
                    self._shared[digest, group] = file, place
                while len(self._shared) > self._layout.places:
                    del self._shared[next(iter(self._shared))]
            self._others[path] = file, newest

    def _keep(self, name: Name, content: U8, tenant: str) -> None:
        name, owner = self._named(name), _owner(self.fingerprint, tenant)
        with self._lock:
            if name in self._places:
                return
            place = self._free.pop() if self._free else self._give_way()
        self._order += 1
        self._file.write(place, name, self._order, content, owner)
        with self._lock:
            self._put(name, place, owner)
        self.blocks_out += 1

    def _give_way(self) -> int:
        """The place of the block that makes room. With the lock."""
        most = max(self._owned.values(), key=len)
        place = self._take(next(iter(most)))
        assert place is not None
        return place

    def _erase(self, name: Name, place: int | None) -> None:
        if place is None:  # it may have been on its way when it was forgotten
            with self._lock:
                place = self._take(self._named(name))
        if place is not None:
            self._file.erase(place)
            with self._lock:
                self._free.append(place)

    def _fetch(self, name: Name, into: U8, reader: int) -> bool:  # noqa: ARG002
        asked, name = name, self._named(name)
        with self._lock:
            place, owner = self._places.get(name, (None, b""))
            if place is not None:  # used last
                del self._owned[owner][name]
                self._owned[owner][name] = None
            file, at = (self._file, place) if place is not None else self._shared.get(name, (None, 0))
        if file is None:
            return False
        if file.read(at, name, into):
            return True
        if file is self._file:
            if self._places.get(name, (None, b""))[0] == at:  # else it was written over meanwhile
                self.damaged += 1
                self.forget(asked)
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
            self._owned.clear()
            self._shared.clear()

    def _closed(self) -> None:
        self._file.close()
        for file, _ in self._others.values():
            file.close()


@lru_cache(4096)
def _owner(fingerprint: bytes, tenant: str) -> bytes:
    """What stands for a tenant in a file: enough to count its blocks."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=OWNER_BYTES, key=fingerprint).digest()
