"""Random weights in any kind of groups, as a quantized checkpoint would hold them."""

from __future__ import annotations

import numpy as np

from quire.program.tensors import Param
from quire.quant import GroupCodes


def codes_of(param: Param, seed: int) -> GroupCodes:
    """Random codes, scales and offsets of either sign in a parameter's format."""
    assert param.groups is not None
    form, random = param.groups, np.random.default_rng(seed)
    shape = (param.rows, form.count(param.cols))

    def numbers(kind: str) -> np.ndarray | None:
        if kind == "none":
            return None
        if kind in {"u8", "f16*u8"}:
            return random.integers(0, min(64, 1 << param.code_bits) if kind == "u8" else 64, shape, np.uint8)
        values = (random.standard_normal(shape) * 0.05).astype(np.float32)
        if kind == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16 if kind == "f16" else np.float32)

    codes = random.integers(0, 1 << param.code_bits, (param.rows, param.cols), np.uint8)
    scales, offsets = numbers(form.scales), numbers(form.offsets)
    assert scales is not None
    factors = None
    if form.two_level:
        each = (param.rows, -(-shape[1] // 8), 1 + (offsets is not None))
        factors = (random.standard_normal(each) * 0.002).astype(np.float16)
    return GroupCodes(codes, scales, offsets, factors)
