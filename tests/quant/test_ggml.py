"""Block formats of GGUF: bit-equal to the gguf package, and to scalar definitions written out here."""

from __future__ import annotations

import numpy as np
import pytest

from quire.program.formats import CODE_BITS
from quire.program.tensors import Param, Part
from quire.quant import check_codes, groups
from quire.quant.ggml import PACKED, READ_TYPES, TYPE_IDS, TYPES_BY_ID, dequantize, group_codes

QUANTIZED = [kind for kind in READ_TYPES.values() if kind.unpack]


def random_blocks(kind, rows: int = 7, per_row: int = 3, seed: int = 0) -> np.ndarray:
    """Random bytes whose float16 scales are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * per_row, kind.nbytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind.name, (0,))
    if kind.name in {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}:
        halves = (0, 2)
    for at in halves:
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 250, len(blocks))
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_bits_of_the_gguf_package(kind) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package (extra dev) is the oracle")
    blocks = random_blocks(kind, rows=400)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(dequantize(blocks, kind).view(np.uint32), expected.view(np.uint32))


def test_sizes_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package (extra dev) is the oracle")
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # never stored; the package counts float32 scales, ggml has float16 ones
            continue
        ours = TYPES_BY_ID[int(kind)]
        assert (ours.name, ours.values, ours.nbytes) == (kind.name, *sizes)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_the_packed_format_gives_the_same_bits(kind) -> None:
    blocks = random_blocks(kind, seed=1)
    form = PACKED[kind.name]
    given = group_codes(blocks, kind)
    expected = dequantize(blocks, kind)
    rows, cols = expected.shape
    check_codes(Param("w", "linear", (Part("w", rows, cols),), form.dtype, form.groups), 0, given)
    np.testing.assert_array_equal(groups.dequantize(form.groups, CODE_BITS[form.dtype], given), expected)


def f16(data: np.ndarray, at: int) -> np.float32:
    return np.float32(data[at : at + 2].view("<f2")[0])


def scalar_q4_0(b: np.ndarray, i: int) -> np.float32:
    nibble = b[2 + i % 16] >> 4 if i >= 16 else b[2 + i % 16] & 15
    return f16(b, 0) * np.float32(int(nibble) - 8)


def scalar_q8_0(b: np.ndarray, i: int) -> np.float32:
    return f16(b, 0) * np.float32(b[2:].view(np.int8)[i])


def scalar_q6_k(b: np.ndarray, i: int) -> np.float32:
    half, quarter, l = i // 128, i % 128 // 32, i % 32
    low = int(b[half * 64 + quarter % 2 * 32 + l])
    low = low >> 4 if quarter >= 2 else low & 15
    high = int(b[128 + half * 32 + l]) >> (2 * quarter) & 3
    scale = b[192:208].view(np.int8)[i // 16]
    return f16(b, 208) * np.float32(scale) * np.float32((low | high << 4) - 32)


def scalar_q4_k(b: np.ndarray, i: int) -> np.float32:
    group = i // 32
    byte = int(b[16 + group // 2 * 32 + i % 32])
    code = byte >> 4 if group % 2 else byte & 15
    s = [int(v) for v in b[4:16]]
    if group < 4:
        scale, low = s[group] & 63, s[group + 4] & 63
    else:
        scale = s[group + 4] & 15 | s[group - 4] >> 6 << 4
        low = s[group + 4] >> 4 | s[group] >> 6 << 4
    return f16(b, 0) * np.float32(scale) * np.float32(code) - f16(b, 2) * np.float32(low)


@pytest.mark.parametrize(
    ("name", "scalar"),
    [("Q4_0", scalar_q4_0), ("Q8_0", scalar_q8_0), ("Q6_K", scalar_q6_k), ("Q4_K", scalar_q4_k)],
)
def test_scalar_definitions(name: str, scalar) -> None:
    kind = READ_TYPES[name]
    blocks = random_blocks(kind, rows=3, per_row=1, seed=2)
    expected = [[scalar(block, i) for i in range(kind.values)] for block in blocks]
    np.testing.assert_array_equal(dequantize(blocks, kind), np.array(expected, np.float32))


def test_one_changed_bit_shows() -> None:
    """Negative control: every byte of a block matters to some value."""
    for kind in QUANTIZED:
        blocks = random_blocks(kind, rows=1, per_row=1, seed=3)
        before = dequantize(blocks, kind)
        for byte in range(kind.nbytes):
            changed = blocks.copy()
            changed[0, byte] ^= 0x11
            with np.errstate(all="ignore"):
                assert not np.array_equal(before, dequantize(changed, kind)), (kind.name, byte)


def test_type_numbers_are_unique() -> None:
    assert len(TYPE_IDS) == len(TYPES_BY_ID)
