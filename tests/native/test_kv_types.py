"""What a cache of few bits holds: bytes against definitions written here, on every instruction set.

Keys and values are put into a step as they are, without a rotation; blocks are read back, and so is what attention
makes of a text of one token: its value.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from helpers.attention import VOCAB, fill, native
from helpers.stepper import Stepper
from quire import _native
from quire.cache_kinds import KVType
from quire.executor.base import F32, Limits
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.program.formats import HeadCodes, HeadScales, NumberFormats
from quire.program.lower import lower
from quire.program.memory import kv_block_bytes
from quire.program.ops.attention import Attend, CompressKV, RopeWrite
from quire.program.program import Program
from quire.spec import MLP, Attention, Layer, ModelSpec, NormSpec, Rope
from quire.spec.rope import cos_sin

ISAS = _native.supported_isas()
HEADS, DIM = 2, 48
U8 = npt.NDArray[np.uint8]


def program_of(
    kv: KVType,
    dim: int = DIM,
    scales: HeadScales | None = None,
    codes: HeadCodes | None = None,
    rope: Rope | None = None,
) -> Program:
    attention = Attention(HEADS, HEADS, dim, rope, 1.0)
    spec = ModelSpec(VOCAB, 32, (Layer(attention, MLP(16)),), NormSpec(), 512, tied=True)
    return lower(
        spec,
        NumberFormats(
            "f32", kv, kv_scales={0: scales} if scales else {}, kv_codes={0: codes} if codes else {}
        ),
    )


class Cached:
    """Tokens [T, heads, dim] written to a fresh cache, in steps of so many tokens."""

    def __init__(
        self, program: Program, keys: F32, values: F32, isa: str, cuts: tuple[int, ...] = ()
    ) -> None:
        count, heads, dim = keys.shape
        size = -(-count // 32) * 32
        limits = Limits(count, 1, count, size, len(program.cache_groups), size)
        executor, stepper = native(program, limits, isa)
        self.program, self.executor, self.size = program, executor, size
        qkv = np.concatenate([np.ones_like(keys), keys, values], 1).reshape(count, -1)
        sequence = stepper.add([0] * count)
        places = [i for i, op in enumerate(program.ops) if isinstance(op, RopeWrite | CompressKV | Attend)]
        found = []
        for begin, end in itertools.pairwise((0, *cuts, count)):
            step = stepper.fill({sequence: end - begin})
            executor.write("qkv", qkv[begin:end])
            executor.run_range(step.num_tokens, 1, 0, places[0], places[-1] + 1)
            found.append(executor.read("mixed", end - begin))
        self.mixed = np.concatenate(found).reshape(count, heads, dim)
        blocks = [int(table[stepper.arrays.slots[0], 0]) for table in stepper.arrays.block_tables]
        self.bytes = np.empty((len(blocks), kv_block_bytes(program, size)), np.uint8)
        executor.read_blocks(blocks, self.bytes)

    def tiles(self, layer: int = 0) -> U8:
        """[heads, tiles, bytes]"""
        kv = self.program.kv_layers[layer]
        tile = 16 * _native.kv_pair_bytes(_native.kv_elems(kv.head_dim), _native.KVType[kv.type])
        own = self.bytes[kv.group][: kv.kv_heads * self.size // 16 * tile]
        return own.reshape(kv.kv_heads, -1, tile)


def fp8_numbers(mantissa: int) -> F32:
    """What codes 0 … 127 stand for: OCP 8-bit floating point specification, 1.0; NaN for NaN and infinity."""
    bias = 7 if mantissa == 3 else 15
    codes = np.arange(128)
    exponent, fraction = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    numbers = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    numbers[127 if mantissa == 3 else slice(124, 128)] = np.nan
    return numbers.astype(np.float32)


def fp8_codes(x: F32, mantissa: int) -> U8:
    """The nearest number's code for each x, the even one of two; NaN for what is not finite."""
    numbers = fp8_numbers(mantissa).astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    middles = (finite[1:] + finite[:-1]) / 2
    size = np.abs(x.astype(np.float64))
    low, high = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where(low == high, low, low + low % 2)  # a tie lies between low and low + 1
    codes = np.where(np.isfinite(x), codes, 127 if mantissa == 3 else 126)
    return (codes | np.signbit(x) * 128).astype(np.uint8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kv", "mantissa"), [("e4m3", 3), ("e5m2", 2)])
def test_every_number_of_fp8_is_written_and_read_as_the_format_says(
    kv: KVType, mantissa: int, isa: str
) -> None:
    """All codes, the middles between neighbours, and the float32 numbers beside these; numbers beyond the largest."""
    numbers = fp8_numbers(mantissa)
    numbers = numbers[np.isfinite(numbers)]
    middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(to), dtype=np.float32) for to in (0, np.inf)]
    large = np.array([numbers[-1] * 1.03, numbers[-1] * 1.2, 1e30, 3e38, 1e-12, 1e-38], np.float32)
    every = np.concatenate([numbers, middles, *beside, large])
    every = np.concatenate([every, -every])
    every = np.resize(every, -(-len(every) // (HEADS * DIM)) * HEADS * DIM).reshape(-1, HEADS, DIM)
    scales = HeadScales((0.5, 3.0), (1.0, 0.7))
    for keys, values, given in ((every, every[::-1], None), (every, every, scales)):
        tiles = Cached(program_of(kv, scales=given), keys, values, isa).tiles()
        known = given or HeadScales((1.0, 1.0), (1.0, 1.0))
        of_keys, of_values = np.float32(known.keys), np.float32(known.values)
        for head in range(HEADS):
            k = tiles[head, :, : 16 * DIM].reshape(-1, DIM // 2, 16, 2).transpose(0, 2, 1, 3).reshape(-1, DIM)
            v = tiles[head, :, 16 * DIM :].reshape(-1, 8, DIM, 2).transpose(0, 1, 3, 2).reshape(-1, DIM)
            count = len(every)
            with np.errstate(over="ignore"):
                scaled = keys[:, head] / of_keys[head], values[:, head] / of_values[head]
            np.testing.assert_array_equal(k[:count], fp8_codes(scaled[0], mantissa))
            np.testing.assert_array_equal(v[:count], fp8_codes(scaled[1], mantissa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kv", "mantissa"), [("e4m3", 3), ("e5m2", 2)])
def test_attention_reads_every_code_of_fp8_exactly(kv: KVType, mantissa: int, isa: str) -> None:
    """A text of one token gives its value; NaN where the format has it, or an infinity."""
    numbers = np.concatenate([fp8_numbers(mantissa), -fp8_numbers(mantissa)])
    dim = 128  # of two heads: all codes
    values = numbers.reshape(1, HEADS, dim)
    found = Cached(program_of(kv, dim), np.zeros_like(values), values, isa).mixed
    np.testing.assert_array_equal(found, values)


def nibbles(x: F32) -> tuple[U8, F32]:
    """Codes and bfloat16 scales of groups of 32; see RopeWrite."""
    codes, scales = np.empty(x.shape, np.uint8), []
    for start in range(0, x.shape[-1], 32):
        group = x[..., start : start + 32]
        most, least = group.max(-1), group.min(-1)
        scale = bf16(np.where(most >= -least, most, least) * np.float32(-0.125))
        inverse = np.float32(1) / scale
        codes[..., start : start + 32] = np.clip(np.rint(group * inverse[..., None]), -8, 7) + 8
        scales.append(scale)
    return codes, np.stack(scales, -1)


def bf16(x: F32) -> F32:
    """To nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def random_heads(count: int, dim: int = DIM) -> tuple[F32, F32]:
    random = np.random.default_rng(count)
    wide = np.exp(random.standard_normal((1, HEADS, dim)))  # some dimensions are much larger than others
    keys, values = (random.standard_normal((2, count, HEADS, dim)) * wide).astype(np.float32)
    return keys, values


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [12, 48, 128])
def test_int4_is_what_its_definition_says(dim: int, isa: str) -> None:
    keys, values = random_heads(45, dim)
    found, d16 = Cached(program_of("i4", dim), keys, values, isa, (3, 20, 41)), -(-dim // 16) * 16
    for head in range(HEADS):
        tiles = found.tiles()[head]
        half = 16 * d16 // 2
        k = tiles[:, :half].reshape(-1, d16 // 2, 16).transpose(0, 2, 1).reshape(-1, d16 // 2)
        k_codes = np.stack([k & 15, k >> 4], -1).reshape(-1, d16)[:45, :dim]
        v = tiles[:, half : 2 * half].reshape(-1, 8, d16 // 16, 2, 8).transpose(0, 1, 3, 2, 4)
        v_codes = np.stack([v & 15, v >> 4], -2).reshape(-1, d16)[:45, :dim]
        scales = tiles[:, 2 * half :].copy().view(np.uint16).astype(np.uint32) << 16
        scales = scales.view(np.float32).reshape(len(tiles), 2, -1, 16).transpose(1, 0, 3, 2)
        for x, codes, stored in ((keys, k_codes, scales[0]), (values, v_codes, scales[1])):
            expected, expected_scales = nibbles(x[:, head])
            np.testing.assert_array_equal(codes, expected)
            np.testing.assert_array_equal(stored.reshape(-1, stored.shape[-1])[:45], expected_scales)


def affine(x: F32, bits: int) -> tuple[U8, F32, F32]:
    """Codes of the last axis, scales and least numbers; see CompressKV."""
    least = bf16(x.min(-1))
    scale = bf16((x.max(-1) - least) / np.float32(2**bits - 1))
    inverse = np.float32(1) / scale
    codes = np.clip(np.rint((x - least[..., None]) * inverse[..., None]), 0, 2**bits - 1)
    return codes.astype(np.uint8), scale, least


def fields(stored: U8, bits: int) -> U8:
    """[..., n] -> [8 // bits, ..., n], from the lowest bits up."""
    return np.stack([(stored >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("bits", [4, 2])
def test_kivi_is_what_its_definition_says(bits: int, dim: int, isa: str) -> None:
    """Two whole groups of 32 tokens and a part of one, which is not rounded, however the steps are cut."""
    keys, values = (bf16(x) for x in random_heads(75, dim))
    kind: KVType = "kivi4" if bits == 4 else "kivi2"
    for cuts in ((), (7, 31, 32, 40, 63), (33,)):
        found = Cached(program_of(kind, dim), keys, values, isa, cuts).tiles()
        for head in range(HEADS):
            for group in range(2):
                tokens = slice(32 * group, 32 * group + 32)
                tiles = found[head, 2 * group : 2 * group + 2]
                _check_kivi(tiles, keys[tokens, head], values[tokens, head], bits)


def _check_kivi(tiles: U8, keys: F32, values: F32, bits: int) -> None:
    dim = keys.shape[-1]
    half, lines = 16 * dim * bits // 8, 4 // bits
    k = fields(tiles[:, :half].reshape(2, -1, 16), bits)  # [fields, tile, units, token]
    k = k.transpose(1, 3, 2, 0).reshape(32, dim)
    numbers = tiles[:, 2 * half :].copy().view(np.uint16).astype(np.uint32) << 16
    numbers = numbers.view(np.float32)
    codes, scale, least = affine(keys.T, bits)
    np.testing.assert_array_equal(k, codes.T)
    np.testing.assert_array_equal(numbers[:, :dim], np.stack([scale, least]))
    v = fields(tiles[:, half : 2 * half].reshape(2, -1, 2, 8), bits)  # [fields, tile, units, token, 8]
    v = v.reshape(lines, 2, *v.shape[1:])  # [line of a unit, half, tile, units, token, 8]
    v = (
        v.transpose(2, 3, 0, 4, 1, 5)
        .reshape(2, 8, dim // 16, 2, 16)
        .transpose(0, 1, 3, 2, 4)
        .reshape(32, dim)
    )
    of_values = numbers[:, dim:].reshape(2, 2, -1, 16).transpose(1, 0, 3, 2).reshape(2, 32, -1)
    for at, start in enumerate(range(0, dim, 32)):
        codes, scale, least = affine(values[:, start : start + 32], bits)
        np.testing.assert_array_equal(v[:, start : start + 32], codes)
        np.testing.assert_array_equal(of_values[:, :, at], np.stack([scale, least]))


def nuq_codes(seed: int, dim: int) -> HeadCodes:
    """Levels, middles and scales as calibration might find them, of HEADS heads."""
    random = np.random.default_rng(seed)
    rows = (
        np.sort(random.standard_normal((HEADS, 8))), np.sort(random.standard_normal((HEADS, 8))),
        random.standard_normal((HEADS, dim)) * 0.3, np.exp(random.standard_normal((HEADS, dim)) * 0.3),
    )  # fmt: skip
    return HeadCodes(*(tuple(tuple(map(float, np.float32(row))) for row in x) for x in rows))


def nearest(y: F32, levels: F32) -> U8:
    """Codes of the nearest of rising levels, the lower of two."""
    return np.searchsorted((levels[1:] + levels[:-1]) * np.float32(0.5), y, "left").astype(np.uint8)


def largest(size: F32, count: int) -> npt.NDArray[np.int64]:
    return np.argsort(-size, axis=-1, kind="stable")[..., :count]


def threes(low: U8, third: U8) -> U8:
    """Codes of eight numbers from two bytes of low bits [..., 2] and one of third bits [...]."""
    bits = np.stack([low[..., i // 4] >> (2 * (i % 4)) & 3 | (third >> i & 1) << 2 for i in range(8)], -1)
    return bits.astype(np.uint8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [12, 48, 128])
def test_kvquant_is_what_its_definition_says(dim: int, isa: str) -> None:
    """Codes, scales and outliers of every token; a text of one token gives its value as it is stored."""
    keys, values = random_heads(45, dim)
    values[0, 0, 3:5] = 7.0  # equal magnitudes: the first is the outlier
    known, d16 = nuq_codes(dim, dim), -(-dim // 16) * 16
    program = program_of("kvquant3", dim, codes=known)
    found, count = Cached(program, keys, values, isa, (1, 3, 20, 41)), -(-d16 // 100)
    of_keys, of_values, middles, scales = (
        np.float32(x) for x in (known.key_levels, known.value_levels, known.middles, known.scales)
    )
    for head in range(HEADS):
        tiles = found.tiles()[head]
        half = 16 * d16 * 3 // 8
        k = tiles[:, :half].reshape(-1, d16 // 8, 3, 16).transpose(0, 3, 1, 2).reshape(-1, d16 // 8, 3)
        k_codes = threes(k[..., :2], k[..., 2]).reshape(-1, d16)[:45, :dim]
        y = (keys[:, head] - middles[head]) / scales[head]
        np.testing.assert_array_equal(k_codes, nearest(y, of_keys[head]))
        v = tiles[:, half : 2 * half].reshape(-1, d16 // 16, 6)
        v_codes = threes(v[..., :4].reshape(*v.shape[:-1], 2, 2), v[..., 4:]).reshape(-1, d16)[:45, :dim]
        numbers = tiles[:, 2 * half :].copy()
        both = numbers[:, :64].view(np.uint16).astype(np.uint32) << 16
        scale, middle = both.view(np.float32).reshape(-1, 2, 16).transpose(1, 0, 2).reshape(2, -1)[:, :45]
        words = (
            numbers[:, 64:]
            .view(np.uint32)
            .reshape(-1, 2, count, 16)
            .transpose(1, 0, 3, 2)
            .reshape(2, -1, count)
        )
        out = largest(np.abs(values[:, head]), count)
        kept = np.ma.masked_array(values[:, head], np.zeros((45, dim), np.bool_))
        np.put_along_axis(kept.mask, out, True, -1)
        most, least = kept.max(-1).data, kept.min(-1).data
        np.testing.assert_array_equal(middle, bf16((most + least) * np.float32(0.5)))
        np.testing.assert_array_equal(scale, bf16((most - least) * np.float32(0.5)))
        inverse = np.float32(1) / scale
        y_values = (values[:, head] - middle[:, None]) * inverse[:, None]
        np.testing.assert_array_equal(v_codes, nearest(y_values, of_values[head]))
        for which, x, places in ((0, keys, largest(np.abs(y), count)), (1, values, out)):
            np.testing.assert_array_equal(words[which, :45] & 0xFFFF, places)
            stored = (words[which, :45] >> 16 << 16).view(np.float32)
            np.testing.assert_array_equal(stored, bf16(np.take_along_axis(x[:, head], places, -1)))
        read = bf16(of_values[head][v_codes[0]].astype(np.float64) * scale[0] + middle[0])
        read[out[0]] = bf16(values[0, head, out[0]])
        np.testing.assert_allclose(found.mixed[0, head], read, rtol=2**-8)


def turned(x: F32, rope: Rope | None) -> F32:
    """x [T, dim] of positions 0 … T - 1, rotated."""
    if rope is None:
        return x
    cos, sin = cos_sin(rope, len(x))
    half, found = rope.dim // 2, x.copy()
    low, high = (
        (np.s_[:, 0 : rope.dim : 2], np.s_[:, 1 : rope.dim : 2])
        if rope.interleaved
        else (np.s_[:, :half], np.s_[:, half : rope.dim])
    )
    found[low], found[high] = x[low] * cos - x[high] * sin, x[high] * cos + x[low] * sin
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rope", [Rope(1e4, 32), Rope(1e4, 48, interleaved=True), Rope(1e4, 20), None])
def test_kvquant_keys_are_rotated_when_they_are_read(rope: Rope | None, isa: str) -> None:
    """Attention over stored numbers in numpy, keys rotated last; in any cut of steps it is the same, bit for bit."""
    known, count = nuq_codes(3, DIM), 77
    keys, values = random_heads(count)
    keys *= np.float32(0.1)
    program = program_of("kvquant3", codes=known, rope=rope)
    whole = Cached(program, keys, values, isa).mixed
    np.testing.assert_array_equal(whole, Cached(program, keys, values, isa, (5, 16, 30, 76)).mixed)
    for head in range(HEADS):
        y = (keys[:, head] - known.middles[head]) / np.float32(known.scales[head])
        k = np.float32(known.key_levels[head])[nearest(y, np.float32(known.key_levels[head]))]
        k = (k * known.scales[head] + known.middles[head]).astype(np.float32)
        x, v = values[:, head], np.float32(known.value_levels[head])
        out = largest(np.abs(y), 1)
        np.put_along_axis(k, out, bf16(np.take_along_axis(keys[:, head], out, -1)), -1)
        out = largest(np.abs(x), 1)
        kept = np.where(np.arange(DIM) == out, np.nan, x)
        most, least = np.nanmax(kept, -1, keepdims=True), np.nanmin(kept, -1, keepdims=True)
        scale, middle = bf16((most - least) * np.float32(0.5)), bf16((most + least) * np.float32(0.5))
        read = v[nearest((x - middle) / scale, v)] * scale + middle
        np.put_along_axis(read, out, bf16(np.take_along_axis(x, out, -1)), -1)
        q = turned(np.ones((count, DIM), np.float32), rope)
        scores = np.where(np.tri(count) > 0, q @ turned(k, rope).T, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        expected = chances / chances.sum(-1, keepdims=True) @ read
        np.testing.assert_allclose(whole[:, head], expected, atol=0.02 * np.abs(read).max())


def test_numbers_that_are_not_finite_are_kept_apart() -> None:
    """In fp8 they become NaN, in int4 their scale does: the other head has its own numbers."""
    keys, values = random_heads(40)
    values[5, 0, 3] = np.inf
    for kv in ("e4m3", "e5m2", "i4", "kvquant3"):
        mixed = Cached(program_of(kv), keys, values, "").mixed  # type: ignore[arg-type]
        bad = ~np.isfinite(mixed)
        assert bad[5:, 0, 3].all()
        assert not bad[:, 1].any()


def test_both_executors_take_the_bytes_that_the_plan_says() -> None:
    for kv in ("e4m3", "e5m2", "i4", "kivi4", "kivi2", "kvquant3"):
        program = program_of(kv)  # type: ignore[arg-type]
        limits = Limits(8, 1, 8, 64, 6, 32)
        for executor in (NativeExecutor(program, threads=1), TorchExecutor(program)):
            fill(program, [executor])
            executor.bind(limits, Stepper(program, limits).arrays)
            assert 0 <= executor.memory()["kv"] - 6 * kv_block_bytes(program, 32) < 4096  # whole pages
