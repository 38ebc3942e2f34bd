"""The native executor: binds a Program to the C++ core once, then runs each step in one call.

Everything that costs memory is planned here from the program (see program/memory), so that what
`memory()` reports is what the process holds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire import _native
from quire.executor.base import (
    F32,
    U8,
    Embeddings,
    Executor,
    ExpertLoads,
    Limits,
    Outputs,
    StepArrays,
    check_blocks,
    check_embeddings,
    check_program,
)
from quire.executor.expert_places import HeldExperts
from quire.executor.expert_replicas import ExpertReplicas, shares_experts, shown_bytes
from quire.executor.expert_rounds import exchange_bytes
from quire.executor.native_adapters import NativeAdapters
from quire.executor.paged_weights import PagedWeights, PagingPlan, weights_in_memory
from quire.executor.plans import Paging, PlanCounts, StepPlans, StepSize
from quire.executor.sampler import HostSampler, sampler_bytes
from quire.loader.finite import first_nonfinite
from quire.program.formats import DTYPE_BYTES
from quire.program.memory import (
    ArenaPlan,
    adapter_layout,
    codebook_bytes,
    kv_block_bytes,
    kv_head_elems,
    kv_token_bytes,
    max_rows,
    numbers_offset,
    packed,
    plan_arena,
    rope_table_bytes,
    row_pitch,
    scale_offset,
    scratch_bytes,
)
from quire.program.program import Program
from quire.program.tensors import Buffer, Param
from quire.quant import GroupCodes, check_codes, quantize
from quire.quant.groups import rotate, weight_share
from quire.records import dataclass
from quire.spec.rope import cos_sin
from quire.types import MemoryBudgetError
from quire.util.given_pages import give_pages, write_through
from quire.util.sizes import format_size

_SOURCE_DTYPES = {"F32": _native.DType.f32, "F16": _native.DType.f16, "BF16": _native.DType.bf16}
_SOURCE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_Field = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class NativeKind:
    """Native executors with so many threads; see ExecutorKind. `isa` and `weight_memory` as in NativeExecutor."""

    threads: int
    isa: str = ""
    weight_memory: int | None = None

    @property
    def layout(self) -> str:
        """The layout of packed weights; see ExecutorKind."""
        return _layout(self.isa or _native.supported_isas()[0])

    def held(self, program: Program) -> Sequence[Program]:
        """This part; see ExecutorKind."""
        return (program,)

    def planned_bytes(self, program: Program, limits: Limits) -> dict[str, int]:
        """What a NativeExecutor of these limits will hold, by part."""
        arena = plan_arena(program, limits.max_tokens, limits.max_logit_rows)
        return {
            "weights": weights_in_memory(program, self.weight_memory, limits.max_tokens),
            "kv": limits.blocks * kv_block_bytes(program, limits.block_size),
            "activations": arena.total
            + scratch_bytes(program, self.threads, limits.max_tokens, limits.max_len)
            + shown_bytes(program, limits)
            + (exchange_bytes([program]) if program.plan.ranks == 1 else 0),
            "tables": rope_table_bytes(program, limits.max_len) + codebook_bytes(program),
            "adapters": adapter_layout(program).pool_bytes(limits.max_loras, limits.adapter_pages)
            if limits.max_loras
            else 0,
        }

    def block_bytes(self, program: Program, block_size: int) -> int:
        """Bytes of a KV block."""
        return kv_block_bytes(program, block_size)

    def sampler_bytes(self, program: Program, limits: Limits) -> int:
        """The most bytes that its sampler will ever hold."""
        return sampler_bytes(program.vocab, limits, self.threads)

    def make(self, program: Program, beside: Executor | None = None) -> NativeExecutor:
        """An executor without weights; see ExecutorKind."""
        other = cast("NativeExecutor | None", beside)
        return NativeExecutor(
            program, threads=self.threads, isa=self.isa, beside=other, weight_memory=self.weight_memory
        )


class NativeExecutor(NativeAdapters):
    """Executor over the C++ core. `isa` forces an instruction set ("" takes the best of this machine). It takes turns
    with the one `beside` it on its threads, if one is given, and uses parameters of it. `weight_memory`: bytes of
    weights that are in memory at once, once they are mapped; None for all."""

    def __init__(
        self, program: Program, *, threads: int, isa: str = "", beside: NativeExecutor | None = None,
        weight_memory: int | None = None,
    ) -> None:  # fmt: skip
        check_program(program)
        self.program = program
        self._core = _native.Executor(isa, threads) if beside is None else _native.Executor(isa, beside.core)
        for param in program.params:
            self._core.add_param(param.name, packed(param))
        for param in program.borrowed:
            assert beside is not None, f"{param.name} belongs to another executor"
            self._core.borrow_param(beside.core, param.name)
        self._core.allocate_weights()
        self.held_experts = HeldExperts(self._core, program)
        self._limits: Limits | None = None
        self._block_bytes = 0  # before bind
        self._arrays: StepArrays | None = None
        self._outputs: list[tuple[str, F32, bool]] = []  # name, all its rows, whether they are logit rows
        self._plans: StepPlans[Outputs] = StepPlans()
        self._samplers: list[HostSampler] = []
        self._size = StepSize(0, 0, 0)  # of the last step
        self._activations = 0
        self._replicas: ExpertReplicas | None = None  # that share experts with this one
        pages = weight_memory is not None and weight_memory < self.weight_bytes
        self._weight_memory = weight_memory if pages else None
        self._paged: PagedWeights | None = None
        self.paging: Paging | None = None

    @property
    def core(self) -> _native.Executor:
        """The native object, for the sampler, which shares its threads, and for tests."""
        return self._core

    @property
    def isa(self) -> str:
        return str(self._core.isa)

    @property
    def threads(self) -> int:
        return int(self._core.threads)

    def join(self, group: _native.Group) -> None:
        """Meet the other ranks of the program there; after bind."""
        self._core.join(group, self.program.plan.tensor_parallel_rank)

    def share_experts(self, replicas: ExpertReplicas) -> None:
        """Meet the ranks of other replicas there; see SharingExecutor."""
        if shares_experts(self.program):
            self._core.share_experts(replicas.group, replicas.rank, replicas.shown)
        self._replicas = replicas
        if self.program.plan.ranks == 1:
            replicas.lead(self.held_experts)

    def run_idle(self) -> None:
        """Come to a round without a step; see SharingExecutor."""
        if self._replicas is not None:
            self._replicas.enter(steps=False)
        self._core.run(0, 0, 0)

    def write(self, buffer: str, rows: F32) -> None:
        """Fill the first rows of an input; see Runnable.write."""
        self._view(buffer, len(rows))[:] = rows

    def put(self, param: Param, row_offset: int, data: npt.NDArray[Any], dtype: str) -> None:
        """Pack one checkpoint part; see Loadable.put."""
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
                given = quantize(_as_float32(data, dtype), param.groups, param.code_bits)
                self.put_codes(param, row_offset, given)
            return found
        bad = self._core.put(param.name, row_offset, data.ctypes.data, _SOURCE_DTYPES[dtype], rows, cols)
        return None if bad < 0 else bad

    @property
    def layout(self) -> str:
        """What packed weights depend on besides the program; see Packer."""
        return _layout(self.isa)

    @property
    def packer(self) -> NativeExecutor:
        """The owner of the packed weights; see Loadable.packer."""
        return self

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
        mapped = self._core.map_weights(fd, sums)
        if mapped and self._weight_memory is not None:
            plan = PagingPlan(self.program, self._weight_memory)
            self.paging = self._paged = PagedWeights(plan, self._weights_at(), self._weight_memory)
        return mapped

    def put_in_file(self, fd: int) -> Callable[[], None]:
        """Have weights that are put from now on in a file; see loader.packed.Packer."""
        os.posix_fallocate(
            fd, 0, self.weight_bytes
        )  # on a full disk a write to a mapping would end the process
        return write_through(fd, self._weights_at(), self.weight_bytes)

    def _weights_at(self) -> int:
        return next(address for name, address, _ in self._core.arenas() if name == "weights")

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        """Pack rows that come quantized; see Loadable.put_codes."""
        check_codes(param, row_offset, given)
        arrays = [
            a if a is None else np.ascontiguousarray(a)
            for a in (given.codes, given.scales, given.offsets, given.factors)
        ]
        addresses = [0 if a is None else a.ctypes.data for a in arrays]
        self._core.put_codes(param.name, row_offset, len(given.codes), addresses)

    def place_activations(self, address: int) -> None:
        """Have activations there, in memory that outlives the executor, and not in memory of its own; before bind."""
        self._activations = address

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        """Allocate cache and buffers and remember the arrays; see Runnable.bind."""
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
                pitch=row_pitch(buffer),
                dtype=_native.DType[buffer.dtype],
                offset=offset,
                scales_at=offset + scale_offset(buffer, limits.max_tokens, limits.max_logit_rows),
                numbers_at=offset + numbers_offset(buffer, limits.max_tokens, limits.max_logit_rows),
                group=buffer.group,
                rotated=buffer.rotated,
                logits=buffer.rows == "logits",
                per=buffer.per,
                shared=buffer.replicas > 1,
            )
        for rope in program.ropes:
            cos, sin = (np.ascontiguousarray(table) for table in cos_sin(rope, limits.max_len))
            self._core.add_rope(
                cos.ctypes.data, sin.ctypes.data, limits.max_len, rope.dim // 2, rope.interleaved
            )
        for layer in program.kv_layers:
            offset = layer.index_in_group * kv_token_bytes(layer) * limits.block_size
            k_scales, v_scales = layer.scales()
            self._core.add_kv_layer(
                layer.group,
                layer.kv_heads,
                layer.head_dim,
                offset,
                _native.KVType[layer.type],
                list(k_scales),
                list(v_scales),
                [] if layer.codes is None else layer.codes.book(kv_head_elems(layer.head_dim)),
                -1 if layer.rope is None else layer.rope,
            )
        self._core.set_adapter_layout(adapter_layout(program))
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
        for field in fields(limits):
            setattr(native, field.name, getattr(limits, field.name))
        self._block_bytes = kv_block_bytes(self.program, limits.block_size)
        try:
            self._core.bind(
                native,
                *_addresses(arrays),
                plan.total,
                self._block_bytes,
                self._activations,
            )
        except MemoryError as error:
            need = plan.total + self._block_bytes * limits.blocks
            raise MemoryBudgetError(
                f"memory: could not allocate {format_size(need)} for the KV cache and activations: lower --memory, or "
                "raise the limit of address space (ulimit -v)"
            ) from error

    @property
    def overlaps(self) -> bool:
        """No; see Runnable.overlaps."""
        return False

    @property
    def experts(self) -> ExpertLoads:
        """Those that it holds; see Runnable.experts."""
        return self.held_experts if self._replicas is None else self._replicas.loads

    def use(self, arrays: StepArrays) -> None:
        """Later steps are in these arrays, which are like those of bind."""
        if arrays is not self._arrays:
            self._arrays = arrays
            self._core.use_step(*_addresses(arrays))

    def sampler(self) -> HostSampler:
        """A sampler on the threads of this executor; see Runnable.sampler."""
        if self._limits is None:
            raise RuntimeError("sampler is called after bind")
        limits = self._limits
        made = HostSampler(
            self.program.vocab, limits.max_rows, executor=self._core, max_rows=limits.max_logit_rows
        )
        self._samplers.append(made)
        return made

    def prepare(self, sizes: Sequence[StepSize]) -> None:
        """Make the views of the outputs of steps of these sizes.

        Nothing else of a native step is worth keeping: its tasks depend on positions, and cutting them takes less than
        a thousandth of the step (decision 0048).
        """
        self._plans.prepare(sizes, self._views)

    @property
    def plans(self) -> PlanCounts:
        """Prepared sizes, and the steps that had them."""
        return self._plans.counts

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int, first_op: int = 0) -> Outputs:
        """One step; see Runnable.run."""
        if self._replicas is not None:
            self._replicas.enter(steps=True)
        end = len(self.program.ops if num_logit_rows else self.program.body)
        if first_op:
            self._run_ops(num_tokens, num_rows, num_logit_rows, first_op, end)
        elif self._arrays is not None and self._arrays.embeddings:
            self._run_with(self._arrays.embeddings, num_tokens, num_rows, num_logit_rows)
        elif self._paged is not None:
            self._run_ops(num_tokens, num_rows, num_logit_rows, 0, end)
        else:
            self._core.run(num_tokens, num_rows, num_logit_rows)
        self._size = StepSize(num_tokens, num_rows, num_logit_rows)
        return self._plans.find(num_tokens, num_rows, num_logit_rows) or self._views(self._size)

    def _run_with(self, embeddings: list[Embeddings], tokens: int, rows: int, logit_rows: int) -> None:
        """A step in two parts, so that the embeddings of soft tokens can be put in between."""
        entry = check_embeddings(self.program, embeddings, tokens)
        end = len(self.program.ops if logit_rows else self.program.body)
        self._run_ops(tokens, rows, logit_rows, 0, entry.ops)
        into = self._view(entry.buffer, tokens)
        for given in embeddings:
            into[given.start : given.start + len(given.rows)] = given.rows
        self._run_ops(tokens, rows, logit_rows, entry.ops, end)

    def _run_ops(self, tokens: int, rows: int, logit_rows: int, begin: int, end: int) -> None:
        """Some ops, with what they need of the weights in memory."""

        def run(first: int, last: int) -> None:
            self._core.run_range(tokens, rows, logit_rows, first, last)

        if self._paged is None:
            run(begin, end)
        else:
            self._paged.run(
                run, lambda ids: np.unique(self._view(ids, tokens).astype(np.int64)).tolist(), begin, end
            )

    def run_head(self, num_logit_rows: int) -> Outputs:
        """The head for other rows of the same step; see Runnable.run_head."""
        if self._paged is not None:
            self._paged.hold_head()
        self._core.run_head(num_logit_rows)
        return self._views(self._size._replace(logit_rows=num_logit_rows))

    def _views(self, size: StepSize) -> Outputs:
        return {
            name: rows[: size.logit_rows if of_logits else size.tokens]
            for name, rows, of_logits in self._outputs
        }

    def run_range(self, num_tokens: int, num_rows: int, num_logit_rows: int, begin: int, end: int) -> None:
        """Only some ops; see Inspectable.run_range."""
        self._run_ops(num_tokens, num_rows, num_logit_rows, begin, end)
        self._size = StepSize(num_tokens, num_rows, num_logit_rows)

    def stop_after(self, op_index: int | None) -> None:
        """End later runs after this op; see Inspectable.stop_after."""
        self._core.stop_after(-1 if op_index is None else op_index)

    def profile(self, on: bool) -> None:
        """Measure every op of later steps, or stop measuring."""
        if self._limits is None:
            raise RuntimeError("profile is called after bind")
        self._core.profile(on)

    def take_profile(self) -> tuple[list[float], list[float]]:
        """Seconds of each op; see Inspectable.take_profile."""
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
        groups = pitch // buffer.group
        at = numbers_offset(buffer, self._limits.max_tokens, self._limits.max_logit_rows)
        numbers = self._bytes(buffer.name, at, rows * groups * 8)
        # the exponent of 1.5 * 2^(23 + bits)
        bits = (numbers.view(np.int32).reshape(rows, groups, 2)[:, :, :1] >> 23) - 150
        bytes_ = stored.view(np.int8).reshape(rows, groups, -1).astype(np.float32)
        whole: F32 = np.ldexp(bytes_, bits) * scales[:, None, None]
        if buffer.rotated:
            whole = rotate(whole) * weight_share(buffer.group)
        return whole.reshape(rows, pitch)[:, : buffer.cols]

    def _most_rows(self, buffer: Buffer) -> int:
        assert self._limits is not None
        return max_rows(buffer, self._limits.max_tokens, self._limits.max_logit_rows)

    def _bytes(self, name: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        address = self._core.buffer(name) + offset
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block; see Runnable.block_bytes."""
        if self._limits is None:
            raise RuntimeError("blocks are there after bind")
        return self._block_bytes

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        """Copy KV blocks out, with the interpreter lock: who took it would hold up steps; see Runnable.read_blocks."""
        cache = self._cache(blocks, into)
        for row, block in zip(into, blocks, strict=True):
            row.data[:] = cache[block].data

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        """Copy KV blocks in, as read_blocks does; see Runnable.write_blocks."""
        cache = self._cache(blocks, content)
        for row, block in zip(content, blocks, strict=True):
            cache[block].data[:] = row.data

    def copy_blocks(self, blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks inside the cache; see Runnable.copy_blocks."""
        self._core.copy_blocks(blocks, targets)

    def use_threads(self, count: int) -> None:
        """Run steps with so many of the threads; see Runnable.use_threads."""
        self._core.use_threads(count)

    def warm_blocks(self, count: int) -> int | None:
        """Bring in no pages of blocks from this one on; see Runnable.warm_blocks."""
        if self._limits is None:
            raise RuntimeError("blocks are there after bind")
        self._core.warm_blocks(count)
        chunk = 2 * 2**21  # one may be on its way, and pages may be huge
        return -(-(self._core.kv_warmed + chunk) // self._block_bytes)

    def give_pages(self) -> None:
        """Give back pages that can be had again; see Runnable.give_pages."""
        give_pages(self.areas())
        if self._paged is not None:
            self._paged.forget()

    def _cache(self, blocks: Sequence[int], content: U8) -> U8:
        """The KV cache, one row a block."""
        if self._limits is None:
            raise RuntimeError("blocks are there after bind")
        check_blocks(self._limits, self._block_bytes, blocks, content)
        [address] = [address for name, address, _ in self._core.arenas() if name == "kv"]
        size = self._limits.blocks * self._block_bytes
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        return whole.reshape(self._limits.blocks, self._block_bytes)

    def memory(self) -> Mapping[str, int]:
        """Bytes held by part."""
        return {
            "weights": self.weight_bytes if self._weight_memory is None else self._weight_memory,
            "kv": self._core.kv_bytes,
            "activations": self._core.activation_bytes,
            "tables": self._core.table_bytes,
            "adapters": self._core.adapter_bytes,
        }

    def areas(self) -> list[tuple[str, int, int]]:
        """Large parts: name, address, bytes."""
        return self._core.arenas()

    def close(self) -> None:
        """Free everything; the executor cannot be used again."""
        self._outputs.clear()
        self._plans = StepPlans()
        self._arrays = None
        while self._samplers:
            self._samplers.pop().close()  # a native sampler keeps its executor
        if self._paged is not None:
            self._paged.close()
        del self._core, self.held_experts, self._replicas


def _layout(isa: str) -> str:
    """The number of the layout of packed weights, and the instruction set."""
    return f"{_native.PACK_LAYOUT}/{isa}"


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


def _addresses(arrays: StepArrays) -> tuple[list[int], list[int]]:
    """Of the arrays of a step, as the native executor takes them, and of its block tables."""
    step = (
        arrays.token_ids, arrays.positions, arrays.query_start, arrays.slots, arrays.logit_rows, arrays.mirrors,
        arrays.adapters,
    )  # fmt: skip
    return [a.ctypes.data for a in step], [t.ctypes.data for t in arrays.block_tables]


def _as_float32(data: npt.NDArray[Any], dtype: str) -> F32:
    """A checkpoint part as float32, exactly."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
