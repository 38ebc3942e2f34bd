"""Write a safetensors file; see loader/safetensors for the layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from quire.loader.source import Array, TensorInfo
from quire.util.files import written_anew


def write_safetensors(
    path: Path, tensors: Sequence[TensorInfo], data: Callable[[TensorInfo], Iterable[Array]]
) -> None:
    """Write a file, in place of one that others may have mapped; `data` yields the numbers of a tensor in pieces of
    whole rows, in order.

    Raises ValueError if the pieces do not have the size of the tensor.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in tensors:
        header[info.name] = {
            "dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, offset + info.nbytes]
        }  # fmt: skip
        offset += info.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_anew(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for info in tensors:
            written = sum(file.write(np.ascontiguousarray(piece).data.cast("B")) for piece in data(info))
            if written != info.nbytes:
                raise ValueError(f"{info.name}: got {written} bytes, expected {info.nbytes}")
