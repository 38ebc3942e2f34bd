"""What binding allocates (activation arena, paged KV cache, rope tables), and what steps allocate for a while."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.executor.base import Limits
from quire.executor.torch.adapter_matrices import AdapterMatrices
from quire.executor.torch.cache import LatentCache, Rotation
from quire.executor.torch.kv_caches import (
    ByteCache,
    CacheShape,
    FloatCache,
    Fp8Cache,
    KiviCache,
    LayerCache,
    NibbleCache,
    NuqCache,
)
from quire.executor.torch.tiles import QUERY_TILE, WEIGHT_TILE
from quire.executor.torch.weights import TORCH_DTYPES
from quire.program.memory import (
    codebook_bytes,
    kv_block_bytes,
    kv_head_elems,
    kv_token_bytes,
    max_rows,
    plan_arena,
)
from quire.program.op import AttentionScratch
from quire.program.program import Program
from quire.program.tensors import Buffer, KVLayer
from quire.records import dataclass
from quire.spec import Rope
from quire.spec.rope import cos_sin


@dataclass(frozen=True, slots=True)
class State:
    """`buffers` are [max rows, cols], views into one arena; `rotations` are by rope number.

    `adapters` holds those of slots. `caches` and `latents` are by layer number: a layer has one of the two.
    """

    buffers: dict[str, Tensor]
    caches: dict[int, LayerCache]
    latents: dict[int, LatentCache]
    rotations: tuple[Rotation, ...]
    adapters: AdapterMatrices
    memory: Tensor  # [blocks, bytes]
    bytes: dict[str, int]

    @classmethod
    def allocate(cls, program: Program, limits: Limits, device: torch.device) -> State:
        """Raises RuntimeError if torch has no memory for it."""
        kv_bytes = limits.blocks * kv_block_bytes(program, limits.block_size)
        arena, buffers = _activations(program, limits, device)
        rotations = tuple(_rotation(rope, limits.max_len, device) for rope in program.ropes)
        memory = torch.zeros(kv_bytes, dtype=torch.uint8, device=device).view(limits.blocks, -1)
        return cls(
            buffers=buffers,
            caches=_caches(program, limits, memory, rotations),
            latents=_latents(program, limits, memory),
            rotations=rotations,
            adapters=AdapterMatrices(program, limits, device),
            memory=memory,
            bytes={
                "kv": kv_bytes,
                "activations": arena,
                "tables": sum(r.cos.nbytes + r.sin.nbytes for r in rotations) + codebook_bytes(program),
            },
        )


def _rotation(rope: Rope, max_len: int, device: torch.device) -> Rotation:
    """Tables for positions 0 … max_len-1, each [max_len, dim/2]."""
    cos, sin = cos_sin(rope, max_len)
    return Rotation(torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device), rope.interleaved)


def _activations(program: Program, limits: Limits, device: torch.device) -> tuple[int, dict[str, Tensor]]:
    """Bytes of the buffers, and the buffers: views into an arena, but for those of int8."""
    plan = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
    arena = torch.zeros(plan.total, dtype=torch.uint8, device=device)
    buffers = {}
    for buffer in program.buffers:
        rows = max_rows(buffer, limits.max_tokens, limits.max_logit_rows)
        dtype = TORCH_DTYPES[buffer.dtype]
        if buffer.dtype == "i8":  # float32 numbers, too large for its place in the arena
            buffers[buffer.name] = torch.zeros(rows, buffer.cols, device=device)
            continue
        piece = arena[plan.offsets[buffer.name] :][: rows * buffer.cols * dtype.itemsize]
        buffers[buffer.name] = piece.view(dtype).view(rows, buffer.cols)
    return buffer_bytes(program, limits), buffers


def buffer_bytes(program: Program, limits: Limits) -> int:
    """Bytes of the buffers of a program."""
    plan = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
    outside = sum(_floats(b, limits) for b in program.buffers if b.dtype == "i8")
    return plan.total + outside


def workspace_bytes(program: Program, limits: Limits) -> int:
    """The most that the tensors of one op take besides buffers: an upper bound, for ops as ops.py defines them.

    Rows in float32 while they are normalised, rotated or activated; a tile of a weight, widened, with its product; the
    scores of a tile of queries over a whole context, with its keys and values.
    """
    rows = 6 * max((_floats(b, limits) for b in program.buffers), default=0)
    linears = [param for param in program.all_params if param.kind == "linear"]
    tile = max((max(WEIGHT_TILE, param.cols) for param in linears), default=0)
    most = max(limits.max_tokens, limits.max_logit_rows)
    products = max((2 * most * min(WEIGHT_TILE // p.cols + 1, p.rows) for p in linears), default=0)
    attention = 0
    for op in program.ops:
        for need in op.scratch(program.buffer):
            if isinstance(need, AttentionScratch):
                queries, keys = min(QUERY_TILE, limits.max_tokens), limits.max_len
                scores = 5 * queries * need.heads * keys
                cached = 8 * keys * need.kv_heads * kv_head_elems(need.head_dim)
                attention = max(attention, scores + cached + 4 * queries * keys)
    return rows + 4 * (max(tile + products, attention))


def _floats(buffer: Buffer, limits: Limits) -> int:
    """Bytes of a buffer's rows in float32."""
    return max_rows(buffer, limits.max_tokens, limits.max_logit_rows) * buffer.cols * 4


def _caches(
    program: Program, limits: Limits, memory: Tensor, rotations: tuple[Rotation, ...]
) -> dict[int, LayerCache]:
    """Keys and values of each layer.

    A block belongs to one cache group and holds that group's layers, so layers with the same place in
    different groups share memory and never a block.
    """
    return {
        number: _cache(layer, limits, _layer_memory(layer, limits, memory), rotations)
        for number, layer in enumerate(program.kv_layers)
        if not layer.latent
    }


def _cache(layer: KVLayer, limits: Limits, memory: Tensor, rotations: tuple[Rotation, ...]) -> LayerCache:
    shape = CacheShape(limits.blocks, limits.block_size, layer.kv_heads, layer.head_dim)
    match layer.type:
        case "i8":
            return ByteCache(memory, shape)
        case "e4m3" | "e5m2":
            return Fp8Cache(memory, shape, layer.type, layer.scales())
        case "i4":
            return NibbleCache(memory, shape)
        case "kivi4" | "kivi2":
            return KiviCache(memory, shape, int(layer.type[-1]))
        case "kvquant3":
            assert layer.codes is not None
            return NuqCache(memory, shape, layer.codes, None if layer.rope is None else rotations[layer.rope])
        case _:
            return FloatCache(memory, shape, layer.type)


def _layer_memory(layer: KVLayer, limits: Limits, memory: Tensor) -> Tensor:
    """The layer's part of all blocks, [blocks, bytes]."""
    size = limits.block_size * kv_token_bytes(layer)
    return memory[:, layer.index_in_group * size :][:, :size]


def _latents(program: Program, limits: Limits, memory: Tensor) -> dict[int, LatentCache]:
    """Latents of each layer that has them; they share memory as `_caches` says."""
    found = {}
    for number, layer in enumerate(program.kv_layers):
        if layer.latent:
            rows = _layer_memory(layer, limits, memory).view(TORCH_DTYPES[layer.type])
            shape = limits.block_size, kv_head_elems(layer.head_dim)
            found[number] = LatentCache(rows.unflatten(1, shape)[..., : layer.head_dim])
    return found
