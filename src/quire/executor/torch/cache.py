"""The cache that earlier steps have filled: latents; the tables of rotations; where a step writes.

Keys and values by head are in kv_caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """Where keys and values are written: block ids [W] and places inside the blocks [W].

    `tokens` [W] are the step's tokens that they are of; None: all of them, in order.
    """

    blocks: Tensor
    places: Tensor
    tokens: Tensor | None = None

    def put(self, into: Tensor, rows: Tensor) -> None:
        """Store rows [T, …] of the step's tokens, rounded to the dtype of `into`."""
        rows = rows.to(into.dtype)
        into[self.blocks, self.places] = rows if self.tokens is None else rows[self.tokens]


@dataclass(frozen=True, slots=True)
class LatentCache:
    """Paged latents of one layer with the key that all heads share: [blocks, block size, rank + rope]."""

    latents: Tensor

    def at(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Rows [S, rank + rope] of a sequence whose block table is `blocks`, at positions [S]."""
        size = self.latents.shape[1]
        return self.latents[blocks[positions // size], positions % size].float()

    def write(self, where: Location, rows: Tensor) -> None:
        """Store rows [T, rank + rope] rounded to the cache's dtype."""
        where.put(self.latents, rows)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of rotation angles, each [positions or tokens, rotated dimensions / 2]."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def at(self, positions: Tensor) -> Rotation:
        return Rotation(self.cos[positions], self.sin[positions], self.interleaved)


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn the first 2·P dimensions of x [T, heads, D] (arXiv 2104.09864).

    Pair k is dimensions (k, k + P), or (2k, 2k + 1) when interleaved.
    """
    if rotation is None:
        return x
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    pairs = cos.shape[-1]
    turned, rest = x.float().split((2 * pairs, x.shape[-1] - 2 * pairs), dim=-1)
    a, b = turned.unflatten(-1, (pairs, 2)).unbind(-1) if rotation.interleaved else turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if rotation.interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned, rest), dim=-1)


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One sequence of a step: it owns tokens start … stop-1; `blocks` is its line of the block table."""

    start: int
    stop: int
    blocks: Tensor
