"""Launchers that start `quire serve` on two hosts: a real start, and an answer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.rank_nodes import SECRET, fresh_address
from helpers.unix_server import ready, text_of, until
from quire import LLM, SamplingParams


@pytest.fixture(scope="module")
def alone() -> str:
    """What one process answers."""
    with LLM("quire-mini", progress=False, threads=1) as llm:
        asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        return llm.generate(["Once"], asked)[0].outputs[0].text


@pytest.mark.ranks
def test_torchrun_starts_a_process_on_each_host(tmp_path: Path, alone: str) -> None:
    path, address = tmp_path / "socket", fresh_address()
    quire = [
        str(Path(sys.executable).with_name("quire")),
        "serve",
        "quire-mini",
        "--tensor-parallel-size",
        "2",
    ]
    quire += ["--threads", "1", "--num-kv-blocks", "512", "--uds", str(path)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", address, "--master-port", "29600", "--no-python"]
    env = {**os.environ, "QUIRE_RANK_SECRET": SECRET}
    started = []
    with contextlib.ExitStack() as stack:
        for node in range(2):
            command = [*launcher, "--node-rank", str(node), *quire]
            process = stack.enter_context(subprocess.Popen(command, env=env, start_new_session=True))
            stack.callback(_end, process)
            started.append(process)
        until(lambda: ready(path) or any(process.poll() is not None for process in started))
        assert text_of(path) == alone


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.mark.ranks
@pytest.mark.ray
def test_ray_starts_the_other_hosts(tmp_path: Path, alone: str) -> None:
    """A cluster of two nodes on this machine."""
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install ray")
    path = tmp_path / "socket"
    nodes = [
        {"num_cpus": 1, "node_ip_address": fresh_address(), "include_dashboard": False} for _ in range(2)
    ]
    cluster = utils.Cluster(initialize_head=True, head_node_args=nodes[0])
    try:
        cluster.add_node(**nodes[1])
        quire = [
            sys.executable,
            "-m",
            "quire",
            "serve",
            "quire-mini",
            "--tensor-parallel-size",
            "2",
            "--nnodes",
            "2",
        ]
        quire += ["--launcher", "ray", "--threads", "1", "--num-kv-blocks", "512", "--uds", str(path)]
        process = subprocess.Popen(quire, env={**os.environ, "RAY_ADDRESS": cluster.address})
        try:
            until(lambda: ready(path) or process.poll() is not None)
            assert text_of(path) == alone
        finally:
            _end(process)
    finally:
        cluster.shutdown()
