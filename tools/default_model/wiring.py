"""Initial weights: a model that can copy from its context before it has learned anything.

Answers that quote their prompt need induction heads (Olsson et al. 2022, arXiv 2209.11895): a head of one layer notes
at every token which token came before it; a head of a later layer looks for tokens whose note is the current token,
and says what stands there. Training finds this pair late and suddenly, after more tokens than the whole run has here,
so it is put in by hand. Everything else starts small, and values and outputs start transposed, as trained models are
found to have them (mimetic initialization: Trockman and Kolter 2023, arXiv 2305.09828).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Attention, Decoder

# Along one fixed direction every embedding is the same. The tied output matrix adds it to all logits alike, which
# changes nothing; a head that reads it alone attends by place and not by content.
_CONSTANT = 0.5
_PLACE_PAIRS = 3  # fastest rotary pairs: they tell neighbouring places apart
_NOTE = 0.3  # weight of the note in the residual stream
_SAY = 1.0  # weight of what an induction head says
_SMALL = 0.02  # weight of what the other heads say
_QUIET = 0.02  # weight of what the MLPs say


def initialize(model: Decoder, generator: torch.Generator) -> None:
    """Fill the weights. Needs two layers or more and head dimensions of 16 or more."""
    shape = model.shape
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            std = weight.shape[1] ** -0.5
            weight.normal_(std=_QUIET * std if "down_proj" in name else std, generator=generator)
        frame = torch.empty(shape.hidden, shape.hidden)
        torch.nn.init.orthogonal_(frame, generator=generator)
        constant, rest = frame[0], frame[1:]
        model.embed_tokens.weight += _CONSTANT * constant - torch.outer(
            model.embed_tokens.weight @ constant, constant
        )
        width = min(shape.head_dim, (shape.hidden - 1) // 2)
        read, note = rest[:width], rest[width : 2 * width]
        attentions = [block.self_attn for block in model.layers]
        for attention in attentions:
            _transpose_values(attention, generator)
        _look_back(attentions[0], constant, read, note, shape.rope_theta)
        _look_up(attentions[1], read, note)


def _transpose_values(attention: Attention, generator: torch.Generator) -> None:
    """Values are orthogonal rows, outputs the same transposed: what a head attends to is what it says."""
    group = attention.heads // attention.kv_heads
    values = torch.nn.init.orthogonal_(attention.v_proj.weight, generator=generator)
    heads = values.view(attention.kv_heads, attention.head_dim, -1).repeat_interleave(group, dim=0)
    attention.o_proj.weight.copy_(_SMALL * heads.flatten(0, 1).T)


def _look_back(attention: Attention, constant: Tensor, read: Tensor, note: Tensor, theta: float) -> None:
    """Head 0 attends to the token before and writes what it reads there into other directions."""
    size = attention.head_dim
    pairs = torch.arange(_PLACE_PAIRS)
    angles = theta ** (-2.0 * pairs / size)
    key, query = torch.zeros(size), torch.zeros(size)
    key[pairs] = 1.0
    # score(i, j) is a sum of cos(angle * (i - j) + argument of query): largest at i - j = 1
    query[pairs], query[pairs + size // 2] = angles.cos(), -angles.sin()
    attention.k_proj.weight[:size] = torch.outer(key, constant)
    attention.q_proj.weight[:size] = torch.outer(query, constant)
    attention.v_proj.weight[: len(read)] = read
    attention.o_proj.weight[:, : len(note)] = _NOTE * note.T


def _look_up(attention: Attention, read: Tensor, note: Tensor) -> None:
    """The first query head of every group attends to tokens whose note is the current token."""
    size, group = attention.head_dim, attention.heads // attention.kv_heads
    slow = torch.arange(size // 2)[size * 3 // 16 :]  # pairs that hardly turn over a prompt
    places = torch.cat([slow, slow + size // 2])
    query, key = torch.zeros(2, size, read.shape[1])
    query[places], key[places] = read[: len(places)], note[: len(places)]
    for kv in range(attention.kv_heads):
        head = kv * group
        attention.q_proj.weight[head * size : (head + 1) * size] = query
        attention.k_proj.weight[kv * size : (kv + 1) * size] = key
        attention.o_proj.weight[:, head * size : (head + 1) * size] *= _SAY / _SMALL
