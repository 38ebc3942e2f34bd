"""The reference executor: runs a Program in plain torch on any torch device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.executor.base import F32, U8, Limits, StepArrays, check_blocks
from quire.executor.torch import experts, ops
from quire.executor.torch.state import State
from quire.executor.torch.step import Step, StepReader
from quire.executor.torch.weights import Weights, quantize_rows
from quire.program.ops import (
    Add,
    Attend,
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
from quire.quant import GroupCodes
from quire.types import MemoryBudgetError


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

    def run(self, num_tokens: int, num_rows: int, num_logit_rows: int) -> F32:
        self._step = self._bound()[1].read(num_tokens, num_rows)
        return self._run_ops(0, self._step, num_logit_rows)

    def run_head(self, num_logit_rows: int) -> F32:
        if self._step is None:
            raise RuntimeError("run_head needs a step that was run before")
        return self._run_ops(len(self.program.body), self._step, num_logit_rows)

    def maxima(self, num_logit_rows: int) -> F32 | None:
        return self.read(self.program.maxima, num_logit_rows) if self.program.maxima else None

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

    def _run_ops(self, first: int, step: Step, num_logit_rows: int) -> F32:
        """Ops from number `first` on; the head only when logits are wanted."""
        state, reader = self._bound()
        logit_rows = reader.logit_rows(num_logit_rows, len(step.positions))
        end = len(self.program.ops if num_logit_rows else self.program.body)
        if self._stop is not None:
            end = min(end, self._stop + 1)
        runner = _Runner(self.program, self._weights, state, step, logit_rows)
        with torch.inference_mode():
            for op in self.program.ops[first:end]:
                runner.run(op)
            logits: F32 = runner.buffer(self.program.logits).cpu().numpy()
        return logits


class _Runner:
    """Finds the tensors that the ops of one step name."""

    def __init__(
        self, program: Program, weights: Weights, state: State, step: Step, logit_rows: Tensor
    ) -> None:
        self.program, self.weights, self.state = program, weights, state
        self.step, self.logit_rows = step, logit_rows
        self.rows = {"tokens": len(step.positions), "logits": len(logit_rows)}

    def buffer(self, name: str) -> Tensor:
        """The rows of a buffer that this step uses."""
        found = self.program.buffer(name)
        return self.state.buffers[name][: self.rows[found.rows] * found.per]

    def wide(self, name: str) -> Tensor:
        """Where an op's float32 rows go that `round` takes to a buffer: itself, unless it is i8."""
        found = self.buffer(name)
        return torch.empty_like(found) if self.program.buffer(name).dtype == "i8" else found

    def round(self, name: str, rows: Tensor) -> None:
        """Rows of an i8 buffer, which holds the numbers that its bytes stand for."""
        found = self.program.buffer(name)
        if found.dtype == "i8":
            self.buffer(name).copy_(quantize_rows(rows, found.group, rotated=found.rotated))

    def optional(self, name: str | None) -> Tensor | None:
        return None if name is None else self.buffer(name)

    def run(self, op: Op) -> None:
        weights, buffer, step = self.weights, self.buffer, self.step
        match op:
            case Embed():
                ops.embed(step.token_ids, weights[op.table], buffer(op.out))
            case Norm():
                vectors = weights.get(op.weight), weights.get(op.bias)
                out = self.wide(op.out)
                ops.norm(op, buffer(op.x), self.optional(op.delta), vectors, out)
                self.round(op.out, out)
            case Add():
                ops.add(buffer(op.x), buffer(op.delta), op.scale)
            case Scale():
                ops.scale_cap(buffer(op.x), op.scale, op.cap)
                self.maxima(op)
            case Linear():
                self.linear(op)
            case Quantize():
                self.round(op.out, buffer(op.x).float())
            case RopeWrite():
                norms = weights.get(op.q_norm), weights.get(op.k_norm)
                rotation = None if op.rope is None else self.state.rotations[op.rope].at(step.positions)
                cache, group = self.state.caches[op.layer], self.program.kv_layers[op.layer].group
                ops.rope_write(
                    op, buffer(op.qkv), norms,
                    rotation=rotation, cache=cache, where=step.locations[group],
                )  # fmt: skip
            case Attend():
                cache, group = self.state.caches[op.layer], self.program.kv_layers[op.layer].group
                out = buffer(op.wide) if op.wide else buffer(op.out)
                ops.attend(
                    op, buffer(op.qkv), weights.get(op.sinks),
                    positions=step.positions, cache=cache, rows=step.rows[group], out=out,
                )  # fmt: skip
                self.round(op.out, out)
            case HeadLinear() | LatentWrite() | LatentAttend():
                self.latent(op)
            case GatedAct():
                out = self.wide(op.out)
                ops.gated_act(buffer(op.gate_up), op.act, out)
                self.round(op.out, out)
            case GatherRows():
                ops.gather_rows(buffer(op.x), self.optional(op.delta), self.logit_rows, buffer(op.out))
            case Route() | Dispatch() | Experts() | Combine():
                self.run_experts(op)

    def linear(self, op: Linear) -> None:
        weight, x, out = self.weights[op.weight], self.buffer(op.x), self.buffer(op.out)
        rows = weight.shape[0]
        to = torch.empty(len(x), rows, device=x.device) if op.act else out[:, op.first : op.first + rows]
        ops.linear(x, weight, self.weights.get(op.bias), to)
        if op.act:
            ops.gated_act(to, op.act, out)
        self.maxima(op)

    def maxima(self, op: Linear | Scale) -> None:
        if op.maxima:
            ops.maxima(self.buffer(op.x if isinstance(op, Scale) else op.out), self.buffer(op.maxima))

    def run_experts(self, op: Route | Dispatch | Experts | Combine) -> None:
        weights, buffer = self.weights, self.buffer
        match op:
            case Route():
                out = buffer(op.ids), buffer(op.weights), buffer(op.places)
                experts.route(op.router, buffer(op.logits), weights.get(op.correction), out)
            case Dispatch():
                experts.dispatch(buffer(op.x), buffer(op.places), buffer(op.out))
            case Experts():
                which = buffer(op.ids), buffer(op.places)
                bias = None if op.bias is None else weights.of_experts(op.bias)
                experts.experts(buffer(op.x), which, weights.of_experts(op.weight), bias, buffer(op.out))
            case Combine():
                shared = self.optional(op.shared), self.optional(op.gate)
                experts.combine(buffer(op.x), buffer(op.places), buffer(op.weights), shared, buffer(op.out))

    def latent(self, op: HeadLinear | LatentWrite | LatentAttend) -> None:
        weights, buffer, step = self.weights, self.buffer, self.step
        match op:
            case HeadLinear():
                ops.head_linear(buffer(op.x), weights.of_experts(op.weight), buffer(op.out))
            case LatentWrite():
                ops.latent_write(
                    op, buffer(op.q), buffer(op.kv), weights[op.norm],
                    rotation=self.state.rotations[op.rope].at(step.positions), cache=self.state.latents[op.layer],
                    where=step.locations[self.program.kv_layers[op.layer].group], q_nope=buffer(op.q_nope),
                )  # fmt: skip
            case LatentAttend():
                ops.latent_attend(
                    op, buffer(op.q_latent), buffer(op.q), positions=step.positions,
                    cache=self.state.latents[op.layer], rows=step.rows[self.program.kv_layers[op.layer].group],
                    out=buffer(op.out),
                )  # fmt: skip


def _device(name: str) -> torch.device:
    """The device of that name. Raises ValueError when torch does not know it or cannot use it here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device: {name!r} cannot be used: {reason}") from error
    return device
