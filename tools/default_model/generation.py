"""Batched greedy generation in torch with a KV cache, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .model import Cache, Decoder


@torch.no_grad()
def greedy(
    model: Decoder, prompts: Sequence[Sequence[int]], stops: set[int], max_tokens: int, batch: int = 48
) -> list[list[int]]:
    """The most likely continuation of each prompt, without the stop token that ends it.

    Prompts of similar length run together; a batch continues until its last row has stopped or has `max_tokens`.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: list[list[int]] = [[] for _ in prompts]
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        made = _greedy_batch(model, [prompts[i] for i in part], stops, max_tokens)
        for i, ids in zip(part, made, strict=True):
            out[i] = ids
    return out


def _greedy_batch(
    model: Decoder, prompts: list[Sequence[int]], stops: set[int], max_tokens: int
) -> list[list[int]]:
    device = model.embed_tokens.weight.device
    lengths = torch.tensor([len(p) for p in prompts])
    longest = int(lengths.max())
    capacity = min(longest + max_tokens, model.shape.max_positions)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    cache = Cache.empty(model.shape, len(prompts), capacity, device)
    hidden = model.prefill(ids.to(device), cache)
    token = model.logits(hidden[torch.arange(len(prompts)), lengths - 1]).argmax(-1)
    position = lengths.to(device)
    out: list[list[int]] = [[] for _ in prompts]
    going = [True] * len(prompts)
    for _ in range(capacity - longest):
        for row, value in enumerate(token.tolist()):
            going[row] = going[row] and value not in stops
            if going[row]:
                out[row].append(value)
        if not any(going) or int(position.max()) >= capacity:
            break
        token = model.logits(model.step(token, position, cache)).argmax(-1)
        position = position + 1
    return out
