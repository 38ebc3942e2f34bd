"""What codes of a kvquant3 cache stand for, in a file that `quire calibrate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.loader.safetensors import SafetensorsFile
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Source, TensorInfo
from quire.program.formats import KV_LEVELS, HeadCodes
from quire.types import CheckpointError

F32 = npt.NDArray[np.float32]
_PARTS = ("key_levels", "value_levels", "key_middles", "key_scales")  # as the fields of HeadCodes


def code_name(layer: int, part: str) -> str:
    """The name of one of a layer's tensors in the file."""
    return f"model.layers.{layer}.self_attn.kvquant.{part}"


def write_codes(path: Path, codes: Mapping[int, HeadCodes]) -> None:
    """Write a file that read_codes_file reads."""
    tensors = {
        code_name(layer, part): np.array(numbers, "<f4")
        for layer, each in sorted(codes.items())
        for part, numbers in zip(
            _PARTS, (each.key_levels, each.value_levels, each.middles, each.scales), strict=True
        )
    }
    infos = [TensorInfo(name, "F32", numbers.shape) for name, numbers in tensors.items()]
    write_safetensors(path, infos, lambda info: [tensors[info.name]])


def read_codes_file(path: Path, heads: Mapping[int, tuple[int, int]]) -> dict[int, HeadCodes]:
    """Those of layers with so many heads of keys and values of so many dimensions.

    Raises CheckpointError, naming the tensor, if one is missing, has another shape, or numbers that are not finite,
    levels that fall, or scales that are not above zero.
    """
    file = SafetensorsFile(path)
    try:
        return {layer: _read(file, path, layer, *shape) for layer, shape in heads.items()}
    finally:
        file.close()


def _read(source: Source, path: Path, layer: int, heads: int, dim: int) -> HeadCodes:
    names, parts = set(source.names()), []
    for part in _PARTS:
        name, shape = code_name(layer, part), (heads, KV_LEVELS if "levels" in part else dim)
        if name not in names:
            raise CheckpointError(
                f"{path}: {name} is missing: is the file for this model, and written by quire calibrate "
                "--kv-cache-dtype kvquant3?"
            )
        info = source.info(name)
        if info.dtype != "F32" or tuple(info.shape) != shape:
            raise CheckpointError(
                f"{path}: tensor {name}: {info.dtype} {list(info.shape)}, but this model needs F32 {list(shape)}"
            )
        numbers: F32 = source.read(name).astype(np.float32, copy=False)
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{path}: tensor {name}: contains NaN or infinity")
        if "levels" in part and (np.diff(numbers, axis=1) < 0).any():
            raise CheckpointError(f"{path}: tensor {name}: levels must rise")
        if part == "key_scales" and not (numbers > 0).all():
            raise CheckpointError(f"{path}: tensor {name}: a scale is not above 0")
        parts.append(tuple(tuple(map(float, row)) for row in numbers))
    return HeadCodes(*parts)
