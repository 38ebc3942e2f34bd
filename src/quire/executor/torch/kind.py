"""What is known of torch executors before there is one: see ExecutorKind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from quire.executor.base import Executor, Limits
from quire.executor.sampler import sampler_bytes
from quire.executor.torch.adapter_matrices import planned_bytes
from quire.executor.torch.executor import TorchExecutor, shown_bytes
from quire.executor.torch.state import buffer_bytes, workspace_bytes
from quire.executor.torch.weights import weight_bytes
from quire.program.memory import codebook_bytes, kv_block_bytes, rope_table_bytes
from quire.program.program import Program
from quire.records import dataclass

# What torch's libraries keep once steps have run: code, buffers of matrix products, freed memory. Measured: 10 MiB.
LIBRARY_GROWTH = 16 * 2**20


@dataclass(frozen=True, slots=True)
class TorchKind:
    """Torch executors on a device; `threads` and `isa` are the sampler's."""

    device: str
    threads: int
    isa: str = ""

    @property
    def layout(self) -> str:
        """None: weights are held in their natural layout."""
        return ""

    def held(self, program: Program) -> Sequence[Program]:
        """This part; see ExecutorKind."""
        return (program,)

    def planned_bytes(self, program: Program, limits: Limits) -> dict[str, int]:
        """What a TorchExecutor of these limits will hold, by part; activations with what steps allocate for a while."""
        return {
            "weights": weight_bytes(program),
            "kv": limits.blocks * kv_block_bytes(program, limits.block_size),
            "activations": buffer_bytes(program, limits)
            + workspace_bytes(program, limits)
            + LIBRARY_GROWTH
            + shown_bytes(program, limits),
            "tables": rope_table_bytes(program, limits.max_len) + codebook_bytes(program),
            "adapters": planned_bytes(program, limits),
        }

    def block_bytes(self, program: Program, block_size: int) -> int:
        """Bytes of a KV block."""
        return kv_block_bytes(program, block_size)

    def sampler_bytes(self, program: Program, limits: Limits) -> int:
        """The most bytes that its sampler will ever hold."""
        return sampler_bytes(program.vocab, limits, self.threads)

    def device_of(self, program: Program) -> str:
        """The device of a program: ranks take turns with the GPUs of the host if none is named by its number."""
        plan = program.plan
        if plan.ranks == 1 or self.device != "cuda" or not torch.cuda.device_count():
            return self.device
        number = plan.pipeline_parallel_rank * plan.tensor_parallel_size + plan.tensor_parallel_rank
        return f"cuda:{number % torch.cuda.device_count()}"

    def make(self, program: Program, beside: Executor | None = None) -> TorchExecutor:
        """An executor without weights; see ExecutorKind."""
        other = cast("TorchExecutor | None", beside)
        return TorchExecutor(
            program, self.device_of(program), threads=self.threads, isa=self.isa, beside=other
        )


def torch_facts(device: str) -> dict[str, str | int]:
    """What hosts must have in common whose executors meet there, by what it is called."""
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    return {"torch": torch.__version__, "number of GPUs": gpus}
