"""Number formats of a program: storage of weights, and rounding of the inputs of their products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal, get_args

from quire import _native
from quire.cache_kinds import KVType
from quire.records import dataclass

DType = Literal[
    "f32", "bf16", "bf16_24", "f16", "i8", "i4", "i3", "i2", "i32"
]  # i32: indices of experts and rows, in buffers only
# Patterns N:M of zeros of which bf16_24 holds all.
FOURS = frozenset({"1:2", "2:4", "1:4", "2:8", "1:8"})
CODE_BITS: dict[DType, int] = {"i8": 8, "i4": 4, "i3": 3, "i2": 2}  # of the codes of weights in groups
CODES: dict[int, DType] = {bits: dtype for dtype, bits in CODE_BITS.items()}
# Per number of a buffer, table or panel of floats.
DTYPE_BYTES = {dtype.name: _native.dtype_bytes(dtype) for dtype in _native.DType}

ScaleKind = Literal["f16", "bf16", "f32", "f16*u8"]
OffsetKind = Literal["none", "u8", "f16", "bf16", "f32", "f16*u8"]
GROUP_SIZES = _native.GROUP_SIZES
# Powers of two between the lowest and the highest scale of a row of inputs in groups.
GROUP_BITS = _native.GROUP_BITS
SUPER_GROUPS = _native.SUPER_GROUPS  # groups that share a float16 factor in the two-level kind "f16*u8"


@dataclass(frozen=True, slots=True)
class Groups:
    """Storage of a weight in groups: unsigned codes, and per group of `size` input features of an output

        w = scale · (code - middle)        offsets "none": symmetric, middle = 2^(bits - 1)
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
        if self.scales not in get_args(ScaleKind):
            raise ValueError(f"scales: {self.scales!r} is not a known kind")
        if self.offsets not in get_args(OffsetKind):
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

    def packed(self, bits: int) -> _native.GroupFormat:
        """The native format of codes of so many bits."""
        scales, offsets = (_native.GroupKind[kind.replace("*", "_")] for kind in (self.scales, self.offsets))
        return _native.GroupFormat(bits, self.size, scales, offsets, self.rotated)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The format of a linear weight.

    f32, bf16: floats; the input has the same format.
    bf16_24: of each four neighbouring input features of an output at most two are not zero, and only they are stored;
    the numbers and their products are those of bf16.
    f16: floats; the input is float32, so products are those of the same numbers in f32.
    i8, i4, i3, i2: integers of so many bits in groups, see Groups; the input is rounded to int8 with one scale per
    token, halved for each group as often as the group allows.
    """

    dtype: DType
    groups: Groups | None = None

    def __post_init__(self) -> None:
        if self.quantized != (self.groups is not None):
            raise ValueError(f"a {self.dtype} weight {'needs' if self.quantized else 'has no'} groups")
        if self.dtype == "i3" and self.groups is not None and self.groups.size == GROUP_SIZES[0]:
            raise ValueError(f"groups of i3 have more than {GROUP_SIZES[0]} features")

    def fitted(self, cols: int) -> WeightFormat:
        """This format for weights of `cols` input features; see Groups.fitted. Of no whole fours, bf16_24 is bf16."""
        if self.dtype == "bf16_24" and cols % 4:
            return WeightFormat("bf16")
        return self if self.groups is None else replace(self, groups=self.groups.fitted(cols))

    @property
    def quantized(self) -> bool:
        return self.dtype in CODE_BITS

    @property
    def inputs(self) -> DType:
        """The format that the previous op writes: the input of a quantized linear is rounded from float32, once."""
        return "bf16" if self.dtype in {"bf16", "bf16_24"} else "f32"

    def __str__(self) -> str:
        if self.groups is None:
            return self.dtype
        return f"{self.dtype} in {'rotated ' * self.groups.rotated}groups of {self.groups.size}"


@dataclass(frozen=True, slots=True)
class HeadScales:
    """What a stored 1 stands for in an fp8 cache: of keys and of values, one number for each head, or one for all."""

    keys: tuple[float, ...]
    values: tuple[float, ...]


KV_LEVELS = _native.KV_LEVELS


@dataclass(frozen=True, slots=True)
class HeadCodes:
    """What codes of a layer's kvquant3 cache stand for (see RopeWrite), for each head of keys and values.

    Levels rise, [heads][8]; of keys `middles` and `scales` [heads][head_dim], scales above zero.
    """

    key_levels: tuple[tuple[float, ...], ...]
    value_levels: tuple[tuple[float, ...], ...]
    middles: tuple[tuple[float, ...], ...]
    scales: tuple[tuple[float, ...], ...]

    @classmethod
    def even(cls, heads: int, dim: int) -> HeadCodes:
        """Levels from -1 to 1 in equal steps, and scales of 1: those of a layer that has no others."""
        levels = tuple(2 * i / (KV_LEVELS - 1) - 1 for i in range(KV_LEVELS))
        return cls((levels,) * heads, (levels,) * heads, ((0.0,) * dim,) * heads, ((1.0,) * dim,) * heads)

    def of_heads(self, start: int, stop: int) -> HeadCodes:
        """Those of heads [start, stop)."""
        return HeadCodes(
            *(x[start:stop] for x in (self.key_levels, self.value_levels, self.middles, self.scales))
        )

    def book(self, elems: int) -> list[float]:
        """All numbers, head by head, dimensions filled up to `elems`, as the native executor reads them."""
        more = elems - len(self.scales[0])
        return [
            number
            for keys, values, middles, scales in zip(
                self.key_levels, self.value_levels, self.middles, self.scales, strict=True
            )
            for number in (*keys, *values, *middles, *(0.0,) * more, *scales, *(1.0,) * more)
        ]


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """Formats of a program. Sums are always float32, or exact int32 inside a group.

    `weights` is the float format of unquantized weights. `linears` and `head` (with it, a tied embedding) have this
    format if None. `params` has exceptions by parameter, such as "layers.3.down", or by part of a stacked parameter,
    "layers.3.qkv.0", ".1" and ".2", if each has its own format. `kv_scales` are those of an fp8 cache by layer; layers
    that are not there have scales of 1. `kv_codes` are those of a kvquant3 cache, HeadCodes.even where there are none.
    """

    weights: DType = "bf16"
    kv: KVType = "bf16"
    linears: WeightFormat | None = None
    head: WeightFormat | None = None
    params: Mapping[str, WeightFormat] = field(default_factory=dict)
    kv_scales: Mapping[int, HeadScales] = field(default_factory=dict)
    kv_codes: Mapping[int, HeadCodes] = field(default_factory=dict)

    def of(self, param: str) -> WeightFormat:
        """The format of a linear weight by the name of its parameter."""
        found = self.params.get(param, self.head if param == "head" else self.linears)
        return found or WeightFormat(self.weights)
