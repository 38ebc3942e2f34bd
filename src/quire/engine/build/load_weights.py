"""Loading weights into an executor: mapped from the cache of packed weights, or read, packed and cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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
from quire.types import CheckpointError
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
    least = SMALLEST if asked.loading.weight_memory is None else 1
    if not wanted or kept is None or weight_bytes(program) < least:
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
    if asked.loading.weight_memory is not None and place and packer:
        return _pack_in_file(place, origin, program, executor, packer, notices, progress)
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


def _pack_in_file(
    place: PackedPlace,
    origin: Origin,
    program: Program,
    executor: Loadable,
    packer: Packer,
    notices: list[str],
    progress: Progress | None,
) -> WeightsReport:
    """Pack weights that do not fit memory: into their file, piece by piece, which is then mapped. Raises
    CheckpointError if it cannot be written."""
    facts: dict[str, Any] = {"model": str(origin.name)}

    def put(fd: int) -> None:
        give_back = packer.put_in_file(fd)

        def told(done: int, total: int) -> None:
            give_back()
            if progress is not None:
                progress(done, total)

        with origin.open() as weights:
            summary = load(program.params, weights, executor, rules=origin.rules, progress=told)
        facts["dequantized"] = summary.dequantized

    try:
        place.cache.store(place.key, packer, facts, lambda *_: None, put).join()
        found = place.cache.restore(place.key, packer)
    except (OSError, DamagedError) as error:
        raise CheckpointError(f"weight_memory: packed weights: {error}") from None
    if found is None:
        raise CheckpointError(f"weight_memory: packed weights could not be written to {place.path}")
    return WeightsReport("checkpoint", tuple(facts["dequantized"]), tuple(notices))


def check_paging(config: ResolvedConfig, program: Program, *, ranks: int, drafts: bool) -> None:
    """Raise ValueError where weight_memory cannot be kept."""
    asked = config.asked
    if asked.loading.weight_memory is None:
        return
    for wrong, what in (
        (asked.execution.executor != "native", "executor torch, which copies weights"),
        (ranks > 1, "ranks, of which each holds its part of the weights"),
        (drafts, "a draft with weights of its own"),
        (asked.adapters.enable_lora, "enable_lora"),
        (program.whole, "a model that computes whole texts at once"),
        (kept_files(asked) is None, "no folder for packed weights"),
    ):
        if wrong:
            raise ValueError(f"weight_memory: not with {what}")


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
