"""The adapters of an engine: versions by name, and those that are in the slots of its executor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from quire.executor.base import Runnable
from quire.lora.adapter import Adapter
from quire.lora.fitting import check_fits, fill_slot
from quire.lora.slot_turns import SlotTurns
from quire.types import CheckpointError, RequestError

Open = Callable[[], Adapter]


class AdapterService:
    """One thread calls it, between steps; slots are filled in a thread of its own while steps of others run.

    A version is the digest of an adapter's weights and configuration. The weights of the `kept` versions that were read
    last stay in memory; others are opened again when they are to be put into a slot.
    """

    def __init__(self, executor: Runnable, max_loras: int, max_rank: int, kept: int = 0) -> None:
        self._executor, self._max_rank, self._most_kept = executor, max_rank, kept
        self._turns = SlotTurns(max_loras)
        self._slots: dict[str, int] = {}
        self._versions: dict[str, str] = {}
        self._sources: dict[str, Open] = {}
        self._kept: OrderedDict[str, Adapter] = OrderedDict()
        self._loading: dict[str, Future[Adapter]] = {}
        self._failed: dict[str, str] = {}  # why versions could not be loaded
        self._thread = ThreadPoolExecutor(1, "adapters")

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each loaded version; what a worker looks sequences up in."""
        return self._slots

    @property
    def versions(self) -> Mapping[str, str]:
        """The digest of the version that each name stands for now."""
        return self._versions

    def register(self, name: str, opener: Open) -> str:
        """Read an adapter, and have a name stand for this version from now on; returns its digest.

        Requests of the version before end on that. Raises CheckpointError, and changes nothing, if it cannot be read or
        does not fit the model.
        """
        adapter = opener()
        check_fits(self._executor.program, adapter, self._max_rank)
        self._sources[adapter.digest] = opener
        self._versions[name] = adapter.digest
        self._keep(adapter)
        return adapter.digest

    def unregister(self, name: str) -> None:
        """Have a name stand for nothing; its requests end on their version. Raises RequestError for an unknown name."""
        self.version(name)
        del self._versions[name]

    def version(self, name: str) -> str:
        """The digest of an adapter's version. Raises RequestError for an unknown name."""
        found = self._versions.get(name)
        if found is None:
            known = ", ".join(sorted(self._versions)) or "none"
            raise RequestError("adapter", f"{name!r} is not loaded; known: {known}")
        return found

    def begin_round(self) -> None:
        """Every request that waits asks again with `acquire`, the oldest first."""
        self._turns.begin_round()

    def acquire(self, digest: str) -> bool:
        """Whether a request may run with a version, which then stays in its slot until `release`; if not, ask again.

        Raises RequestError if the version cannot be loaded.
        """
        self._settle()
        if digest in self._failed:
            raise RequestError("adapter", self._failed.pop(digest))
        if digest in self._slots:
            return self._turns.enter(digest)
        if digest not in self._loading:
            claimed = self._turns.claim(digest)
            if claimed is not None:
                slot, before = claimed
                if before is not None:
                    del self._slots[before]
                self._loading[digest] = self._thread.submit(self._load, slot, digest, self._kept.get(digest))
        return False

    def release(self, digest: str) -> None:
        """A request that acquired a version has ended."""
        self._turns.leave(digest)

    def close(self) -> None:
        """End the thread, once it has loaded what it is loading."""
        self._thread.shutdown(cancel_futures=True)

    def _settle(self) -> None:
        """Take over what the thread has done."""
        for digest in [digest for digest, future in self._loading.items() if future.done()]:
            future = self._loading.pop(digest)
            slot, error = self._turns.slot_of(digest), future.exception()
            if error is not None or slot is None:
                self._turns.drop(digest)
                self._failed[digest] = str(error)
                continue
            self._slots[digest] = slot
            self._turns.leave(digest)  # the claim's
            self._keep(future.result())

    def _load(self, slot: int, digest: str, kept: Adapter | None) -> Adapter:
        adapter = kept or self._sources[digest]()
        if adapter.digest != digest:
            raise CheckpointError(f"adapter {adapter.name}: its files changed since it was loaded")
        fill_slot(self._executor, slot, adapter)
        return adapter

    def _keep(self, adapter: Adapter) -> None:
        self._kept[adapter.digest] = adapter
        self._kept.move_to_end(adapter.digest)
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
