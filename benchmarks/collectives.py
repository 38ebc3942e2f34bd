"""What a meeting of two ranks takes, by bytes of a rank: `python -m benchmarks.collectives`.

An all-gather of float32 rows in memory that two processes share, as a program of nothing else runs it; beside it that
of torch.distributed with gloo over the loopback, and that of MPI if mpi4py is there and mpirun started this. Medians,
in microseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire import _native
from quire.executor.base import Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.program.memory import plan_arena
from quire.program.ops.collectives import AllGather
from quire.program.program import Program
from quire.program.ranks import RankPlan
from quire.program.tensors import Buffer

SIZES = (1 << 10, 4 << 10, 64 << 10, 1 << 20)
TIMES, OPS = 200, 10  # runs, and meetings in each
LIMITS = Limits(max_tokens=1, max_rows=1, max_logit_rows=1, max_len=16, num_blocks=1)


def _program(rank: int, size: int) -> Program:
    buffers = Buffer("mine", size // 4, "f32"), Buffer("all", 2 * size // 4, "f32")
    return Program(
        body=(AllGather("mine", "all", 2),) * OPS, head=(), outputs=(), params=(), buffers=buffers, ropes=(),
        kv_layers=(), cache_groups=(), layers_per_group=0, vocab=2, plan=RankPlan(2, rank),
    )  # fmt: skip


def own(rank: int, fd: int, nbytes: int, size: int) -> float:
    """Of one rank."""
    ranks = _native.SharedRanks(fd, nbytes, 2, rank, False)
    program = _program(rank, size)
    executor, arrays = NativeExecutor(program, threads=1), StepArrays(LIMITS, 0)
    arena = plan_arena(program, 1, 1).total
    executor.place_activations(ranks.address + _native.SharedRanks.HEADER_BYTES + rank * arena)
    executor.bind(LIMITS, arrays)
    executor.join(_native.SharedGroup(ranks, 0, 2))
    return _median(lambda: executor.core.run(1, 0, 0), OPS)


def gloo(rank: int, path: str, size: int) -> float:
    """The same of torch.distributed."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mine = torch.zeros(size // 4)
    found = [torch.zeros(size // 4), torch.zeros(size // 4)]
    spent = _median(lambda: dist.all_gather(found, mine), 1)
    dist.destroy_process_group()
    return spent


def mpi(size: int) -> float:
    """The same of MPI, in a process that mpirun has started."""
    from mpi4py import MPI  # type: ignore[import-not-found]

    mine, found = np.zeros(size // 4, np.float32), np.zeros(size // 2, np.float32)
    return _median(lambda: MPI.COMM_WORLD.Allgather(mine, found), 1)


def _median(call: Callable[[], Any], each: int) -> float:
    spent = []
    for _ in range(TIMES):
        began = time.perf_counter()
        call()
        spent.append((time.perf_counter() - began) / each * 1e6)
    return round(statistics.median(spent), 2)


def _both(work: Callable[..., float], *given: Any) -> float:
    """The time of rank 0, with rank 1 in a process beside it."""
    other = multiprocessing.get_context("fork").Process(target=work, args=(1, *given))
    other.start()
    found = work(0, *given)
    other.join()
    return found


def main() -> None:
    """Entry point."""
    if "PMI_SIZE" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ:
        print(json.dumps({size: mpi(size) for size in SIZES}))
        return
    found: dict[int, dict[str, float]] = {}
    for size in SIZES:
        nbytes = _native.SharedRanks.HEADER_BYTES + 2 * plan_arena(_program(0, size), 1, 1).total
        fd = os.memfd_create("quire-collectives")
        os.ftruncate(fd, nbytes)
        found[size] = {"own": _both(own, fd, nbytes, size)}
        os.close(fd)
    for size in SIZES:  # after them: torch has threads of its own
        with tempfile.TemporaryDirectory() as folder:
            found[size]["gloo"] = _both(gloo, f"{folder}/meeting", size)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
