"""A decoder-only transformer, and the loop that every engine is built around."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.loader.safetensors import SafetensorsFile
from quire.reference.plain_attention import attention
from quire.types import UnsupportedModelError

Array = npt.NDArray[np.float32]


class Transformer:
    """Llama's architecture (2302.13971), with Qwen3's norms of queries and keys where the checkpoint has them."""

    def __init__(self, folder: Path) -> None:
        """Read config.json and model.safetensors. Raises UnsupportedModelError for another architecture."""
        self.config = json.loads((folder / "config.json").read_text())
        if self.config["model_type"] not in {"llama", "qwen3"} or self.config.get("rope_scaling"):
            raise UnsupportedModelError(
                f"model_type = {self.config['model_type']}: the reference reads llama and qwen3, without rope_scaling"
            )
        file = SafetensorsFile(folder / "model.safetensors")
        self.weights = {name: _float32(file.read(name, 0, file.info(name).shape[0])) for name in file.names()}
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config.get("num_key_value_heads", self.heads)
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads

    def __call__(self, tokens: list[int]) -> Array:
        """Logits [tokens, vocab] of a whole sequence."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            x = x + self._attend(
                self._norm(x, f"model.layers.{i}.input_layernorm"), f"model.layers.{i}.self_attn"
            )
            x = x + self._mlp(
                self._norm(x, f"model.layers.{i}.post_attention_layernorm"), f"model.layers.{i}.mlp"
            )
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits: Array = self._norm(x, "model.norm") @ head.T
        return logits

    def _norm(self, x: Array, name: str) -> Array:
        """RMSNorm (1910.07467)."""
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config["rms_norm_eps"]))
        return np.asarray(x / scale * self.weights[f"{name}.weight"], np.float32)

    def _attend(self, x: Array, name: str) -> Array:
        q, k, v = (
            (x @ self.weights[f"{name}.{part}_proj.weight"].T).reshape(len(x), -1, self.head_dim)
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        shared = self.heads // self.kv_heads  # query heads that share a KV head (2305.13245)
        out = np.stack(
            [
                attention(q[:, h], k[:, h // shared], v[:, h // shared], causal=True)
                for h in range(self.heads)
            ],
            axis=1,
        )
        attended = out.reshape(len(x), -1) @ self.weights[f"{name}.o_proj.weight"].T
        return np.asarray(attended, np.float32)

    def _rotate(self, x: Array) -> Array:
        """Rotary position embedding, halves of a head as pairs (2104.09864)."""
        half = self.head_dim // 2
        rates = np.float32(self.config.get("rope_theta", 10000.0)) ** (
            -np.arange(half, dtype=np.float32) / half
        )
        angles = np.arange(len(x), dtype=np.float32)[:, None] * rates
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, x: Array, name: str) -> Array:
        """SwiGLU (2002.05202)."""
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        opened = x @ gate
        closed: Array = (opened / (1 + np.exp(-opened)) * (x @ up)) @ down
        return closed


def generate(
    model: Transformer, prompt: list[int], max_tokens: int, *, temperature: float = 1.0, top_p: float = 1.0,
    eos: int | None = None, seed: int = 0,
) -> list[int]:  # fmt: skip
    """The loop of inference, without a cache: every token computes the whole sequence again."""
    tokens, chance = list(prompt), np.random.default_rng(seed)
    for _ in range(max_tokens):
        logits = model(tokens)[-1].astype(np.float64)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            weights = np.exp((logits - logits.max()) / temperature)
            order = np.argsort(-weights, kind="stable")
            chances = weights[order] / weights.sum()
            kept = np.cumsum(chances) - chances < top_p
            token = int(chance.choice(order[kept], p=chances[kept] / chances[kept].sum()))
        tokens.append(token)
        if token == eos:
            break
    return tokens[len(prompt) :]


def _float32(values: npt.NDArray[np.generic]) -> Array:
    """Numbers of a checkpoint as float32; bfloat16 comes as integers, the upper half of a float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
