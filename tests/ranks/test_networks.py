"""`quire serve` on two hosts with networks of their own: a cable that is pulled, and put back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.rank_nodes import SECRET
from helpers.unix_server import ask, ready, text_of, until


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable: 10.97.0.1 and 10.97.0.2; its ends are called wire."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    names = tuple(f"quire-{uuid.uuid4().hex[:8]}" for _ in range(2))
    try:
        for name in names:
            _ip("netns", "add", name)
        one, other = names
        _ip("link", "add", "wire", "netns", one, "type", "veth", "peer", "name", "wire", "netns", other)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.97.0.{number}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
        yield one, other
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.ranks
@pytest.mark.parametrize("executor", ["native", "torch"])
def test_a_cable_that_is_pulled(hosts: tuple[str, str], tmp_path: Path, executor: str) -> None:
    """The request that runs ends with an error, others are refused at once, and both work again with the cable."""
    path = tmp_path / "socket"
    options = ["--tensor-parallel-size", "2", "--max-model-len", "2048", "--num-kv-blocks", "512"]
    options += ["--executor", executor, "--threads", "1", "--nnodes", "2", "--master-addr", "10.97.0.1"]
    command = [sys.executable, "-m", "quire", "serve", "quire-mini", *options, "--uds", str(path)]
    env = {**os.environ, "QUIRE_RANK_SECRET": SECRET}
    with contextlib.ExitStack() as stack:
        started = []
        for node, name in enumerate(hosts):
            inside = ["ip", "netns", "exec", name, *command, "--node-rank", str(node)]
            process = stack.enter_context(subprocess.Popen(inside, env=env))
            stack.callback(process.kill)
            started.append(process)
        until(lambda: ready(path) or any(process.poll() is not None for process in started))
        text = text_of(path)
        _ip("-n", hosts[1], "link", "set", "wire", "down")
        assert b'"error"' in ask(path, 1900, stream=True).read()
        refused = ask(path, 20)
        assert refused.status == 503
        assert refused.getheader("retry-after")
        refused.read()
        _ip("-n", hosts[1], "link", "set", "wire", "up")
        until(lambda: ready(path))
        assert text_of(path) == text
