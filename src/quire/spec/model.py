"""ModelSpec: one description of a model that loader, executors, memory plan and cost all read.

A field is added only when two families need it and it is a number or an on/off in the same data flow.
A block with its own state or data flow is a new dataclass and a new op, never a flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) with half-split pairs.

    `dim` is the number of rotated dimensions of a head. Scaled kinds: linear (position interpolation,
    2306.15595), dynamic (NTK-aware), llama3 (frequency bands of Llama 3.1), yarn (2309.00071).
    `original_max` is the context length that the unscaled base was trained for.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention. `window` 0 is full; else position p sees positions p-window+1 … p.

    `softcap` above 0 bounds the scores to ±softcap by tanh. `sinks`: each head has a learned logit that takes part
    in the softmax without a value. See program/ops.Attend.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward: down(act(gate(x)) * up(x))."""

    width: int
    act: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """Pre-norm residual block: x += attention(norm(x)); x += mlp(norm(x))."""

    attention: Attention
    mlp: MLP


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Checkpoint tensor names; `{i}` is the layer number. Data, so that a family can rename."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attn_norm: str = "model.layers.{i}.input_layernorm.weight"
    mlp_norm: str = "model.layers.{i}.post_attention_layernorm.weight"
    q: str = "model.layers.{i}.self_attn.q_proj"
    k: str = "model.layers.{i}.self_attn.k_proj"
    v: str = "model.layers.{i}.self_attn.v_proj"
    o: str = "model.layers.{i}.self_attn.o_proj"
    q_norm: str = "model.layers.{i}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{i}.self_attn.k_norm.weight"
    sinks: str = "model.layers.{i}.self_attn.sinks"
    gate: str = "model.layers.{i}.mlp.gate_proj"
    up: str = "model.layers.{i}.mlp.up_proj"
    down: str = "model.layers.{i}.mlp.down_proj"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model. `max_positions` is the trained (scaled) context length in tokens."""

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_positions: int
    tied: bool = False
    dtype: DTypeName = "bfloat16"  # what the checkpoint stores
    names: WeightNames = field(default_factory=WeightNames)
    # Tensors that released checkpoints carry and the computation does not need (regular expressions).
    ignored: tuple[str, ...] = ()
