"""A model's spec as the metadata and the tensor names of a GGUF file; the inverse of spec/gguf.

What was written is read back and compared with the spec: whatever GGUF cannot say is found before a file exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.spec.gguf import ARCHITECTURES, STEMS, GGUFSummary, StoredTensor, read_gguf_model
from quire.spec.model import ModelSpec
from quire.spec.rope import inverse_frequencies
from quire.types import UnsupportedModelError

Metadata = dict[str, Any]
_COMPARED_ELSEWHERE = {"layers", "dtype", "ignored", "names"}
_PROBE = 4096  # a length at which ropes are compared


def architecture_of(model_type: str) -> str:
    """The `general.architecture` of a model_type; UnsupportedModelError when it has none here."""
    for name, architecture in ARCHITECTURES.items():
        if architecture.model_type == model_type:
            return name
    known = ", ".join(architecture.model_type for architecture in ARCHITECTURES.values())
    raise UnsupportedModelError(
        f"model_type = {model_type!r} has no GGUF architecture here; those that have: {known}"
    )


def gguf_metadata(name: str, spec: ModelSpec, eps: float) -> Metadata:
    """The keys of a dense model. `eps` is of its norms."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    found: Metadata = {
        "general.architecture": name,
        f"{name}.block_count": len(spec.layers),
        f"{name}.context_length": spec.max_positions,
        f"{name}.embedding_length": spec.dim,
        f"{name}.feed_forward_length": mlp.width,
        f"{name}.attention.head_count": attention.heads,
        f"{name}.attention.head_count_kv": attention.kv_heads,
        f"{name}.attention.key_length": attention.head_dim,
        f"{name}.attention.value_length": attention.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(eps),
        f"{name}.vocab_size": spec.vocab,
    }
    rope = attention.rope
    if rope is not None:
        found |= {f"{name}.rope.dimension_count": rope.dim, f"{name}.rope.freq_base": float(rope.theta)}
        if rope.kind in {"linear", "yarn"}:
            found |= {
                f"{name}.rope.scaling.type": rope.kind,
                f"{name}.rope.scaling.factor": float(rope.factor),
            }
            found[f"{name}.context_length"] = round(spec.max_positions / rope.factor)
        if rope.kind == "yarn":
            found[f"{name}.rope.scaling.original_context_length"] = rope.original_max
            found[f"{name}.context_length"] = spec.max_positions
    return found


def rope_factors(spec: ModelSpec) -> npt.NDArray[np.float32] | None:
    """What a file divides each pair's frequency by, for kinds that it has no key for but this tensor; else None."""
    rope = spec.layers[0].attention.rope
    if rope is None or rope.kind not in {"llama3", "longrope"} or rope.short_factors != rope.long_factors:
        return None
    factors = inverse_frequencies(replace(rope, kind="default"), _PROBE) / inverse_frequencies(rope, _PROBE)
    return factors.astype(np.float32)


def stored_names(name: str, spec: ModelSpec, asked: Iterable[str]) -> dict[str, StoredTensor]:
    """For each tensor that the model asks for, its name in a file and the heads whose rows are permuted."""
    stems = {}
    for field in fields(spec.names):
        if field.name in STEMS:
            for layer in range(len(spec.layers)):
                stem = getattr(spec.names, field.name).removesuffix(".weight").format(i=layer)
                stems[stem] = (field.name, STEMS[field.name].format(i=layer), layer)
    found = {}
    for tensor in asked:
        stem, _, suffix = tensor.rpartition(".")
        if stem not in stems:
            raise UnsupportedModelError(f"tensor {tensor} has no name in GGUF")
        kind, target, layer = stems[stem]
        heads = 0
        if ARCHITECTURES[name].permuted and kind in {"q", "k"}:
            attention = spec.layers[layer].attention
            heads = attention.heads if kind == "q" else attention.kv_heads
        found[tensor] = StoredTensor(f"{target}.{suffix}", heads)
    return found


def check_round_trip(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    spec: ModelSpec,
) -> None:
    """Raise UnsupportedModelError, naming what differs, unless a file of these says the same model as `spec`."""
    factors = rope_factors(spec)
    small = () if factors is None else tuple(factors)
    summary = GGUFSummary("the GGUF file", metadata, shapes, kinds, lambda _: small, dict, "")
    found = read_gguf_model(summary).facts.spec
    for field in fields(spec):
        if field.name not in _COMPARED_ELSEWHERE and getattr(found, field.name) != getattr(spec, field.name):
            raise _lost(field.name, getattr(spec, field.name), getattr(found, field.name))
    for number, (ours, theirs) in enumerate(zip(spec.layers, found.layers, strict=True)):
        a, b = ours.attention, theirs.attention
        if (a.rope is None) != (b.rope is None) or (
            a.rope is not None
            and b.rope is not None
            and not (
                a.rope.attention_factor == b.rope.attention_factor
                and np.allclose(
                    inverse_frequencies(a.rope, _PROBE),
                    inverse_frequencies(b.rope, _PROBE),
                    rtol=1e-6,
                    atol=0,
                )
            )
        ):
            raise _lost(f"layer {number}: rope", a.rope, b.rope)
        if replace(ours, attention=replace(a, rope=b.rope)) != theirs:
            raise _lost(f"layer {number}", ours, theirs)


def _lost(what: str, ours: object, theirs: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"GGUF cannot say {what}: {str(ours)[:300]} would be read as {str(theirs)[:300]}"
    )
