"""Loading weights into an executor: mapped from the cache of packed weights, or read, packed and cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.opening import Model, kept_files
from quire.executor.base import Loadable
from quire.loader import (
    DamagedError,
    LoadRules,
    LoadSummary,
    PackedWeights,
    Packer,
    RandomWeights,
    Source,
    checkpoint_files,
    fingerprint,
    load,
    packed_key,
)
from quire.program.memory import weight_bytes
from quire.program.program import Program
from quire.records import dataclass
from quire.store.gguf_names import shards
from quire.util.sizes import format_size

# Below this, packing takes no longer than checking the cache.
SMALLEST = 16 * 2**20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where weights are read from: a name for messages, the tensors it may have, its files, and how to open them."""

    name: Path
    rules: LoadRules
    files: Callable[[], Sequence[Path]]
    open: Callable[[], AbstractContextManager[Source]]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Where weights came from: "packed" (the cache), "checkpoint" or "random"; and notices for the user.

    `dequantized` are the formats of the checkpoint that were converted to floats.
    """

    source: str
    dequantized: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where a model's packed weights are kept, whether or not they are there now."""

    cache: PackedWeights
    key: str

    @property
    def path(self) -> Path:
        return self.cache.path(self.key)


def packed_place(origin: Origin, program: Program, config: ResolvedConfig, layout: str) -> PackedPlace | None:
    """Where the packed weights of a model belong; None if none are kept for this configuration.

    `layout` is the executor's ("" if it packs none). Raises CheckpointError if the checkpoint's files cannot be read.
    """
    asked = config.asked
    kept = kept_files(asked)
    wanted = asked.loading.load_format != "random" and layout
    if not wanted or kept is None or weight_bytes(program) < SMALLEST:
        return None
    files = fingerprint(origin.files(), whole=asked.loading.weight_cache == "content")
    key = packed_key(program.params, layout, files)
    return PackedPlace(PackedWeights(kept.folder, kept.limit), key)


def load_weights(
    origin: Origin,
    program: Program,
    config: ResolvedConfig,
    executor: Loadable,
    progress: Progress | None,
    meanwhile: Callable[[], None] = lambda: None,
) -> WeightsReport:
    """Fill an executor. `progress(done, total)` gets bytes of weights.

    `meanwhile` is called at least once: while packed weights are being checked, or before others are read.

    Raises CheckpointError for an invalid checkpoint. A cache that cannot be read or written only costs time.
    """
    rules, asked = origin.rules, config.asked
    if asked.loading.load_format == "random":
        meanwhile()
        source = RandomWeights(program.params, asked.execution.seed)
        load(program.params, source, executor, rules=rules, progress=progress)
        return WeightsReport("random")
    packer = executor.packer
    place = packed_place(origin, program, config, packer.layout) if packer else None
    notices = []
    if place and packer:
        try:
            facts = place.cache.restore(place.key, packer, meanwhile)
            if facts is not None:
                return WeightsReport("packed", tuple(facts["dequantized"]))
        except DamagedError as error:
            notices.append(str(error))
    meanwhile()
    with origin.open() as weights:
        summary = load(program.params, weights, executor, rules=rules, progress=progress)
    if place and packer:
        on = asked.loading.weight_cache == "on"
        after = packed_place(origin, program, config, packer.layout) if on else place
        if after is not None and after.key == place.key:
            notices += _keep(place, origin, summary, packer, progress)
        else:
            notices.append(
                "packed weights were not cached: the files of the checkpoint changed while they were read"
            )
    return WeightsReport("checkpoint", summary.dequantized, tuple(notices))


def _keep(
    place: PackedPlace,
    origin: Origin,
    summary: LoadSummary,
    packer: Packer,
    progress: Progress | None,
) -> list[str]:
    """Write packed weights for the next start; return a notice if they could not be written."""
    try:
        facts = {"model": str(origin.name), "dequantized": summary.dequantized}
        place.cache.store(place.key, packer, facts, progress)
    except OSError as error:
        size, reason = format_size(packer.weight_bytes), error.strerror or error
        return [f"packed weights ({size}) were not cached for the next start: {reason}"]
    return []


def modules_of(model: Model) -> tuple[str, ...]:
    """Folders of a checkpoint with tensors of their own."""
    pooling = model.facts.spec.pooling
    return () if pooling is None else pooling.folders


def weights_fingerprint(model: Model, asked: EngineConfig, *, copies: bool = False) -> str:
    """A digest of the files that weights are read from; see loader.fingerprint."""
    return "" if asked.loading.load_format == "random" else fingerprint(weight_files(model), copies=copies)


def weight_files(model: Model) -> list[Path]:
    """All files that determine the weights."""
    if model.gguf is not None:
        return shards(model.folder)
    files = checkpoint_files(model.folder, modules=modules_of(model))
    return files if model.facts.quantization is None else [*files, model.folder / "config.json"]
