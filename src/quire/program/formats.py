"""Number formats of a program: storage of weights, and rounding of the inputs of their products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal

from quire.records import dataclass

DType = Literal["f32", "bf16", "f16", "i8", "i4", "i32"]  # i32: indices of experts and rows, in buffers only
DTYPE_BYTES: dict[str, int] = {
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "i8": 1,
    "i32": 4,
}  # per number of a buffer, table or plain panel

ScaleKind = Literal["f16", "bf16", "f32", "f16*u8"]
OffsetKind = Literal["none", "u8", "f16", "bf16", "f32", "f16*u8"]
GROUP_SIZES = (16, 32, 64, 128)
GROUP_BITS = 8  # powers of two between the lowest and the highest scale of a row of inputs in groups
SUPER_GROUPS = 8  # groups that share a float16 factor in the two-level kind "f16*u8"
_KIND_BYTES = {"none": 0, "u8": 1, "f16": 2, "bf16": 2, "f32": 4, "f16*u8": 1}


@dataclass(frozen=True, slots=True)
class Groups:
    """Storage of a weight in groups: unsigned codes, and per group of `size` input features of an output

        w = scale · (code - middle)        offsets "none": symmetric, middle = 8 for 4 bits, 128 for 8
        w = scale · (code - zero)          offsets "u8": an integer zero point of one byte
        w = scale · code + offset          offsets of a float kind

    `scales` and float `offsets` are stored in that float format, so the values of a checkpoint are not rounded.
    "f16*u8" is two-level, as in GGUF's Q4_K: SUPER_GROUPS neighbours share a float16 factor that is multiplied by
    the byte of each group (for offsets: minus the product). Input features after the last whole group form a short one.

    `rotated`: the weights and the inputs of a group were both multiplied by a Hadamard matrix, which does not change
    their products and spreads outliers over the group (quant.groups.rotate). All groups are whole.
    """

    size: int = 32
    scales: ScaleKind = "f16"
    offsets: OffsetKind = "none"
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.size not in GROUP_SIZES:
            raise ValueError(f"group size: {self.size} is not one of {', '.join(map(str, GROUP_SIZES))}")
        if self.scales not in _KIND_BYTES or self.scales in {"none", "u8"}:
            raise ValueError(f"scales: {self.scales!r} is not a known kind")
        if self.offsets not in _KIND_BYTES:
            raise ValueError(f"offsets: {self.offsets!r} is not a known kind")
        if "f16*u8" in {self.scales, self.offsets} and self.scales != self.offsets != "none":
            raise ValueError("two-level offsets need two-level scales")
        if self.rotated and self.offsets != "none":
            raise ValueError("rotated groups must be symmetric")

    @property
    def two_level(self) -> bool:
        return self.scales == "f16*u8"

    def count(self, cols: int) -> int:
        """Groups per row of `cols` input features."""
        return -(-cols // self.size)

    def fitted(self, cols: int) -> Groups:
        """These groups for weights of `cols` input features: rotated ones halved until all are whole."""
        if not self.rotated or cols % self.size == 0:
            return self
        whole = [size for size in GROUP_SIZES if size < self.size and cols % size == 0]
        return replace(self, size=whole[-1]) if whole else replace(self, size=GROUP_SIZES[0], rotated=False)

    def row_bytes(self, cols: int) -> int:
        """Bytes of scales and offsets of one row of `cols` input features."""
        groups = self.count(cols)
        each = groups * (_KIND_BYTES[self.scales] + _KIND_BYTES[self.offsets])
        shared = -(-groups // SUPER_GROUPS) * 2 * (1 + (self.offsets != "none")) if self.two_level else 0
        return each + shared


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of a linear weight.

    f32, bf16: floats; the input has the same format.
    f16: floats; the input is float32, so products are those of the same numbers in f32.
    i8 without groups: integers in [-127, 127] and a float32 scale per output; the input is rounded to int8 with one
    scale per token.
    i4, and i8 with groups: see Groups; the input is rounded to int8 with one scale per token, halved for each group as
    often as the group allows.
    """

    dtype: DType
    groups: Groups | None = None

    def __post_init__(self) -> None:
        if self.dtype == "i4" and self.groups is None:
            raise ValueError("an i4 weight needs groups")
        if self.groups is not None and self.dtype not in {"i4", "i8"}:
            raise ValueError(f"a {self.dtype} weight has no groups")

    def fitted(self, cols: int) -> WeightFormat:
        """This format for weights of `cols` input features; see Groups.fitted."""
        return self if self.groups is None else replace(self, groups=self.groups.fitted(cols))

    @property
    def quantized(self) -> bool:
        return self.dtype in {"i8", "i4"}

    @property
    def inputs(self) -> DType:
        """The format that the previous op writes: the input of a quantized linear is rounded from float32, once."""
        return "bf16" if self.dtype == "bf16" else "f32"

    def __str__(self) -> str:
        if self.groups is None:
            return self.dtype
        return f"{self.dtype} in {'rotated ' * self.groups.rotated}groups of {self.groups.size}"


I8 = WeightFormat("i8")


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """Formats of a program. Sums are always float32, or exact int32 inside a group.

    `weights` is the float format of unquantized weights. `linears` and `head` (with it, a tied embedding) have this
    format if None. `params` has exceptions by parameter, such as "layers.3.down", or by part of a stacked parameter,
    "layers.3.qkv.0", ".1" and ".2", if each has its own format.
    """

    weights: DType = "bf16"
    kv: DType = "bf16"
    linears: WeightFormat | None = None
    head: WeightFormat | None = None
    params: Mapping[str, WeightFormat] = field(default_factory=dict)

    def of(self, param: str) -> WeightFormat:
        """The format of a linear weight by the name of its parameter."""
        found = self.params.get(param, self.head if param == "head" else self.linears)
        return found or WeightFormat(self.weights)
