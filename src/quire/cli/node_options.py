"""The options of a server whose ranks are on several hosts, in vLLM's spelling: they say what a launcher would."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from quire.config.launched import variables_of

NAMES = "nnodes", "node_rank", "master_addr", "master_port", "launcher"


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add `--nnodes`, `--node-rank`, `--master-addr`, `--master-port` and `--launcher`."""
    add: Any = parser.add_argument
    add("--nnodes", type=int, default=argparse.SUPPRESS, metavar="N",
        help="hosts that share the ranks of the model; each runs this command (default: 1)")  # fmt: skip
    add("--node-rank", type=int, default=argparse.SUPPRESS, metavar="N",
        help="which of the hosts this is; 0 leads and serves (default: 0)")  # fmt: skip
    add("--master-addr", default=argparse.SUPPRESS, metavar="ADDRESS",
        help="address of host 0, where the others join it with QUIRE_RANK_SECRET")  # fmt: skip
    add("--master-port", type=int, default=argparse.SUPPRESS, metavar="N",
        help="TCP port below the one where they meet (default: 29500)")  # fmt: skip
    add("--launcher", choices=("ray",), default=argparse.SUPPRESS,
        help="what starts this command on the other hosts: a Ray cluster with this one (default: none)")  # fmt: skip


def use_node_options(sources: list[dict[str, Any]]) -> int:
    """Take these options from where they were given, the first of which overrides the others; from now on this process
    and those that it starts see what a launcher would have set. Returns how many hosts there are. Raises ValueError for
    options that do not fit."""
    given: dict[str, Any] = {}
    for source in reversed(sources):
        given |= {name: source.pop(name) for name in NAMES if name in source}
    if given.pop("launcher", None) and given.get("nnodes", 1) > 1 and "node_rank" not in given:
        from quire.cli.launch_ray import launch_hosts

        given |= launch_hosts(given["nnodes"], other_words(sys.argv[2:]))
    nodes: int = given.get("nnodes", 1)
    rank: int = given.get("node_rank", 0)
    if nodes < 1 or not 0 <= rank < nodes:
        raise ValueError(f"node_rank: {rank} is not one of {nodes} hosts (nnodes)")
    if (
        nodes == 1
        and given.keys() & {"node_rank", "master_addr", "master_port"}
        and given.get("nnodes") is None
    ):
        raise ValueError(f"{min(given)}: it says something of several hosts: give nnodes, too")
    if nodes == 1:
        return 1
    if not 0 < given.get("master_port", 1) < 2**16 - 1:
        raise ValueError(f"master_port: {given['master_port']} is not in [1, 65534]")
    if "RANK" in os.environ:
        raise ValueError("nnodes: a launcher has set RANK already; leave one of them out")
    if "master_addr" not in given:
        raise ValueError("master_addr: where the other hosts reach host 0")
    os.environ.update(variables_of(nodes, rank, given["master_addr"], given.get("master_port")))
    return nodes


def other_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without these options."""
    flags = {"--" + name.replace("_", "-") for name in NAMES}
    found, value = [], False
    for word in words:
        name, sign, _ = word.partition("=")
        if not value and name not in flags:
            found.append(word)
        value = not value and name in flags and not sign
    return found
