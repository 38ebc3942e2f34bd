"""Writing safetensors files byte by byte, right and wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.program.tensors import Param, Part

NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int64": "I64"}


def raw(header: object, data: bytes = b"") -> bytes:
    """A file of a header (an object to dump, or bytes as they are) and a data part."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path: Path, tensors: Mapping[str, np.ndarray], *, pad: int = 0) -> Path:
    """A well-formed file; uint16 arrays are stored as BF16. `pad` spaces after the header move the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = entry(NAMES[array.dtype.name], array.shape, offset, offset + len(blob))
        offset += len(blob)
        blobs.append(blob)
    path.write_bytes(raw(json.dumps(header).encode() + b" " * pad, b"".join(blobs)))
    return path


def write_shards(folder: Path, shards: Sequence[Mapping[str, np.ndarray]]) -> dict[str, str]:
    """Shards and their index; returns the weight map."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def linear(name: str, *parts: tuple[str, int, int]) -> Param:
    return Param(name, "linear", tuple(Part(*part) for part in parts), "f32")


def vector(name: str, *parts: tuple[str, int]) -> Param:
    return Param(name, "vector", tuple(Part(tensor, rows) for tensor, rows in parts), "f32")
