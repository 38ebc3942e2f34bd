"""The GGUF file or files of a model as a source of weights under the model's names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from quire.loader.gguf_file import GGUFArray, GGUFFile, GGUFTensor, Value
from quire.loader.source import NUMPY_TYPES, Array, TensorInfo
from quire.program.formats import WeightFormat
from quire.quant.floats import to_float32
from quire.quant.ggml import PACKED, READ_TYPES, dequantize, group_codes
from quire.quant.groups import GroupCodes
from quire.records import dataclass
from quire.spec.config_reader import show
from quire.spec.gguf_config import GGUFModel, StoredTensor, read_gguf_model
from quire.spec.gguf_keys import GGUFSummary
from quire.store.gguf_names import shards
from quire.types import CheckpointError, UnsupportedModelError

MAX_VECTOR = 2**16
_CONTROL = 3  # token type


class GGUFFiles:
    """All files of one model: metadata of the first, tensors of all. A context manager that closes them.

    Raises CheckpointError for a malformed file, a missing or foreign shard, or a duplicate tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[GGUFFile] = []
        self.tensors: dict[str, GGUFTensor] = {}
        self._where: dict[str, GGUFFile] = {}
        try:
            for number, shard in enumerate(shards(path)):
                self._add(shard, number)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path, number: int) -> None:
        file = GGUFFile(path)
        self._files.append(file)
        declared = file.metadata.get("split.count", 0)
        total = len(shards(self.path))
        if (declared or 1) != total or file.metadata.get("split.no", 0) != number:
            raise CheckpointError(
                f"{path.name}: split.no {show(file.metadata.get('split.no'))} of split.count {show(declared)}, "
                f"but the name says {number + 1} of {total}"
            )
        for name, tensor in file.tensors.items():
            if name in self._where:
                raise CheckpointError(
                    f"tensor {show(name)} is in both {self._where[name].path.name} and {path.name}"
                )
            self._where[name] = file
            self.tensors[name] = tensor

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self._files[0].metadata

    @property
    def header_bytes(self) -> int:
        """Length of the header of the first file: metadata and vocabulary."""
        return self._files[0].header.nbytes

    def release_headers(self) -> None:
        """Release the memory that reading the headers made resident."""
        for file in self._files:
            file.release_header()

    def model(self) -> GGUFModel:
        """Facts and tensor names; raises like `read_gguf_model`."""
        return read_gguf_model(
            GGUFSummary(
                where=self.path.name,
                metadata=self.metadata,
                shapes={name: tensor.shape for name, tensor in self.tensors.items()},
                stored={name: tensor.kind.name for name, tensor in self.tensors.items()},
                vector=self._vector,
                control=self._control_tokens,
                sha256=hashlib.sha256(self._files[0].header_bytes()).hexdigest(),
            )
        )

    def read(self, name: str, start: int, stop: int, entry: int | None = None) -> Array:
        """Rows [start, stop) along the first axis, in the numpy type of `TensorInfo.dtype`.

        With `entry`, along the second axis of that entry of the first.
        """
        tensor = self.tensors[name]
        kind = READ_TYPES[tensor.kind.name]
        shape = tensor.shape if entry is None else tensor.shape[1:]
        data = self._rows(name, start, stop, entry)
        values: Array = (
            dequantize(data, kind) if kind.unpack else data.reshape(-1).view(NUMPY_TYPES[kind.name])
        )
        if len(shape) == 1:
            return values.reshape(-1)[start:stop]
        return values.reshape(stop - start, *shape[1:])

    def read_codes(self, name: str, start: int, stop: int, entry: int | None = None) -> GroupCodes:
        """Rows [start, stop) of a quantized matrix, or of an entry of a stack, as codes in the format PACKED[type]."""
        return group_codes(self._rows(name, start, stop, entry), self.tensors[name].kind)

    def _rows(self, name: str, start: int, stop: int, entry: int | None) -> npt.NDArray[np.uint8]:
        """Bytes of rows [start, stop) of a tensor or of an entry of it; of a vector, all."""
        tensor, file = self.tensors[name], self._where[name]
        shape = tensor.shape if entry is None else tensor.shape[1:]
        inner = math.prod(shape[1:-1])  # rows of bytes to one entry of the first axis
        first = 0 if entry is None else entry * math.prod(shape[:-1])
        if len(shape) == 1:
            return file.rows(tensor, first, first + 1)
        return file.rows(tensor, first + start * inner, first + stop * inner)

    def release(self, name: str) -> None:
        self._where[name].release(self.tensors[name])

    def _vector(self, name: str) -> list[float]:
        tensor = self.tensors[name]
        if len(tensor.shape) != 1 or tensor.shape[0] > MAX_VECTOR or tensor.kind.name != "F32":
            raise CheckpointError(f"{self.path.name}: {name}: not a vector of at most {MAX_VECTOR} in F32")
        return [float(value) for value in self.read(name, 0, tensor.shape[0])]

    def _control_tokens(self) -> dict[int, str]:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        kinds = self.metadata.get("tokenizer.ggml.token_type")
        if not isinstance(tokens, GGUFArray) or not isinstance(kinds, GGUFArray) or kinds.holds_strings:
            return {}
        control = [int(number) for number in np.flatnonzero(kinds.numbers()[: len(tokens)] == _CONTROL)]
        return dict(zip(control, tokens.strings(control), strict=True))

    def close(self) -> None:
        """Unmap all files. Arrays already read stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self) -> GGUFFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class GGUFOpened:
    """The open files of a model, parsed once. The maps are closed when the last reference is gone."""

    files: GGUFFiles
    model: GGUFModel

    @classmethod
    def at(cls, files: GGUFFiles) -> GGUFOpened:
        """Parse the files; raises like `read_gguf_model`."""
        return cls(files, files.model())

    def weights(self) -> GGUFSource:
        return GGUFSource(self.files, self.model.tensors)


class GGUFSource:
    """The tensors of a model's files by the model's names. Implements Source.

    Quantized types are read as F32, block by block; rows that a converter permuted are restored.
    """

    def __init__(self, files: GGUFFiles, names: Mapping[str, StoredTensor]) -> None:
        self._files, self._stored = files, names

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def info(self, name: str) -> TensorInfo:
        stored = self._stored[name]
        tensor = self._files.tensors[stored.name]
        kind = READ_TYPES.get(tensor.kind.name)
        if kind is None:
            raise UnsupportedModelError(
                f"{self._files.path.name}: tensor {tensor.name}: type {tensor.kind.name} is not supported; "
                f"supported types: {', '.join(READ_TYPES)}"
            )
        shape, size = tensor.shape, tensor.end - tensor.begin
        if stored.entry is not None:
            shape, size = shape[1:], size // shape[0]
        if stored.span is not None:
            rows = stored.span[1] - stored.span[0]
            shape, size = (rows, *shape[1:]), size * rows // shape[0]
        if stored.row:
            shape = (1, *shape)
        if stored.values:
            return self._latent_info(name, tensor, stored)
        return (
            TensorInfo(name, "F32", shape, kind.name, size)
            if kind.unpack
            else TensorInfo(name, kind.name, shape)
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        stored = self._stored[name]
        info = self.info(name)
        start, stop = info.rows(start, stop)
        if stored.row:
            return self._files.read(stored.name, 0, info.shape[1])[None][start:stop]
        if stored.values:
            return self._latent(stored, info, start, stop)
        first, last, order = self._order(stored, start, stop)
        values = self._files.read(stored.name, first, last, stored.entry)
        return values if order is None else values[order]

    def packed(self, name: str) -> WeightFormat | None:
        """The format in groups that represents a quantized matrix exactly; None for anything else."""
        kind = self._files.tensors[self._stored[name].name].kind
        if self._stored[name].values:
            return None  # its keys are stored transposed
        return PACKED.get(kind.name) if len(self.info(name).shape) == 2 else None

    def read_codes(self, name: str, start: int, stop: int) -> GroupCodes:
        """Rows [start, stop) in the format `packed(name)`."""
        stored = self._stored[name]
        first, last, order = self._order(stored, start, stop)
        given = self._files.read_codes(stored.name, first, last, stored.entry)
        if order is None:
            return given
        offsets = None if given.offsets is None else given.offsets[order]
        factors = None if given.factors is None else given.factors[order]
        return GroupCodes(given.codes[order], given.scales[order], offsets, factors)

    def _latent_info(self, name: str, keys: GGUFTensor, stored: StoredTensor) -> TensorInfo:
        """[heads · (keys + values), latent] of keys [heads, latent, keys] and values [heads, values, latent]."""
        values = self._files.tensors.get(stored.values)
        if values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            raise CheckpointError(
                f"{self._files.path.name}: {stored.name}, {stored.values}: not two stacks of heads"
            )
        (heads, rank, size), found = keys.shape, values.shape
        if (found[0], found[2]) != (heads, rank) or values.kind.name not in READ_TYPES:
            raise CheckpointError(
                f"{self._files.path.name}: {stored.values}: {values.kind.name} {list(found)} does not match"
                f" {list(keys.shape)}"
            )
        plain = keys.kind is values.kind and not keys.kind.unpack
        kinds = "/".join(dict.fromkeys((keys.kind.name, values.kind.name)))
        size_of_both = keys.end - keys.begin + values.end - values.begin
        return TensorInfo(
            name, keys.kind.name if plain else "F32", (heads * (size + found[1]), rank),
            "" if plain else kinds, 0 if plain else size_of_both,
        )  # fmt: skip

    def _latent(self, stored: StoredTensor, info: TensorInfo, start: int, stop: int) -> Array:
        keys, values = (self._files.tensors[name] for name in (stored.name, stored.values))
        _, rank, size = keys.shape
        each = size + values.shape[1]
        found: list[Array] = []
        for head in range(start // each, -(-stop // each)):
            down = self._files.read(stored.name, 0, rank, head)
            up = self._files.read(stored.values, 0, values.shape[1], head)
            if info.stored:
                down, up = to_float32(down, _dtype(keys)), to_float32(up, _dtype(values))
            found += [down.T, up]
        first = start // each * each
        return np.concatenate(found)[start - first : stop - first]

    def _order(
        self, stored: StoredTensor, start: int, stop: int
    ) -> tuple[int, int, npt.NDArray[np.int64] | None]:
        """The stored rows that contain rows [start, stop), and the position of each among them (None: in order)."""
        above = 0 if stored.span is None else stored.span[0]
        if not stored.heads:
            return above + start, above + stop, None
        rows = self._files.tensors[stored.name].shape[0] if stored.span is None else stored.span[1] - above
        if rows % (2 * stored.heads):
            raise CheckpointError(
                f"{self._files.path.name}: tensor {stored.name}: {rows} rows are not pairs in {stored.heads} heads"
            )
        dim = rows // stored.heads
        first, last = start // dim * dim, -(-stop // dim) * dim
        head, place = np.divmod(np.arange(start, stop), dim)
        half, pair = np.divmod(place, dim // 2)
        return above + first, above + last, head * dim + 2 * pair + half - first

    def release(self, name: str) -> None:
        stored = self._stored[name]
        for tensor in (stored.name, stored.values):
            if tensor:
                self._files.release(tensor)


def _dtype(tensor: GGUFTensor) -> str:
    """The format in which a tensor is read."""
    return "F32" if tensor.kind.unpack else tensor.kind.name
