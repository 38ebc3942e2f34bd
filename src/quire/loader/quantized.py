"""Quantized weights of a safetensors checkpoint under the names of plain weights.

A quantized linear `P` is stored as several arrays (`P.qweight`, `P.scales`, …). They become one float32 tensor
`P.weight`, dequantized block by block as it is read; everything else passes through. Stacked experts `P_blocks` and
`P_scales` become one tensor `P` [experts, out features, in features].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from quire.loader.source import Array, Source, TensorInfo
from quire.program.formats import WeightFormat
from quire.quant import bitsandbytes, compressed, gptq, hqq, mxfp4
from quire.quant.groups import GroupCodes
from quire.quant.linear_codes import PackedLinear, QuantizedLinear, Stored
from quire.spec.config_reader import show
from quire.spec.quantization import Quantization
from quire.types import CheckpointError

Infos = Mapping[str, Stored]
_MAX_SETTING = 8  # numbers in a tensor of settings


class QuantizedSource:
    """A checkpoint with quantized linears, read as floats, or as codes if kernels support them. Implements Source.

    Raises CheckpointError naming the tensor for arrays that are missing or have the wrong type or shape.
    """

    def __init__(self, source: Source, quantization: Quantization) -> None:
        self._source, self._quantization = source, quantization
        self._linears: dict[str, QuantizedLinear] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._parts: dict[str, dict[str, str]] = {}  # "P.weight" -> suffix after P -> stored name
        reader = _READERS[quantization.layout]
        taken: set[str] = set()
        for prefix, parts in self._modules(reader).items():
            infos = {part: self._stored(name) for part, name in parts.items()}
            if not reader.is_quantized(infos):
                continue
            name = f"{prefix}{reader.plain}"
            self._linears[name] = reader.read(self, prefix, infos)
            self._parts[name] = parts
            taken.update(parts.values())
        self._names = [name for name in source.names() if name not in taken] + list(self._linears)
        if not self._linears:
            raise CheckpointError(
                f"config.json: quantization_config: no tensor has the format of {quantization.method}"
            )

    @property
    def quantization(self) -> Quantization:
        return self._quantization

    def stored_parts(self) -> tuple[Source, list[str]]:
        """The arrays of quantized weights: their source, and their names there."""
        return self._source, [name for parts in self._parts.values() for name in parts.values()]

    def _modules(self, reader: _Reader) -> dict[str, dict[str, str]]:
        """Module name -> its arrays by suffix."""
        found: dict[str, dict[str, str]] = {}
        longest_first = sorted(reader.parts, key=len, reverse=True)
        for name in self._source.names():
            part = next((part for part in longest_first if name.endswith(f"{reader.joint}{part}")), None)
            if part is not None:
                found.setdefault(name[: -len(part) - 1], {})[part] = name
        return found

    def _stored(self, name: str) -> Stored:
        info = self._source.info(name)
        return Stored(info.dtype, info.shape)

    def array(self, prefix: str, part: str) -> Array:
        """Read a small stored array, for readers that need its content."""
        return self._source.read(f"{prefix}.{part}")

    def names(self) -> Iterable[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        linear = self._linears.get(name)
        if linear is None:
            return self._source.info(name)
        found = self._infos.get(name)
        if found is None:
            size = sum(self._source.info(part).nbytes for part in self._parts[name].values())
            found = self._infos[name] = TensorInfo(name, "F32", linear.shape, linear.label, size)
        return found

    def packed(self, name: str) -> WeightFormat | None:
        """The format in groups in which `read_codes` returns a tensor; None if there is none."""
        packed: WeightFormat | None = getattr(self._linears.get(name), "packed", None)
        return packed

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        linear = self._linears.get(name)
        if linear is None:
            return self._source.read(name, start, stop)
        start, stop = self.info(name).rows(start, stop)
        with np.errstate(invalid="ignore", over="ignore"):  # loading finds NaN and infinity
            return np.ascontiguousarray(linear.dequantize(self._arrays(name), start, stop))

    def read_codes(self, name: str, start: int, stop: int) -> GroupCodes:
        """Rows [start, stop) in the format `packed(name)`."""
        linear = self._linears[name]
        assert isinstance(linear, PackedLinear)
        return linear.codes(self._arrays(name), start, stop)

    def _arrays(self, name: str) -> dict[str, Array]:
        return {part: self._source.read(stored) for part, stored in self._parts[name].items()}

    def release(self, name: str) -> None:
        for stored in self._parts.get(name, {"": name}).values():
            self._source.release(stored)


class _Reader:
    """Finds and reads one layout: `parts` are the arrays of a module, `is_quantized` detects a quantized one.

    An array is named by the module's name, `joint` and the part; the weight by the module's name and `plain`.
    """

    def __init__(
        self,
        parts: tuple[str, ...],
        is_quantized: Callable[[Infos], bool],
        read: Callable[[QuantizedSource, str, Infos], QuantizedLinear],
        *,
        joint: str = ".",
        plain: str = ".weight",
    ) -> None:
        self.parts, self.is_quantized, self.read = parts, is_quantized, read
        self.joint, self.plain = joint, plain


def _gptq(source: QuantizedSource, prefix: str, infos: Infos) -> QuantizedLinear:
    found = source.quantization
    return gptq.gptq(
        infos,
        prefix,
        bits=found.bits or gptq.bits_of(infos, prefix),
        zero_offset=found.zero_offset,
        ordered=found.ordered,
        symmetric=found.symmetric,
    )


def _awq(_source: QuantizedSource, prefix: str, infos: Infos) -> QuantizedLinear:
    return gptq.awq(infos, prefix)


def _compressed(source: QuantizedSource, prefix: str, infos: Infos) -> QuantizedLinear:
    if "weight_packed" in infos and infos["weight_packed"].dtype == "U8":
        if "weight_global_scale" in infos:
            raise CheckpointError(f"{prefix}: weight_global_scale: NVFP4 is not supported")
        return mxfp4.mxfp4_linear(infos, prefix)
    if "weight_packed" in infos:
        shape = infos.get("weight_shape")
        if shape is None or shape.dtype not in {"I64", "I32"} or shape.shape != (2,):
            raise CheckpointError(f"{prefix}: weight_shape: is not a pair of integers")
        rows, cols = (int(size) for size in source.array(prefix, "weight_shape"))
        return compressed.packed_integers(infos, (rows, cols), prefix)
    if infos["weight"].dtype == "I8":
        return compressed.scaled_integers(infos, prefix)
    return compressed.scaled_floats(infos, prefix, source.quantization.block)


def _bitsandbytes(source: QuantizedSource, prefix: str, infos: Infos) -> QuantizedLinear:
    if "SCB" in infos:
        return bitsandbytes.eight_bit(infos, prefix)
    name = next((name for name in bitsandbytes.STATES if name in infos), None)
    if name is None or infos[name].dtype != "U8" or infos[name].shape[0] > bitsandbytes.MAX_STATE_BYTES:
        raise CheckpointError(f"{prefix}: no {show(bitsandbytes.STATES[0])} of at most 4096 bytes")
    return bitsandbytes.four_bit(infos, source.array(prefix, name).tobytes(), prefix)


def _hqq(source: QuantizedSource, prefix: str, infos: Infos) -> QuantizedLinear:
    settings = {}
    for part in hqq.SETTINGS:
        if part in infos:
            if math.prod(infos[part].shape) > _MAX_SETTING:
                raise CheckpointError(
                    f"{prefix}: {part}: shape {list(infos[part].shape)} is not that of a setting"
                )
            settings[part] = source.array(prefix, part)
    return hqq.hqq(infos, settings, prefix)


def _is_scaled(infos: Infos) -> bool:
    return "weight_packed" in infos or (
        "weight" in infos and infos["weight"].dtype in {"I8", "F8_E4M3"} and len(infos) > 1
    )


_READERS = {
    "gptq": _Reader(gptq.GPTQ_PARTS, lambda infos: "qweight" in infos, _gptq),
    "awq": _Reader(gptq.AWQ_PARTS, lambda infos: "qweight" in infos, _awq),
    "compressed": _Reader(compressed.PACKED_PARTS + compressed.SCALED_PARTS, _is_scaled, _compressed),
    "fp8": _Reader(compressed.SCALED_PARTS, _is_scaled, _compressed),
    "bitsandbytes": _Reader(
        bitsandbytes.FOUR_BIT_PARTS + bitsandbytes.EIGHT_BIT_PARTS,
        lambda infos: "weight.absmax" in infos or "SCB" in infos,
        _bitsandbytes,
    ),
    "hqq": _Reader(hqq.HQQ_PARTS, lambda infos: "W_q" in infos, _hqq),
    "mxfp4": _Reader(
        mxfp4.MXFP4_PARTS,
        lambda infos: "blocks" in infos,
        lambda _source, prefix, infos: mxfp4.mxfp4(infos, prefix),
        joint="_",
        plain="",
    ),
}
