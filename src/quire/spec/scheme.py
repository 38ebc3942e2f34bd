"""The scheme of a checkpoint's weights in the field's words: W4A16 g128 sym, W8A8 dynamic, W8A8-FP8 static.

W4A16: weights of 4 bits, activations of 16; W3/4/8A16: linears differ in bits. g128: 128 input features share a scale.
sym: the grid is symmetric around zero. dynamic: activations are rounded with the scale of each token, static: with one
that is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.spec.config_reader import ConfigReader

_BITS = 64
_GROUP = 2**20


def scheme(config: Mapping[str, object]) -> str | None:
    """The scheme that a config.json describes; None if its weights are plain. See the module.

    For configs that read_quantization accepts. Raises CheckpointError for a value of a wrong type.
    """
    reader = ConfigReader(config)
    quant = reader.child("quantization_config") or reader.child("compression_config")
    if quant is None:
        return None
    default = "compressed-tensors" if quant.has("config_groups") else "bitsandbytes"
    method = quant.string("quant_method", default)
    describe = _METHODS.get(method)
    return method if describe is None else describe(quant)


def _words(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _group(size: int) -> str:
    """A group of -1 or 0 is a whole output channel."""
    return f"g{size}" if size > 0 else "channel"


def _symmetry(symmetric: bool) -> str:
    return "sym" if symmetric else "asym"


def _gptq(quant: ConfigReader) -> str:
    settings = quant.child("dynamic")
    modules = [] if settings is None else [settings.child(name) for name in settings.values]
    bits = quant.integer("bits", 4, high=_BITS)
    widths = {bits, *(each.integer("bits", bits, high=_BITS) for each in modules if each is not None)}
    return _words(
        f"W{'/'.join(map(str, sorted(widths)))}A16",
        _group(quant.integer("group_size", -1, low=-1, high=_GROUP)),
        _symmetry(quant.boolean("sym", True)),
        "desc_act" if quant.boolean("desc_act", False) else "",
    )


def _awq(quant: ConfigReader) -> str:
    bits = quant.integer("bits" if quant.has("bits") else "w_bit", 4, high=_BITS)
    size = quant.integer(
        "group_size" if quant.has("group_size") else "q_group_size", 128, low=-1, high=_GROUP
    )
    return _words(f"W{bits}A16", _group(size), _symmetry(not quant.boolean("zero_point", True)))


def _auto_round(quant: ConfigReader) -> str:
    if quant.string("data_type", "int") == "fp":
        return "W8A8-FP8 dynamic"
    return _gptq(quant)


def _compressed(quant: ConfigReader) -> str:
    groups = quant.child("config_groups")
    found = []
    for name in () if groups is None else groups.values:
        group = groups.child(name) if groups is not None else None
        weights = None if group is None else group.child("weights")
        if group is not None and weights is not None:
            found.append(_compressed_group(weights, group.child("input_activations")))
    return ", ".join(dict.fromkeys(found)) or "compressed-tensors"


def _compressed_group(weights: ConfigReader, inputs: ConfigReader | None) -> str:
    bits, floats = weights.integer("num_bits", 8, high=_BITS), weights.string("type", "int") == "float"
    of_inputs = 16 if inputs is None else inputs.integer("num_bits", 8, high=_BITS)
    kind = f"-{'MXFP4' if bits == 4 else 'FP8'}" if floats else ""
    strategy = weights.string("strategy", "channel")
    size = weights.integer("group_size", -1, low=-1, high=_GROUP) if weights.has("group_size") else -1
    shape = _group(size) if strategy in {"group", "tensor_group"} else strategy
    dynamic = "" if inputs is None else "dynamic" if inputs.values.get("dynamic", False) else "static"
    return _words(
        f"W{bits}A{of_inputs}{kind}",
        shape,
        "" if floats else _symmetry(weights.boolean("symmetric", True)),
        dynamic,
    )


def _fp8(quant: ConfigReader) -> str:
    block = quant.values.get("weight_block_size")
    shape = "x".join(map(str, block)) if isinstance(block, list) else "tensor"
    return _words(
        "W8A8-FP8", f"block {shape}" if block else shape, quant.string("activation_scheme", "dynamic")
    )


def _bitsandbytes(quant: ConfigReader) -> str:
    if quant.boolean("load_in_8bit", False):
        return "W8A8 LLM.int8 channel"
    double = ", double quantization" if quant.boolean("bnb_4bit_use_double_quant", False) else ""
    return f"W4A16 {quant.string('bnb_4bit_quant_type', 'fp4').upper()} g64{double}"


def _hqq(quant: ConfigReader) -> str:
    settings = quant.child("quant_config")
    weights = None if settings is None else settings.child("weight_quant_params")
    if weights is None:
        return "HQQ"
    bits, size = (
        weights.integer("nbits", 4, high=_BITS),
        weights.integer("group_size", 64, low=-1, high=_GROUP),
    )
    return f"W{bits}A16 {_group(size)} asym"


_METHODS: dict[str, Callable[[ConfigReader], str]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: "W8A8-FP8 channel dynamic",
    "modelopt": lambda _: "W8A8-FP8 tensor static",
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "mxfp4": lambda _: "W4A16-MXFP4 g32",
}
