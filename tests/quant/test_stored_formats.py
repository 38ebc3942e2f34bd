"""Quantized checkpoints' formats: every number equal to the formula evaluated one element at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers import packing
from quire.program.formats import CODE_BITS
from quire.quant import bitsandbytes, compressed, gptq, hqq
from quire.quant.groups import dequantize
from quire.quant.linear_codes import PackedLinear, QuantizedLinear, Stored, unpack_bits
from quire.types import CheckpointError

ROWS, COLS = 48, 64
DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "uint8": "U8", "int8": "I8"}


def infos(arrays: dict[str, np.ndarray]) -> dict[str, Stored]:
    return {name: Stored(DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()}


def check(linear: QuantizedLinear, arrays: dict[str, np.ndarray], weight: np.ndarray) -> None:
    """Whole, in row blocks, and as codes where there is a packed format: always the same bits."""
    assert linear.shape == weight.shape
    for start, stop in ((0, len(weight)), (0, 5), (5, 30), (13, len(weight))):
        np.testing.assert_array_equal(linear.dequantize(arrays, start, stop), weight[start:stop])
        if (
            isinstance(linear, PackedLinear)
            and linear.packed is not None
            and linear.packed.groups is not None
        ):
            bits = CODE_BITS[linear.packed.dtype]
            given = linear.codes(arrays, start, stop)
            np.testing.assert_array_equal(dequantize(linear.packed.groups, bits, given), weight[start:stop])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_are_one_stream(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (64, 5))
    np.testing.assert_array_equal(unpack_bits(packing.pack_rows(numbers, bits), bits), numbers)


@pytest.mark.parametrize(("bits", "group", "packs"), [(4, 32, True), (4, 64, True), (8, 32, False), (3, 32, True),
                                                      (2, 16, True)])  # fmt: skip
def test_gptq(bits: int, group: int, packs: bool) -> None:
    rng = np.random.default_rng(bits)
    arrays, weight = packing.gptq(rng, ROWS if bits != 3 else 64, COLS, bits=bits, group=group)
    linear = gptq.gptq(infos(arrays), "m", bits=bits, zero_offset=1, ordered=False)
    assert (linear.packed is not None) == packs
    check(linear, arrays, weight)


def test_gptq_of_eight_bits_packs_if_it_is_symmetric() -> None:
    """A zero point is stored less one, so a byte cannot hold the greatest; symmetric ones are 128."""
    arrays, weight = packing.gptq(np.random.default_rng(0), ROWS, COLS, bits=8, group=32)
    arrays["qzeros"][:] = 0x7F7F7F7F
    linear = gptq.gptq(infos(arrays), "m", bits=8, zero_offset=1, ordered=False, symmetric=True)
    assert str(linear.packed) == "i8 in groups of 32"
    check(linear, arrays, linear.dequantize(arrays, 0, len(weight)))
    arrays["qzeros"][:] = -1
    with pytest.raises(CheckpointError, match="a zero point of 256, but sym is true"):
        linear.codes(arrays, 0, 1)


def test_gptq_v2_eight_bits_pack() -> None:
    arrays, weight = packing.gptq(np.random.default_rng(0), ROWS, COLS, bits=8, group=32, offset=0)
    linear = gptq.gptq(infos(arrays), "m", bits=8, zero_offset=0, ordered=False)
    assert str(linear.packed) == "i8 in groups of 32"
    check(linear, arrays, weight)


def test_gptq_in_the_order_of_activations() -> None:
    rng = np.random.default_rng(1)
    index = rng.permutation(np.arange(COLS) // 32)
    arrays, weight = packing.gptq(rng, ROWS, COLS, bits=4, group=32, g_idx=index)
    linear = gptq.gptq(infos(arrays), "m", bits=4, zero_offset=1, ordered=True)
    assert linear.packed is None
    check(linear, arrays, weight)
    arrays["g_idx"] = arrays["g_idx"] + 1
    with pytest.raises(CheckpointError, match="g_idx: a group is not in"):
        linear.dequantize(arrays, 0, 1)


def test_the_zero_convention_matters() -> None:
    """Negative control: v1 read as v2 is another matrix."""
    arrays, weight = packing.gptq(np.random.default_rng(2), ROWS, COLS, bits=4, group=32)
    linear = gptq.gptq(infos(arrays), "m", bits=4, zero_offset=0, ordered=False)
    assert not np.array_equal(linear.dequantize(arrays, 0, ROWS), weight)


def test_awq() -> None:
    arrays, weight = packing.awq(np.random.default_rng(3), ROWS, COLS, 32)
    linear = gptq.awq(infos(arrays), "m")
    assert str(linear.packed) == "i4 in groups of 32"
    check(linear, arrays, weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized(bits: int, symmetric: bool) -> None:
    arrays, weight = packing.pack_quantized(
        np.random.default_rng(4), ROWS, COLS, bits=bits, group=32, symmetric=symmetric
    )
    linear = compressed.packed_integers(infos(arrays), (ROWS, COLS), "m")
    assert linear.packed is not None
    check(linear, arrays, weight)


@pytest.mark.parametrize("shape", [(1,), (ROWS, 1), (ROWS, 2)])
def test_int_quantized(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    arrays = {
        "weight": rng.integers(-128, 128, (ROWS, COLS)).astype(np.int8),
        "weight_scale": rng.random(shape).astype(np.float32),
    }
    scales = np.broadcast_to(
        arrays["weight_scale"].reshape(shape if len(shape) == 2 else (1, 1)), (ROWS, shape[-1])
    )
    spread = np.repeat(scales, COLS // shape[-1], axis=1)
    check(
        compressed.scaled_integers(infos(arrays), "m"), arrays, spread * arrays["weight"].astype(np.float32)
    )


@pytest.mark.parametrize("kind", ["tensor", "output", "blocks"])
def test_float_quantized(kind: str) -> None:
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 256, (ROWS, COLS)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    plain = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    shape = {"tensor": (1,), "output": (ROWS, 1), "blocks": (3, 2)}[kind]
    scales = rng.random(shape).astype(np.float32)
    if kind == "blocks":
        weight = plain * np.kron(scales, np.ones((20, 48), np.float32))[:ROWS, :COLS]
    else:
        weight = plain * scales
    arrays: dict[str, Any] = {"weight": codes, "weight_scale_inv": scales}
    stored = infos(arrays) | {"weight": Stored("F8_E4M3", codes.shape)}
    check(compressed.scaled_floats(stored, "m", (20, 48) if kind == "blocks" else None), arrays, weight)


def test_every_e4m3_number() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(compressed.E4M3, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_four_bits(nested: bool) -> None:
    arrays, weight = packing.nf4(np.random.default_rng(7), ROWS, COLS, nested=nested)
    state = arrays["weight.quant_state.bitsandbytes__nf4"].tobytes()
    check(bitsandbytes.four_bit(infos(arrays), state, "m"), arrays, weight)


def test_bitsandbytes_eight_bits() -> None:
    rng = np.random.default_rng(8)
    arrays = {
        "weight": rng.integers(-127, 128, (ROWS, COLS)).astype(np.int8),
        "SCB": rng.random(ROWS).astype(np.float32),
    }
    weight = arrays["weight"].astype(np.float32) * arrays["SCB"][:, None] * np.float32(1 / 127)
    check(bitsandbytes.eight_bit(infos(arrays), "m"), arrays, weight)


def settings(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: arrays[name] for name in hqq.SETTINGS if name in arrays}


@pytest.mark.parametrize("bits", hqq.HQQ_BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq(bits: int, axis: int) -> None:
    arrays, weight = packing.hqq(np.random.default_rng(bits), ROWS, COLS, bits=bits, group=32, axis=axis)
    linear = hqq.hqq(infos(arrays), settings(arrays), "m")
    np.testing.assert_array_equal(linear.dequantize(arrays, 0, ROWS), weight)
    np.testing.assert_array_equal(linear.dequantize(arrays, 5, 30), weight[5:30])
    assert (linear.packed is not None) == (axis == 1)
    if linear.packed is not None and linear.packed.groups is not None:
        found = dequantize(linear.packed.groups, 8 if bits == 8 else 4, linear.codes(arrays, 5, 30))
        np.testing.assert_allclose(found, weight[5:30], rtol=0, atol=2e-6 * np.abs(weight).max())


def test_hqq_words_viewed_as_floats() -> None:
    arrays, weight = packing.hqq(np.random.default_rng(0), ROWS, COLS, bits=4, group=64)
    viewed = arrays | {"W_q": arrays["W_q"].view(np.float16)}
    linear = hqq.hqq(infos(viewed), settings(viewed), "m")
    np.testing.assert_array_equal(linear.dequantize(viewed, 0, ROWS), weight)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", None, "m: scale is missing"),
        ("W_q", np.zeros((3, 4), np.uint8), "m: W_q: 12 bytes, but 4 bits"),
        ("zero", np.zeros((5, 1), np.float16), "m: zero: shape"),
        ("scale", np.zeros((1, 96), np.float16), "m: scale: shape .* axis 1"),
        ("nbits", np.array(5, np.int32), "nbits 5"),
        ("axis", np.array(2, np.int32), "axis 2"),
        ("nbits", np.array(4.0, np.float32), "nbits: is missing, or has no integers"),
        ("shape", np.array([2**40, 2], np.int64), "m: shape, nbits, axis"),
        ("quant_scale", np.array(1, np.uint8), "quantized scales are not supported"),
    ],
)
def test_hqq_arrays_that_do_not_fit_are_named(name: str, value: np.ndarray | None, message: str) -> None:
    arrays, _ = packing.hqq(np.random.default_rng(1), ROWS, COLS, bits=4, group=32)
    changed = {key: array for key, array in arrays.items() if key != name or value is not None}
    if value is not None:
        changed[name] = value
    with pytest.raises(CheckpointError, match=message):
        hqq.hqq(infos(changed), settings(changed), "m")


def broken(arrays: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> dict[str, Stored]:
    changed = {key: array for key, array in arrays.items() if key != name}
    return infos(changed if value is None else changed | {name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scales", None, "m: scales is missing"),
        ("qweight", np.zeros((8, 4), np.float32), "m: qweight: dtype F32 is not I32"),
        ("qzeros", np.zeros((3, 3), np.int32), "m: qzeros: shape"),
        ("scales", np.zeros((99, ROWS), np.float16), "m: 99 groups of 64"),
        ("g_idx", np.zeros(5, np.int32), "m: g_idx: shape"),
        ("qweight", np.zeros(8, np.int32), "m: qweight and scales are not matrices"),
    ],
)
def test_arrays_that_do_not_fit_are_named(name: str, value: np.ndarray | None, message: str) -> None:
    arrays, _ = packing.gptq(np.random.default_rng(9), ROWS, COLS, bits=4, group=32)
    with pytest.raises(CheckpointError, match=message):
        gptq.gptq(broken(arrays, name, value), "m", bits=4, zero_offset=1, ordered=False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"no", "not valid JSON"),
        (b'{"shape": [8]}', "shape: is not a pair"),
        (b'{"shape": [8, 9999999999], "blocksize": 64}', "is not in"),
        (b'{"shape": [1000, 1000], "blocksize": 64}', "weight: shape"),
        (b'{"shape": [48, 64], "blocksize": 0}', "blocksize: 0 is not in"),
        (b'{"shape": [48, 64], "blocksize": 32}', "weight.absmax: shape"),
    ],
)
def test_states_that_do_not_fit_are_named(state: bytes, message: str) -> None:
    arrays, _ = packing.nf4(np.random.default_rng(10), ROWS, COLS, nested=False)
    with pytest.raises(CheckpointError, match=message):
        bitsandbytes.four_bit(infos(arrays), state, "m")
