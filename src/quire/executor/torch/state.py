"""What binding allocates: activation arena, paged KV cache, rope tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.executor.base import Limits
from quire.executor.torch.ops import LatentCache, LayerCache, Rotation
from quire.executor.torch.weights import TORCH_DTYPES
from quire.program.memory import kv_block_bytes, kv_head_elems, max_rows, plan_arena
from quire.program.ops import Program
from quire.spec import Rope
from quire.spec.rope import cos_sin


@dataclass(frozen=True, slots=True)
class State:
    """`buffers` are views [max rows, cols] into one arena; `rotations` by rope number.

    `caches` and `latents` are by layer number: a layer has one of the two.
    """

    buffers: dict[str, Tensor]
    caches: dict[int, LayerCache]
    latents: dict[int, LatentCache]
    rotations: tuple[Rotation, ...]
    bytes: dict[str, int]

    @classmethod
    def allocate(cls, program: Program, limits: Limits, device: torch.device) -> State:
        """Raises RuntimeError when torch has no memory for it."""
        kv_bytes = limits.num_blocks * kv_block_bytes(program, limits.block_size)
        arena, buffers = _activations(program, limits, device)
        rotations = tuple(_rotation(rope, limits.max_len, device) for rope in program.ropes)
        memory = torch.zeros(kv_bytes, dtype=torch.uint8, device=device)
        return cls(
            buffers=buffers,
            caches=_caches(program, limits, memory),
            latents=_latents(program, limits, memory),
            rotations=rotations,
            bytes={
                "kv": kv_bytes,
                "activations": arena,
                "tables": sum(r.cos.nbytes + r.sin.nbytes for r in rotations),
            },
        )

    def block_parts(self) -> list[Tensor]:
        """What a block consists of, each [blocks, …]. Layers that share memory are there once."""
        parts = [tensor for cache in self.caches.values() for tensor in (cache.keys, cache.values)]
        parts += [
            scales for cache in self.caches.values() if cache.scales is not None for scales in cache.scales
        ]
        parts += [cache.latents for cache in self.latents.values()]
        return list({part.data_ptr(): part for part in parts}.values())


def _rotation(rope: Rope, max_len: int, device: torch.device) -> Rotation:
    """Tables for positions 0 … max_len-1, each [max_len, dim/2]."""
    cos, sin = cos_sin(rope, max_len)
    return Rotation(torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device), rope.interleaved)


def _activations(program: Program, limits: Limits, device: torch.device) -> tuple[int, dict[str, Tensor]]:
    """Arena bytes and the buffers as views into it."""
    plan = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
    arena = torch.zeros(plan.total, dtype=torch.uint8, device=device)
    buffers = {}
    for buffer in program.buffers:
        rows = max_rows(buffer, limits.max_tokens, limits.max_logit_rows)
        dtype = TORCH_DTYPES[buffer.dtype]
        if (
            buffer.dtype == "i8"
        ):  # held as the numbers it stands for, which take more than its place in the arena
            buffers[buffer.name] = torch.zeros(rows, buffer.cols, device=device)
            continue
        piece = arena[plan.offsets[buffer.name] :][: rows * buffer.cols * dtype.itemsize]
        buffers[buffer.name] = piece.view(dtype).view(rows, buffer.cols)
    outside = sum(buffers[b.name].nbytes for b in program.buffers if b.dtype == "i8")
    return plan.total + outside, buffers


def _caches(program: Program, limits: Limits, memory: Tensor) -> dict[int, LayerCache]:
    """Keys and values of each layer.

    A block belongs to one cache group and holds that group's layers, so layers with the same place in
    different groups share a tensor and never a block.
    """
    pool = memory.view(program.layers_per_group, -1)
    dtype = torch.int8 if program.kv_dtype == "i8" else TORCH_DTYPES[program.kv_dtype]
    caches = {}
    for number, layer in enumerate(program.kv_layers):
        if layer.latent:
            continue
        width = kv_head_elems(layer.head_dim)  # whole vectors; the executor uses the first head_dim
        heads = (2, limits.num_blocks, limits.block_size, layer.kv_heads)
        piece, numbers = pool[layer.index_in_group], math.prod(heads) * width * dtype.itemsize
        keys, values = piece[:numbers].view(dtype).view(*heads, width)[..., : layer.head_dim]
        scales = piece[numbers:].view(torch.bfloat16).view(heads) if program.kv_dtype == "i8" else None
        caches[number] = LayerCache(keys, values, scales)
    return caches


def _latents(program: Program, limits: Limits, memory: Tensor) -> dict[int, LatentCache]:
    """Latents of each layer that has them; they share memory as `_caches` says."""
    pool, dtype = memory.view(program.layers_per_group, -1), TORCH_DTYPES[program.kv_dtype]
    found = {}
    for number, layer in enumerate(program.kv_layers):
        if layer.latent:
            shape = limits.num_blocks, limits.block_size, kv_head_elems(layer.head_dim)
            rows = pool[layer.index_in_group].view(dtype).view(shape)
            found[number] = LatentCache(rows[..., : layer.head_dim])
    return found
