"""Ranks that compute in torch on several hosts: they meet through gloo at the address that was given, and say where
over connections that proved the secret."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.rank_nodes import environment, following, fresh_address
from helpers.rank_processes import COMMON, Wide, answers, make
from helpers.torch_ranks import TORCH, same_answers
from quire.executor.torch.group import DistributedGroup
from quire.executor.torch.rank_store import RankStore


class Here:
    """Ranks that are all there, until one leaves."""

    left = False
    waited = 0

    def wait_more(self, nanoseconds: int) -> None:
        self.waited += nanoseconds


@pytest.fixture
def meeting() -> Iterator[str]:
    """A file without a name, as RankProcesses has it."""
    fd = os.memfd_create("meeting")
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def test_rows_of_all_ranks(meeting: str) -> None:
    """Of different widths, several dimensions and types; and none at all, whose widths are known all the same."""
    ranks = Here()
    groups = [DistributedGroup(meeting, "a", 2, ranks, nccl=False) for _ in range(2)]
    given = [
        [torch.arange(6.0).view(2, 3), torch.arange(10.0).view(2, 5)],
        [torch.ones(4, 2, 3, dtype=torch.bfloat16), torch.zeros(4, 2, 1, dtype=torch.bfloat16)],
        [torch.tensor([7]), torch.tensor([8])],
        [torch.empty(0, 3), torch.empty(0, 5)],
    ]
    with ThreadPoolExecutor(2) as threads:
        for shown in given:
            found = [*threads.map(lambda at, shown=shown: groups[at].exchange(at, shown[at]), range(2))]
            for each in found:
                assert [rows.shape for rows in each] == [rows.shape for rows in shown]
                assert all(map(torch.equal, each, shown))
    assert ranks.waited > 0


class Stuck:
    """NCCL whose other ranks are gone: a collective that ends when it is aborted."""

    aborted = False

    def allgather(self, _: Any, __: Any) -> Stuck:
        return self

    def is_completed(self) -> bool:
        return self.aborted

    def wait(self) -> None:
        assert self.aborted, "nobody would come back from it"

    def abort(self) -> None:
        self.aborted = True


def test_a_collective_on_a_gpu_ends_with_the_ranks(meeting: str) -> None:
    ranks, stuck = Here(), Stuck()
    group = DistributedGroup(meeting, "a", 2, ranks, nccl=True)
    group._backend = stuck  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(group.exchange, 0, torch.ones(3))
        ranks.left = True
        with pytest.raises(RuntimeError, match="ranks came apart: a rank has left"):
            asked.result()
    assert stuck.aborted


def test_what_is_said_reaches_the_files_of_other_hosts() -> None:
    one, other = socket.socketpair()
    files = [os.memfd_create(name) for name in "ab"]
    paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in files]
    here = Here()
    ours, theirs = RankStore(paths[0], here, [one.fileno()]), RankStore(paths[1], here, [other.fileno()])
    beside = RankStore(paths[1], here)  # another rank of that host
    ours.set("key", b"\0value")
    assert theirs.get("key") == beside.get("key") == b"\0value"
    assert not ours.check(["other"])
    here.left = True
    with pytest.raises(RuntimeError, match="a rank has left"):
        ours.get("other")
    for each in (one, other):
        each.shutdown(socket.SHUT_RDWR)
        each.close()


def test_its_end_touches_no_other_file() -> None:
    """The number of the meeting's file is a socket's by then."""
    fd = os.memfd_create("meeting")
    store = RankStore(f"/proc/{os.getpid()}/fd/{fd}", Here())
    store.set("key", b"value")
    one, other = socket.socketpair()
    os.dup2(one.fileno(), fd)
    del store
    gc.collect()
    os.close(fd)
    one.close()
    other.close()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where node 0, which is this process, meets one other."""
    found = fresh_address()
    for name, value in environment(found, 2).items():
        monkeypatch.setenv(name, value)
    return found


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "columns": ("qwen3", {"tensor_parallel_size": 2}),
    "stages": ("qwen3", {"pipeline_parallel_size": 2}),
    "experts": ("gpt-oss", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "both": ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
}
SLOW = pytest.mark.ranks


@pytest.mark.parametrize(
    "plan", ["columns", *(pytest.param(each, marks=SLOW) for each in ("stages", "experts", "both"))]
)
def test_answers_of_two_hosts_are_those_of_one_process(wide: Wide, address: str, plan: str) -> None:
    name, ranks = PLANS[plan]
    folder = wide(name)
    with make(folder, **TORCH) as llm:
        alone = answers(llm)
    before = listening()
    with following(folder, address, 2, COMMON | TORCH | ranks), make(folder, **TORCH, **ranks) as llm:
        same_answers(answers(llm), alone)
        if plan == "columns":
            assert {place for place, _ in listening() - before} == {address}


def listening() -> set[tuple[str, int]]:
    """Where this process has sockets of TCP that listen: IPv4 addresses and ports."""
    inodes = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the folder itself
            inodes.add(os.readlink(each))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {(socket.inet_ntoa(bytes.fromhex(place)[::-1]), int(port, 16)) for place, port in found}
