"""The scheme of a checkpoint for `quire inspect`: what is stored, what it is computed as, and bytes by part."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.engine.build.opening import Model
    from quire.loader import Source
    from quire.program.program import Program
    from quire.program.tensors import Param

_16_BITS = 2  # bytes of a weight before quantization
_PARTS = (
    "embedding",
    "head",
    "embedding, head",
    "attention",
    "experts",
    "feed-forward",
    "norms and biases",
    "others",
)
_FLOATS = {"F32": "W32A32", "F16": "W16A16", "BF16": "W16A16"}
_FLOAT_SCHEMES = {"f32": "W32A32", "bf16": "W16A16", "bf16_24": "W16A16 2:4", "f16": "W16A32"}
_FEED_FORWARD = (
    "gate_up",
    "down",
    "up",
    "shared_gate_up",
    "shared_up",
    "shared_down",
    "shared_gate",
    "router",
)


def schemes(model: Model, program: Program, source: Source | None) -> dict[str, Any]:
    """`stored` and `computed`: schemes in the field's words; `parts`: elements and bytes of each part of the model, as
    16-bit floats, stored, and in memory. Without weights nothing is known of what is stored.
    """
    return {
        "stored": None if source is None else _stored(model, source),
        "computed": _computed(program),
        "parts": _parts(model, program, source),
    }


def _stored(model: Model, source: Source) -> str:
    from quire.spec.scheme import scheme

    matrices = [info for info in map(source.info, source.names()) if len(info.shape) > 1]
    sizes: dict[str, int] = {}
    for info in matrices:
        kind = info.stored or info.dtype
        sizes[kind] = sizes.get(kind, 0) + (info.stored_bytes or info.nbytes)
    if model.gguf is not None:
        bits = 8 * sum(sizes.values()) / max(sum(math.prod(info.shape) for info in matrices), 1)
        names = sorted(sizes, key=lambda kind: -sizes[kind])
        return f"GGUF {' + '.join(names)}, {bits:.2f} bits per weight"
    config = json.loads((model.folder / "config.json").read_bytes())
    found = scheme(config.get("text_config") or {}) or scheme(config)
    main = max(sizes, key=lambda kind: sizes[kind], default="F32")
    pruned = config.get("quire_pruning")
    sparse = (
        f", {pruned.get('summary')}"
        if isinstance(pruned, dict) and isinstance(pruned.get("summary"), str)
        else ""
    )
    return (found or _FLOATS.get(main, main)) + sparse


def _computed(program: Program) -> str:
    """Of most weights of the layers' linears. Inputs of weights in groups are rounded to int8, one scale per token."""
    linears = [param for param in program.params if param.kind == "linear" and param.name != "head"]
    sizes: dict[str, int] = {}
    for param in linears:
        sizes[_of_param(param)] = sizes.get(_of_param(param), 0) + param.rows * param.cols
    return max(sizes, key=lambda name: sizes[name], default="none")


def _of_param(param: Param) -> str:
    if param.groups is None:
        return _FLOAT_SCHEMES.get(param.dtype, param.dtype)
    symmetry = "sym" if param.groups.offsets == "none" else "asym"
    return f"W{param.code_bits}A8 g{param.groups.size} {symmetry} dynamic"


def _part(param: Param, *, tied: bool) -> str:
    if param.kind == "vector":
        return "norms and biases"
    if param.kind == "table":
        return "embedding"
    if param.name == "head":
        return "embedding, head" if tied else "head"
    if param.name.rsplit(".", 1)[-1] not in _FEED_FORWARD:
        return "attention"
    return "experts" if param.experts else "feed-forward"


def _parts(model: Model, program: Program, source: Source | None) -> list[dict[str, Any]]:
    from quire.engine.build.assemble import weight_origin
    from quire.program.memory import param_bytes

    rows: dict[str, dict[str, Any]] = {
        name: {"part": name, "weights": 0, "bytes_16_bit": 0, "stored": 0, "memory": 0} for name in _PARTS
    }
    view = None if source is None else weight_origin(model).rules.view(source)
    names = {} if view is None else {name: view.info(name) for name in view.names()}
    seen: set[str] = set()
    for param in program.params:
        row = rows[_part(param, tied=model.facts.spec.tied)]
        count = param.rows * max(param.cols, 1)
        row["weights"] += count
        row["bytes_16_bit"] += _16_BITS * count
        row["memory"] += param_bytes(param)
        for part in param.parts:
            info = names.get(part.tensor)
            if info is not None and part.tensor not in seen:
                seen.add(part.tensor)
                row["stored"] += info.stored_bytes or info.nbytes
    rows["others"]["stored"] = sum(
        info.stored_bytes or info.nbytes for n, info in names.items() if n not in seen
    )
    return [row for row in rows.values() if row["weights"] or row["stored"]]


def lines(found: dict[str, Any]) -> list[str]:
    """The schemes as text."""
    total = {
        key: sum(row[key] for row in found["parts"])
        for key in ("weights", "bytes_16_bit", "stored", "memory")
    }
    stored = found["stored"] or "unknown: the weights are not here"
    rows = [f"scheme: {stored}; computed as {found['computed']}"]
    rows.append(
        f"  {'part':<16} {'weights':>13} {'in 16 bits':>11} {'stored':>11} {'bits':>6} {'in memory':>11} {'bits':>6}"
    )
    rows += [
        f"  {row['part']:<16} {row['weights']:>13,} {format_size(row['bytes_16_bit']):>11} "
        f"{format_size(row['stored']):>11} {_bits(row, 'stored'):>6} {format_size(row['memory']):>11} "
        f"{_bits(row, 'memory'):>6}"
        for row in [*found["parts"], {"part": "sum", **total}]
    ]
    return rows


def _bits(row: dict[str, Any], key: str) -> str:
    return f"{8 * row[key] / row['weights']:.2f}" if row["weights"] and row[key] else "-"


def stored_lines(stored: dict[str, Any], computed: str) -> list[str]:
    """A line for each format of stored weights; `computed` is the format of the linears."""
    return [
        f"  {name:<12} x{entry['tensors']:<4} {format_size(entry['bytes']):>11}{_how(name, entry, computed)}"
        for name, entry in stored.items()
    ]


def _how(name: str, entry: dict[str, Any], computed: str) -> str:
    """Say how weights of a quantized format are computed."""
    if name in {"F32", "F16", "BF16"}:
        return ""
    if not entry["dequantized"]:
        bits = re.search(r"\b(\d)-bit\b|^I?Q(\d)_", name)
        wider = bits is not None and int(bits[1] or bits[2]) < entry["code_bits"]
        return "  computed from their codes" + (
            f", stored as {entry['code_bits']} bits in memory" if wider else ""
        )
    if entry["dequantized"] == entry["tensors"]:
        return f"  dequantized at load, linears computed in {computed}"
    return f"  {entry['dequantized']} of them dequantized at load, the others computed from their codes"
