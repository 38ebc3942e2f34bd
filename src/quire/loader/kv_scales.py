"""Scales of an fp8 cache: those of a checkpoint, or of a file that `quire calibrate` wrote.

A layer has one number for its keys and one for its values, or one for each head of keys and values: what a stored 1
stands for. Writers of checkpoints name them in several ways, all of which vLLM reads too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.loader.safetensors import SafetensorsFile
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array, Source, TensorInfo
from quire.program.formats import HeadScales
from quire.types import CheckpointError

# compressed-tensors and ModelOpt, with or without the projection; AutoFP8's one number for both.
_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|attn|attention)\.(?:attn\.)?"
    r"(?:(?P<key>k_scale|k_proj\.(?:k_scale|output_scale))|(?P<value>v_scale|v_proj\.(?:v_scale|output_scale))"
    r"|(?P<both>kv_scale))"
)


def scale_name(layer: int, which: str) -> str:
    """The name of a layer's scales in a file; `which` is "k" or "v"."""
    return f"model.layers.{layer}.self_attn.{which}_scale"


def read_scales_file(path: Path, heads: Mapping[int, int]) -> dict[int, HeadScales]:
    """The scales of a file, for layers with so many heads of keys and values. Raises CheckpointError."""
    file = SafetensorsFile(path)
    try:
        found = read_scales(file, heads, str(path))
    finally:
        file.close()
    if not found:
        raise CheckpointError(f"{path}: has no scales of a cache ({scale_name(0, 'k')} …)")
    return found


def read_scales(
    source: Source, heads: Mapping[int, int], where: str = "the checkpoint"
) -> dict[int, HeadScales]:
    """The scales that are stored, by layer, for layers with so many heads of keys and values; {} if there are none.

    Raises CheckpointError, naming the tensor, for scales that are not finite or not above zero, of another number than
    one or that of the heads, and for layers without some.
    """
    keys: dict[int, tuple[float, ...]] = {}
    values: dict[int, tuple[float, ...]] = {}
    for name in _names(source.names()):
        match = _NAME.fullmatch(name)
        assert match is not None
        layer = int(match[1])
        if layer not in heads:
            raise CheckpointError(f"tensor {name}: the model has no attention in layer {layer}")
        numbers = _numbers(source, name, heads[layer])
        for found in (keys,) if match["key"] else (values,) if match["value"] else (keys, values):
            if found.setdefault(layer, numbers) != numbers:
                raise CheckpointError(f"tensor {name}: {where} has other scales for layer {layer} too")
    if not keys and not values:
        return {}
    for which, found in (("k", keys), ("v", values)):
        if missing := sorted(heads.keys() - found.keys()):
            raise CheckpointError(f"{where} has no {which}_scale for layer {missing[0]}, but for others")
    return {layer: HeadScales(keys[layer], values[layer]) for layer in heads}


def write_scales(path: Path, scales: Mapping[int, HeadScales]) -> None:
    """Write a file that read_scales_file reads."""
    tensors = {
        scale_name(layer, which): np.array(numbers, "<f4")
        for layer, each in sorted(scales.items())
        for which, numbers in (("k", each.keys), ("v", each.values))
    }
    infos = [TensorInfo(name, "F32", numbers.shape) for name, numbers in tensors.items()]
    write_safetensors(path, infos, lambda info: [tensors[info.name]])


def _names(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith("_scale") and _NAME.fullmatch(name))


def _numbers(source: Source, name: str, heads: int) -> tuple[float, ...]:
    info = source.info(name)
    numbers = _floats(source.read(name), info.dtype, name).reshape(-1)
    if len(numbers) not in {1, heads}:
        raise CheckpointError(
            f"tensor {name}: shape {list(info.shape)} is neither one scale nor one for each of {heads} heads"
        )
    bad = ~(np.isfinite(numbers) & (numbers > 0))
    if bad.any():
        raise CheckpointError(f"tensor {name}: scale {numbers[bad][0]:g} is not a finite number above 0")
    return tuple(map(float, numbers))


def _floats(stored: Array, dtype: str, name: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype not in {"F16", "F32", "F64"}:
        raise CheckpointError(f"tensor {name}: dtype {dtype} is not one of BF16, F16, F32, F64")
    return stored.astype(np.float32)
