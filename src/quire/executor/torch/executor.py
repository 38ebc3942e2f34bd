"""The reference executor: runs a Program in plain torch on any torch device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire import _native
from quire.executor.base import (
    F32,
    U8,
    AdapterSlots,
    ExpertLoads,
    Limits,
    Outputs,
    StepArrays,
    check_blocks,
    check_embeddings,
    check_program,
)
from quire.executor.expert_places import UncountedExperts
from quire.executor.plans import Paging, PlanCounts, StepSize
from quire.executor.sampler import HostSampler
from quire.executor.torch import collectives, experts, ops
from quire.executor.torch.group import DistributedGroup, Group
from quire.executor.torch.operands import Operands, run_op
from quire.executor.torch.state import State
from quire.executor.torch.step import DeviceStep, StepReader
from quire.executor.torch.weights import Weights
from quire.loader.packed import Packer
from quire.program.memory import kv_block_bytes, plan_arena
from quire.program.program import Program
from quire.program.tensors import AdapterShape, Param
from quire.quant import GroupCodes
from quire.quant.floats import FloatsOrBits, floats
from quire.types import MemoryBudgetError
from quire.util.given_pages import give_pages

_DEFINED_IN = (ops, experts, collectives)  # importing them makes their definitions known


class TorchOutputs(Mapping[str, F32]):
    """The outputs of a step as tensors on the device; looking one up copies it to the host, if it is not there."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> F32:
        found: F32 = self.tensors[name].cpu().numpy()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class TorchExecutor:
    """An Executor (see executor/base.py) whose ops are those of executor/torch/ops.py.

    device: a torch device by name ("cpu", "cuda", "cuda:1"). Products of float32 are taken in float32: this relies on
    torch's default, which leaves TF32 off. A step that breaks the contract of StepArrays (ids, positions, slots or
    needed blocks out of range) is refused with ValueError before any op runs. `threads` and `isa` are the sampler's,
    `beside` as in ExecutorKind.make.
    """

    packer: Packer | None = None
    paging: Paging | None = None  # all weights stay
    held_experts = UncountedExperts()

    def __init__(
        self, program: Program, device: str = "cpu", *, threads: int = 1, isa: str = "",
        beside: TorchExecutor | None = None,
    ) -> None:  # fmt: skip
        check_program(program)
        self.program = program
        self._device = find_device(device)
        self._threads, self._isa = threads, isa
        self._weights: Weights
        lender = None if beside is None else beside._weights
        self._weights = Weights(program, self._device, lender)
        self._state: State | None = None
        self._reader: StepReader | None = None
        self._step: DeviceStep | None = None
        self._stop: int | None = None
        self._steps = 0
        self._seconds: list[float] | None = None  # of each op, while they are measured
        self._group: Group | None = None
        self._shown = 0  # the address of what other ranks read

    @property
    def isa(self) -> str:
        return "torch"

    def join(self, group: Group) -> None:
        """Meet the other ranks of the program there."""
        self._group = group

    def meet(
        self, ranks: _native.SharedRanks, meeting: str, stage: int, size: int, here: int, peers: Iterable[int]
    ) -> None:
        """Meet the ranks of the program in their processes; see MeetingExecutor."""
        torch.set_num_threads(max(1, self._threads))  # others have the other processors
        own = self._device.type == "cuda" and torch.cuda.device_count() >= here
        self.join(DistributedGroup(meeting, f"stage of rank {stage}", size, ranks, nccl=own, peers=peers))

    def place_activations(self, address: int) -> None:
        """Show what the next stage takes there, where a native executor has it; see RankExecutor."""
        self._shown = address

    def use(self, arrays: StepArrays) -> None:
        """Later steps are in these arrays; see RankExecutor."""
        self._bound()[1].arrays = arrays

    def _show(self, outputs: Outputs, num_tokens: int) -> None:
        """Copy the outputs of a stage to where ranks of the next one read them."""
        if not self._shown or self.program.plan.is_last_stage:
            return
        limits = self._bound()[1].limits
        places = plan_arena(self.program, limits.max_tokens, limits.max_logit_rows).offsets
        for each in self.program.outputs:
            rows = np.ascontiguousarray(outputs[each.name][:num_tokens])
            ctypes.memmove(self._shown + places[each.buffer], rows.ctypes.data, rows.nbytes)

    def write(self, buffer: str, rows: F32) -> None:
        """Fill the first rows of an input; see Runnable.write."""
        self._bound()[0].buffers[buffer][: len(rows)] = torch.from_numpy(rows)

    def put(self, param: Param, row_offset: int, data: np.ndarray, dtype: str) -> None:
        self._weights.put(param, row_offset, data, dtype)

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        self._weights.put_codes(param, row_offset, given)

    def bind(self, limits: Limits, arrays: StepArrays) -> None:
        if self._reader is not None:
            raise RuntimeError("bind is called once")
        self._weights.check_complete()
        try:
            self._state = State.allocate(self.program, limits, self._device)
        except RuntimeError as error:  # what torch raises when it cannot allocate
            raise MemoryBudgetError(f"no memory for the KV cache and activations: {error}") from error
        self._reader = StepReader(self.program, limits, arrays, self._device)

    def sampler(self) -> HostSampler:
        limits = self._bound()[1].limits
        return HostSampler(
            self.program.vocab, limits.max_rows, self._isa, self._threads, max_rows=limits.max_logit_rows
        )

    def prepare(self, sizes: Sequence[StepSize]) -> None:
        """Nothing: torch runs op by op, whatever the size."""

    @property
    def plans(self) -> PlanCounts:
        return PlanCounts(fallbacks=self._steps)

    @property
    def overlaps(self) -> bool:
        """No; see Runnable.overlaps."""
        return False

    @property
    def experts(self) -> ExpertLoads:
        """Not counted; see Runnable.experts."""
        return UncountedExperts()

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int, first_op: int = 0) -> Outputs:
        self._step = self._bound()[1].read(num_tokens, num_rows)
        self._steps += 1
        ops = self.program.ops if num_logit_rows else self.program.body
        outputs = self._run_ops(first_op, len(ops), self._step, num_logit_rows)
        self._show(outputs, num_tokens)
        return outputs

    def run_head(self, num_logit_rows: int) -> Outputs:
        if self._step is None:
            raise RuntimeError("run_head needs a step that was run before")
        body, ops = len(self.program.body), len(self.program.ops)
        return self._run_ops(body, ops if num_logit_rows else body, self._step, num_logit_rows)

    def run_range(self, num_tokens: int, num_rows: int, num_logit_rows: int, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= len(self.program.ops):
            raise ValueError(f"ops {begin} … {end - 1} are not all ops of the program")
        self._step = self._bound()[1].read(num_tokens, num_rows)
        self._run_ops(begin, end, self._step, num_logit_rows)

    def read(self, buffer: str, rows: int) -> F32:
        found: F32 = self._bound()[0].buffers[buffer][:rows].float().cpu().numpy().copy()
        return found

    def stop_after(self, op_index: int | None) -> None:
        if op_index is not None and not 0 <= op_index < len(self.program.ops):
            raise ValueError(f"op_index: {op_index} is not in [0, {len(self.program.ops) - 1}]")
        self._stop = op_index

    def give_pages(self) -> None:
        give_pages(self.areas())

    @property
    def block_bytes(self) -> int:
        _, reader = self._bound()
        return kv_block_bytes(self.program, reader.limits.block_size)

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        state, reader = self._bound()
        check_blocks(reader.limits, self.block_bytes, blocks, into)
        into[:] = state.memory[list(blocks)].cpu().numpy()

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        state, reader = self._bound()
        check_blocks(reader.limits, self.block_bytes, blocks, content)
        state.memory[list(blocks)] = torch.from_numpy(np.array(content)).to(state.memory.device)

    def copy_blocks(self, blocks: Sequence[int], targets: Sequence[int]) -> None:
        memory = self._bound()[0].memory
        memory[list(targets)] = memory[list(blocks)]

    def use_threads(self, count: int) -> None:  # the protocol names it
        """Nothing changes: torch has threads of its own."""

    def warm_blocks(self, count: int) -> int | None:  # noqa: ARG002  the protocol names it
        """All pages are there."""
        return None

    @property
    def adapter_slots(self) -> Sequence[AdapterSlots]:
        """Its own; see Runnable.adapter_slots."""
        return (self,)

    def settle_adapters(self) -> None:
        """Nothing: what was put is there; see AdapterSlots."""

    def open_adapter(self, slot: int, shape: AdapterShape) -> None:
        self._bound()[0].adapters.open(slot, shape)

    def put_adapter(
        self,
        slot: int,
        name: str,
        part: int,
        a: FloatsOrBits,
        b: FloatsOrBits,
        gain: F32 | None = None,
        scale: float = 1.0,
    ) -> None:
        self._bound()[0].adapters.put(slot, name, part, a, floats(b) * np.float32(scale), gain)

    def put_own_rows(self, slot: int, name: str, first: int, rows: F32) -> None:
        self._bound()[0].adapters.put_rows(slot, name, first, rows)

    def clear_adapter(self, slot: int) -> None:
        self._bound()[0].adapters.clear(slot)

    def profile(self, on: bool) -> None:
        self._seconds = [0.0] * len(self.program.ops) if on else None

    def take_profile(self) -> tuple[list[float], list[float]]:
        found = self._seconds
        if found is None:
            return [], []
        self._seconds = [0.0] * len(found)
        return found, [0.0] * len(found)

    def areas(self) -> Sequence[tuple[str, int, int]]:
        return ()

    def memory(self) -> Mapping[str, int]:
        held = {"weights": self._weights.nbytes}
        if self._state is None:
            return held
        return held | self._state.bytes | {"adapters": self._state.adapters.nbytes}

    def close(self) -> None:
        self._weights.clear()
        self._state = self._reader = self._step = None

    def _bound(self) -> tuple[State, StepReader]:
        if self._state is None or self._reader is None:
            raise RuntimeError("bind must be called before a step is run or read")
        return self._state, self._reader

    def _run_ops(self, begin: int, end: int, step: DeviceStep, num_logit_rows: int) -> Outputs:
        """Ops begin … end - 1, and none after the one to stop after."""
        state, reader = self._bound()
        logit_rows = reader.logit_rows(num_logit_rows, len(step.positions))
        if self._stop is not None:
            end = min(end, self._stop + 1)
        operands = Operands(self.program, self._weights, state, step, logit_rows, self._group)
        embeddings, entry = reader.arrays.embeddings, None
        if embeddings and not begin:
            entry = check_embeddings(self.program, embeddings, len(step.positions))
        with torch.inference_mode():
            for number, op in enumerate(self.program.ops[begin:end], begin):
                start = time.perf_counter()
                if entry is not None and number == entry.ops:
                    self._enter(operands.buffer(entry.buffer))
                run_op(operands, op)
                if self._seconds is not None:
                    self._finish()
                    self._seconds[number] += time.perf_counter() - start
            return TorchOutputs({o.name: operands.buffer(o.buffer) for o in self.program.outputs})

    def _finish(self) -> None:
        """Wait until the device has computed what was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _enter(self, buffer: Tensor) -> None:
        """Put the embeddings of soft tokens in place of those of their ids."""
        for given in self._bound()[1].arrays.embeddings:
            rows = torch.tensor(given.rows)  # a copy: those of a request are read-only
            buffer[given.start : given.start + len(rows)] = rows.to(buffer.device)


def shown_bytes(program: Program, limits: Limits) -> int:
    """Bytes of what a stage shows to the next one."""
    if program.plan.is_last_stage:
        return 0
    return sum(4 * limits.max_tokens * program.buffer(each.buffer).cols for each in program.outputs)


def find_device(name: str) -> torch.device:
    """The device of that name. Raises ValueError if torch does not know it or cannot use it here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {name!r} cannot be used: {reason}") from error
    return device
