"""Low-rank pairs as a file has them: known by their header, checked against the base, read last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from quire.executor.stored_adapters import StoredPair
from quire.lora.adapter import LowRank, MatrixRows
from quire.lora.base_modules import BaseModules
from quire.quant.floats import floats
from quire.records import dataclass
from quire.spec.config_reader import show
from quire.types import CheckpointError
from quire.util.files import Identity

MAX_RANK = 256


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """What an adapter file changes, in its own names: rank 0 replaces the module. `shape`: [out, in]."""

    module: str
    rank: int
    shape: tuple[int, int]
    parameters: int
    dora: bool = False
    experts: int = 1


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a file says of itself. `base`: the model named in it. `method`: "LoRA", "rsLoRA", "DoRA" or "rsDoRA"."""

    format: str  # "PEFT" or "GGUF"
    base: str
    method: str
    rank: int  # the greatest
    alpha: tuple[float, ...]  # different ones, ascending
    nbytes: int  # of its tensors


@dataclass(frozen=True, slots=True, eq=False)
class ModulePair:
    """A pair that changes `module`, a name of ModelSpec.names or a row range of one (BaseModules.fused).

    `shape` is [out, in]. `read` returns finite numbers of these sizes, or raises CheckpointError. `stored`: where they
    lie in the file, if it has them so.
    """

    module: str
    tensor: str  # in messages
    rank: int
    shape: tuple[int, int]
    read: Callable[[], LowRank]
    dora: bool = False
    end: int = 0  # of its bytes in the file
    stored: StoredPair | None = None


class AdapterFile(Protocol):
    """An open adapter file, its header checked: no number has been read."""

    where: str
    identity: Identity  # of the file that has the numbers

    def head(self) -> bytes:
        """What determines the adapter beside that file's bytes: its format and configuration."""

    def facts(self) -> AdapterFacts: ...

    def targets(self) -> Sequence[AdaptedModule]: ...

    def pairs(self, base: BaseModules) -> Sequence[ModulePair]:
        """The pairs under the base's names. CheckpointError for modules that the base lacks."""

    def saved(self) -> Mapping[str, tuple[int, ...]]:
        """Whole matrices that replace those of modules: their shapes."""

    def read_saved(self, module: str) -> MatrixRows:
        """One of them. CheckpointError for NaN and infinity."""

    def close(self) -> None: ...


def check_rank(rank: int, limit: int, where: str) -> int:
    """Raise CheckpointError unless a rank is in [1, limit]."""
    if not 1 <= rank <= limit:
        raise CheckpointError(f"{where}: rank {rank} is not in [1, {limit}]")
    return rank


def checked(pairs: Sequence[ModulePair], base: BaseModules, where: str) -> dict[str, list[ModulePair]]:
    """The pairs by module of the base, if all fit it; several of a module change different rows.

    Raises CheckpointError naming the module, its shape and that of the adapter.
    """
    found: dict[str, list[ModulePair]] = {}
    taken: dict[str, str] = {}
    for pair in pairs:
        place = base.fused.get(pair.module)
        module = pair.module if place is None else place.module
        expected = base.shapes.get(module)
        if expected is None:
            raise unknown(pair.module, pair.tensor, where)
        if place is not None:
            expected = (place.count, expected[1])
        if pair.shape != expected:
            raise CheckpointError(
                f"{where}: module {show(pair.module)}: the adapter is for [out, in] = {list(pair.shape)}, but the "
                f"model has {list(expected)}: it was trained on another base"
            )
        if pair.module in taken:
            raise CheckpointError(
                f"{where}: {taken[pair.module]} and {pair.tensor} both change {pair.module}"
            )
        taken[pair.module] = pair.tensor
        found.setdefault(module, []).append(pair)
    for module, several in found.items():
        whole = [pair for pair in several if pair.module == module]
        if whole and len(several) > 1:
            raise CheckpointError(f"{where}: module {module} is changed as a whole and by part")
        if not whole and any(pair.dora for pair in several):
            raise CheckpointError(
                f"{where}: module {module}: DoRA of a part of a fused linear is not supported"
            )
        check_rank(sum(pair.rank for pair in several), MAX_RANK, f"{where}: module {module}")
    return found


def unknown(module: str, tensor: str, where: str) -> CheckpointError:
    """The error of a module that the base does not have."""
    return CheckpointError(
        f"{where}: {show(tensor)}: the model has no linear {show(module)}: it was trained on another base"
    )


def combined(pairs: Sequence[ModulePair], module: str, base: BaseModules) -> LowRank:
    """The pair of a module from its pairs: those of row ranges are put below each other, their ranks side by side."""
    lows = [pair.read() for pair in pairs]
    if pairs[0].module == module:
        return lows[0]
    a = np.concatenate([floats(low.a) for low in lows])
    b = np.zeros((base.shapes[module][0], len(a)), np.float32)
    same, rank = len({low.scale for low in lows}) == 1, 0
    for pair, low in zip(pairs, lows, strict=True):
        rows = base.fused[pair.module]
        part = floats(low.b) if same else floats(low.b) * np.float32(low.scale)
        b[rows.first : rows.first + rows.count, rank : rank + low.rank] = part
        rank += low.rank
    return LowRank(a, b, lows[0].scale if same else 1.0)
