"""Which ranks are chosen for the memory nodes of a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from quire.planner.host_ranks import host_ranks, ranks_over_hosts
from quire.types import UnsupportedModelError

GIB = 2**30
NODE = 64 * GIB


def heads(most: int) -> Callable[[int, int], bool]:
    """Whether a model with so many heads, and four layers, can be split."""
    return lambda tensor, stages: tensor <= most and stages <= 4


@pytest.mark.parametrize(
    ("need", "nodes", "most", "experts", "chosen"),
    [
        (8 * GIB, [NODE], 8, 0, {}),
        (8 * GIB, [], 8, 0, {}),
        (8 * GIB, [NODE, NODE], 8, 0, {"data_parallel_size": 2}),
        (63 * GIB, [NODE, NODE], 8, 0, {"tensor_parallel_size": 2}),
        (100 * GIB, [NODE] * 4, 8, 0, {"tensor_parallel_size": 4}),
        (100 * GIB, [NODE] * 4, 2, 0, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (100 * GIB, [NODE] * 4, 1, 0, {"pipeline_parallel_size": 4}),
        (100 * GIB, [NODE] * 8, 1, 0, {}),
        (100 * GIB, [NODE, NODE], 8, 16, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        (100 * GIB, [NODE, NODE], 8, 5, {"tensor_parallel_size": 2}),
        (40 * GIB, [NODE, 16 * GIB], 8, 0, {"tensor_parallel_size": 2}),
    ],
)
def test_ranks_of_a_host(
    need: int, nodes: Sequence[int], most: int, experts: int, chosen: dict[str, object]
) -> None:
    found = host_ranks(need, nodes, experts=experts, possible=heads(most))
    assert found.options() == chosen
    assert ("fit" in found.why) == (len(nodes) > 1)


@pytest.mark.parametrize(
    ("nodes", "hosts", "most", "experts", "chosen"),
    [
        ([NODE], 2, 8, 0, {"pipeline_parallel_size": 2}),
        ([], 2, 8, 0, {"pipeline_parallel_size": 2}),
        ([NODE, NODE], 2, 8, 0, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ([NODE, NODE], 2, 1, 0, {"pipeline_parallel_size": 4}),
        (
            [NODE, NODE], 2, 8, 16,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
        ),
        ([NODE], 8, 8, 0, {"tensor_parallel_size": 8}),
    ],
)  # fmt: skip
def test_ranks_of_several_hosts(
    nodes: Sequence[int], hosts: int, most: int, experts: int, chosen: dict[str, object]
) -> None:
    found = ranks_over_hosts(100 * GIB, nodes, hosts, experts=experts, possible=heads(most))
    assert found.options() == chosen


def test_what_fits_one_host_is_told_so_and_what_fits_none_is_refused() -> None:
    assert "quire router" in ranks_over_hosts(8 * GIB, [NODE], 2, possible=heads(8)).why
    assert "quire router" not in ranks_over_hosts(100 * GIB, [NODE], 2, possible=heads(8)).why
    with pytest.raises(UnsupportedModelError, match="cannot be split over 8 hosts"):
        ranks_over_hosts(100 * GIB, [NODE], 8, possible=heads(1))
