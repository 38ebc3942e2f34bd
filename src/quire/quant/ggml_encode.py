"""Rounding floats to the tensor types of GGUF files; see quant.ggml for what their bytes mean.

Scales are searched as llama.cpp does (ggml-quants.c): some candidates for the scale of a group, codes for each, then
the scale (and offset) of least squares for those codes; the candidate of least weighted error stays. Weights of the
error are the importance of a column (the mean square of its inputs) times a number that grows with the value; see
`_weights`. The scales of a block are then rounded together, and codes once more for the scales as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.quant.floats import to_q8_0
from quire.quant.ggml import NON_LINEAR, READ_TYPES

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_PIECE_VALUES = 2**16


def encode(values: F32, kind: str, importance: F32 | None = None) -> U8:
    """Round [rows, cols] to blocks [rows, bytes per row] of a type of ENCODED_TYPES; `importance` is of columns [cols].

    Raises ValueError unless the columns are whole blocks.
    """
    rows, cols = values.shape
    block = READ_TYPES[kind]
    if cols % block.values:
        raise ValueError(f"{cols} columns are not whole blocks of {block.values}, as {kind} needs")
    out = np.empty((rows, cols // block.values * block.nbytes), np.uint8)
    step = max(_PIECE_VALUES // cols, 1)
    for at in range(0, rows, step):
        part = np.ascontiguousarray(values[at : at + step])
        blocks = part.reshape(-1, block.values)
        if kind == "Q8_0":
            out[at : at + step] = to_q8_0(part)
            continue
        weights = _weights(part, importance).reshape(blocks.shape)
        out[at : at + step] = _ENCODERS[kind](blocks, weights).reshape(len(part), -1)
    return out


def _weights(values: F32, importance: F32 | None) -> F32:
    """The weight of each value's squared error: by its magnitude, which stands for that of its neighbours' inputs."""
    mean = np.square(values).mean(1, keepdims=True)
    if importance is None:
        found: F32 = np.sqrt(mean + np.square(values)) + np.float32(1e-30)
        return found
    sizes: F32 = np.sqrt(2 * mean + np.square(values))
    return importance * sizes + np.float32(1e-30)


# -- scales ----------------------------------------------------------------------------------------


def _inverse(x: F32) -> F32:
    found = np.zeros_like(x)
    np.divide(np.float32(1), x, out=found, where=x != 0)
    return found


def _signed_scales(x: F32, w: F32, half: int) -> F32:
    """Scales [..., 1] for codes from -half to half - 1 of groups along the last axis."""
    at = np.abs(x).argmax(-1)[..., None]
    top = np.take_along_axis(x, at, -1)
    best, found = np.full(top.shape, -1, np.float32), np.zeros_like(top)
    wx = w * x
    for step in range(-9, 10):
        inverse = -np.float32(half + 0.1 * step) * _inverse(top)
        codes = np.clip(np.rint(x * inverse), -half, half - 1)
        xl = (wx * codes).sum(-1, keepdims=True)
        ll = (w * codes * codes).sum(-1, keepdims=True)
        scale = xl * _inverse(ll)
        gain = scale * xl
        better = gain > best
        best, found = np.where(better, gain, best), np.where(better, scale, found)
    return found


def _affine_scales(x: F32, w: F32, top: int) -> tuple[F32, F32]:
    """Scales and minima [..., 1], at least 0, for codes from 0 to top: value = scale · code - minimum."""
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    width = np.maximum(high - low, np.float32(1e-30))
    sw, sx = w.sum(-1, keepdims=True), (w * x).sum(-1, keepdims=True)
    best = np.full(low.shape, np.inf, np.float32)
    scales, minima = np.zeros_like(low), -low
    wx = w * x
    for step in range(21):
        codes = np.clip(np.rint((x - low) * (np.float32(top - 0.9 + 0.05 * step) / width)), 0, top)
        wl = w * codes
        sl, sll = wl.sum(-1, keepdims=True), (wl * codes).sum(-1, keepdims=True)
        sxl = (wx * codes).sum(-1, keepdims=True)
        inverse = _inverse(sw * sll - sl * sl)
        scale, offset = (sw * sxl - sx * sl) * inverse, (sll * sx - sl * sxl) * inverse
        single = (offset > 0) | (inverse == 0)
        scale = np.where(single, sxl * _inverse(sll), scale)
        offset = np.where(single, np.float32(0), offset)
        far = scale * codes + offset - x
        error = (w * far * far).sum(-1, keepdims=True)
        better = (error < best) & (scale >= 0)
        best, scales = np.where(better, error, best), np.where(better, scale, scales)
        minima = np.where(better, -offset, minima)
    return scales, minima


def _level_scales(x: F32, w: F32) -> F32:
    """Scales [..., 1] for codes of the non-linear levels."""
    at = np.abs(x).argmax(-1)[..., None]
    top = np.take_along_axis(x, at, -1)
    best, found = np.full(top.shape, -1, np.float32), np.zeros_like(top)
    wx = w * x
    for step in range(-7, 8):
        levels = _LEVELS[_nearest_level(x * (np.float32(step + _LEVELS[0]) * _inverse(top)))]
        xl, ll = (wx * levels).sum(-1, keepdims=True), (w * levels * levels).sum(-1, keepdims=True)
        scale = xl * _inverse(ll)
        gain = scale * xl
        better = gain > best
        best, found = np.where(better, gain, best), np.where(better, scale, found)
    return found


def _factors(scales: F32, weights: F32, top: int) -> tuple[npt.NDArray[np.float16], U8]:
    """A factor float16 [n, 1] and codes from 0 to top for scales [n, groups] of a block."""
    highest = scales.max(1, keepdims=True)
    best = np.full(highest.shape, -1, np.float32)
    found, kept = np.zeros(highest.shape, np.float16), np.zeros(scales.shape, np.uint8)
    for step in range(-4, 9):
        codes = np.clip(np.rint(scales * (np.float32(top + 0.25 * step) * _inverse(highest))), 0, top)
        xl, ll = (
            (weights * scales * codes).sum(1, keepdims=True),
            (weights * codes * codes).sum(1, keepdims=True),
        )
        factor = (xl * _inverse(ll)).astype(np.float16)
        gain = 2 * factor.astype(np.float32) * xl - np.square(factor.astype(np.float32)) * ll
        better = gain > best
        best, found = np.where(better, gain, best), np.where(better, factor, found)
        kept = np.where(better, codes, kept).astype(np.uint8)
    return found, kept


# -- packing ---------------------------------------------------------------------------------------


def _half(scale: npt.NDArray[np.float16]) -> U8:
    return np.ascontiguousarray(scale, "<f2").view(np.uint8).reshape(len(scale), -1)


def _nibbles(codes: U8) -> U8:
    """[n, g, 2b] codes below 16 to [n, g, b] bytes, the first half in the low bits."""
    low, high = np.split(codes, 2, axis=-1)
    return low | (high << np.uint8(4))


def _crumbs(codes: U8) -> U8:
    """[n, 256] codes below 4 to [n, 64] bytes."""
    parts = codes.reshape(-1, 2, 4, 32)
    found = parts[:, :, 0] | (parts[:, :, 1] << 2) | (parts[:, :, 2] << 4) | (parts[:, :, 3] << 6)
    return found.astype(np.uint8).reshape(-1, 64)


def _scales_and_mins(scales: U8, mins: U8) -> U8:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    return np.concatenate(
        [
            scales[:, :4] | ((scales[:, 4:] >> 4) << 6),
            mins[:, :4] | ((mins[:, 4:] >> 4) << 6),
            (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4),
        ],
        axis=1,
    ).astype(np.uint8)


def _codes(x: F32, scale: F32, low: int, high: int) -> npt.NDArray[np.int16]:
    """Codes for scales as they are stored."""
    found: npt.NDArray[np.int16] = np.clip(np.rint(x * _inverse(scale)), low, high).astype(np.int16)
    return found


# -- types -----------------------------------------------------------------------------------------


def _q4_0(x: F32, w: F32) -> U8:
    scale = _signed_scales(x, w, 8).astype(np.float16)
    codes = (_codes(x, scale.astype(np.float32), -8, 7) + 8).astype(np.uint8)
    return np.concatenate([_half(scale), _nibbles(codes)], axis=1)


def _q5_0(x: F32, w: F32) -> U8:
    scale = _signed_scales(x, w, 16).astype(np.float16)
    codes = (_codes(x, scale.astype(np.float32), -16, 15) + 16).astype(np.uint8)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([_half(scale), fifth, _nibbles(codes & np.uint8(15))], axis=1)


def _q2_k(x: F32, w: F32) -> U8:
    x, w = x.reshape(-1, 16, 16), w.reshape(-1, 16, 16)
    factor, scales, smallest, mins = _two_levels(x, w, 3, 15)
    codes = _affine_codes(x, factor, scales, smallest, mins, 3).reshape(-1, 256)
    return np.concatenate([scales | (mins << 4), _crumbs(codes), _half(factor), _half(smallest)], axis=1)


def _q4_k(x: F32, w: F32) -> U8:
    x, w = x.reshape(-1, 8, 32), w.reshape(-1, 8, 32)
    factor, scales, smallest, mins = _two_levels(x, w, 15, 63)
    codes = _affine_codes(x, factor, scales, smallest, mins, 15)
    packed = _nibbles(codes.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate([_half(factor), _half(smallest), _scales_and_mins(scales, mins), packed], axis=1)


def _q5_k(x: F32, w: F32) -> U8:
    x, w = x.reshape(-1, 8, 32), w.reshape(-1, 8, 32)
    factor, scales, smallest, mins = _two_levels(x, w, 31, 63)
    codes = _affine_codes(x, factor, scales, smallest, mins, 31)
    fifth = np.packbits((codes >> 4).swapaxes(1, 2), axis=2, bitorder="little").reshape(-1, 32)
    packed = _nibbles((codes & np.uint8(15)).reshape(-1, 4, 64)).reshape(-1, 128)
    head = [_half(factor), _half(smallest), _scales_and_mins(scales, mins)]
    return np.concatenate([*head, fifth, packed], axis=1)


def _two_levels(
    x: F32, w: F32, top: int, most: int
) -> tuple[npt.NDArray[np.float16], U8, npt.NDArray[np.float16], U8]:
    """Factor and codes of scales, factor and codes of minima, of groups [n, groups, size]."""
    scales, minima = _affine_scales(x, w, top)
    weights = w.sum(-1)
    factor, codes = _factors(scales[..., 0], weights, most)
    smallest, mins = _factors(minima[..., 0], weights, most)
    return factor, codes, smallest, mins


def _affine_codes(
    x: F32, factor: npt.NDArray[np.float16], scales: U8, smallest: npt.NDArray[np.float16], mins: U8, top: int
) -> U8:
    scale = (factor.astype(np.float32) * scales)[..., None]
    minimum = (smallest.astype(np.float32) * mins)[..., None]
    return _codes(x + minimum, scale, 0, top).astype(np.uint8)


def _signed_levels(
    x: F32, scales: F32, half: int, low: int, high: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    """Factor float16 [n, 1], scales rounded to low … high [n, groups], and codes from -half to half - 1."""
    at = np.abs(scales).argmax(1)[:, None]
    factor = (np.take_along_axis(scales, at, 1) / np.float32(low)).astype(np.float16)
    rounded = _codes(scales, factor.astype(np.float32), low, high)
    whole = (factor.astype(np.float32) * rounded)[..., None]
    return factor, rounded, _codes(x, whole, -half, half - 1)


def _q3_k(x: F32, w: F32) -> U8:
    x, w = x.reshape(-1, 16, 16), w.reshape(-1, 16, 16)
    factor, scales, signed = _signed_levels(x, _signed_scales(x, w, 4)[..., 0], 4, -32, 31)
    codes = (signed.reshape(-1, 256) + 4).astype(np.uint8)
    high = np.packbits((codes >> 2).reshape(-1, 8, 32).swapaxes(1, 2), axis=2, bitorder="little").reshape(
        -1, 32
    )
    six = (scales + 32).astype(np.uint8)
    low = (six[:, :8] & 15) | ((six[:, 8:] & 15) << 4)
    tops = (six >> 4).reshape(-1, 4, 4)
    top = tops[:, 0] | (tops[:, 1] << 2) | (tops[:, 2] << 4) | (tops[:, 3] << 6)
    return np.concatenate(
        [high, _crumbs(codes & np.uint8(3)), low, top.astype(np.uint8), _half(factor)], axis=1
    )


def _q6_k(x: F32, w: F32) -> U8:
    x, w = x.reshape(-1, 16, 16), w.reshape(-1, 16, 16)
    factor, scales, signed = _signed_levels(x, _signed_scales(x, w, 32)[..., 0], 32, -128, 127)
    codes = (signed.reshape(-1, 2, 4, 32) + 32).astype(np.uint8)
    low = codes & 15
    nibbles = (low[:, :, :2] | (low[:, :, 2:] << 4)).reshape(-1, 128)
    high = _crumbs((codes >> np.uint8(4)).reshape(-1, 256))
    return np.concatenate([nibbles, high, scales.astype(np.int8).view(np.uint8), _half(factor)], axis=1)


_LEVELS = NON_LINEAR.astype(np.float32)
_BETWEEN = (_LEVELS[1:] + _LEVELS[:-1]) / 2


def _nearest_level(x: F32) -> U8:
    """The index of the nearest non-linear level."""
    return np.searchsorted(_BETWEEN, x).astype(np.uint8)


def _iq4_nl(x: F32, w: F32) -> U8:
    scale = _level_scales(x, w).astype(np.float16)
    return np.concatenate(
        [_half(scale), _nibbles(_nearest_level(x * _inverse(scale.astype(np.float32))))], axis=1
    )


def _iq4_xs(x: F32, w: F32) -> U8:
    x, w = x.reshape(-1, 8, 32), w.reshape(-1, 8, 32)
    scales = _level_scales(x, w)[..., 0]
    at = np.abs(scales).argmax(1)[:, None]
    factor = (np.take_along_axis(scales, at, 1) / np.float32(-32)).astype(np.float16)
    rounded = _codes(scales, factor.astype(np.float32), -32, 31)
    codes = _nearest_level(x * _inverse((factor.astype(np.float32) * rounded)[..., None]))
    six = (rounded + 32).astype(np.uint8)
    low = (six[:, 0::2] & 15) | ((six[:, 1::2] & 15) << 4)
    tops = (six >> 4).reshape(-1, 2, 4)
    high = tops[..., 0] | (tops[..., 1] << 2) | (tops[..., 2] << 4) | (tops[..., 3] << 6)
    return np.concatenate(
        [_half(factor), high.astype(np.uint8), low, _nibbles(codes).reshape(-1, 128)], axis=1
    )


_ENCODERS: dict[str, Callable[[F32, F32], U8]] = {
    "Q4_0": _q4_0, "Q5_0": _q5_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
ENCODED_TYPES = ("Q8_0", *_ENCODERS)
