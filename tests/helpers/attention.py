"""Programs whose only interesting op is attention, filled with random numbers and bound to executors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helpers.stepper import Stepper
from quire.executor.base import Executor, Limits
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor
from quire.program.lower import NumberFormats, lower
from quire.program.ops.attention import Attend, LatentAttend
from quire.program.program import Program
from quire.spec import MLP, Attention, LatentAttention, Layer, ModelSpec, NormSpec, Rope

VOCAB = 128


@dataclass(frozen=True)
class Shape:
    """One attention layer. `window` 0 is full attention, `softcap` 0 none."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def program(self, formats: NumberFormats) -> Program:
        """Scores are made large (scale 1, wide weights), so that caps bite and softmax is far from flat."""
        attention = Attention(
            self.heads, self.kv_heads, self.head_dim, Rope(1e4, self.head_dim), 2.0 * self.head_dim**-0.5,
            window=self.window, softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip
        layer = Layer(attention, MLP(16))
        return lower(ModelSpec(VOCAB, 48, (layer,), NormSpec(), 1 << 16, tied=True), formats)

    def __str__(self) -> str:
        extras = "".join(
            text
            for on, text in (
                (self.window, f"-w{self.window}"),
                (self.softcap, f"-cap{self.softcap:g}"),
                (self.sinks, "-sinks"),
            )
            if on
        )
        return f"{self.heads}x{self.kv_heads}x{self.head_dim}{extras}"


@dataclass(frozen=True)
class Latent:
    """One layer of latent attention: per token a latent of `rank` and a rotated key of `rope` numbers."""

    heads: int
    rank: int
    rope: int
    nope: int = 16
    v: int = 12
    q_rank: int = 0
    interleaved: bool = True
    sharpness: float = 2.0

    def program(self, formats: NumberFormats) -> Program:
        attention = LatentAttention(
            self.heads, self.q_rank, self.rank, self.nope, self.rope, self.v,
            Rope(1e4, self.rope, interleaved=self.interleaved), self.sharpness * (self.nope + self.rope) ** -0.5,
        )  # fmt: skip
        layer = Layer(attention, MLP(16))
        return lower(ModelSpec(VOCAB, 48, (layer,), NormSpec(), 1 << 16, tied=True), formats)

    def __str__(self) -> str:
        return f"{self.heads}x{self.rank}+{self.rope}"


def fill(program: Program, executors: Sequence[Executor], seed: int = 0) -> None:
    """The same random parameters in every executor; norm weights near one."""
    random = np.random.default_rng(seed)
    for param in program.params:
        offset = 0
        for part in param.parts:
            shape = (part.rows, part.cols) if part.cols else part.rows
            data = random.standard_normal(shape).astype(np.float32)
            data = data * np.float32(0.3) + 1 if param.name.endswith("norm") else data * np.float32(0.3)
            for executor in executors:
                executor.put(param, offset, data, "F32")
            offset += part.rows


def native(
    program: Program, limits: Limits, isa: str = "", threads: int = 1, stepper_seed: int = 0
) -> tuple[NativeExecutor, Stepper]:
    """A filled native executor bound to a stepper's arrays."""
    executor = NativeExecutor(program, threads=threads, isa=isa)
    fill(program, [executor])
    stepper = Stepper(program, limits, stepper_seed)
    executor.bind(limits, stepper.arrays)
    return executor, stepper


def pair(program: Program, limits: Limits, isa: str, threads: int = 2) -> tuple[Executor, Executor, Stepper]:
    """A native and a torch executor with equal parameters, bound to the arrays of one stepper."""
    executors: list[Executor] = [NativeExecutor(program, threads=threads, isa=isa), TorchExecutor(program)]
    fill(program, executors)
    stepper = Stepper(program, limits)
    for executor in executors:
        executor.bind(limits, stepper.arrays)
        executor.stop_after(attend_index(program))
    return executors[0], executors[1], stepper


def attend_index(program: Program) -> int:
    """Number of the first attention op."""
    return next(i for i, op in enumerate(program.ops) if isinstance(op, Attend | LatentAttend))


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
