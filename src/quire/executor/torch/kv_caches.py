"""Paged keys and values of one layer in every format: what is stored, and what attention reads of it.

Shapes: a cache is [blocks, block size, G, …] for G heads, a step writes [T, G, D], a sequence reads [S, G, D]. Padded
dimensions of native tiles are left out of the numbers, and are zeros where they share a scale with others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quire.cache_kinds import LATE_TOKENS, KVType
from quire.executor.torch.cache import Location, Rotation, rotate
from quire.program.formats import HeadCodes
from quire.program.memory import kv_head_elems, kv_outliers
from quire.records import dataclass

GROUP = 32  # neighbouring dimensions that share a scale in i4, and of values in kivi4 and kivi2
_FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """blocks, tokens of a block, heads and dimensions of a head."""

    blocks: int
    size: int
    heads: int
    dim: int


class BlockArrays:
    """Takes arrays with a line for each block from the bytes [blocks, …] of a layer, one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._at = memory, 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """[blocks, *shape]"""
        count = torch.Size(shape).numel() * dtype.itemsize
        piece = self._memory[:, self._at : self._at + count]
        self._at += count
        return piece.view(dtype).unflatten(1, shape)


class LayerCache:
    """Keys and values of a layer."""

    def __init__(self, size: int) -> None:
        self._size = size

    def at(self, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, G, D] of a sequence whose block table is `blocks`, at positions [S]."""
        return self.read(blocks[positions // self._size], positions % self._size)

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., G, D] at places of blocks."""
        raise NotImplementedError

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, G, D], rounded to the format; see RopeWrite."""
        raise NotImplementedError


class FloatCache(LayerCache):
    """float32, bfloat16, float16."""

    def __init__(self, memory: Tensor, shape: CacheShape, kind: KVType) -> None:
        super().__init__(shape.size)
        pieces, width = BlockArrays(memory), kv_head_elems(shape.dim)
        self.keys, self.values = (
            pieces.take(_FLOATS[kind], shape.size, shape.heads, width)[..., : shape.dim] for _ in range(2)
        )

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[blocks, places], self.values[blocks, places]

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        where.put(self.keys, keys)
        where.put(self.values, values)


class ByteCache(LayerCache):
    """int8, with a scale for each key and each value."""

    def __init__(self, memory: Tensor, shape: CacheShape) -> None:
        super().__init__(shape.size)
        pieces, width = BlockArrays(memory), kv_head_elems(shape.dim)
        self.codes = [
            pieces.take(torch.int8, shape.size, shape.heads, width)[..., : shape.dim] for _ in range(2)
        ]
        self.scales = [pieces.take(torch.bfloat16, shape.size, shape.heads) for _ in range(2)]

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            codes[blocks, places] * scales[blocks, places].float()[..., None]
            for codes, scales in zip(self.codes, self.scales, strict=True)
        )
        return keys, values

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        for x, codes, scales in zip((keys, values), self.codes, self.scales, strict=True):
            whole, scale = quantize_heads(x)
            where.put(codes, whole)
            where.put(scales, scale)


class Fp8Cache(LayerCache):
    """e4m3 and e5m2, with a scale for each head."""

    def __init__(
        self,
        memory: Tensor,
        shape: CacheShape,
        kind: KVType,
        scales: tuple[tuple[float, ...], tuple[float, ...]],
    ) -> None:
        super().__init__(shape.size)
        self._dtype, pieces, width = _FP8[kind], BlockArrays(memory), kv_head_elems(shape.dim)
        self._scales = [torch.tensor(each, device=memory.device)[:, None] for each in scales]
        self.codes = [
            pieces.take(torch.uint8, shape.size, shape.heads, width)[..., : shape.dim] for _ in range(2)
        ]

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            codes[blocks, places].view(self._dtype).float() * scale
            for codes, scale in zip(self.codes, self._scales, strict=True)
        )
        return keys, values

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        for x, codes, scale in zip((keys, values), self.codes, self._scales, strict=True):
            where.put(codes, to_fp8(x.float() / scale, self._dtype).view(torch.uint8))


class NibbleCache(LayerCache):
    """int4 in groups of 32 dimensions."""

    def __init__(self, memory: Tensor, shape: CacheShape) -> None:
        super().__init__(shape.size)
        pieces, self._dim, width = BlockArrays(memory), shape.dim, kv_head_elems(shape.dim)
        self.codes = [pieces.take(torch.uint8, shape.size, shape.heads, width // 2) for _ in range(2)]
        groups = -(-width // GROUP)
        self.scales = [pieces.take(torch.bfloat16, shape.size, shape.heads, groups) for _ in range(2)]

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            spread(scales[blocks, places].float(), self._dim)
            * (unpacked(codes[blocks, places], 4)[..., : self._dim].float() - 8)
            for codes, scales in zip(self.codes, self.scales, strict=True)
        )
        return keys.bfloat16(), values.bfloat16()

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        for x, codes, scales in zip((keys, values), self.codes, self.scales, strict=True):
            whole, scale = quantize_nibbles(x)
            padded = functional.pad(whole, (0, 2 * codes.shape[-1] - self._dim), value=8.0)
            where.put(codes, packed(padded.to(torch.uint8), 4))
            where.put(scales, scale)


class KiviCache(LayerCache):
    """kivi4 and kivi2: keys in groups of 32 tokens of a dimension, values in groups of 32 dimensions of a token."""

    def __init__(self, memory: Tensor, shape: CacheShape, bits: int) -> None:
        super().__init__(shape.size)
        self._bits, self._dim, self._width = bits, shape.dim, kv_head_elems(shape.dim)
        pieces = BlockArrays(memory)
        self.codes = [
            pieces.take(torch.uint8, shape.size, shape.heads, self._width * bits // 8) for _ in range(2)
        ]
        runs, groups = shape.size // LATE_TOKENS, -(-self._width // GROUP)
        self.of_keys = pieces.take(torch.bfloat16, runs, shape.heads, 2, self._width)  # scales, least numbers
        self.of_values = pieces.take(torch.bfloat16, shape.size, shape.heads, 2, groups)

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        scale, least = self.of_keys[blocks, places // LATE_TOKENS].float().unbind(-2)
        keys = unpacked(self.codes[0][blocks, places], self._bits) * scale + least
        scale, least = (
            spread(each, self._width) for each in self.of_values[blocks, places].float().unbind(-2)
        )
        values = unpacked(self.codes[1][blocks, places], self._bits) * scale + least
        return keys[..., : self._dim].bfloat16(), values[..., : self._dim].bfloat16()

    def compress(self, blocks: Tensor, runs: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, 32, G, D] of runs [N] of 32 tokens in blocks [N]; see CompressKV."""
        keys, values = (
            functional.pad(x.float(), (0, self._width - self._dim)).transpose(1, 2) for x in (keys, values)
        )  # [N, G, 32, D]
        codes, scale, least = to_codes(keys.transpose(2, 3), self._bits)
        self._put(0, blocks, runs, codes.transpose(2, 3))
        self.of_keys[blocks, runs] = torch.stack((scale, least), 2)
        whole = functional.pad(values, (0, -self._width % GROUP))
        if self._width % GROUP:  # the last group is of the numbers that there are
            last = values[..., -(self._width % GROUP) :]
            whole[..., self._width :] = last[..., :1]
        codes, scale, least = to_codes(whole.unflatten(3, (-1, GROUP)), self._bits)
        self._put(1, blocks, runs, codes.flatten(3)[..., : self._width])
        places = runs[:, None] * LATE_TOKENS + torch.arange(LATE_TOKENS, device=runs.device)
        self.of_values[blocks[:, None], places] = torch.stack((scale, least), 3).transpose(1, 2)

    def _put(self, which: int, blocks: Tensor, runs: Tensor, codes: Tensor) -> None:
        """Codes [N, G, 32, D]."""
        places = runs[:, None] * LATE_TOKENS + torch.arange(LATE_TOKENS, device=runs.device)
        self.codes[which][blocks[:, None], places] = packed(codes.to(torch.uint8), self._bits).transpose(1, 2)


class NuqCache(LayerCache):
    """kvquant3: levels of each head, outliers apart, keys rotated when they are read."""

    def __init__(
        self, memory: Tensor, shape: CacheShape, codes: HeadCodes, rotation: Rotation | None
    ) -> None:
        super().__init__(shape.size)
        self._dim, self._width, self._rotation = shape.dim, kv_head_elems(shape.dim), rotation
        pieces, count = BlockArrays(memory), kv_outliers(self._width)
        self.codes = [
            pieces.take(torch.uint8, shape.size, shape.heads, self._width * 3 // 8) for _ in range(2)
        ]
        self.of_values = pieces.take(torch.bfloat16, shape.size, shape.heads, 2)  # scale, middle
        self.outliers = [pieces.take(torch.bfloat16, shape.size, shape.heads, count) for _ in range(2)]
        self.places = [pieces.take(torch.int16, shape.size, shape.heads, count) for _ in range(2)]
        self.levels, self._middles, self._scales = (
            torch.tensor(each, device=memory.device)
            for each in ((codes.key_levels, codes.value_levels), codes.middles, codes.scales)
        )

    def at(self, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().at(blocks, positions)
        rotation = None if self._rotation is None else self._rotation.at(positions)
        return rotate(keys, rotation).bfloat16(), values.bfloat16()

    def read(self, blocks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys as they are before the rotation, float32."""
        scale, middle = self.of_values[blocks, places].float().unbind(-1)
        keys = self._numbers(0, blocks, places) * self._scales + self._middles
        values = self._numbers(1, blocks, places) * scale[..., None] + middle[..., None]
        return self._with_outliers(0, blocks, places, keys), self._with_outliers(1, blocks, places, values)

    def _numbers(self, which: int, blocks: Tensor, places: Tensor) -> Tensor:
        """The levels of stored codes, [..., G, D]."""
        stored = unpacked_threes(self.codes[which][blocks, places])[..., : self._dim].long()
        levels = self.levels[which].expand(*stored.shape[:-1], -1)
        return levels.gather(-1, stored)

    def _with_outliers(self, which: int, blocks: Tensor, places: Tensor, x: Tensor) -> Tensor:
        at = self.places[which][blocks, places].long().clamp(0, self._dim - 1)
        return x.scatter(-1, at, self.outliers[which][blocks, places].float())

    def write(self, where: Location, keys: Tensor, values: Tensor) -> None:
        y = (keys.float() - self._middles) / self._scales
        self._put(0, where, keys.float(), y.abs(), y)
        x = values.float()
        kept = torch.ones_like(x, dtype=torch.bool).scatter(-1, self._largest(x.abs()), value=False)
        most, least = x.where(kept, -torch.inf).amax(-1), x.where(kept, torch.inf).amin(-1)
        finite = x.isfinite().all(-1)
        middle, scale = (
            each.bfloat16().where(finite, torch.nan) for each in ((most + least) * 0.5, (most - least) * 0.5)
        )
        where.put(self.of_values, torch.stack((scale, middle), -1))
        inverse = torch.where(scale.float() > 1e-30, 1.0 / scale.float(), 0.0)
        self._put(1, where, x, x.abs(), (x - middle.float()[..., None]) * inverse[..., None])

    def _largest(self, size: Tensor) -> Tensor:
        """Places [..., n] of the largest numbers, the first of equal ones."""
        order = size.nan_to_num(0.0).sort(dim=-1, descending=True, stable=True)[1]
        return order[..., : self.places[0].shape[-1]]

    def _put(self, which: int, where: Location, x: Tensor, size: Tensor, y: Tensor) -> None:
        """Codes of y [T, G, D], and the outliers of x, which are those of the largest `size`."""
        finite, at = x.isfinite().all(-1)[..., None], self._largest(size)
        where.put(self.places[which], at.where(finite, 0).to(torch.int16))
        where.put(self.outliers[which], x.gather(-1, at).bfloat16().where(finite, torch.nan))
        levels = self.levels[which]
        middles = (levels[:, 1:] + levels[:, :-1]) * 0.5
        codes = (y[..., None] > middles[:, None]).sum(-1)
        padded = functional.pad(codes, (0, self._width - self._dim))
        where.put(self.codes[which], packed_threes(padded))


def packed_threes(codes: Tensor) -> Tensor:
    """Codes [..., D] of three bits as three bytes for each eight: low two bits of four, of four, and the third bits."""
    eights = codes.to(torch.uint8).unflatten(-1, (-1, 8))
    low = packed((eights & 3).flatten(-2), 2).unflatten(-1, (-1, 2))
    third = packed((eights >> 2).flatten(-2), 1)[..., None]
    return torch.cat((low, third), -1).flatten(-2)


def unpacked_threes(stored: Tensor) -> Tensor:
    """The codes that `packed_threes` took."""
    low, third = stored.unflatten(-1, (-1, 3)).split((2, 1), -1)
    return unpacked(low.flatten(-2), 2) | unpacked(third.flatten(-2), 1) << 2


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as whole numbers in [-127, 127], float32, and their bfloat16 scales [...]; see RopeWrite."""
    exact = x.float().abs().amax(-1) / 127.0
    bits = (exact.view(torch.int32) + 0xFFFF) >> 16 << 16  # the next bfloat16, away from zero
    scale = bits.view(torch.float32).where(exact >= 1e-30, 0.0).where(exact.isfinite(), torch.nan)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    whole = (x.float() * inverse[..., None]).round().clamp(-127, 127).nan_to_num(127.0)
    return whole, scale.to(torch.bfloat16)


def to_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of an fp8 format, ties to even, or its largest; NaN for what is not finite."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).where(x.isfinite(), torch.nan).to(dtype)


def quantize_nibbles(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] as codes [..., D] in [0, 15], float32, and bfloat16 scales [..., groups]; see RopeWrite."""
    dim = x.shape[-1]
    first = x[..., dim - 1 - (dim - 1) % GROUP :][..., :1]  # fills up the last group
    groups = torch.cat((x.float(), first.float().expand(*x.shape[:-1], -dim % GROUP)), -1).unflatten(
        -1, (-1, GROUP)
    )
    most, least = groups.amax(-1), groups.amin(-1)
    extreme = torch.where(most >= -least, most, least)
    some = extreme.abs() > 1e-30
    scale = (extreme * -0.125).bfloat16().where(some, 0.0).where(groups.isfinite().all(-1), torch.nan)
    inverse = torch.where(some, 1.0 / scale.float(), 0.0)
    codes = (groups * inverse[..., None]).round().clamp(-8, 7).nan_to_num(-8.0) + 8
    return codes.flatten(-2)[..., :dim], scale


def to_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., n] as codes [..., n], float32, with the bfloat16 scale [...] and number of code 0; see CompressKV."""
    most, finite = 2**bits - 1, x.isfinite().all(-1)
    least = x.amin(-1).bfloat16().where(finite, torch.nan)
    scale = ((x.amax(-1) - least.float()) / most).bfloat16()
    inverse = torch.where(scale.float() > 1e-30, 1.0 / scale.float(), 0.0)
    codes = ((x - least.float()[..., None]) * inverse[..., None]).round().clamp(0, most).nan_to_num(0.0)
    return codes, scale, least


def spread(numbers: Tensor, dim: int) -> Tensor:
    """[..., groups] -> [..., dim]"""
    return numbers.repeat_interleave(GROUP, -1)[..., :dim]


def packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., D] in as few bytes as possible, the first in the lowest bits."""
    fields = codes.unflatten(-1, (-1, 8 // bits))
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (fields << shifts).sum(-1, dtype=torch.uint8)


def unpacked(stored: Tensor, bits: int) -> Tensor:
    """The codes that `packed` took."""
    shifts = torch.arange(0, 8, bits, device=stored.device, dtype=torch.uint8)
    return ((stored[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
