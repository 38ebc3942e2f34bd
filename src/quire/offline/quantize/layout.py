"""Rounded weights as checkpoints store them, and the quantization_config that says so.

A `Rounded` is what a method makes of a weight; a layout turns it into arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.loader.source import Array, TensorInfo
from quire.offline.quantize.grid import Grid
from quire.offline.quantize.recipe import PRUNERS, SCALED, Recipe, parse_pattern
from quire.quant.compressed import E4M3
from quire.quant.gptq import pack_awq, pack_gptq
from quire.records import dataclass

F32 = npt.NDArray[np.float32]
_DTYPES = {"int32": "I32", "float16": "F16", "float32": "F32", "int8": "I8", "uint8": "F8_E4M3"}
Arrays = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight: codes uint8 on a grid; or int8 and E4M3 `numbers` with `scales` float32 [rows, 1].

    input_scale: of static activations. floats: a pruned weight, in place of all others.
    """

    codes: npt.NDArray[np.uint8] | None = None
    grid: Grid | None = None
    numbers: Array | None = None
    scales: F32 | None = None
    input_scale: float = 0.0
    floats: F32 | None = None

    @classmethod
    def joined(cls, pieces: Sequence[Rounded]) -> Rounded:
        """A weight of pieces, some rows each, that are codes on grids; or the only piece."""
        if len(pieces) == 1:
            return pieces[0]
        codes = [piece.codes for piece in pieces if piece.codes is not None]
        grids = [piece.grid for piece in pieces if piece.grid is not None]
        scales, zeros = (
            np.concatenate(part) for part in zip(*((g.scales, g.zeros) for g in grids), strict=True)
        )
        return cls(np.concatenate(codes), Grid(grids[0].kind, scales, zeros))

    def values(self) -> F32:
        """The numbers that a reader computes with, float32."""
        if self.floats is not None:
            return self.floats
        if self.grid is not None:
            assert self.codes is not None
            return self.grid.values(self.codes)
        assert self.numbers is not None
        assert self.scales is not None
        wide: F32 = self.numbers.astype(np.float32) if self.numbers.dtype == np.int8 else E4M3[self.numbers]
        return wide * self.scales


def layout_of(recipe: Recipe) -> str:
    """The layout of tensors that a recipe is written in; "floats": as the checkpoint's own."""
    if recipe.method in PRUNERS:
        return "floats"
    if recipe.method in SCALED and recipe.bits == 4 and not recipe.target_bits:
        return "awq"
    return {"smoothquant": "int-quantized", "fp8": "float-quantized"}.get(recipe.method, "gptq")


def arrays_of(layout: str, rounded: Rounded) -> Arrays:
    """The arrays of a linear by suffix. Raises ValueError for a shape that the layout does not have."""
    if layout in {"gptq", "awq"}:
        assert rounded.codes is not None
        assert rounded.grid is not None
        grid = rounded.grid
        if layout == "awq":
            return pack_awq(rounded.codes, grid.scales, grid.zeros)
        return pack_gptq(rounded.codes, grid.scales, grid.zeros, grid.kind.bits, v2=not grid.kind.symmetric)
    assert rounded.numbers is not None
    assert rounded.scales is not None
    found: Arrays = {"weight": rounded.numbers, "weight_scale": rounded.scales}
    if rounded.input_scale:
        found["input_scale"] = np.array([rounded.input_scale], np.float32)
    return found


def check_shape(layout: str, recipe: Recipe, name: str, rows: int, cols: int) -> None:
    """Raise ValueError for a weight that the layout cannot hold with these options."""
    pattern = parse_pattern(recipe.pattern)
    if pattern is not None and cols % pattern[1]:
        raise ValueError(f"pattern: {recipe.pattern} does not divide the {cols} input features of {name}")
    if layout not in {"gptq", "awq"}:
        return
    group = recipe.group_size or cols
    if cols % group:
        fitting = [size for size in (128, 96, 64, 48, 32, 16) if cols % size == 0]
        raise ValueError(
            f"group_size: {group} does not divide the {cols} input features of {name}; "
            f"{', '.join(map(str, fitting)) or '0 (one scale per output)'} would"
        )
    words = 8 if layout == "awq" else 32 if recipe.bits == 3 else 32 // recipe.bits
    for what, count in (("outputs", rows), ("input features", cols if layout == "gptq" else 0)):
        if count % words:
            raise ValueError(
                f"bits: {recipe.bits} bits of the {count} {what} of {name} do not fill whole words"
            )


def tensors_of(name: str, arrays: Arrays) -> list[tuple[TensorInfo, Array]]:
    """The tensors of a linear `name`."""
    return [
        (TensorInfo(f"{name}.{part}", _DTYPES[array.dtype.name], array.shape), array)
        for part, array in arrays.items()
    ]


def quantization_config(
    layout: str, recipe: Recipe, kept: list[str], meta: dict[str, Any], dynamic: Mapping[str, int]
) -> dict[str, Any]:
    """The entry of config.json; `kept` are modules with plain weights, `meta` how it was made, `dynamic` patterns of
    the names of modules and the bits that they have in place of the recipe's.
    """
    if layout == "gptq":
        return {
            "quant_method": "gptq", "bits": recipe.bits, "group_size": recipe.group_size or -1,
            "desc_act": False, "static_groups": True, "sym": recipe.symmetric, "damp_percent": recipe.damping,
            "true_sequential": False, "lm_head": False, "pack_dtype": "int32",
            "checkpoint_format": "gptq" if recipe.symmetric else "gptq_v2",
            **({"dynamic": {f"+:{name}": {"bits": bits} for name, bits in dynamic.items()}} if dynamic else {}),
            "meta": meta,
        }  # fmt: skip
    if layout == "awq":
        return {
            "quant_method": "awq", "bits": recipe.bits, "group_size": recipe.group_size or -1, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": kept or None, "meta": meta,
        }  # fmt: skip
    kind = "int" if layout == "int-quantized" else "float"
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    if recipe.activations == "static":
        inputs |= {"strategy": "tensor", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", *kept], "kv_cache_scheme": None, "meta": meta,
    }  # fmt: skip
