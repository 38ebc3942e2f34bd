"""Getting a model's weights into an executor: mapped as they were packed before, or read, packed and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from quire.config.schema import ResolvedConfig
from quire.engine.build.opening import kept_files
from quire.executor.base import Executor
from quire.executor.native import NativeExecutor, packed_layout
from quire.loader import (
    DamagedError,
    LoadRules,
    LoadSummary,
    PackedWeights,
    RandomWeights,
    Source,
    fingerprint,
    load,
    packed_key,
)
from quire.program.memory import weight_bytes
from quire.program.program import Program
from quire.records import dataclass
from quire.util.sizes import format_size

# Below this, packing takes no longer than a look into the cache would save.
SMALLEST = 16 * 2**20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """What weights are read from: its name for people, which tensors it may have, its files, and how they open."""

    name: Path
    rules: LoadRules
    files: Callable[[], Sequence[Path]]
    open: Callable[[], AbstractContextManager[Source]]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Where weights came from: "packed" (the cache), "checkpoint" or "random"; and what the user should know.

    `dequantized` are the checkpoint's formats that were turned into floats.
    """

    source: str
    dequantized: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where a model's packed weights are kept, whether they are there or not."""

    cache: PackedWeights
    key: str

    @property
    def path(self) -> Path:
        return self.cache.path(self.key)


def packed_place(origin: Origin, program: Program, config: ResolvedConfig) -> PackedPlace | None:
    """Where the packed weights of a model belong; None when none are kept for what was asked.

    Raises CheckpointError when the checkpoint's files cannot be read.
    """
    asked = config.asked
    kept = kept_files(asked)
    wanted = asked.loading.load_format != "random" and asked.execution.executor == "native"
    if not wanted or kept is None or weight_bytes(program) < SMALLEST:
        return None
    files = fingerprint(origin.files(), whole=asked.loading.weight_cache == "content")
    key = packed_key(program.params, packed_layout(config.isa), files)
    return PackedPlace(PackedWeights(kept.folder, kept.limit), key)


def load_weights(
    origin: Origin,
    program: Program,
    config: ResolvedConfig,
    executor: Executor,
    progress: Progress | None,
    meanwhile: Callable[[], None] = lambda: None,
) -> WeightsReport:
    """Fill an executor. `progress(done, total)` is told bytes of weights.

    `meanwhile` is called at least once: while packed weights are checked, or before others are read.

    Raises CheckpointError for a checkpoint that is wrong. A cache that cannot be read or written only costs time.
    """
    rules, asked = origin.rules, config.asked
    if asked.loading.load_format == "random":
        meanwhile()
        source = RandomWeights(program.params, asked.execution.seed)
        load(program.params, source, executor, rules=rules, progress=progress)
        return WeightsReport("random")
    place = packed_place(origin, program, config)
    notices = []
    if place is not None and isinstance(executor, NativeExecutor):
        try:
            facts = place.cache.restore(place.key, executor, meanwhile)
            if facts is not None:
                return WeightsReport("packed", tuple(facts["dequantized"]))
        except DamagedError as error:
            notices.append(str(error))
    meanwhile()
    with origin.open() as weights:
        summary = load(program.params, weights, executor, rules=rules, progress=progress)
    if place is not None and isinstance(executor, NativeExecutor):
        after = packed_place(origin, program, config) if asked.loading.weight_cache == "on" else place
        if after is not None and after.key == place.key:
            notices += _keep(place, origin, summary, executor, progress)
        else:
            notices.append("packed weights are not kept: the checkpoint's files changed while they were read")
    return WeightsReport("checkpoint", summary.dequantized, tuple(notices))


def _keep(
    place: PackedPlace,
    origin: Origin,
    summary: LoadSummary,
    executor: NativeExecutor,
    progress: Progress | None,
) -> list[str]:
    """Write packed weights for the next start; what went wrong, as notices."""
    try:
        facts = {"model": str(origin.name), "dequantized": summary.dequantized}
        place.cache.store(place.key, executor, facts, progress)
    except OSError as error:
        size, reason = format_size(executor.weight_bytes), error.strerror or error
        return [f"packed weights are not kept for the next start ({size}): {reason}"]
    return []
