"""Drafts in torch, with the tensor names of their published checkpoints, and what they are trained for.

A draft over features sees a text of the target: at position t its features f(t) and the token x(t + 1), and guesses at
what the target would say after x(t + 1), its label at t + 1. A small model sees the tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.records import dataclass
from quire.spec import NormSpec, Rope

_Seen = list[tuple[Tensor, Tensor]]  # keys and values [B, H, T, D] of each depth so far
MISSING = -100  # the place of a token that a draft has no logit of; cross_entropy leaves such labels out


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer of Llama."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    rope: Rope
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What a draft shares with its target: embedding and head [V, d], and a multiplier of the embeddings."""

    embed: Tensor
    head: Tensor
    scale: float = 1.0


class Chain(nn.Module):
    """Guesses at the next `DEPTH` tokens, those nearest first."""

    DEPTH = 4

    def guesses(self, features: Tensor, tokens: Tensor, target: TargetWeights) -> list[Tensor]:
        """Logits [B, ·, V'] by depth, of the last positions that have a label so far ahead."""
        raise NotImplementedError

    def places(self, labels: Tensor) -> Tensor:
        """Columns of the logits for labels: MISSING for tokens without one."""
        return labels

    def loss(self, features: Tensor, tokens: Tensor, labels: Tensor, target: TargetWeights) -> Tensor:
        """Of a batch of texts [B, T]; the nearest token counts most."""
        found = self._compared(features, tokens, labels, target)
        losses = [0.8**s * _cross_entropy(logits, wanted) for s, (logits, wanted) in enumerate(found)]
        return torch.stack(losses).sum()

    def right(self, features: Tensor, tokens: Tensor, labels: Tensor, target: TargetWeights) -> list[Tensor]:
        """Which guesses are right, by depth."""
        found = self._compared(features, tokens, labels, target)
        return [logits.argmax(-1) == wanted for logits, wanted in found]

    def _compared(
        self, features: Tensor, tokens: Tensor, labels: Tensor, target: TargetWeights
    ) -> Iterator[tuple[Tensor, Tensor]]:
        wanted = self.places(labels)
        for logits in self.guesses(features, tokens, target):
            yield logits, wanted[:, wanted.shape[1] - logits.shape[1] :]


class Medusa(Chain):
    """Heads of one block each, with the target's head behind them (2401.10774). They begin with the target's guess."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        blocks = [nn.Sequential(_Block(dim)) for _ in range(heads)]
        self.medusa_head = nn.ModuleList(blocks)

    def guesses(self, features: Tensor, tokens: Tensor, target: TargetWeights) -> list[Tensor]:
        """Head h is trained on the labels h positions ahead."""
        del tokens
        return [head(features[:, :-at]) @ target.head.T for at, head in enumerate(self.medusa_head, 1)]


class Unrolled(Chain):
    """Layers over embeddings and features, unrolled over their own rows while they are trained (2503.01840): depth s
    has, in place of the features, the rows that depth s - 1 left one position before, as in a chain of drafts.
    """

    def enter(self, features: Tensor) -> Tensor:
        """The features, as wide as the rows that the layers leave."""
        return features

    def passed(self, embedded: Tensor, x: Tensor, seen: _Seen) -> Tensor:
        """The rows after the layers."""
        raise NotImplementedError

    def logits(self, x: Tensor, target: TargetWeights) -> Tensor:
        """What the rows say."""
        return x @ target.head.T

    def guesses(self, features: Tensor, tokens: Tensor, target: TargetWeights) -> list[Tensor]:
        """The first depth is trained on all labels but the first."""
        embedded = target.embed[tokens[:, 1:]] * target.scale
        x = self.enter(features[:, :-1])
        seen: _Seen = []
        found = []
        for depth in range(self.DEPTH):
            x = self.passed(embedded, x, seen)
            found.append(self.logits(x[:, depth:], target))
            x = functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return found


class Eagle(Unrolled):
    """EAGLE-1 and 2 (2401.15077): a linear over embedding and last hidden row, and a layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.dim, shape.dim)
        self.layers = nn.ModuleList([_Layer(shape, shape.dim)])

    def passed(self, embedded: Tensor, x: Tensor, seen: _Seen) -> Tensor:
        x = self.fc(torch.cat([embedded, x], -1))
        found: Tensor = self.layers[0](x, x, seen)
        return found


class Eagle3(Unrolled):
    """EAGLE-3 (2503.01840): one layer over embedding and the features of three layers. With `ids` it has logits of
    these tokens only, by a head of its own, which begins as their rows of `head`."""

    def __init__(self, shape: LayerShape, ids: Tensor | None = None, head: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        dim, eps = shape.dim, shape.norm.eps
        self.fc = nn.Linear(3 * dim, dim, bias=False)
        self.midlayer = _Layer(shape, 2 * dim)
        for name in ("input_layernorm", "hidden_norm"):
            setattr(self.midlayer, name, _Norm(dim, eps=eps))
        self.norm = _Norm(dim, eps=eps)
        self.ids = ids
        if ids is not None and head is not None:
            self.lm_head = nn.Linear(dim, len(ids), bias=False)
            self.lm_head.weight.data.copy_(head[ids])
            self._place = torch.full((len(head),), MISSING).index_put((ids,), torch.arange(len(ids)))

    def places(self, labels: Tensor) -> Tensor:
        return labels if self.ids is None else self._place[labels]

    def enter(self, features: Tensor) -> Tensor:
        found: Tensor = self.fc(features)
        return found

    def passed(self, embedded: Tensor, x: Tensor, seen: _Seen) -> Tensor:
        layer = self.midlayer
        found: Tensor = layer(x, torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(x)], -1), seen)
        return found

    def logits(self, x: Tensor, target: TargetWeights) -> Tensor:
        found: Tensor = self.norm(x) @ target.head.T if self.ids is None else self.lm_head(self.norm(x))
        return found


class SmallModel(Chain):
    """A draft model: Llama with tied embeddings, which sees the tokens alone. Its chains go on from right drafts, so
    what it says of the next token counts for every depth."""

    def __init__(self, shape: LayerShape, layers: int, vocab: int) -> None:
        super().__init__()
        self.shape = shape
        dim, eps = shape.dim, shape.norm.eps
        self.embed_tokens = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed_tokens.weight, std=dim**-0.5)
        self.layers = nn.ModuleList([_Layer(shape, dim) for _ in range(layers)])
        for layer in self.layers:
            layer.input_layernorm = _Norm(dim, eps=eps)
        self.norm = _Norm(dim, eps=eps)

    def guesses(self, features: Tensor, tokens: Tensor, target: TargetWeights) -> list[Tensor]:
        """At every position; the same for each depth."""
        del features, target
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, layer.input_layernorm(x), [])
        return [self.norm(x) @ self.embed_tokens.weight.T]

    def right(self, features: Tensor, tokens: Tensor, labels: Tensor, target: TargetWeights) -> list[Tensor]:
        return super().right(features, tokens, labels, target) * self.DEPTH


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class _Norm(nn.RMSNorm):
    """In float32, whatever the rest is computed in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class _Layer(nn.Module):
    """A layer of Llama whose attention takes `inputs` columns; norms of what it takes are its owner's."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        dim = shape.dim
        self.post_attention_layernorm = _Norm(dim, eps=shape.norm.eps)
        self.self_attn = _Attention(shape, inputs)
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(dim, shape.width, bias=False) for name in ("gate_proj", "up_proj")}
            | {"down_proj": nn.Linear(shape.width, dim, bias=False)}
        )

    def forward(self, x: Tensor, taken: Tensor, seen: _Seen) -> Tensor:
        """The residual stream x [B, T, d] after the layer, whose attention takes `taken`."""
        x = x + self.self_attn(taken, seen)
        hidden, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](functional.silu(mlp["gate_proj"](hidden)) * mlp["up_proj"](hidden))


class _Attention(nn.Module):
    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        q_cols, kv_cols = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(inputs, q_cols, bias=False)
        self.k_proj = nn.Linear(inputs, kv_cols, bias=False)
        self.v_proj = nn.Linear(inputs, kv_cols, bias=False)
        self.o_proj = nn.Linear(q_cols, shape.dim, bias=False)

    def forward(self, x: Tensor, seen: _Seen) -> Tensor:
        """`seen` are keys and values [B, H, T, D] of the depths before, to which this adds its own.

        At depth s a position sees the first depth up to s positions before it, and of each later depth one position.
        """
        shape = self.shape
        q, k, v = (
            p(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, shape.rope), _rotated(k, shape.rope)
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 1) for t in (k, v))
        seen.append((k, v))
        depth, length = len(seen) - 1, x.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-depth)
        scores = [(q @ seen[0][0].transpose(2, 3)).masked_fill(~visible, -torch.inf)]
        scores += [
            (q * _back(keys, depth - at)).sum(-1, keepdim=True) for at, (keys, _) in enumerate(seen) if at
        ]
        shares = (torch.cat(scores, -1) * shape.head_dim**-0.5).softmax(-1)
        out = shares[..., :length] @ seen[0][1]
        for at in range(1, depth + 1):
            out = out + shares[..., length + at - 1 : length + at] * _back(seen[at][1], depth - at)
        found: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return found


def _back(x: Tensor, positions: int) -> Tensor:
    """x [B, H, T, D] of so many positions before, zeros at the beginning."""
    return functional.pad(x, (0, 0, positions, 0))[:, :, : x.shape[2]]


def _rotated(x: Tensor, rope: Rope) -> Tensor:
    """x [B, H, T, D] turned by its position, in halves."""
    pairs = torch.arange(0, rope.dim, 2, device=x.device) / rope.dim
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * rope.theta**-pairs
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=MISSING)
