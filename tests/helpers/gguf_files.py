"""GGUF files for tests: byte by byte, right and wrong, and from the tiny checkpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.loader import Checkpoint
from quire.loader.gguf_writer import OutTensor, encode, write_gguf
from quire.quant.ggml import TYPE_IDS

STEMS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """`shape` as the file has it: innermost first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *(size % 2**64 for size in shape))
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


def raw(
    metadata: Mapping[str, Any] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    """A file; values given as bytes are written as they are (type included). `counts`: of tensors, entries."""
    metadata, tensors = metadata or {}, tensors or []
    head = struct.pack(
        "<4sIQQ", b"GGUF", version,
        len(tensors) if counts[0] is None else counts[0],
        len(metadata) if counts[1] is None else counts[1],
    )  # fmt: skip
    for key, value in metadata.items():
        head += string(key) + (value if isinstance(value, bytes) else encode(value))
    head += b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data or tensors else head


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (half, pair) to (pair, half), as converters do for the llama architecture."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """model.layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight"""
    stem, _, suffix = name.rpartition(".")
    if stem in STEMS:
        return f"{STEMS[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{STEMS[part]}.{suffix}"


def metadata_of(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """What a converter writes for a config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    if rope.get("rope_type") in {"linear", "yarn"}:
        found[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        found[f"{arch}.rope.scaling.factor"] = rope["factor"]
    if rope.get("rope_type") == "yarn":
        found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def write_model(folder: Path, out: Path, arch: str, **more: Any) -> Path:
    """The float32 checkpoint of `folder` as a GGUF file in F32, with further metadata."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    with Checkpoint(folder) as checkpoint:
        for name in checkpoint.names():
            weight = np.array(checkpoint.read(name))
            target = gguf_name(name)
            part = target.split(".")[-2]
            if arch == "gemma" and "norm" in part:
                weight = weight + np.float32(1)
            tensors[target] = permute(weight, heads[part]) if arch == "llama" and part in heads else weight
    write_arrays(out, metadata_of(config, arch) | more, tensors)
    return out


def write_arrays(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Tensors as F32, F16, or uint8 arrays [rows, row bytes] given as (type name, array)."""
    kinds = {"float32": "F32", "float16": "F16"}
    out = [OutTensor(name, kinds[array.dtype.name], array.shape) for name, array in tensors.items()]
    write_gguf(path, metadata, out, lambda tensor: [tensors[tensor.name]])
    return path


def type_id(name: str) -> int:
    return TYPE_IDS[name]
