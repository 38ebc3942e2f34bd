"""The native executor: binds a Program to the C++ core once, then runs each step in one call.

Everything that costs memory is planned here from the program (see program/memory), so that what
`memory()` reports is what the process holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire import _native
from quire.executor.base import F32, U8, Limits, StepArrays, check_blocks
from quire.loader.finite import first_nonfinite
from quire.program.formats import DTYPE_BYTES
from quire.program.memory import (
    ArenaPlan,
    kv_block_bytes,
    kv_token_bytes,
    max_rows,
    packed_matrix_rows,
    plan_arena,
    rope_table_bytes,
    rounded_row_bytes,
    row_pitch,
    scale_offset,
    weight_bytes,
)
from quire.program.ops import (
    Add,
    Attend,
    Buffer,
    Combine,
    Dispatch,
    Embed,
    Experts,
    GatedAct,
    GatherRows,
    HeadLinear,
    LatentAttend,
    LatentWrite,
    Linear,
    Norm,
    Op,
    Param,
    Program,
    Quantize,
    RopeWrite,
    Route,
    Scale,
)
from quire.quant import GroupCodes, check_codes, quantize
from quire.quant.groups import rotate, weight_share
from quire.spec.model import Activation, ClampedSwiGLU
from quire.spec.rope import cos_sin
from quire.types import MemoryBudgetError

_DTYPES = {
    "f32": _native.DType.f32, "bf16": _native.DType.bf16, "f16": _native.DType.f16, "i8": _native.DType.i8,
    "i32": _native.DType.i32,
}  # fmt: skip
_SOURCE_DTYPES = {"F32": _native.DType.f32, "F16": _native.DType.f16, "BF16": _native.DType.bf16}
_SOURCE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_GROUP_KINDS = ("none", "u8", "f16", "bf16", "f32", "f16*u8")  # by number: GroupKind in csrc/kernels.h
_ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def planned_bytes(program: Program, limits: Limits, threads: int) -> dict[str, int]:
    """What a NativeExecutor of these limits will hold, by part, before any of it is allocated."""
    arena = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
    return {
        "weights": weight_bytes(program),
        "kv": limits.num_blocks * kv_block_bytes(program, limits.block_size),
        "activations": arena.total + _scratch_bytes(program, threads, limits),
        "tables": rope_table_bytes(program, limits.max_len),
    }


def best_isa() -> str:
    """The best instruction set of this machine."""
    return _native.supported_isas()[0]


def packed_layout(isa: str) -> str:
    """The layout of weights that are packed for an instruction set ("" is the best of this machine)."""
    return f"{_native.PACK_LAYOUT}/{isa or best_isa()}"


class NativeExecutor:
    """Executor over the C++ core. `isa` forces an instruction set ("" takes the best of this machine)."""

    def __init__(self, program: Program, *, threads: int, isa: str = "") -> None:
        self.program = program
        self._core = _native.Executor(isa, threads)
        self._params = {param.name: self._add_param(param) for param in program.params}
        self._core.allocate_weights()
        self._buffers: dict[str, int] = {}
        self._limits: Limits | None = None
        self._arrays: StepArrays | None = None
        self._logits: F32 = np.zeros((0, program.vocab), np.float32)
        self._maxima: F32 | None = None

    @property
    def core(self) -> _native.Executor:
        """The native object, for what shares its threads: the sampler."""
        return self._core

    @property
    def isa(self) -> str:
        return str(self._core.isa)

    @property
    def threads(self) -> int:
        return int(self._core.threads)

    def _add_param(self, param: Param) -> int:
        if param.kind == "vector":
            return int(self._core.add_vector(param.rows))
        rows = packed_matrix_rows(param) * param.experts if param.experts else param.rows
        if param.groups is not None:
            bits, form = 4 if param.dtype == "i4" else 8, param.groups
            scales, offsets = _GROUP_KINDS.index(form.scales), _GROUP_KINDS.index(form.offsets)
            index = int(
                self._core.add_groups(rows, param.cols, bits, form.size, scales, offsets, form.rotated)
            )
        else:
            add = self._core.add_weight if param.kind == "linear" else self._core.add_table
            index = int(add(rows, param.cols, _DTYPES[param.dtype]))
        if param.experts:
            self._core.set_experts(index, param.experts, param.matrix_rows)
        return index

    def put(self, param: Param, row_offset: int, data: npt.NDArray[Any], dtype: str) -> None:
        """Pack one checkpoint part; see Executor.put."""
        self.put_checked(param, row_offset, data, dtype)

    def put_checked(self, param: Param, row_offset: int, data: npt.NDArray[Any], dtype: str) -> int | None:
        """Pack one checkpoint part; the flat index of its first NaN or infinity, or None."""
        rows = data.shape[0]
        cols = data.shape[1] if data.ndim == 2 else 0
        if not data.flags.c_contiguous or data.itemsize != _SOURCE_BYTES[dtype]:
            raise ValueError(f"{param.name}: a part must be contiguous {dtype}")
        if param.groups is not None and param.groups.offsets != "none":
            found = first_nonfinite(data, dtype)
            if found is None:
                given = quantize(_as_float32(data, dtype), param.groups, 4 if param.dtype == "i4" else 8)
                self.put_codes(param, row_offset, given)
            return found
        source = data.ctypes.data
        index = self._params[param.name]
        at = _packed_row(param, row_offset, rows)
        bad = self._core.put(index, at, source, _SOURCE_DTYPES[dtype], rows, cols)
        return None if bad < 0 else bad

    @property
    def layout(self) -> str:
        """What packed bytes depend on beside the program: the layout's number and the instruction set."""
        return packed_layout(self.isa)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights."""
        return int(self._core.weight_bytes)

    @property
    def weight_chunks(self) -> int:
        """Chunks of packed weights that have a checksum each."""
        return -(-self.weight_bytes // _native.CHUNK_BYTES)

    def save_weights(self, fd: int, first: int, count: int) -> bytes:
        """Write chunks of the packed weights to a file; see loader.packed.Packer."""
        return self._core.save_weights(fd, first, count)

    def map_weights(self, fd: int, sums: bytes) -> bool:
        """Map packed weights instead of putting parts; see loader.packed.Packer."""
        return self._core.map_weights(fd, sums)

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        """Pack rows that come quantized; see Executor.put_codes."""
        check_codes(param, row_offset, given)
        arrays = [
            a if a is None else np.ascontiguousarray(a)
            for a in (given.codes, given.scales, given.offsets, given.factors)
        ]
        addresses = [0 if a is None else a.ctypes.data for a in arrays]
        at = _packed_row(param, row_offset, len(given.codes))
        self._core.put_codes(self._params[param.name], at, len(given.codes), addresses)

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        """Allocate cache and buffers and remember the arrays; see Executor.bind."""
        if self._limits is not None:
            raise RuntimeError("bind is called once")
        program = self.program
        self._limits, self._arrays = limits, arrays
        plan = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
        for buffer in program.buffers:
            offset = plan.offsets[buffer.name]
            scales = offset + scale_offset(buffer, limits.max_tokens, limits.max_logit_rows)
            dtype = _DTYPES[buffer.dtype]
            rows = self._most_rows(buffer)
            self._buffers[buffer.name] = self._core.add_buffer(
                buffer.cols, dtype, offset, scales, buffer.group, buffer.rotated, rows, buffer.per
            )
        for rope in program.ropes:
            cos, sin = (np.ascontiguousarray(table) for table in cos_sin(rope, limits.max_len))
            self._core.add_rope(
                cos.ctypes.data, sin.ctypes.data, limits.max_len, rope.dim // 2, rope.interleaved
            )
        for layer in program.kv_layers:
            offset = layer.index_in_group * kv_token_bytes(layer, program.kv_dtype) * limits.block_size
            self._core.add_kv_layer(layer.group, layer.kv_heads, layer.head_dim, offset)
        for op in program.body:
            self._add_op(op)
        self._core.begin_head()
        for op in program.head:
            self._add_op(op)
        self._allocate(limits, arrays, plan)
        self._logits = self._view(program.logits, limits.max_logit_rows)
        if program.maxima:
            self._maxima = self._view(program.maxima, limits.max_logit_rows)

    def _allocate(self, limits: Limits, arrays: StepArrays, plan: ArenaPlan) -> None:
        native = _native.Limits()
        for name in ("max_tokens", "max_rows", "max_logit_rows", "max_len", "num_blocks", "block_size"):
            setattr(native, name, getattr(limits, name))
        step = (arrays.token_ids, arrays.positions, arrays.query_start, arrays.slots, arrays.logit_rows)
        block_bytes = kv_block_bytes(self.program, limits.block_size)
        try:
            self._core.bind(
                native,
                [a.ctypes.data for a in step],
                [t.ctypes.data for t in arrays.block_tables],
                plan.total,
                block_bytes,
                _DTYPES[self.program.kv_dtype],
            )
        except MemoryError as error:
            need = plan.total + block_bytes * limits.num_blocks
            raise MemoryBudgetError(
                f"the system would not give {need} bytes for cache and activations"
            ) from error

    def _add_op(self, op: Op) -> None:
        core, buffers = self._core, self._buffers
        match op:
            case Embed():
                core.op_embed(self._params[op.table], buffers[op.out])
            case Norm():
                delta, weight, bias = self._optional(op.delta), self._vector(op.weight), self._vector(op.bias)
                core.op_norm(buffers[op.x], delta, weight, bias, op.kind == "layer", op.eps, buffers[op.out])
            case Add():
                core.op_add(buffers[op.x], buffers[op.delta], op.scale)
            case Scale():
                core.op_scale(buffers[op.x], op.scale, op.cap, self._optional(op.maxima))
            case Linear():
                weight, bias = self._params[op.weight], self._vector(op.bias)
                act = _activation(op.act) if op.act else (-1, 0.0, 0.0)
                maxima = self._optional(op.maxima)
                core.op_linear(buffers[op.x], weight, bias, buffers[op.out], op.first, *act, maxima)
            case Quantize():
                core.op_quantize(buffers[op.x], buffers[op.out])
            case RopeWrite():
                core.op_rope_write(
                    buffers[op.qkv], op.shape.heads, op.layer, -1 if op.rope is None else op.rope,
                    self._vector(op.q_norm), self._vector(op.k_norm), op.kind == "layer", op.whole, op.eps,
                )  # fmt: skip
            case Attend():
                core.op_attend(
                    buffers[op.qkv], buffers[op.out], op.shape.heads, op.layer, op.scale, op.window,
                    op.softcap, self._vector(op.sinks), self._optional(op.wide),
                )  # fmt: skip
            case HeadLinear() | LatentWrite() | LatentAttend():
                self._add_latent(op)
            case GatedAct():
                core.op_gated_act(buffers[op.gate_up], buffers[op.out], *_activation(op.act))
            case GatherRows():
                core.op_gather(buffers[op.x], self._optional(op.delta), buffers[op.out])
            case Route() | Dispatch() | Experts() | Combine():
                self._add_expert_op(op)

    def _add_expert_op(self, op: Route | Dispatch | Experts | Combine) -> None:
        core, buffers = self._core, self._buffers
        match op:
            case Route():
                router = op.router
                sizes = [router.experts, router.top_k, router.groups, router.top_groups]
                kinds = [router.scores == "sigmoid", router.group_score == "top2", router.renormalise]
                core.op_route(
                    buffers[op.logits], self._vector(op.correction), buffers[op.ids], buffers[op.weights],
                    buffers[op.places], sizes, kinds, router.scale,
                )  # fmt: skip
            case Dispatch():
                core.op_dispatch(buffers[op.x], buffers[op.places], buffers[op.out])
            case Experts():
                core.op_experts(
                    buffers[op.x], self._params[op.weight], self._vector(op.bias), buffers[op.out]
                )
            case Combine():
                shared, gate = self._optional(op.shared), self._optional(op.gate)
                core.op_combine(
                    buffers[op.x], buffers[op.places], buffers[op.weights], shared, gate, buffers[op.out]
                )

    def _add_latent(self, op: HeadLinear | LatentWrite | LatentAttend) -> None:
        core, buffers = self._core, self._buffers
        match op:
            case HeadLinear():
                heads = self.program.param(op.weight).experts
                core.op_head_linear(buffers[op.x], self._params[op.weight], buffers[op.out], heads)
            case LatentWrite():
                core.op_latent_write(
                    buffers[op.q], buffers[op.kv], buffers[op.q_nope], op.shape.heads, op.layer, op.rope,
                    self._params[op.norm], op.eps,
                )  # fmt: skip
            case LatentAttend():
                core.op_latent_attend(
                    buffers[op.q_latent], buffers[op.q], buffers[op.out], op.shape.heads, op.layer, op.scale
                )

    def _optional(self, buffer: str | None) -> int:
        return -1 if buffer is None else self._buffers[buffer]

    def _vector(self, param: str | None) -> int:
        return -1 if param is None else self._params[param]

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int) -> F32:
        """One step; see Executor.run."""
        self._core.run(num_tokens, num_rows, num_logit_rows)
        return self._logits[:num_logit_rows]

    def run_head(self, num_logit_rows: int) -> F32:
        """The head for other rows of the same step; see Executor.run_head."""
        self._core.run_head(num_logit_rows)
        return self._logits[:num_logit_rows]

    def maxima(self, num_logit_rows: int) -> F32 | None:
        """Maxima of the last logits; see Executor.maxima."""
        return None if self._maxima is None else self._maxima[:num_logit_rows]

    def run_range(self, num_tokens: int, num_rows: int, num_logit_rows: int, begin: int, end: int) -> None:
        """Only ops begin … end - 1 of Program.ops, on whatever their buffers hold: what a kernel benchmark times."""
        self._core.run_range(num_tokens, num_rows, num_logit_rows, begin, end)

    def stop_after(self, op_index: int | None) -> None:
        """End later runs after this op; see Executor.stop_after."""
        self._core.stop_after(-1 if op_index is None else op_index)

    def profile(self, on: bool) -> None:
        """Measure every op of later steps, or no longer. While it is off a step pays nothing for it."""
        if self._limits is None:
            raise RuntimeError("profile is called after bind")
        self._core.profile(on)

    def take_profile(self) -> tuple[list[float], list[float]]:
        """For each of Program.ops: seconds since the last call, and of these the mean that a thread waited for others.

        Empty when nothing is measured. What runs after the last op of a step (threads that finish later) is not in it.
        """
        found = self._core.take_profile()
        half = len(found) // 2
        return found[:half], found[half:]

    def read(self, buffer: str, rows: int) -> F32:
        """A copy of a buffer's first rows as float32."""
        return self._view(buffer, rows).astype(np.float32, copy=True)

    def _view(self, name: str, rows: int) -> F32:
        buffer = self.program.buffer(name)
        if buffer.dtype == "i8":
            return self._dequantized(buffer, rows)
        raw = self._bytes(name, 0, rows * buffer.cols * DTYPE_BYTES[buffer.dtype])
        if buffer.dtype == "i32":
            return raw.view(np.int32).reshape(rows, buffer.cols).astype(np.float32)
        if buffer.dtype == "f32":
            floats: F32 = raw.view(np.float32)
        else:
            floats = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return floats.reshape(rows, buffer.cols)

    def _dequantized(self, buffer: Buffer, rows: int) -> F32:
        assert self._limits is not None
        at = scale_offset(buffer, self._limits.max_tokens, self._limits.max_logit_rows)
        pitch = row_pitch(buffer)
        stored = self._bytes(buffer.name, 0, rows * pitch)
        scales: F32 = self._bytes(buffer.name, at, rows * 4).view(np.float32)
        if buffer.group:
            groups = pitch // buffer.group
            numbers = self._bytes(buffer.name, at + self._most_rows(buffer) * 4, rows * groups * 8)
            # the exponent of 1.5 * 2^(23 + bits)
            bits = (numbers.view(np.int32).reshape(rows, groups, 2)[:, :, :1] >> 23) - 150
            bytes_ = stored.view(np.int8).reshape(rows, groups, -1).astype(np.float32)
            whole: F32 = np.ldexp(bytes_, bits) * scales[:, None, None]
            if buffer.rotated:
                whole = rotate(whole) * weight_share(buffer.group)
            return whole.reshape(rows, pitch)[:, : buffer.cols]
        plain = stored.reshape(rows, pitch)[:, : buffer.cols].astype(np.float32)
        return (plain - np.float32(128)) * scales[:, None]

    def _most_rows(self, buffer: Buffer) -> int:
        assert self._limits is not None
        return max_rows(buffer, self._limits.max_tokens, self._limits.max_logit_rows)

    def _bytes(self, name: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        address = self._core.buffer(self._buffers[name]) + offset
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        """Copy KV blocks out; see Executor.read_blocks."""
        cache = self._cache(blocks, into)
        for row, block in zip(into, blocks, strict=True):
            row[:] = cache[block]

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        """Copy KV blocks in; see Executor.write_blocks."""
        cache = self._cache(blocks, content)
        for row, block in zip(content, blocks, strict=True):
            cache[block] = row

    def _cache(self, blocks: Sequence[int], content: U8) -> U8:
        """The KV cache, one row a block."""
        if self._limits is None:
            raise RuntimeError("blocks are there after bind")
        check_blocks(self.program, self._limits, blocks, content)
        [address] = [address for name, address, _ in self._core.arenas() if name == "kv"]
        whole = self._limits.num_blocks, content.shape[1]
        return np.ctypeslib.as_array((ctypes.c_uint8 * (whole[0] * whole[1])).from_address(address)).reshape(
            whole
        )

    def memory(self) -> Mapping[str, int]:
        """Bytes held by part."""
        return {
            "weights": self._core.weight_bytes,
            "kv": self._core.kv_bytes,
            "activations": self._core.activation_bytes,
            "tables": self._core.table_bytes,
        }

    def areas(self) -> list[tuple[str, int, int]]:
        """Where large parts lie in memory: name, address, bytes."""
        return self._core.arenas()

    def close(self) -> None:
        """Give everything back; the executor cannot be used again."""
        self._logits = np.zeros((0, self.program.vocab), np.float32)
        self._maxima = None
        self._arrays = None
        del self._core


def _activation(act: Activation) -> tuple[int, float, float]:
    """A gate by its number in csrc/kernels.h, and its alpha and limit."""
    return (3, act.alpha, act.limit) if isinstance(act, ClampedSwiGLU) else (_ACTS[act], 0.0, 0.0)


def _scratch_bytes(program: Program, threads: int, limits: Limits) -> int:
    """What attention, experts and rounding need beside buffers and cache."""
    routers = [op.router for op in program.body if isinstance(op, Route)]
    experts = 0
    if routers:
        pairs = limits.max_tokens * max(router.top_k for router in routers)
        experts = _native.experts_bytes(max(router.experts for router in routers), pairs)
    heads = {op.shape for op in program.body if isinstance(op, Attend)}
    latent = {op.shape for op in program.body if isinstance(op, LatentAttend)}
    shapes = [(s.head_dim, s.heads, s.kv_heads, 0) for s in heads]
    shapes += [(s.cached, s.heads, 1, s.rank) for s in latent]
    rows = threads * rounded_row_bytes(program)
    return _native.attention_bytes(shapes, threads, limits.max_len) + experts + rows


def _packed_row(param: Param, row_offset: int, rows: int) -> int:
    """Where rows of a parameter begin in its packed form: an expert's weight is padded to whole panels."""
    if not param.experts or param.kind != "linear":
        return row_offset
    expert, row = divmod(row_offset, param.matrix_rows)
    if row + rows > param.matrix_rows:
        raise ValueError(f"{param.name}: rows of several experts in one part")
    return expert * packed_matrix_rows(param) + row


def _as_float32(data: npt.NDArray[Any], dtype: str) -> F32:
    """A checkpoint part as float32, exactly."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
