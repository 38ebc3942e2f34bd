"""`quantization_config`: the format of a checkpoint's quantized weights, and facts that the tensors do not show.

One reader per `quant_method`. Variants that are not implemented are refused by name here, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.types import UnsupportedModelError

Layout = Literal["gptq", "awq", "compressed", "fp8", "bitsandbytes", "mxfp4", "hqq"]
_MAX_BLOCK = 2**16
_MXFP4_BITS = 4


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of a checkpoint's quantized tensors.

    `method` is the name for messages; `layout` that of the tensor layout. GPTQ: `bits` (0: a
    module's own), `zero_offset` (to add to stored zero points), `ordered` (groups follow activations), `symmetric` (all
    zero points are the middle).
    FP8: `block` of outputs and input features with one scale.
    """

    method: str
    layout: Layout
    bits: int = 4
    zero_offset: int = 0
    ordered: bool = False
    symmetric: bool = False
    block: tuple[int, int] | None = None


def read_quantization(config: ConfigReader) -> Quantization | None:
    """Read the quantization of a config.json, None if its weights are plain.

    Raises UnsupportedModelError naming key and value for a method or a variant that is not implemented,
    CheckpointError for malformed values.
    """
    quant = config.child("quantization_config") or config.child("compression_config")
    if quant is None:
        return None
    method = quant.string(
        "quant_method", "compressed-tensors" if quant.has("config_groups") else "bitsandbytes"
    )
    if method not in METHODS:
        raise UnsupportedModelError(
            f"{quant.where}: quant_method = {show(method)} is not supported; supported methods are {', '.join(METHODS)}"
        )
    return METHODS[method][0](quant)


def _gptq(quant: ConfigReader) -> Quantization:
    bits = quant.integer("bits", high=32)
    if bits not in {2, 3, 4, 8}:
        raise quant.unsupported("bits", "GPTQ has 2, 3, 4 or 8")
    kind = quant.string("checkpoint_format", "gptq")
    if kind not in {"gptq", "gptq_v2"}:
        raise quant.unsupported("checkpoint_format", "implemented are gptq and gptq_v2")
    modules = _dynamic(quant)
    every = (quant, *modules)
    ordered = any(each.boolean("desc_act", False) for each in every)
    symmetric = all(each.boolean("sym", each is not quant) for each in every)
    return Quantization("GPTQ", "gptq", 0 if modules else bits, int(kind == "gptq"), ordered, symmetric)


def _dynamic(quant: ConfigReader) -> list[ConfigReader]:
    """GPTQModel's settings of modules. Tensors show which modules have them, so their patterns are not used."""
    settings = quant.child("dynamic")
    found = [] if settings is None else [settings.child(name) for name in settings.values]
    return [each for each in found if each is not None]


def _awq(quant: ConfigReader) -> Quantization:
    if quant.integer("bits", 4, high=32) != 4 or quant.integer("w_bit", 4, high=32) != 4:
        raise quant.unsupported("bits" if quant.has("bits") else "w_bit", "AWQ has 4")
    if quant.string("version", "gemm").lower() != "gemm":
        raise quant.unsupported("version", "only the gemm order is implemented")
    return Quantization("AWQ", "awq")


def _auto_round(quant: ConfigReader) -> Quantization:
    """Native auto-round: the tensors of GPTQ (v1) or AWQ, depending on `packing_format`."""
    packing = quant.string("packing_format", quant.string("backend", "auto_round:auto_gptq"))
    kind = quant.string("data_type", "int")
    if kind == "fp" and packing.endswith("fp8"):
        return replace(_fp8(quant), method="AutoRound")
    if (
        kind == "mx_fp"
        and packing.endswith("llm_compressor")
        and quant.integer("bits", high=32) == _MXFP4_BITS
    ):
        return Quantization("AutoRound", "compressed")
    if kind != "int":
        raise quant.unsupported("data_type", "implemented are int, fp of 8 bits and mx_fp of 4 bits")
    if quant.child("extra_config") is not None:
        for name, settings in (quant.child("extra_config") or quant).values.items():
            if isinstance(settings, dict) and settings.get("bits", 16) not in {16, 32}:
                raise quant.unsupported(
                    "extra_config", f"separate settings for {show(name)} are not implemented"
                )
    if packing.endswith("awq"):
        return Quantization("AutoRound", "awq")
    if not packing.endswith("gptq"):
        raise quant.unsupported(
            "packing_format", "implemented are auto_round:auto_gptq and auto_round:auto_awq"
        )
    bits = quant.integer("bits", high=32)
    if bits not in {2, 3, 4, 8}:
        raise quant.unsupported("bits", "this packing has 2, 3, 4 or 8")
    return Quantization("AutoRound", "gptq", bits, 1)


def _compressed(quant: ConfigReader) -> Quantization:
    formats = {quant.string("format", "dense")}
    groups = quant.child("config_groups")
    for name in () if groups is None else groups.values:
        group = groups.child(name) if groups is not None else None
        if group is not None:
            formats.add(group.string("format", next(iter(formats))))
    known = {
        "dense",
        "pack-quantized",
        "int-quantized",
        "naive-quantized",
        "float-quantized",
        "mxfp4-pack-quantized",
        "mixed-precision",
    }
    for kind in sorted(formats - known):
        raise quant.unsupported("format", f"{show(kind)}: implemented are {', '.join(sorted(known))}")
    for key in ("sparsity_config", "transform_config"):
        child = quant.child(key)
        if (
            child is not None
            and child.string("format", "") != "dense"
            and child.values.get("config_groups") != {}
        ):
            raise quant.unsupported(key, "sparse weights and rotations are not implemented")
    if quant.has("kv_cache_scheme"):
        quant.notices.append(
            f"{quant.where}: kv_cache_scheme is ignored: --kv-cache-dtype sets the format of the cache"
        )
    return Quantization("compressed-tensors", "compressed", block=_block_structure(groups))


def _block_structure(groups: ConfigReader | None) -> tuple[int, int] | None:
    """The common block shape of weights with strategy "block"."""
    for name in () if groups is None else groups.values:
        group = groups.child(name) if groups is not None else None
        weights = None if group is None else group.child("weights")
        if weights is not None and weights.has("block_structure"):
            return _pair(weights, "block_structure")
    return None


def _fp8(quant: ConfigReader) -> Quantization:
    if quant.string("fmt", "e4m3") not in {"e4m3", "float8_e4m3fn"}:
        raise quant.unsupported("fmt", "only e4m3 is implemented")
    block = _pair(quant, "weight_block_size") if quant.has("weight_block_size") else None
    return Quantization("FP8", "fp8", block=block)


def _fbgemm_fp8(_quant: ConfigReader) -> Quantization:
    """One scale per output; the bound of activation scales is not applied."""
    return Quantization("FBGEMM FP8", "fp8")


def _modelopt(quant: ConfigReader) -> Quantization:
    if quant.string("quant_algo", "FP8") != "FP8":
        raise quant.unsupported("quant_algo", "only FP8 is implemented")
    return Quantization("ModelOpt FP8", "fp8")


def _bitsandbytes(quant: ConfigReader) -> Quantization:
    if not quant.boolean("load_in_4bit", False) and not quant.boolean("load_in_8bit", False):
        raise quant.unsupported("load_in_4bit", "neither load_in_4bit nor load_in_8bit is set")
    return Quantization("bitsandbytes", "bitsandbytes")


def _mxfp4(_quant: ConfigReader) -> Quantization:
    """Blocks of 32 with one exponent each; `modules_to_not_convert` repeats what the tensors show."""
    return Quantization("MXFP4", "mxfp4")


def _hqq(_quant: ConfigReader) -> Quantization:
    """Every tensor has its bits and groups; `quant_config` and `skip_modules` only repeat them."""
    return Quantization("HQQ", "hqq")


def _pair(reader: ConfigReader, key: str) -> tuple[int, int]:
    sizes = reader.values.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise reader.error(key, f"{show(sizes)} is not a pair of sizes")
    pair = ConfigReader({f"{key}[{i}]": size for i, size in enumerate(sizes)}, reader.where)
    return pair.integer(f"{key}[0]", high=_MAX_BLOCK), pair.integer(f"{key}[1]", high=_MAX_BLOCK)


# quant_method -> its reader, and a description of the supported variants.
METHODS: dict[str, tuple[Callable[[ConfigReader], Quantization], str]] = {
    "gptq": (
        _gptq,
        "2, 3, 4, 8 bits, by module too; checkpoint_format gptq (v1) and gptq_v2; desc_act with g_idx",
    ),
    "awq": (_awq, "4 bits, version gemm"),
    "auto-round": (
        _auto_round,
        "packing auto_round:auto_gptq (2, 3, 4, 8 bits), auto_round:auto_awq, auto_round:fp8, MXFP4",
    ),
    "intel/auto-round": (_auto_round, "older name of auto-round"),
    "compressed-tensors": (
        _compressed,
        "pack-quantized (4, 8 bits), int-quantized and naive-quantized int8, float-quantized E4M3 per tensor, output, "
        "group or block, mxfp4-pack-quantized",
    ),
    "fp8": (_fp8, "E4M3 with weight_scale, or weight_scale_inv in blocks (DeepSeek-V3)"),
    "fbgemm_fp8": (_fbgemm_fp8, "E4M3 with weight_scale per output"),
    "modelopt": (_modelopt, "quant_algo FP8: E4M3 with weight_scale per tensor"),
    "bitsandbytes": (_bitsandbytes, "nf4 and fp4 with or without double quantization, LLM.int8"),
    "hqq": (_hqq, "1, 2, 3, 4, 8 bits along either axis, with unquantized scales"),
    "mxfp4": (_mxfp4, "stacked experts as gpt-oss stores them (`_blocks`, `_scales`)"),
}
