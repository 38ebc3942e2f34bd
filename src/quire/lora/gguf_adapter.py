"""A GGUF adapter as llama.cpp writes and reads it.

For each matrix NAME of the model's file there are NAME.lora_a [rank, in] and NAME.lora_b [out, rank]. Experts are
stacked in front; rows of B are permuted where those of the matrix are. Of an embedding, lora_a is [vocabulary, rank]
and lora_b [width, rank].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from quire.loader.gguf_file import GGUFFile, GGUFTensor
from quire.loader.source import NUMPY_TYPES
from quire.lora.adapter import F32, LowRank, MatrixRows
from quire.lora.base_modules import BaseModules
from quire.lora.module_pairs import MAX_RANK, AdaptedModule, AdapterFacts, ModulePair, check_rank
from quire.quant.floats import to_float32
from quire.quant.ggml import READ_TYPES, dequantize
from quire.records import dataclass
from quire.spec import MoE
from quire.spec.config_reader import ConfigReader, show
from quire.spec.gguf_architectures import ARCHITECTURES
from quire.spec.gguf_config import StoredTensor, stored_tensors
from quire.types import CheckpointError, UnsupportedModelError

MAX_ALPHA = 1e6
_ENDS = (".lora_a", ".lora_b")
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """`name`: the matrix in the model's file. `shape`: its sizes, experts in front."""

    name: str
    a: GGUFTensor
    b: GGUFTensor
    rank: int
    shape: tuple[int, ...]


def is_adapter(file: GGUFFile) -> bool:
    """Whether a GGUF file is an adapter, not a model."""
    return file.metadata.get("general.type") == "adapter"


class GGUFAdapter:
    """An open file. Implements AdapterFile.

    Raises CheckpointError or UnsupportedModelError naming file, key and tensor for anything malformed, a tensor without
    its other, a rank beyond MAX_RANK, and a type of numbers that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.where = path.name
        self._file = GGUFFile(path)
        self.identity = self._file.identity
        try:
            self._read_metadata()
            self._pairs = self._paired()
        except BaseException:
            self.close()
            raise

    def _read_metadata(self) -> None:
        config = ConfigReader(self._file.metadata, self.where)
        if not is_adapter(self._file):
            raise config.error("general.type", "is not adapter: this is a model")
        if config.string("adapter.type") != "lora":
            raise config.unsupported("adapter.type", "only lora is implemented")
        for key in self._file.metadata:
            if key.startswith("adapter.alora."):
                raise config.unsupported(key, "activated LoRA is not implemented")
        name = config.string("general.architecture")
        if name not in ARCHITECTURES:
            raise config.unsupported("general.architecture", f"implemented are {', '.join(ARCHITECTURES)}")
        self._architecture = ARCHITECTURES[name]
        self._base = config.string("general.base_model.0.name", "") or name
        self._alpha = config.number("adapter.lora.alpha", 0.0, low=0.0, high=MAX_ALPHA)

    def _error(self, tensor: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: tensor {show(tensor)}: {message}")

    def _paired(self) -> list[_Pair]:
        halves: dict[str, dict[str, GGUFTensor]] = {}
        for name, tensor in self._file.tensors.items():
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is None or not name.endswith(f".weight{end}"):
                raise self._error(name, "its name does not end in .weight.lora_a or .weight.lora_b")
            if tensor.kind.name not in READ_TYPES:
                raise UnsupportedModelError(
                    f"{self.where}: tensor {show(name)}: type {tensor.kind.name} is not supported"
                )
            halves.setdefault(name.removesuffix(end), {})[end] = tensor
        if not halves:
            raise CheckpointError(f"{self.where}: has no tensors")
        return [self._pair(name, of) for name, of in halves.items()]

    def _pair(self, name: str, of: Mapping[str, GGUFTensor]) -> _Pair:
        missing = [end for end in _ENDS if end not in of]
        if missing:
            raise self._error(next(iter(of.values())).name, f"lacks {name}{missing[0]}")
        a, b = (of[end] for end in _ENDS)
        turned = name == _EMBEDDING
        rank = a.shape[-1] if turned else a.shape[-2] if len(a.shape) > 1 else 0
        check_rank(rank, MAX_RANK, f"{self.where}: {name}")
        axes = {2} if turned else {2, 3}
        if (
            len(a.shape) not in axes
            or len(a.shape) != len(b.shape)
            or a.shape[:-2] != b.shape[:-2]
            or b.shape[-1] != rank
        ):
            raise self._error(a.name, f"shapes {list(a.shape)} and {list(b.shape)} are not those of A and B")
        shape = (a.shape[0], b.shape[0]) if turned else (*b.shape[:-1], a.shape[-1])
        return _Pair(name, a, b, rank, shape)

    def _scale(self, rank: int) -> float:
        """Without an alpha llama.cpp does not scale."""
        return self._alpha / rank if self._alpha else 1.0

    def facts(self) -> AdapterFacts:
        nbytes = sum(tensor.end - tensor.begin for tensor in self._file.tensors.values())
        rank = max(pair.rank for pair in self._pairs)
        return AdapterFacts("GGUF", self._base, "LoRA", rank, (self._alpha,) if self._alpha else (), nbytes)

    def targets(self) -> Sequence[AdaptedModule]:
        return [
            AdaptedModule(
                pair.name.removesuffix(".weight"), pair.rank, (pair.shape[-2], pair.shape[-1]),
                math.prod(pair.a.shape) + math.prod(pair.b.shape), experts=math.prod(pair.shape[:-2]),
            )
            for pair in self._pairs
        ]  # fmt: skip

    def saved(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def read_saved(self, module: str) -> MatrixRows:
        raise KeyError(module)

    def pairs(self, base: BaseModules) -> Sequence[ModulePair]:
        pairs = {pair.name: pair for pair in self._pairs}
        shapes = {name: pair.shape for name, pair in pairs.items()}
        places = stored_tensors(shapes, base.spec, self._architecture)
        found = {place.name for place in places.values()}
        for pair in self._pairs:
            if pair.name not in found:
                raise self._unknown(pair)
        known = {name.removesuffix(".weight"): place for name, place in places.items()}
        return [self._module_pair(module, place, pairs[place.name], base) for module, place in known.items()]

    def _unknown(self, pair: _Pair) -> CheckpointError:
        return self._error(pair.a.name, "the model has no such matrix: it was trained on another base")

    def _module_pair(self, module: str, place: StoredTensor, pair: _Pair, base: BaseModules) -> ModulePair:
        if place.values:
            raise UnsupportedModelError(
                f"{self.where}: tensor {pair.a.name}: pairs of the turned key projection of latent attention are not "
                "supported; the PEFT folder is"
            )
        if module not in base.shapes and module not in base.fused:
            raise self._unknown(pair)
        experts = {layer.mlp.router.experts for layer in base.spec.layers if isinstance(layer.mlp, MoE)}
        stacked = len(pair.shape) == 3
        if (place.entry is not None) != stacked or (stacked and pair.shape[0] not in experts):
            raise self._error(pair.a.name, f"shape {list(pair.shape)} of its matrix is not that of the model")
        rows, cols = pair.shape[-2:]
        if place.span is not None:
            rows = place.span[1] - place.span[0]
        if place.heads and rows % (2 * place.heads):
            raise self._error(pair.b.name, f"{rows} rows are not pairs in {place.heads} heads")
        end = max(pair.a.end, pair.b.end)
        return ModulePair(
            module, pair.a.name, pair.rank, (rows, cols), lambda: self._low_rank(place, pair), end=end
        )

    def _low_rank(self, place: StoredTensor, pair: _Pair) -> LowRank:
        a, b = self._matrix(pair.a, place.entry), self._matrix(pair.b, place.entry)
        if pair.name == _EMBEDDING:
            a, b = np.ascontiguousarray(b.T), a
        if place.span is not None:
            b = b[slice(*place.span)]
        if place.heads:
            pairs = b.reshape(place.heads, -1, 2, b.shape[1])
            b = pairs.swapaxes(1, 2).reshape(b.shape)
        return LowRank(a, np.ascontiguousarray(b), self._scale(pair.rank))

    def _matrix(self, tensor: GGUFTensor, entry: int | None) -> F32:
        """A tensor, or that entry of it, as float32 of its own. CheckpointError for NaN and infinity."""
        kind = READ_TYPES[tensor.kind.name]
        shape = tensor.shape if entry is None else tensor.shape[1:]
        first = 0 if entry is None else entry * shape[0]
        rows = self._file.rows(tensor, first, first + shape[0])
        values: F32 = dequantize(rows, kind) if kind.unpack else _floats(rows, kind.name)
        if not np.isfinite(values).all():
            raise self._error(tensor.name, "has NaN or infinite elements")
        return np.ascontiguousarray(values.reshape(shape))

    def head(self) -> bytes:
        return b"GGUF"

    def close(self) -> None:
        self._file.close()


def _floats(rows: np.ndarray, kind: str) -> F32:
    data = np.array(rows).reshape(-1).view(NUMPY_TYPES[kind])
    return np.array(to_float32(data, kind))
