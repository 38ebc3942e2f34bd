"""The reference executor: runs a Program in plain torch on any torch device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quire.executor.base import F32, U8, Limits, Outputs, StepArrays, check_blocks
from quire.executor.group import Group
from quire.executor.torch import collectives, experts, ops
from quire.executor.torch.operands import Operands, run_op
from quire.executor.torch.state import State
from quire.executor.torch.step import Step, StepReader
from quire.executor.torch.weights import Weights
from quire.program.program import Program
from quire.program.tensors import Param
from quire.quant import GroupCodes
from quire.types import MemoryBudgetError

_DEFINED_IN = (ops, experts, collectives)  # importing them makes their definitions known


class TorchExecutor:
    """An Executor (see executor/base.py) whose ops are those of executor/torch/ops.py.

    device: a torch device by name ("cpu", "cuda", "cuda:1"). Products of float32 are taken in float32:
    torch's default, which leaves TF32 off, is relied on. A step that breaks the contract of StepArrays
    (ids, positions, slots or needed blocks out of range) is refused with ValueError before any op runs.
    """

    def __init__(self, program: Program, device: str = "cpu") -> None:
        self.program = program
        self._device = _device(device)
        self._weights = Weights(program, self._device)
        self._state: State | None = None
        self._reader: StepReader | None = None
        self._step: Step | None = None
        self._stop: int | None = None
        self._group: Group | None = None

    def join(self, group: Group) -> None:
        """Meet the other ranks of the program there."""
        self._group = group

    def write(self, buffer: str, rows: F32) -> None:
        """Fill the first rows of an input; see Program.inputs."""
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

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int) -> Outputs:
        self._step = self._bound()[1].read(num_tokens, num_rows)
        return self._run_ops(0, self._step, num_logit_rows)

    def run_head(self, num_logit_rows: int) -> Outputs:
        if self._step is None:
            raise RuntimeError("run_head needs a step that was run before")
        return self._run_ops(len(self.program.body), self._step, num_logit_rows)

    def read(self, buffer: str, rows: int) -> F32:
        found: F32 = self._bound()[0].buffers[buffer][:rows].float().cpu().numpy().copy()
        return found

    def stop_after(self, op_index: int | None) -> None:
        if op_index is not None and not 0 <= op_index < len(self.program.ops):
            raise ValueError(f"op_index: {op_index} is not in [0, {len(self.program.ops) - 1}]")
        self._stop = op_index

    def read_blocks(self, blocks: Sequence[int], into: U8) -> None:
        state, reader = self._bound()
        check_blocks(self.program, reader.limits, blocks, into)
        at = 0
        for part in state.block_parts():
            content = part[list(blocks)].reshape(len(blocks), -1).view(torch.uint8).cpu().numpy()
            into[:, at : at + content.shape[1]] = content
            at += content.shape[1]

    def write_blocks(self, blocks: Sequence[int], content: U8) -> None:
        state, reader = self._bound()
        check_blocks(self.program, reader.limits, blocks, content)
        at = 0
        for part in state.block_parts():
            shape = len(blocks), *part.shape[1:]
            size = part[0].numel() * part.itemsize
            piece = torch.from_numpy(np.ascontiguousarray(content[:, at : at + size]))
            part[list(blocks)] = piece.to(part.device).view(part.dtype).reshape(shape)
            at += size

    def memory(self) -> Mapping[str, int]:
        held = {"weights": self._weights.nbytes}
        return held if self._state is None else held | self._state.bytes

    def close(self) -> None:
        self._weights.clear()
        self._state = self._reader = self._step = None

    def _bound(self) -> tuple[State, StepReader]:
        if self._state is None or self._reader is None:
            raise RuntimeError("bind must be called before a step is run or read")
        return self._state, self._reader

    def _run_ops(self, first: int, step: Step, num_logit_rows: int) -> Outputs:
        """Ops from number `first` on; the head only when logits are wanted."""
        state, reader = self._bound()
        logit_rows = reader.logit_rows(num_logit_rows, len(step.positions))
        end = len(self.program.ops if num_logit_rows else self.program.body)
        if self._stop is not None:
            end = min(end, self._stop + 1)
        operands = Operands(self.program, self._weights, state, step, logit_rows, self._group)
        with torch.inference_mode():
            for op in self.program.ops[first:end]:
                run_op(operands, op)
            return {
                output.name: operands.buffer(output.buffer).cpu().numpy() for output in self.program.outputs
            }


def _device(name: str) -> torch.device:
    """The device of that name. Raises ValueError when torch does not know it or cannot use it here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {name!r} cannot be used: {reason}") from error
    return device
