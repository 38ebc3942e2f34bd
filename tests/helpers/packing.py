"""Packing numbers as quantized checkpoints store them, one number at a time: the reference for the readers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch


def pack_rows(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers [n, m] packed along n into int32 words, lowest bits first."""
    n, m = numbers.shape
    words = np.zeros((-(-n * bits // 32), m), np.uint64)
    for i in range(n):
        for bit in range(bits):
            at = i * bits + bit
            words[at // 32] |= ((numbers[i].astype(np.uint64) >> np.uint64(bit)) & np.uint64(1)) << np.uint64(
                at % 32
            )
    return words.astype(np.uint32).view(np.int32)


def gptq(rng: np.random.Generator, rows: int, cols: int, *, bits: int, group: int, offset: int = 1,
         g_idx: np.ndarray | None = None) -> tuple[dict[str, np.ndarray], np.ndarray]:  # fmt: skip
    """Random GPTQ arrays of a [rows, cols] weight, and its values by the formula, element by element."""
    groups = cols // group
    codes = rng.integers(0, 1 << bits, (cols, rows))
    zeros = rng.integers(1, 1 << bits, (groups, rows))
    scales = (rng.random((groups, rows)) * 0.02 + 0.01).astype(np.float16)
    index = np.arange(cols) // group if g_idx is None else g_idx
    weight = np.zeros((rows, cols), np.float32)
    for o in range(rows):
        for i in range(cols):
            g = index[i]
            weight[o, i] = np.float32(scales[g, o]) * np.float32(codes[i, o] - zeros[g, o])
    arrays = {
        "qweight": pack_rows(codes, bits),
        "qzeros": np.ascontiguousarray(pack_rows((zeros - offset).T, bits).T),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    return arrays, weight


def awq(
    rng: np.random.Generator, rows: int, cols: int, group: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    groups = cols // group
    codes, zeros = rng.integers(0, 16, (cols, rows)), rng.integers(0, 16, (groups, rows))
    scales = (rng.random((groups, rows)) * 0.02 + 0.01).astype(np.float16)

    def pack(numbers: np.ndarray) -> np.ndarray:
        words = np.zeros((len(numbers), rows // 8), np.uint32)
        for j in range(rows // 8):
            for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[:, j] |= numbers[:, 8 * j + column].astype(np.uint32) << np.uint32(4 * nibble)
        return words.view(np.int32)

    index = np.arange(cols) // group
    weight = scales.astype(np.float32).T[:, index] * (codes.T - zeros.T[:, index]).astype(np.float32)
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, weight


def pack_quantized(
    rng: np.random.Generator, rows: int, cols: int, *, bits: int, group: int, symmetric: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    groups, half = cols // group, 1 << (bits - 1)
    codes = rng.integers(-half, half, (rows, cols))
    scales = (rng.random((rows, groups)) * 0.02 + 0.01).astype(np.float16)
    zeros = np.zeros((rows, groups), np.int64) if symmetric else rng.integers(-half, half, (rows, groups))
    arrays = {
        "weight_packed": np.ascontiguousarray(pack_rows((codes + half).T, bits).T),
        "weight_scale": scales,
        "weight_shape": np.array([rows, cols], np.int64),
    }
    if not symmetric:
        arrays["weight_zero_point"] = pack_rows(zeros + half, bits)
    spread = np.arange(cols) // group
    weight = scales.astype(np.float32)[:, spread] * (codes - zeros[:, spread]).astype(np.float32)
    return arrays, weight


def int_quantized(
    rng: np.random.Generator, rows: int, cols: int, *, static: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """8-bit codes with a scale an output; `static` adds the scale and zero point that inputs would be rounded with."""
    arrays = {
        "weight": rng.integers(-127, 128, (rows, cols)).astype(np.int8),
        "weight_scale": (rng.random((rows, 1)) * 0.002 + 0.001).astype(np.float32),
    }
    weight = arrays["weight"].astype(np.float32) * arrays["weight_scale"]
    if static:
        arrays |= {"input_scale": np.array([0.02], np.float32), "input_zero_point": np.array([3], np.int8)}
    return arrays, weight


def fp8(
    rng: np.random.Generator, rows: int, cols: int, *, block: int = 0, whole: bool = False
) -> tuple[dict[str, np.ndarray | torch.Tensor], np.ndarray]:
    """E4M3 numbers with a scale an output, one a square block, or one of the `whole` and one of the inputs."""
    codes = torch.from_numpy(rng.normal(0, 100, (rows, cols)).clip(-448, 448)).to(torch.float8_e4m3fn)
    shape = () if whole else (-(-rows // block), -(-cols // block)) if block else (rows, 1)
    scales = np.array(rng.random(shape) * 0.0004 + 0.0002, np.float32)
    spread = scales
    if block:
        spread = np.kron(scales, np.ones((block, block), np.float32))[:rows, :cols]
    name = "weight_scale_inv" if block else "weight_scale"
    more = {"input_scale": np.array(0.02, np.float32)} if whole else {}
    return {"weight": codes, name: scales, **more}, codes.float().numpy() * spread


def mxfp4(rng: np.random.Generator, rows: int, cols: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """E2M1 numbers, two a byte, with a power of two for each 32."""
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes, exponents = rng.integers(0, 16, (rows, cols)), rng.integers(120, 124, (rows, cols // 32))
    weight = np.zeros((rows, cols), np.float32)
    for o in range(rows):
        for i in range(cols):
            sign = -1 if codes[o, i] & 8 else 1
            weight[o, i] = sign * levels[codes[o, i] & 7] * 2.0 ** (int(exponents[o, i // 32]) - 127)
    packed = (codes[:, 1::2] << 4 | codes[:, ::2]).astype(np.uint8)
    return {"weight_packed": packed, "weight_scale": exponents.astype(np.uint8)}, weight


def nf4(
    rng: np.random.Generator, rows: int, cols: int, *, nested: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    block, nested_block = 64, 256
    levels = np.sort(rng.random(16)).astype(np.float32) * 2 - 1
    codes = rng.integers(0, 16, rows * cols).astype(np.uint8)
    blocks = -(-rows * cols // block)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": block,
        "dtype": "bfloat16",
        "shape": [rows, cols],
    }
    arrays = {"weight": ((codes[::2] << 4) | codes[1::2])[:, None], "weight.quant_map": levels}
    if nested:
        indices = rng.integers(0, 256, blocks).astype(np.uint8)
        table = np.sort(rng.random(256)).astype(np.float32)
        outer = (rng.random(-(-blocks // nested_block)) * 0.1).astype(np.float32)
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.03}
        arrays |= {"weight.absmax": indices, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
        absmax = table[indices] * outer[np.arange(blocks) // nested_block] + np.float32(0.03)
    else:
        absmax = arrays["weight.absmax"] = (rng.random(blocks) * 0.1).astype(np.float32)
    arrays["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    values = [levels[code] * absmax[i // block] for i, code in enumerate(codes)]
    return arrays, np.array(values, np.float32).reshape(rows, cols)


def llm_int8(rng: np.random.Generator, rows: int, cols: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """bitsandbytes' eight bits: codes of each output in parts of its largest weight."""
    codes = rng.integers(-127, 128, (rows, cols)).astype(np.int8)
    largest = (rng.random(rows) * 0.2 + 0.1).astype(np.float32)
    values = codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)
    return {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}, values


def hqq(rng: np.random.Generator, rows: int, cols: int, *, bits: int, group: int,
        axis: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:  # fmt: skip
    """Random HQQ arrays: codes as [groups, group] or [group, groups], equal parts of the first axis in a word."""
    count = rows * cols // group
    shape = (count, group) if axis == 1 else (group, count)
    codes = rng.integers(0, 1 << bits, shape)
    each = (count, 1) if axis == 1 else (1, count)
    scales = (rng.random(each) * 0.02 + 0.005).astype(np.float16)
    zeros = (rng.random(each) * (1 << bits)).astype(np.float16)
    per = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}[bits]
    step = -(-shape[0] // per)
    words = np.zeros((step, shape[1]), np.int64)
    for i in range(shape[0]):
        words[i % step] |= codes[i] << bits * (per - 1 - i // step)
    weight = (codes.astype(np.float32) - zeros.astype(np.float32)) * scales.astype(np.float32)
    arrays = {
        "W_q": words.astype(np.int32 if bits == 3 else np.uint8), "scale": scales, "zero": zeros,
        "shape": np.array([rows, cols], np.int64), "nbits": np.array(bits, np.int32),
        "axis": np.array(axis, np.int32), "group_size": np.array(group, np.int32),
        "packing": np.frombuffer(b"4bit_u8", np.uint8).copy(), "quant_scale": np.array(0, np.uint8),
    }  # fmt: skip
    return arrays, weight.reshape(rows, cols)
