"""bitsandbytes checkpoints: 4-bit floats in blocks (QLoRA, arXiv 2305.14314) and LLM.int8 (2208.07339).

4 bits: `weight` is one stream of nibbles, the upper one first, each an index into `weight.quant_map`; every block of
`blocksize` values has a scale in `weight.absmax`. With double quantization absmax is itself 8-bit: an index into
`weight.nested_quant_map`, times `weight.nested_absmax` of its block, plus `nested_offset`. Sizes are in the JSON of
`weight.quant_state.bitsandbytes__nf4` or `…fp4`.

8 bits: `weight` int8 [out, in], `SCB` the largest magnitude of each output: value = weight · SCB / 127.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.quant.linear_codes import F32, Array, Arrays, Stored, check_shape, need
from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.types import CheckpointError
from quire.util.strict_json import parse_json_object

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
FOUR_BIT_PARTS = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    *STATES,
)
EIGHT_BIT_PARTS = ("weight", "SCB", "weight_format")
MAX_STATE_BYTES = 4096
_MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class FourBit:
    """One linear. `nested` is the block size of the nested scales, 0 without; `offset` is added to them."""

    label: str
    shape: tuple[int, int]
    block: int
    nested: int
    offset: float

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        cols = self.shape[1]
        first, last = start * cols, stop * cols
        data = arrays["weight"].reshape(-1)[first // 2 : -(-last // 2)]
        codes = np.stack([data >> 4, data & 15], axis=1).reshape(-1)[first % 2 :][: last - first]
        blocks = np.arange(first // self.block, -(-last // self.block))
        scales = np.repeat(self._absmax(arrays, blocks), self.block)[first - blocks[0] * self.block :][
            : last - first
        ]
        values: F32 = arrays["weight.quant_map"].reshape(-1).astype(np.float32)[codes] * scales
        return values.reshape(stop - start, cols)

    def _absmax(self, arrays: Arrays, blocks: Array) -> F32:
        stored = arrays["weight.absmax"].reshape(-1)[blocks]
        if not self.nested:
            return stored.astype(np.float32)
        scales = arrays["weight.nested_absmax"].reshape(-1)[blocks // self.nested]
        levels = arrays["weight.nested_quant_map"].reshape(-1)[stored]
        found: F32 = levels * scales + np.float32(self.offset)
        return found


def four_bit(infos: Mapping[str, Stored], state: bytes, where: str) -> FourBit:
    """Build a linear from stored arrays; `state` are the bytes of its quant_state."""
    reader = ConfigReader(parse_json_object(state, f"{where}: quant_state"), f"{where}: quant_state")
    sizes = reader.values.get("shape")
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise reader.error("shape", "is not a pair of sizes")
    pair = ConfigReader({f"shape[{i}]": size for i, size in enumerate(sizes)}, reader.where)
    rows, cols = (pair.integer(key, high=_MAX_SIZE) for key in pair.values)
    block = reader.integer("blocksize", high=2**16)
    nested = reader.integer("nested_blocksize", 0, low=0, high=2**16)
    blocks = -(-rows * cols // block)
    weight = need(infos, "weight", ("U8",), where)
    if weight.shape != (-(-rows * cols // 2), 1):
        raise CheckpointError(f"{where}: weight: shape {list(weight.shape)} for [{rows}, {cols}]")
    check_shape(need(infos, "weight.quant_map", ("F32",), where), (16,), "weight.quant_map", where)
    check_shape(
        need(infos, "weight.absmax", ("U8",) if nested else ("F32",), where),
        (blocks,),
        "weight.absmax",
        where,
    )
    if nested:
        shape = (-(-blocks // nested),)
        check_shape(
            need(infos, "weight.nested_absmax", ("F32",), where), shape, "weight.nested_absmax", where
        )
        check_shape(
            need(infos, "weight.nested_quant_map", ("F32",), where), (256,), "weight.nested_quant_map", where
        )
    kind = reader.string("quant_type", "nf4")
    offset = reader.number("nested_offset", 0.0, low=-1e30, high=1e30)
    return FourBit(f"bitsandbytes {kind} in blocks of {block}", (rows, cols), block, nested, offset)


@dataclass(frozen=True, slots=True)
class EightBit:
    """One linear of LLM.int8."""

    label: str
    shape: tuple[int, int]

    def dequantize(self, arrays: Arrays, start: int, stop: int) -> F32:
        scales = arrays["SCB"][start:stop, None].astype(np.float32)
        values: F32 = arrays["weight"][start:stop].astype(np.float32) * scales * np.float32(1 / 127)
        return values


def eight_bit(infos: Mapping[str, Stored], where: str) -> EightBit:
    """Build a linear from stored arrays."""
    weight = need(infos, "weight", ("I8",), where)
    if len(weight.shape) != 2:
        raise CheckpointError(f"{where}: weight: shape {list(weight.shape)} is not a matrix")
    check_shape(need(infos, "SCB", ("F32",), where), weight.shape[:1], "SCB", where)
    return EightBit("bitsandbytes int8 per output", (weight.shape[0], weight.shape[1]))
