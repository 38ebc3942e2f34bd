"""Ranks of a model whose programs run in torch, each in a process of its own; see executor/ranked.py."""

from __future__ import annotations

from quire.executor.base import Executor
from quire.executor.leading import Leads, RankedKind
from quire.executor.torch.executor import TorchExecutor
from quire.executor.torch.kind import TorchKind
from quire.program.program import Program


class LeadingTorchExecutor(Leads, TorchExecutor):
    """A torch executor that leads others."""


def ranked_torch_kind(own: TorchKind, programs: tuple[Program, ...], nodes: int) -> RankedKind:
    """Torch executors of ranks on so many hosts."""

    def leading(program: Program, programs: tuple[Program, ...]) -> Executor:
        device = own.device_of(program)
        made: Executor = LeadingTorchExecutor(programs, program, device, threads=own.threads, isa=own.isa)
        return made

    return RankedKind(own, leading, programs, nodes)
