"""Write GGUF files, version 3; see loader/gguf_file for the layout."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.quant.ggml import TYPE_IDS, TYPES_BY_ID
from quire.records import dataclass
from quire.util.files import written_anew

ALIGNMENT = 32
_ARRAY_TYPES = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
                "bool": 7, "uint64": 10, "int64": 11, "float64": 12}  # fmt: skip

Value = int | float | bool | str | Sequence[str] | npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write: `kind` is the name of a type, `shape` outermost first."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        kind = TYPES_BY_ID[TYPE_IDS[self.kind]]
        return math.prod(self.shape) // kind.values * kind.nbytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Sequence[OutTensor],
    data: Callable[[OutTensor], Iterable[npt.NDArray[np.generic]]],
) -> None:
    """Write a file, in place of one that others may have mapped; `data` yields the bytes of a tensor in pieces, in
    order.

    Integers are written as uint32, int32 or 64 bits as needed, floats as float32. Raises ValueError if the pieces do
    not have the size of the tensor, TypeError for a value without a GGUF type.
    """
    header, offset = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))], 0
    for key, value in metadata.items():
        header += [_string(key), encode(value)]
    for tensor in tensors:
        axes = tuple(reversed(tensor.shape))
        header.append(_string(tensor.name) + struct.pack(f"<I{len(axes)}Q", len(axes), *axes))
        header.append(struct.pack("<IQ", TYPE_IDS[tensor.kind], offset))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    with written_anew(path) as file:
        file.write(b"".join(header))
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            written = sum(file.write(np.ascontiguousarray(piece).data) for piece in data(tensor))
            if written != tensor.nbytes:
                raise ValueError(f"{tensor.name}: got {written} bytes, expected {tensor.nbytes}")
        file.write(bytes(-file.tell() % ALIGNMENT))


def encode(value: Value) -> bytes:
    """Encode a metadata value with its type."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return _integer(value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case np.ndarray():
            if value.ndim != 1 or value.dtype.name not in _ARRAY_TYPES:
                raise TypeError(f"an array of {value.dtype} with {value.ndim} axes has no GGUF type")
            head = struct.pack("<IIQ", 9, _ARRAY_TYPES[value.dtype.name], len(value))
            return head + value.tobytes()
        case _:
            items = [_string(text) for text in value]
            return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(items)


def _integer(value: int) -> bytes:
    for kind, code, low, high in ((4, "I", 0, 2**32), (5, "i", -(2**31), 0), (10, "Q", 0, 2**64)):
        if low <= value < high:
            return struct.pack(f"<I{code}", kind, value)
    return struct.pack("<Iq", 11, value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
