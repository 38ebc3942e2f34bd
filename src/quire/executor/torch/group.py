"""Where the ranks of a program meet whose ops are in torch; csrc/group.h is the native one."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from quire.executor.torch.rank_store import RankStore, SeenRanks

_FOREVER = timedelta(days=365)  # nobody times a wait: whoever watches the ranks ends it
_LOOK = timedelta(milliseconds=200)  # for that, while a rank waits for the others
_POLL_SECONDS = 5e-5
_REASON_SECONDS = 10.0  # in which a rank that ended is found by who watches it


class Group(Protocol):
    """The ranks of a program."""

    size: int

    def exchange(self, rank: int, mine: Tensor) -> Sequence[Tensor]:
        """What every rank shows, in the order of ranks: tensors that differ in their last dimension at most.
        RuntimeError when one has left."""


class LocalGroup:
    """Ranks in threads of this process. Implements Group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._shown = [torch.empty(0)] * size
        self._meeting = threading.Barrier(size)

    def exchange(self, rank: int, mine: Tensor) -> Sequence[Tensor]:
        """See Group.exchange."""
        try:
            self._shown[rank] = mine.clone()
            self._meeting.wait()
            found = list(self._shown)
            self._meeting.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank has left the group") from None
        return found

    def leave(self) -> None:
        """End the wait of all other ranks: this one will not come."""
        self._meeting.abort()


class DistributedGroup:
    """Ranks in processes, which meet through torch.distributed when the first of them shows something: NCCL where each
    has a GPU, else gloo. Implements Group.

    meeting: a file that all of them on this host open, which has where they listen. `name`: of this group among those
    that meet there. `ranks`: who tells whether one of them has left, and is told how long this one waits. `peers`:
    sockets of ranks on other hosts (RankNodes.peers). gloo listens at this side's address of those, else at the
    loopback.
    """

    def __init__(
        self, meeting: str, name: str, size: int, ranks: SeenRanks, *, nccl: bool, peers: Iterable[int] = ()
    ) -> None:
        self.size = size
        self._whole = RankStore(meeting, ranks, peers)
        self._store = dist.PrefixStore(name, self._whole)
        self._ranks, self._nccl = ranks, nccl
        self._backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None

    def _connected(self, rank: int) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
        if self._backend is None:
            if self._nccl:
                self._backend = dist.ProcessGroupNCCL(self._store, rank, self.size, _FOREVER)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._whole.address)]
                options._timeout = _FOREVER
                self._backend = dist.ProcessGroupGloo(self._store, rank, self.size, options)
        return self._backend

    def exchange(self, rank: int, mine: Tensor) -> Sequence[Tensor]:
        """See Group.exchange. Bytes travel, each rank's filled up to the widest one's."""
        began = time.monotonic_ns()
        try:
            return self._exchange(rank, mine)
        except RuntimeError as error:
            end = time.monotonic() + _REASON_SECONDS
            while not self._ranks.left and time.monotonic() < end:
                time.sleep(0.01)
            raise RuntimeError(f"ranks came apart: {error}") from None
        finally:
            self._ranks.wait_more(time.monotonic_ns() - began)

    def _exchange(self, rank: int, mine: Tensor) -> Sequence[Tensor]:
        outer, width = mine.shape[:-1], mine.shape[-1]
        flat = mine.contiguous().view(-1).view(torch.uint8)
        if not self._nccl:
            flat = flat.cpu()
        widths = [int(each) for each in self._gather(rank, flat.new_tensor([width], dtype=torch.int64))]
        row = math.prod(outer) * mine.itemsize  # bytes of a column of all rows
        if not row:
            return [mine.new_empty(*outer, each) for each in widths]
        filled = flat.new_zeros(max(widths) * row)
        filled[: len(flat)] = flat
        return [
            shown[: each * row].view(mine.dtype).view(*outer, each).to(mine.device)
            for shown, each in zip(self._gather(rank, filled), widths, strict=True)
        ]

    def _gather(self, rank: int, mine: Tensor) -> list[Tensor]:
        """Tensors of one size, of all ranks."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._connected(rank).allgather([found], [mine])
        while not work.is_completed():
            if self._nccl:  # whose wait is one of the device, which nothing here could end
                time.sleep(_POLL_SECONDS)
            else:
                with suppress(RuntimeError):  # it is not completed; what else went wrong is raised below
                    work.wait(_LOOK)
            if self._ranks.left and not work.is_completed():
                self._give_up()
                raise RuntimeError("a rank has left")
        work.wait()
        return found

    def _give_up(self) -> None:
        """What waits for a host that is gone is not waited for, and nor is its end."""
        assert self._backend is not None
        if self._nccl:
            self._backend.abort()
        else:  # a pulled cable closes no connection, and the end of gloo waits for all of them
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
