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
from quire.executor.base import F32, U8, Limits, Outputs, StepArrays, check_blocks
from quire.loader.finite import first_nonfinite
from quire.program.formats import DTYPE_BYTES
from quire.program.memory import (
    ALIGNMENT,
    ArenaPlan,
    kv_block_bytes,
    kv_token_bytes,
    max_rows,
    plan_arena,
    rope_table_bytes,
    row_pitch,
    scale_offset,
    weight_bytes,
)
from quire.program.op import AttentionScratch, ExpertScratch, RowScratch
from quire.program.program import Program
from quire.program.tensors import Buffer, Param
from quire.quant import GroupCodes, check_codes, quantize
from quire.quant.groups import rotate, weight_share
from quire.spec.rope import cos_sin
from quire.types import MemoryBudgetError
from quire.util.sizes import format_size

_DTYPES = {dtype.name: dtype for dtype in _native.DType}
_SOURCE_DTYPES = {"F32": _native.DType.f32, "F16": _native.DType.f16, "BF16": _native.DType.bf16}
_SOURCE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_GROUP_KINDS = {kind.name.replace("_", "*"): kind for kind in _native.GroupKind}
_Field = str | int | float | bool | None


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
        for param in program.params:
            self._add_param(param)
        self._core.allocate_weights()
        self._limits: Limits | None = None
        self._arrays: StepArrays | None = None
        self._outputs: list[tuple[str, F32, bool]] = []  # name, all its rows, whether they are logit rows
        self._tokens = 0  # of the last step

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

    def _add_param(self, param: Param) -> None:
        core, matrices, rows = self._core, max(param.experts, 1), param.matrix_rows
        if param.kind == "vector":
            core.add_vector(param.name, matrices, rows)
        elif param.groups is not None:
            form = param.groups
            scales, offsets = _GROUP_KINDS[form.scales], _GROUP_KINDS[form.offsets]
            packed = _native.GroupFormat(_code_bits(param), form.size, scales, offsets, form.rotated)
            core.add_groups(param.name, matrices, rows, param.cols, packed)
        elif param.kind == "linear":
            core.add_panels(param.name, matrices, rows, param.cols, _DTYPES[param.dtype])
        else:
            core.add_table(param.name, rows, param.cols, _DTYPES[param.dtype])

    def join(self, group: _native.Group) -> None:
        """Meet the other ranks of the program there; after bind."""
        self._core.join(group, self.program.plan.tensor_parallel_rank)

    def write(self, buffer: str, rows: F32) -> None:
        """Fill the first rows of an input; see Program.inputs."""
        self._view(buffer, len(rows))[:] = rows

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
                given = quantize(_as_float32(data, dtype), param.groups, _code_bits(param))
                self.put_codes(param, row_offset, given)
            return found
        bad = self._core.put(param.name, row_offset, data.ctypes.data, _SOURCE_DTYPES[dtype], rows, cols)
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
        self._core.put_codes(param.name, row_offset, len(given.codes), addresses)

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        """Allocate cache and buffers and remember the arrays; see Executor.bind."""
        if self._limits is not None:
            raise RuntimeError("bind is called once")
        program = self.program
        self._limits, self._arrays = limits, arrays
        plan = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
        for buffer in program.buffers:
            offset = plan.offsets[buffer.name]
            self._core.add_buffer(
                name=buffer.name,
                cols=buffer.cols,
                dtype=_DTYPES[buffer.dtype],
                offset=offset,
                scale_offset=offset + scale_offset(buffer, limits.max_tokens, limits.max_logit_rows),
                group=buffer.group,
                rotated=buffer.rotated,
                logits=buffer.rows == "logits",
                max_rows=self._most_rows(buffer),
                per=buffer.per,
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
            self._core.add_op(type(op).__name__, _fields(op))
        self._core.begin_head()
        for op in program.head:
            self._core.add_op(type(op).__name__, _fields(op))
        self._allocate(limits, arrays, plan)
        for output in program.outputs:
            buffer = program.buffer(output.buffer)
            rows = self._view(buffer.name, self._most_rows(buffer))
            self._outputs.append((output.name, rows, buffer.rows == "logits"))

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
                f"memory: could not allocate {format_size(need)} for the KV cache and activations: lower --memory, or "
                "raise the limit of address space (ulimit -v)"
            ) from error

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int) -> Outputs:
        """One step; see Executor.run."""
        self._core.run(num_tokens, num_rows, num_logit_rows)
        self._tokens = num_tokens
        return self._views(num_logit_rows)

    def run_head(self, num_logit_rows: int) -> Outputs:
        """The head for other rows of the same step; see Executor.run_head."""
        self._core.run_head(num_logit_rows)
        return self._views(num_logit_rows)

    def _views(self, num_logit_rows: int) -> Outputs:
        return {
            name: rows[: num_logit_rows if of_logits else self._tokens]
            for name, rows, of_logits in self._outputs
        }

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
        address = self._core.buffer(name) + offset
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
        self._outputs.clear()
        self._arrays = None
        del self._core


def _fields(record: Any, prefix: str = "") -> dict[str, _Field]:
    """An op's fields by name, as csrc/fields.h reads them: those of a record inside as "shape.heads"."""
    found: dict[str, _Field] = {}
    for name in record.__match_args__:  # a dataclass's fields, in no time
        value = getattr(record, name)
        if hasattr(value, "__match_args__"):
            found |= _fields(value, f"{prefix}{name}.")
            value = type(value).__name__
        found[prefix + name] = value
    return found


def _scratch_bytes(program: Program, threads: int, limits: Limits) -> int:
    """What ops need beside buffers and cache; it is planned as csrc/context.h shares it."""
    wanted = {need for op in program.ops for need in op.scratch(program.buffer)}
    rows = [need.cols * DTYPE_BYTES["f32"] for need in wanted if isinstance(need, RowScratch)]
    shapes = [
        (need.head_dim, need.heads, need.kv_heads, need.rank)
        for need in wanted
        if isinstance(need, AttentionScratch)
    ]
    routers = [need for need in wanted if isinstance(need, ExpertScratch)]
    experts = 0
    if routers:
        pairs = limits.max_tokens * max(router.top_k for router in routers)
        experts = _native.experts_bytes(max(router.experts for router in routers), pairs)
    row_bytes = -(-max(rows, default=0) // ALIGNMENT) * ALIGNMENT
    return _native.attention_bytes(shapes, threads, limits.max_len) + experts + threads * row_bytes


def _code_bits(param: Param) -> int:
    """Bits of a code of a weight in groups."""
    return 4 if param.dtype == "i4" else 8


def _as_float32(data: npt.NDArray[Any], dtype: str) -> F32:
    """A checkpoint part as float32, exactly."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
