"""The native executor that leads the ranks of a model; see executor/leading.py."""

from __future__ import annotations

from quire.executor.base import Executor
from quire.executor.leading import Leads, RankedKind
from quire.executor.native import NativeExecutor, NativeKind
from quire.program.program import Program


class LeadingExecutor(Leads, NativeExecutor):
    """A native executor that leads others."""


def ranked_kind(own: NativeKind, programs: tuple[Program, ...], nodes: int) -> RankedKind:
    """Native executors of ranks on so many hosts."""

    def leading(program: Program, programs: tuple[Program, ...]) -> Executor:
        return LeadingExecutor(programs, program, threads=own.threads, isa=own.isa)

    return RankedKind(own, leading, programs, nodes)
