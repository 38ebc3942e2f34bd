"""`quire serve --launcher ray`: Ray starts the other hosts of a model, each with the same command.

This process is host 0, and has to be on a node of a Ray cluster. One task on every other node runs the command there,
until this process ends; its output comes here. Ray is no dependency: it is imported when it is asked for.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from quire.config.launched import SECRET
from quire.types import QuireError
from quire.util.platform import end_with_parent


class RayLaunchError(QuireError):
    """Ray is missing, has no cluster here, or too few nodes."""


def launch_hosts(count: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Start `quire serve` with these arguments on so many nodes but this one; returns the options of this host. The
    address is the one that Ray has for this node, the secret is made here and is in the environment of all from now on.

    Raises RayLaunchError.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise RayLaunchError("launcher ray: Ray is not installed: pip install ray") from error
    try:
        ray.init(address="auto", include_dashboard=False, log_to_driver=True, logging_level="warning")
    except ConnectionError as error:
        raise RayLaunchError(f"launcher ray: no cluster here: {error} (ray start --head)") from None
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    address = next(node["NodeManagerAddress"] for node in alive if node["NodeID"] == here)
    others = [node["NodeID"] for node in alive if node["NodeID"] != here][: count - 1]
    if len(others) < count - 1:
        raise RayLaunchError(f"launcher ray: the cluster has {len(alive)} nodes, nnodes asks for {count}")
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    where = {"nnodes": count, "node_rank": 0, "master_addr": address}
    follow = ray.remote(num_cpus=0, max_retries=-1)(_follow)
    for number, node in enumerate(others, 1):
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        words = [*arguments, "--nnodes", str(count), "--node-rank", str(number), "--master-addr", address]
        follow.options(scheduling_strategy=place).remote(words, os.environ[SECRET])
    return where


def _follow(words: Sequence[str], secret: str) -> int:
    """On another node: run the command until it ends, or until Ray ends this task."""
    command = [sys.executable, "-m", "quire", "serve", *words]
    own = os.getpid()
    env = {**os.environ, SECRET: secret}
    return subprocess.call(command, env=env, preexec_fn=lambda: end_with_parent(own))
