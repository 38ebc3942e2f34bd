"""Shapes of the shipped models, as the keys of a Qwen3 `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Qwen3 decoder: RMSNorm before each block and on q and k per head, RoPE, grouped-query attention, SwiGLU.

    Tied embeddings, no biases. Sizes in elements; `heads` must be a multiple of `kv_heads`.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = MAX_POSITIONS

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        for name, step in (("hidden", 64), ("intermediate", 64), ("head_dim", 16)):
            if getattr(self, name) % step:
                raise ValueError(f"{name}: {getattr(self, name)} is not a multiple of {step}")

    @property
    def parameters(self) -> int:
        """Number of weights, the tied embedding counted once."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 2 * self.head_dim
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocab * self.hidden + self.layers * block + self.hidden

    def config(self, eos_token_id: int, pad_token_id: int) -> dict[str, object]:
        """The `config.json` that transformers and Quire read."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": pad_token_id,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab,
        }


def shape_from_config(config: dict[str, object]) -> Shape:
    """The inverse of `Shape.config`."""
    keys = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
        "max_positions": "max_position_embeddings",
    }
    return Shape(**{name: config[key] for name, key in keys.items()})  # type: ignore[arg-type]


# Few wide heads: what a head copies passes through head_dim numbers, and 32 are too few to tell 4,096 tokens apart.
CANDIDATES = {
    "5m": Shape(vocab=4096, hidden=256, intermediate=640, layers=6, heads=4, kv_heads=2, head_dim=64),
    "5m-vocab": Shape(vocab=6144, hidden=256, intermediate=640, layers=6, heads=4, kv_heads=2, head_dim=64),
    "7m-deep": Shape(vocab=4096, hidden=256, intermediate=768, layers=8, heads=4, kv_heads=2, head_dim=64),
    "8m": Shape(vocab=5120, hidden=320, intermediate=768, layers=6, heads=4, kv_heads=2, head_dim=64),
    "8m-deep": Shape(vocab=5120, hidden=256, intermediate=768, layers=8, heads=4, kv_heads=2, head_dim=64),
    "12m": Shape(vocab=6144, hidden=384, intermediate=1024, layers=6, heads=6, kv_heads=2, head_dim=64),
}
MINI = CANDIDATES["7m-deep"]
VOCAB = MINI.vocab
DRAFT = Shape(vocab=VOCAB, hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, head_dim=64)
# For tests and trials of the pipeline: takes seconds on one core; the model learns nothing useful.
TOY = Shape(vocab=1024, hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16)
SHAPES = {"mini": MINI, "draft": DRAFT, "toy": TOY, **CANDIDATES}
