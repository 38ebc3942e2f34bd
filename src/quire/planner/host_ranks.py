"""How a model is spread over the memory nodes of one host: fit, then tensor ranks, stages, replicas, whole experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.records import dataclass
from quire.types import UnsupportedModelError
from quire.util.sizes import format_size

_ROOM = 1.1  # of what a node must hold: caches of other requests, and the process


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The degrees that were chosen, and why."""

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    whole_experts: bool = False
    why: str

    def options(self) -> dict[str, Any]:
        """The same as options of an engine, those that are not the default."""
        found: dict[str, Any] = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "data_parallel_size": self.replicas,
        }
        found = {name: value for name, value in found.items() if value > 1}
        return found | ({"enable_expert_parallel": True} if self.whole_experts else {})


def host_ranks(
    need: int, nodes: Sequence[int], *, experts: int = 0, possible: Callable[[int, int], bool]
) -> HostRanks:
    """`need`: bytes of the weights and of the cache of one long request. `nodes`: bytes of each memory node. `experts`:
    those of a layer. `possible`: whether the model can be split into so many tensor ranks and stages.

    A replica on each node where one fits: nothing travels between them. Else as many tensor ranks as the model allows,
    each of which reads its weights from memory of its own, and stages for the rest, which a single
    request goes through one after the other.
    """
    count = len(nodes)
    if count < 2:
        return HostRanks(why="this machine has one memory node: ranks would share what one process has alone")
    held, room = format_size(need), format_size(min(nodes))
    if need * _ROOM <= min(nodes):
        return HostRanks(
            replicas=count, why=f"{held} of weights and cache fit into each of {count} memory nodes of {room}"
        )
    text = f"{held} of weights and cache do not fit into a memory node of {room}"
    for tensor in range(count, 0, -1):
        if count % tensor or not possible(tensor, count // tensor):
            continue
        stages = count // tensor
        if stages > 1:
            text += f", and no layer can be split over more than {tensor} of {count}"
        whole = tensor > 1 and experts > 0 and experts % tensor == 0
        return HostRanks(tensor=tensor, pipeline=stages, whole_experts=whole, why=text)
    return HostRanks(why=f"{text}, but the model cannot be split over {count}")


def ranks_over_hosts(
    need: int, nodes: Sequence[int], hosts: int, *, experts: int = 0, possible: Callable[[int, int], bool]
) -> HostRanks:
    """The same for `hosts` with such memory nodes each, which share the ranks of one model. Raises
    UnsupportedModelError if it cannot be split over so many.

    A stage or more on each host: stages meet once a step, ranks of a stage four times a layer. On a host as many tensor
    ranks as it has memory nodes, where the model allows it. Only a model with fewer layers than hosts has a stage on
    several of them.
    """
    count = max(1, len(nodes))
    for tensor in range(count, 0, -1):
        if count % tensor == 0 and possible(tensor, count // tensor * hosts):
            why = f"{hosts} hosts: stages on each, which send the least between them"
            if nodes and need * _ROOM <= sum(nodes):
                why += "; the model fits into one of them, so a server on each behind quire router would answer more"
            whole = tensor > 1 and experts > 0 and experts % tensor == 0
            return HostRanks(tensor=tensor, pipeline=count // tensor * hosts, whole_experts=whole, why=why)
    if possible(hosts * count, 1):
        whole = experts > 0 and experts % (hosts * count) == 0
        why = f"{hosts} hosts, more than there can be stages: each layer is split over all of them"
        return HostRanks(tensor=hosts * count, whole_experts=whole, why=why)
    raise UnsupportedModelError(
        f"nnodes: the model cannot be split over {hosts} hosts of {count} memory nodes"
    )
