"""Weights in groups: values of codes by hand, rounding near its optimum, and refusals that name the field."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.program.formats import CODES, Groups, WeightFormat
from quire.program.tensors import Param, Part
from quire.quant import GroupCodes, check_codes, dequantize, quantize
from quire.quant.groups import input_share, rotate, weight_share


def weights(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.square(a - b).sum() / np.square(a).sum()))


def test_values_of_codes_by_hand() -> None:
    codes = np.array([[0, 8, 15, 1] + [8] * 12 + [3, 5]], np.uint8)  # two groups, the second of two features
    half = np.array([[0.5, -2.0]], np.float16)
    found = dequantize(Groups(16, "f16"), 4, GroupCodes(codes, half))
    assert found[0, :4].tolist() == [-4.0, 0.0, 3.5, -3.5]
    assert found[0, 16:].tolist() == [10.0, 6.0]
    zeros = np.array([[1, 5]], np.uint8)
    found = dequantize(Groups(16, "f16", "u8"), 4, GroupCodes(codes, half, zeros))
    assert found[0, [0, 2, 16, 17]].tolist() == [-0.5, 7.0, 4.0, 0.0]
    minimum = np.array([[-1.25, 3.0]], np.float32)
    single = half.astype(np.float32)
    found = dequantize(Groups(16, "f32", "f32"), 4, GroupCodes(codes, single, minimum))
    assert found[0, [0, 2, 16, 17]].tolist() == [-1.25, 6.25, -3.0, -7.0]
    bits = (single.view(np.uint32) >> 16).astype(np.uint16)
    found = dequantize(Groups(16, "bf16"), 8, GroupCodes(codes, bits))
    assert found[0, [0, 16]].tolist() == [-64.0, 250.0]


def test_two_levels_are_products() -> None:
    """Nine groups of 32: the ninth has the second pair of factors. Offsets are subtracted, as in Q4_K."""
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (3, 288), np.uint8)
    scales, mins = random.integers(0, 64, (2, 3, 9), np.uint8)
    factors = random.standard_normal((3, 2, 2)).astype(np.float16)
    found = dequantize(Groups(32, "f16*u8", "f16*u8"), 4, GroupCodes(codes, scales, mins, factors))
    for row, col in ((0, 0), (1, 255), (2, 256), (2, 287)):
        g = col // 32
        d, dmin = (float(f) for f in factors[row, g // 8])
        expected = d * int(scales[row, g]) * int(codes[row, col]) - dmin * int(mins[row, g])
        assert found[row, col] == np.float32(expected)


@settings(max_examples=40)
@given(
    bits=st.sampled_from([2, 3, 4, 8]), size=st.sampled_from([16, 32, 64, 128]),
    scales=st.sampled_from(["f16", "bf16", "f32"]), offsets=st.sampled_from(["none", "u8"]),
    cols=st.integers(1, 200), exponent=st.integers(-30, 12), seed=st.integers(0, 99),
)  # fmt: skip
def test_no_other_code_is_nearer(
    bits: int, size: int, scales: str, offsets: str, cols: int, exponent: int, seed: int
) -> None:
    """With the chosen scale and zero point, every weight has its nearest code."""
    groups = Groups(max(size, 32) if bits == 3 else size, scales, offsets)  # type: ignore[arg-type]
    w = weights(3, cols, seed) * np.float32(2.0**exponent)
    made = quantize(w, groups, bits)
    check_codes(Param("w", "linear", (Part("t", 3, cols),), CODES[bits], groups), 0, made)
    far = np.abs(w - dequantize(groups, bits, made))
    for step in (-1, 1):
        other = made.codes.astype(int) + step
        inside = (other >= 0) & (other < 1 << bits)
        moved = replace(made, codes=np.clip(other, 0, (1 << bits) - 1).astype(np.uint8))
        assert (far <= np.abs(w - dequantize(groups, bits, moved)) * 1.0001 + 1e-30)[inside].all()


def test_error_of_normal_weights() -> None:
    """The documented figures, within 2 %: root mean square error of the weights' own root mean square."""
    w = weights(64, 4096)
    for size, offsets, expected in ((32, "none", 0.0824), (64, "none", 0.0905), (128, "none", 0.0970),
                                    (32, "u8", 0.0782), (128, "u8", 0.0953)):  # fmt: skip
        groups = Groups(size, "f16", offsets)  # type: ignore[arg-type]
        found = relative(w, dequantize(groups, 4, quantize(w, groups, 4)))
        assert found == pytest.approx(expected, rel=0.02)
    plain = np.abs(w.reshape(64, -1, 32)).max(-1, keepdims=True) / 7
    rounded = (np.rint(w.reshape(64, -1, 32) / plain) * plain).reshape(w.shape)
    assert relative(w, rounded) > 1.15 * 0.0824  # negative control: the plain way is worse


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_rotated_groups(size: int) -> None:
    """The rotation is a Hadamard matrix, undone by itself; outliers cost what normal weights cost."""
    matrix = rotate(np.eye(size, dtype=np.float32))
    assert set(matrix.ravel()) == {1.0, -1.0}
    assert np.array_equal(matrix @ matrix.T, size * np.eye(size))
    assert weight_share(size) * input_share(size) == 1 / size
    w = weights(32, 512)
    outliers = np.where(np.random.default_rng(1).random(w.shape) < 0.01, w * 40, w).astype(np.float32)
    plain, rotated = Groups(size, "bf16"), Groups(size, "bf16", rotated=True)

    def error(x: np.ndarray, form: Groups) -> float:
        return relative(x, dequantize(form, 8, quantize(x, form, 8)))

    assert error(w, rotated) == pytest.approx(error(w, plain), rel=0.1)
    assert error(outliers, rotated) < (1.0 if size == 16 else 0.8) * error(outliers, plain)


def test_rotated_groups_are_whole() -> None:
    form = Groups(128, "bf16", rotated=True)
    sizes = {cols: form.fitted(cols).size for cols in (1024, 576, 160, 48)}
    assert sizes == {1024: 128, 576: 64, 160: 32, 48: 16}
    assert form.fitted(200) == Groups(16, "bf16")  # no whole groups: not rotated
    assert Groups(32).fitted(200) == Groups(32)
    with pytest.raises(ValueError, match="symmetric"):
        Groups(32, "f16", "u8", rotated=True)


def test_extremes_stay_finite() -> None:
    w = np.zeros((4, 64), np.float32)
    w[1, 3], w[2, :], w[3, 5] = 3e38, 1e-42, -7e5
    for offsets in ("none", "u8"):
        groups = Groups(32, "f16", offsets)  # type: ignore[arg-type]
        found = dequantize(groups, 4, quantize(w, groups, 4))
        assert np.isfinite(found).all()
        assert (found[0] == 0).all()
        assert (found[2] == 0).all()


def test_refusals_name_the_parameter() -> None:
    groups = Groups(32, "f16", "u8")
    param = Param("layers.0.o", "linear", (Part("t", 4, 70),), "i4", groups)
    good = quantize(weights(4, 70), groups, 4)
    check_codes(param, 0, good)
    assert good.offsets is not None
    bad = {
        r"codes are uint8 \[4, 69\]": replace(good, codes=good.codes[:, :69]),
        "codes are int8": replace(good, codes=good.codes.view(np.int8)),
        r"scales are float16 \[4, 2\]": replace(good, scales=good.scales[:, :2]),
        "scales are float32": replace(good, scales=good.scales.astype(np.float32)),
        "offsets missing": replace(good, offsets=None),
        "offsets are int16": replace(good, offsets=good.offsets.astype(np.int16)),
        "factors not expected": replace(good, factors=np.zeros((4, 1, 2), np.float16)),
        "above 15": replace(good, codes=good.codes + np.uint8(16)),
        "NaN or infinity": replace(good, scales=good.scales * np.float16(np.nan)),
    }
    for message, given_ in bad.items():
        with pytest.raises(ValueError, match=f"layers.0.o.*{message}"):
            check_codes(param, 0, given_)
    with pytest.raises(ValueError, match=r"rows 1:5 of 4"):
        check_codes(param, 1, good)
    with pytest.raises(ValueError, match="not stored in groups"):
        check_codes(replace(param, dtype="bf16", groups=None), 0, good)


def test_impossible_formats_are_refused() -> None:
    for wrong in (
        {"size": 48},
        {"scales": "none"},
        {"offsets": "i8"},
        {"scales": "f16", "offsets": "f16*u8"},
    ):
        with pytest.raises(ValueError, match=r"size|scales|offsets"):
            Groups(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs groups"):
        WeightFormat("i4")
    with pytest.raises(ValueError, match="no groups"):
        WeightFormat("bf16", Groups())
    with pytest.raises(ValueError, match="not rounded"):
        quantize(weights(2, 32), Groups(32, "f16*u8"), 4)
