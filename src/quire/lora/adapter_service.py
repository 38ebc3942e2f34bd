"""The adapters of an engine: versions by name, and those that are in the pool of its executor."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from quire.executor.base import Runnable
from quire.lora.adapter import Adapter, AdapterNumbers
from quire.lora.base_modules import BaseModules
from quire.lora.fitting import check_fits, clear_slot, fill_slot, shape_of
from quire.lora.gains import BaseWeights
from quire.lora.leaf_hash import Memory
from quire.lora.mix import mix
from quire.lora.pool_turns import PoolTurns
from quire.lora.read import find_adapter, inside, reading
from quire.program.memory import adapter_layout, largest_adapter, low_rank_bytes
from quire.program.program import Program
from quire.program.tensors import AdapterShape
from quire.spec import ModelSpec
from quire.types import CheckpointError, RequestError

Open = Callable[[], AbstractContextManager[AdapterNumbers]]


class Checked(NamedTuple):
    """A version that was read and fits."""

    digest: str
    rank: int


class _Loaded(NamedTuple):
    """An adapter in a slot: the pages that it takes, and what stays in memory of it."""

    pages: int
    kept: Adapter | None


class AdapterService:
    """One thread calls it, between steps; adapters are read, and slots filled, in threads of its own while steps run.

    A version is the digest of an adapter's weights and configuration. The weights of the `kept` versions that were read
    last stay in memory; others are opened again when they are to be put into the pool. `weights` are those of the base,
    which adapters with magnitudes are measured by. `loads` and `evictions` count how often each version was put into
    the pool, and made room for others.

    Up to `max_loras` adapters are in use at once. `pool`: its slots and its pages, as in Limits.
    """

    def __init__(
        self,
        executor: Runnable,
        spec: ModelSpec,
        max_loras: int,
        max_rank: int,
        pool: tuple[int, int],
        kept: int = 0,
        weights: BaseWeights | None = None,
    ) -> None:
        self._executor, self._max_rank, self._most_kept = executor, max_rank, kept
        self._weights = weights
        self._base = cache(partial(BaseModules.of, spec))  # made with the first adapter
        self.max_loras, self._pool_pages = max_loras, pool[1]
        self._turns = PoolTurns(max_loras, *pool)
        self._programs = [slots.program for slots in executor.adapter_slots]
        self._layouts = [adapter_layout(program) for program in self._programs]
        self._most_pages = self._pages_on_all(largest_adapter)
        self._pages: dict[str, int] = {}  # of versions that were read
        self._slots: dict[str, int] = {}
        self._versions: dict[str, str] = {}
        self._sources: dict[str, Open] = {}
        self._kept: OrderedDict[str, Adapter] = OrderedDict()
        self._loading: dict[str, Future[_Loaded]] = {}
        self._failed: dict[str, str] = {}  # why versions could not be loaded
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._checks = ThreadPoolExecutor(1, "adapter-checks")
        self.loads: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each loaded version; what a worker looks sequences up in."""
        return self._slots

    @property
    def pool_bytes(self) -> tuple[int, int]:
        """Bytes of the pool's pages: of those that adapters have, and of all."""
        page_bytes = sum(layout.page_bytes for layout in self._layouts)
        return self._turns.used_pages * page_bytes, self._pool_pages * page_bytes

    @property
    def versions(self) -> Mapping[str, str]:
        """The digest of the version that each name stands for now."""
        return self._versions

    def opener(self, name: str, path: str, root: str | None = None) -> Open:
        """What reads an adapter of this model: a path, or a shipped one's name; with `root`, a name in that folder."""
        most = 2 * sum(map(low_rank_bytes, self._programs))  # float32, where a slot is bfloat16
        memory = Memory()

        def read() -> AbstractContextManager[AdapterNumbers]:
            folder = None if root is None else Path(root)
            found = find_adapter(path) if folder is None else inside(folder, path)
            return reading(
                found,
                self._base(),
                name=name,
                root=folder,
                max_rank=self._max_rank,
                max_bytes=most,
                memory=memory,
            )

        return read

    def mixed(self, parts: Sequence[tuple[str, float]]) -> Open:
        """What reads the sum of versions with weights."""
        openers = [(self._sources.get(digest), weight) for digest, weight in parts]

        def read() -> AbstractContextManager[AdapterNumbers]:
            known = [(self._whole(opener), weight) for opener, weight in openers if opener is not None]
            if len(known) < len(openers):
                raise CheckpointError("one of these adapters is not loaded any more")
            return nullcontext(mix(known))

        return read

    def register(self, name: str, opener: Open) -> str:
        """Read an adapter, and have a name stand for this version from now on; returns its digest.

        Requests of the version before end on that. Raises CheckpointError, and changes nothing, if it cannot be read or
        does not fit the model.
        """
        adapter = self._checked(opener)
        self.know(adapter.digest, opener)
        self._versions[name] = adapter.digest
        if self._most_kept:
            self._keep(adapter.kept())
        return adapter.digest

    def check(self, opener: Open) -> Future[Checked]:
        """Begin to read an adapter, one after the other while steps run; the future raises what `register` does."""

        def check() -> Checked:
            adapter = self._checked(opener)
            return Checked(adapter.digest, adapter.rank)

        return self._checks.submit(check)

    def know(self, digest: str, opener: Open) -> None:
        """Take a version that was checked, without a name."""
        self._sources[digest] = opener

    def forget(self, digest: str) -> None:
        """Have a version unknown, of which no request is left; it stays in the pool until its room is needed."""
        for known in (self._sources, self._kept, self._pages, self.loads, self.evictions):
            known.pop(digest, None)

    def _checked(self, opener: Open) -> Adapter:
        with opener() as found:
            adapter = found.whole()
        check_fits(self._programs, adapter, self._max_rank)
        adapter = self._measured(adapter).whole()
        self._pages[adapter.digest] = self._pages_of(adapter)
        return adapter

    def _whole(self, opener: Open) -> Adapter:
        """All of an adapter that was checked before, without magnitudes."""
        with opener() as found:
            return self._measured(found).whole()

    def _pages_of(self, adapter: AdapterNumbers) -> int:
        return self._pages_on_all(partial(shape_of, adapter=adapter))

    def _pages_on_all(self, shape_on: Callable[[Program], AdapterShape]) -> int:
        """Pages of a slot that suffice on every rank."""
        shapes = map(shape_on, self._programs)
        return max(
            layout.pages(shape.parts, shape.own) for layout, shape in zip(self._layouts, shapes, strict=True)
        )

    def _measured(self, found: AdapterNumbers) -> AdapterNumbers:
        """An adapter that fits, without magnitudes."""
        if not any(dora for _, dora in found.outline.values()):
            return found
        adapter = found.whole()
        dora = next((key for key, part in adapter.parts.items() if part.magnitude is not None), None)
        if dora is None:
            return adapter
        if self._weights is None:
            raise CheckpointError(
                f"adapter {adapter.name}: {dora}: DoRA of weights that were not read from a checkpoint is not supported"
            )
        return self._weights.with_gains(adapter, self._base())

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
        self._settle()
        self._turns.begin_round()

    def acquire(self, digest: str) -> bool:
        """Whether a request may run with a version, which then stays in the pool until `release`; if not, ask again.

        Raises RequestError if the version cannot be loaded.
        """
        if digest in self._failed:
            raise RequestError("adapter", self._failed.pop(digest))
        if digest in self._slots:
            return self._turns.enter(digest)
        if digest not in self._loading:
            opener = self._sources.get(digest)
            if opener is None:
                raise RequestError("adapter", "this version is not loaded any more")
            # One that was never read here takes the room of the largest until it is.
            claimed = self._turns.claim(digest, self._pages.get(digest, self._most_pages))
            if claimed is not None:
                slot, gone = claimed
                for before, _ in gone:
                    del self._slots[before]
                    if before in self._sources:
                        self.evictions[before] += 1
                emptied, kept = [slot for _, slot in gone], self._kept.get(digest)
                self._loading[digest] = self._thread.submit(self._load, slot, emptied, digest, kept, opener)
        return False

    def release(self, digest: str) -> None:
        """A request that acquired a version has ended."""
        self._turns.leave(digest)

    def close(self) -> None:
        """End the threads, once they have read what they are reading."""
        self._checks.shutdown(cancel_futures=True)
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
            loaded = future.result()
            self._slots[digest] = slot
            self._turns.shrink(digest, loaded.pages)
            self.loads[digest] += 1
            self._turns.leave(digest)  # the claim's
            if loaded.kept is not None:
                self._keep(loaded.kept)

    def _load(
        self, slot: int, emptied: list[int], digest: str, kept: Adapter | None, opener: Open
    ) -> _Loaded:
        for each in emptied:
            clear_slot(self._executor, each)
        with opener() if kept is None else nullcontext(kept) as found:
            adapter = self._measured(found.whole().kept() if self._most_kept else found)
            try:
                fill_slot(self._executor, slot, adapter)
                if adapter.digest != digest:
                    raise CheckpointError(f"adapter {adapter.name}: its files changed since it was loaded")
            except BaseException:
                clear_slot(self._executor, slot)
                raise
            pages = self._pages.get(digest) or self._pages_of(adapter)
            return _Loaded(pages, adapter.whole() if self._most_kept else None)

    def _keep(self, adapter: Adapter) -> None:
        self._kept[adapter.digest] = adapter
        self._kept.move_to_end(adapter.digest)
        while len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
