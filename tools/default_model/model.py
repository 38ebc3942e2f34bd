"""The decoder in plain torch: one flat token stream for training, a KV cache for generation.

Training lays documents out as groups: a group is `rows` documents padded to `length` tokens, and groups follow one
another in one flat stream. Every linear layer sees the stream as one matrix; attention sees each group as a batch, so
no document attends to another and no mask is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .shape import Shape

Group = tuple[int, int]  # rows, length


@dataclass(slots=True)
class Cache:
    """Keys and values of a batch: per layer [rows, kv_heads, capacity, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def empty(shape: Shape, rows: int, capacity: int, device: torch.device) -> Cache:
        size = (rows, shape.kv_heads, capacity, shape.head_dim)
        return Cache(
            [torch.zeros(size, device=device) for _ in range(shape.layers)],
            [torch.zeros(size, device=device) for _ in range(shape.layers)],
        )


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on every query and key head before RoPE."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.eps = shape.norm_eps
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of tokens x [n, hidden], each [n, heads, head_dim] in float32; q and k rotated.

        Attention stays in float32 under autocast too: on CPU its bfloat16 backward pass is the slower one.
        """
        n = x.shape[0]
        q = self.q_norm(self.q_proj(x).float().view(n, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).float().view(n, self.kv_heads, self.head_dim))
        v = self.v_proj(x).float().view(n, self.kv_heads, self.head_dim)
        return rotate(q, rope), rotate(k, rope), v

    def forward(
        self,
        x: Tensor,
        groups: list[Group],
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Tokens x [n, hidden] of whole documents; a cache (for a single group) keeps their keys and values."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            rows, length = groups[0]
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, :length] = new.view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        outputs = []
        # Not cut by slices: the gradient of a slice fills the rest with zeros.
        sizes = [rows * length for rows, length in groups]
        for (rows, length), *parts in zip(groups, *(t.split(sizes) for t in (q, k, v)), strict=True):
            qs, ks, vs = (t.view(rows, length, -1, self.head_dim).transpose(1, 2) for t in parts)
            with torch.autocast(x.device.type, enabled=False):
                out = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True)
            outputs.append(out.transpose(1, 2).reshape(rows * length, -1))
        return self.o_proj(torch.cat(outputs))

    def step(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], at: Tensor
    ) -> Tensor:
        """One new token per row: x [rows, hidden] at position at[row]; the cache holds all tokens before."""
        q, k, v = self.project(x, rope)
        keys, values = cache
        rows = torch.arange(x.shape[0], device=x.device)
        keys[rows, :, at], values[rows, :, at] = k, v
        seen = torch.arange(keys.shape[2], device=x.device) <= at[:, None]
        out = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return self.o_proj(out.reshape(x.shape[0], -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x: Tensor,
        groups: list[Group],
        rope: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), groups, rope, cache)
        x = x if rows is None else x[rows]
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], at: Tensor
    ) -> Tensor:
        x = x + self.self_attn.step(self.input_layernorm(x), rope, cache, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks, final norm; logits come from the embedding transposed.

    Attribute names are those of the published checkpoints without the leading "model.".
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, groups: list[Group], rows: Tensor | None = None) -> Tensor:
        """Final hidden states of a flat stream of token ids [n] laid out as `groups`: [n, hidden], or those of
        `rows` alone, which saves the rest of the last MLP.
        """
        positions = torch.cat([torch.arange(length).repeat(rows) for rows, length in groups]).to(ids.device)
        rope = (self.cos[positions], self.sin[positions])
        x = self.embed_tokens(ids)
        last = len(self.layers) - 1
        for i, block in enumerate(self.layers):
            x = block(x, groups, rope, rows=rows if i == last else None)
        return self.norm(x)

    def prefill(self, ids: Tensor, cache: Cache) -> Tensor:
        """Hidden states [rows, length, hidden] of right-padded prompts [rows, length]; fills the empty cache."""
        rows, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(rows)
        rope = (self.cos[positions], self.sin[positions])
        x = self.embed_tokens(ids.reshape(-1))
        for i, block in enumerate(self.layers):
            x = block(x, [(rows, length)], rope, (cache.keys[i], cache.values[i]))
        return self.norm(x).view(rows, length, -1)

    def step(self, ids: Tensor, at: Tensor, cache: Cache) -> Tensor:
        """Hidden states [rows, hidden] of one new token per row; `at` are their positions. Writes the cache."""
        rope = (self.cos[at], self.sin[at])
        x = self.embed_tokens(ids)
        for i, block in enumerate(self.layers):
            x = block.step(x, rope, (cache.keys[i], cache.values[i]), at)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of hidden states [n, hidden]."""
        return F.linear(hidden, self.embed_tokens.weight)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [max_positions, head_dim / 2] of RoPE (Su et al. 2021), in float32."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-half)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate halves of x [n, heads, head_dim] by the angles of each token's position."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
