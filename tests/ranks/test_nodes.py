"""Ranks on several hosts: where they are, how their hosts meet and what travels; answers are those of one process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_async.running import ask, collect, run, running, until
from helpers.rank_nodes import SECRET, Relay, environment, following, fresh_address
from helpers.rank_processes import COMMON, Wide, answers, bits, make
from quire.config.launched import Launched, RendezvousError, launched, node_count
from quire.config.schema import EngineConfig
from quire.config.shipped import shipped_models
from quire.engine.api import EngineState, EngineUnavailableError
from quire.engine.build.node_frames import BadFrameError, NodeConnection, Said
from quire.engine.build.node_place import difference, shared_options
from quire.engine.build.rank_processes import RankStartError
from quire.program.rank_nodes import RankNodes
from quire.types import SamplingParams, UnsupportedModelError
from quire.util.platform import started_by

PORT = 29501  # where hosts meet by default
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SLOW = pytest.mark.ranks


@pytest.mark.parametrize(
    ("size", "stages", "nodes", "places", "before", "peers"),
    [
        (2, 1, 2, [[0], [1]], {}, {0: (1,), 1: (0,)}),
        (4, 1, 2, [[0, 1], [2, 3]], {}, {0: (2,), 1: (3,), 2: (0,), 3: (1,)}),
        (2, 2, 2, [[2, 3], [0, 1]], {2: [0, 1], 3: [0, 1]}, {}),
        (1, 3, 3, [[2], [0], [1]], {1: [0], 2: [1]}, {}),
        (1, 4, 2, [[2, 3], [0, 1]], {1: [0], 2: [1], 3: [2]}, {}),
        (4, 2, 4, [[4, 5], [0, 1], [2, 3], [6, 7]], {4: [0, 1], 7: [2, 3]}, {1: (3,), 6: (4,)}),
    ],
)
def test_where_ranks_are(
    size: int, stages: int, nodes: int, places: list[list[int]], before: dict[int, list[int]],
    peers: dict[int, tuple[int, ...]],
) -> None:  # fmt: skip
    """Node 0 has the first rank of the last stage; a stage takes the residual stream of one node."""
    found = RankNodes(size, stages, nodes)
    assert [list(found.ranks_of(node)) for node in range(nodes)] == places
    assert all(found.node_of(rank) == node for node in range(nodes) for rank in places[node])
    assert {rank: list(found.before(rank)) for rank in before} == before
    assert {rank: found.peers(rank) for rank in peers} == peers
    for rank in range(size, size * stages):
        assert len({found.node_of(each) for each in found.before(rank)}) == 1
        assert found.taken_from(rank) in found.before(rank)


@pytest.mark.parametrize(("size", "stages", "nodes"), [(3, 1, 2), (2, 3, 2), (2, 1, 4), (2, 1, 0)])
def test_hosts_that_cannot_share_ranks(size: int, stages: int, nodes: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"nnodes: {nodes} hosts cannot share"):
        RankNodes(size, stages, nodes)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[03-05,9].cluster,other", "MASTER_PORT": "5",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TORCHRUN, ("10.0.0.1", 29501, True)),
        (SLURM, ("node03.cluster", 6, True)),
        (OPEN_MPI, ("a", 29501, True)),
        (MPICH, ("127.0.0.1", 29501, False)),
    ],
    ids=["torchrun", "Slurm", "Open MPI", "MPICH"],
)
def test_variables_of_launchers(given: dict[str, str], expected: tuple[str, int, bool]) -> None:
    address, port, nodes = expected
    variables = {**given, "QUIRE_RANK_SECRET": SECRET}
    assert launched(variables, 2) == Launched(1, 2, address, port, SECRET.encode(), nodes)
    assert node_count(variables, 2) == (2 if nodes else 1)
    assert launched(variables, 1) is None
    if given is TORCHRUN:
        with pytest.raises(RendezvousError, match="QUIRE_RANK_SECRET"):
            launched(given, 2)
    else:  # a job whose processes have nothing to do with each other
        assert launched(given, 2) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: where the other hosts reach node 0"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "a launcher starts one process on each"),
        ({"RANK": "2"}, "RANK 2 of WORLD_SIZE 2"),
    ],
)
def test_variables_that_do_not_fit(changed: dict[str, str], message: str) -> None:
    with pytest.raises(RendezvousError, match=message):
        launched({**TORCHRUN, "QUIRE_RANK_SECRET": SECRET, **changed}, 4)


def test_a_node_that_differs_is_refused_by_name() -> None:
    ours = {"version": "1", "kernels": "avx512", "weights": "a", "option block_size": 16}
    assert not difference(ours, ours, "node 1")
    assert difference(ours, {**ours, "version": "2"}, "node 1") == (
        "node 1: its version is '2', the leading node has '1'"
    )
    assert difference(ours, {**ours, "weights": "b"}, "node 1") == "node 1: its weights is another"
    assert "option block_size is 32" in difference(ours, {**ours, "option block_size": 32}, "node 1")


def test_no_host_is_told_where_another_keeps_blocks() -> None:
    """There may be a password in it."""
    told = shared_options(EngineConfig(kv_tiers="ram=1MiB,remote=redis://me:secret@host", block_size=32))
    assert "secret" not in json.dumps(told)
    assert (told["block_size"], told["swap_space"]) == (32, 2**20)
    assert EngineConfig(**told).replace(kv_tiers=None).cache.block_size == 32


def test_frames_bring_pieces_of_memory() -> None:
    one, other = socket.socketpair()
    sender, receiver = NodeConnection(one), NodeConnection(other)
    memory = np.zeros(2**20, np.uint8)
    content = np.random.default_rng(1).integers(0, 256, 2**19, np.uint8)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(
            sender.send, Said.COMMAND, b"text", [(5, content), (7, content[:0]), (1, content[:3])]
        )
        frame = receiver.receive(memory)
        sent.result()
    assert frame is not None
    assert (frame.kind, frame.text, frame.pieces) == (Said.COMMAND, b"text", [(5, 2**19), (7, 0), (1, 3)])
    expected = np.zeros(2**20, np.uint8)
    expected[5 : 5 + 2**19] = content
    expected[1:4] = content[:3]
    np.testing.assert_array_equal(memory, expected)
    sender.close()
    assert receiver.receive(memory) is None
    receiver.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\x00" + bytes(6),
        b"\x01\x00\x01\x00" + bytes(4) + b"\xff" * 16,
        b"\x01\x00" + bytes(2) + b"\xff" * 4,
    ],
)
def test_bytes_that_are_no_frame_end_the_connection(sent: bytes) -> None:
    one, other = socket.socketpair()
    one.sendall(sent)
    receiver = NodeConnection(other)
    with pytest.raises(BadFrameError):
        receiver.receive(np.zeros(100, np.uint8))
    receiver.close()
    one.close()


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where node 0, which is this process, meets one other."""
    found = fresh_address()
    for name, value in environment(found, 2).items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        pytest.param(
            "qwen3", {"dtype": "bfloat16", "speculate": "ngram"}, {"tensor_parallel_size": 2}, marks=SLOW
        ),
        pytest.param(
            "qwen2-mixed-windows", {"kv_cache_dtype": "int8"}, {"pipeline_parallel_size": 2}, marks=SLOW
        ),
        (
            "qwen3-moe",
            {"quantization": "int8"},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
        ),
    ],
    ids=["tensor", "pipeline", "both"],
)
def test_answers_of_two_hosts_are_those_of_one_process(
    wide: Wide, address: str, name: str, options: dict[str, Any], ranks: dict[str, Any]
) -> None:
    folder = wide(name)
    with make(folder, **options) as llm:
        alone = answers(llm)
    asked = COMMON | options | ranks
    with following(folder, address, 2, asked), make(folder, **options, **ranks) as llm:
        assert answers(llm) == alone
        assert answers(llm) == alone  # with what is cached now


@pytest.mark.ranks
def test_a_slow_wire_changes_nothing(wide: Wide, address: str) -> None:
    """What travels comes late and in other pieces."""
    ranks = {"tensor_parallel_size": 2}
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    relay = Relay(address, PORT, 0.002)
    with following(wide("qwen3"), relay.address, 2, COMMON | ranks), make(wide("qwen3"), **ranks) as llm:
        assert answers(llm) == alone
    relay.close()


@pytest.mark.ranks
def test_a_leader_that_is_slow_to_tell_some_hosts(
    wide: Wide, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host is done with a step before the next one has heard of it."""
    for name, value in environment(address, 3).items():
        monkeypatch.setenv(name, value)
    ranks = {"pipeline_parallel_size": 3}
    with make(wide("smollm3")) as llm:
        alone = answers(llm)
    send = NodeConnection.send

    def slowly(self: NodeConnection, kind: Said, *more: Any) -> None:
        send(self, kind, *more)
        if kind == Said.COMMAND:
            time.sleep(0.03)

    monkeypatch.setattr(NodeConnection, "send", slowly)
    with following(wide("smollm3"), address, 3, COMMON | ranks), make(wide("smollm3"), **ranks) as llm:
        assert answers(llm) == alone


def test_blocks_are_swapped_on_all_hosts(wide: Wide, address: str) -> None:
    """Prompts that are asked again after others took their blocks; a copy of a block is made on all hosts, too."""
    rows = [np.random.default_rng(seed).integers(3, 128, 80).tolist() for seed in (1, 2, 3, 1, 2)]
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    folder, options = wide("llama3.1"), {"num_kv_blocks": 7, "swap_space": 2**20}
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with make(folder, num_kv_blocks=7) as llm:
        alone = [bits(llm.generate([row], asked)[0]) for row in rows]
    with following(folder, address, 2, COMMON | options | ranks), make(folder, **options, **ranks) as llm:
        assert [bits(llm.generate([row], asked)[0]) for row in rows] == alone
        assert llm.built.core.swap.blocks_in > 0  # type: ignore[union-attr]


@pytest.mark.ranks
def test_embeddings_reach_the_host_of_the_first_stage(wide: Wide, address: str) -> None:
    rows = {"prompt_embeds": np.random.default_rng(5).standard_normal((40, 192)).astype(np.float32)}
    prompts: list[Any] = [rows, list(range(3, 30))]
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    options: dict[str, Any] = {"enable_prompt_embeds": True}
    ranks = {"pipeline_parallel_size": 2}
    with make(wide("llama3.1"), **options) as llm:
        alone = [bits(found) for found in llm.generate(prompts, [asked, asked])]
    asks = COMMON | options | ranks
    with following(wide("llama3.1"), address, 2, asks), make(wide("llama3.1"), **options, **ranks) as llm:
        assert [bits(found) for found in llm.generate(prompts, [asked, asked])] == alone


def test_a_host_that_differs_or_has_too_little_memory_is_refused(wide: Wide, address: str) -> None:
    """By the leading host, with one reason; nothing is left over."""
    ranks: dict[str, Any] = {"tensor_parallel_size": 2}
    for differs, message in (
        ({"block_size": 32}, "node 1: its option block_size is 32, the leading node has 16"),
        (
            {"memory": 2**20},
            "node 1: MemoryBudgetError: memory: the ranks of node 1 need .* and its bound is 1.00 MiB",
        ),
    ):
        with following(wide("qwen3"), address, 2, COMMON | ranks | differs) as (other,):
            with pytest.raises((RendezvousError, RankStartError), match=message):
                make(wide("qwen3"), **ranks)
            assert other.wait(60) == 1


# What ends on which host, and what the log says of it.
ENDS = [
    ("rank", signal.SIGKILL, "node 1: rank 1 of 2 was killed by SIGKILL"),
    ("rank", signal.SIGSTOP, "node 1: rank 1 of 2 does not answer"),
    ("node", signal.SIGSTOP, "node 1 does not answer"),
    ("node", signal.SIGKILL, "node 1 has closed its connection"),
    ("engine", signal.SIGKILL, "killed by SIGKILL"),
]
SERVED: dict[str, Any] = {"tensor_parallel_size": 2, "num_kv_blocks": 1024, "load_format": "auto"}


@pytest.mark.ranks
@pytest.mark.parametrize(("victim", "number", "reason"), ENDS, ids=[f"{a}-{b.name}" for a, b, _ in ENDS])
def test_the_model_comes_back(
    caplog: pytest.LogCaptureFixture, address: str, victim: str, number: signal.Signals, reason: str
) -> None:
    """Requests end with errors that can be retried; then the hosts meet again, and answers are the same."""

    async def work() -> None:
        folder = shipped_models()["quire-mini"]
        with following(folder, address, 2, SERVED) as nodes:
            async with running(folder, in_process=False, **SERVED) as engine:
                text = await collect(engine.generate(ask("before", params=SHORT)))
                (rank,) = started_by(nodes[0].pid)
                pids = {"rank": rank, "node": nodes[0].pid, "engine": engine.pid}
                streams = [engine.generate(ask(f"r{i}", params=LONG)) for i in range(3)]
                await anext(aiter(streams[0]))
                os.kill(pids[victim], number)  # type: ignore[arg-type]
                late = engine.generate(ask("late", params=SHORT))
                for stream in streams:  # one may have all its tokens already
                    with contextlib.suppress(EngineUnavailableError):
                        await collect(stream)
                with pytest.raises(EngineUnavailableError, match="ended unexpectedly"):
                    await collect(late)
                if (victim, number) == ("node", signal.SIGSTOP):
                    os.kill(nodes[0].pid, signal.SIGCONT)
                gone = (victim, number) == ("node", signal.SIGKILL)  # a launcher starts another one
                with following(folder, address, 2, SERVED) if gone else contextlib.nullcontext():
                    await until(lambda: engine.state is EngineState.READY)
                    assert await collect(engine.generate(ask("after", params=SHORT))) == text
                await until(lambda: not Path(f"/proc/{rank}").exists())
        assert reason in caplog.text

    run(work())


@pytest.mark.ranks
def test_a_cut_wire_ends_requests_and_the_model_comes_back(
    caplog: pytest.LogCaptureFixture, address: str
) -> None:
    async def work() -> None:
        folder, relay = shipped_models()["quire-mini"], Relay(address, PORT, 0.0)
        with following(folder, relay.address, 2, SERVED):
            async with running(folder, in_process=False, **SERVED) as engine:
                text = await collect(engine.generate(ask("before", params=SHORT)))
                relay.cut.set()
                with pytest.raises(EngineUnavailableError, match="ended unexpectedly"):
                    await collect(engine.generate(ask("meanwhile", params=LONG)))
                relay.cut.clear()
                await until(lambda: engine.state is EngineState.READY)
                assert await collect(engine.generate(ask("after", params=SHORT))) == text
        relay.close()
        assert "node 1 does not answer" in caplog.text

    run(work())
