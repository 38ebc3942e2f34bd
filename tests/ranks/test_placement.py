"""Ranks and replicas stay on the processors of a memory node each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.processors import EVERY, on_every_processor
from helpers.rank_processes import Wide, answers, answers_of_replicas, make
from quire.cli.main import main
from quire.engine.front import replicated_engine
from quire.util import numa
from quire.util.numa import MemoryNode, memory_nodes, near, parsed_cores
from quire.util.platform import started_by


def node(number: int, *cores: int) -> MemoryNode:
    return MemoryNode(number, frozenset(cores), 2**30)


def test_nodes_are_read_as_the_kernel_tells_them(tmp_path: Path) -> None:
    """Without processors that this process may not use; one of memory alone is none of ours."""
    mine = sorted(os.sched_getaffinity(0))
    for number, cores in enumerate([f"{mine[-1]}", f"{mine[0]},{mine[-1] + 1}-{mine[-1] + 3}", ""]):
        folder = tmp_path / f"node{number + 8}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:  {number + 1} kB\nNode {number} MemFree: 5 kB\n"
        )
    assert memory_nodes(tmp_path) == (
        MemoryNode(8, frozenset({mine[-1]}), 1024), MemoryNode(9, frozenset({mine[0]}), 2048)
    )  # fmt: skip
    assert memory_nodes(tmp_path / "none") == ()
    assert parsed_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]


def test_processes_share_nodes_or_have_several() -> None:
    nodes = [node(0, 0, 1), node(1, 2, 3), node(2, 4, 5), node(3, 6, 7)]
    assert near(nodes[:1], 3) == [frozenset()] * 3
    assert near([], 2) == [frozenset()] * 2
    assert near(nodes, 4) == [each.cores for each in nodes]
    assert near(nodes[:2], 4) == [nodes[0].cores, nodes[0].cores, nodes[1].cores, nodes[1].cores]
    assert near(nodes, 2) == [nodes[0].cores | nodes[1].cores, nodes[2].cores | nodes[3].cores]
    assert near(nodes, 3) == [nodes[0].cores, nodes[1].cores, nodes[2].cores | nodes[3].cores]


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MemoryNode]]:
    """This machine as one of two nodes; afterwards this thread may run anywhere again."""
    if len(EVERY) < 2:
        pytest.skip("needs two processors")
    first, *others = EVERY
    nodes = [node(0, first), node(1, *others)]
    for module in (numa, replicated_engine):
        monkeypatch.setattr(module, "memory_nodes", lambda: nodes)
    with on_every_processor():
        yield nodes


def test_each_rank_stays_on_its_node(wide: Wide, two_nodes: list[MemoryNode]) -> None:
    folder = wide("qwen3")
    with make(folder) as llm:
        alone = answers(llm)
        assert os.sched_getaffinity(0) > two_nodes[0].cores, "one rank may use all processors"
    with make(folder, tensor_parallel_size=2) as llm:
        assert answers(llm) == alone
        [other] = [
            pid
            for pid in started_by(os.getpid())
            if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert [os.sched_getaffinity(0), os.sched_getaffinity(other)] == [each.cores for each in two_nodes]


def test_each_replica_stays_on_its_node(
    wide: Wide, two_nodes: list[MemoryNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Load(replicated_engine.AsyncEngine):  # type: ignore[misc, name-defined]
        async def start(self) -> None:
            await super().start()
            found.append(os.sched_getaffinity(self.pid))

    monkeypatch.setattr(replicated_engine, "AsyncEngine", Load)
    assert answers_of_replicas(wide("qwen3"), data_parallel_size=2)
    assert sorted(found, key=min) == [each.cores for each in two_nodes]


@pytest.mark.parametrize(("nbytes", "chosen"), [(2**30, "replicas: 2"), (2**20, "rank 1: ")])
def test_parallel_auto_goes_by_the_memory_nodes(
    wide: Wide, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nbytes: int, chosen: str
) -> None:
    nodes = (MemoryNode(0, frozenset({0}), nbytes), MemoryNode(1, frozenset({1}), nbytes))
    monkeypatch.setattr(numa, "memory_nodes", lambda: nodes)
    asked = ["inspect", str(wide("qwen3")), "--parallel", "auto", "--no-measure"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert chosen in out.replace("of 2 replicas this is one", "replicas: 2")
    assert "--parallel auto: --" in err
    assert ("fit into each of 2 memory nodes" in err) == (nbytes == 2**30)
    assert main([*asked, "--tensor-parallel-size", "2"]) == 2
    assert "parallel: auto chooses tensor_parallel_size" in capsys.readouterr().err
