"""How the layers of a model are cut into stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.program.cost import Row, step_cost
from quire.program.op import param_names
from quire.program.program import Program

DECODE = [Row(1, 256)] * 16
PROMPT = [Row(64, 0)]
_LAYER = re.compile(r"layers\.(\d+)\.")


class LayerCost(NamedTuple):
    """Shares of the whole: of the bytes that a step reads whose rows decode, and of the operations for a prompt."""

    decode: float
    prompt: float


def layer_costs(program: Program, layers: int) -> list[LayerCost]:
    """What each layer costs; the last one with the head. `program` is that of the whole model."""
    found = []
    for rows, of in ((DECODE, "bytes"), (PROMPT, "flops")):
        costs, layer = [0.0] * layers, 0
        made = step_cost(program, rows, len(rows)).ops
        for at, (op, cost) in enumerate(zip(program.ops, made, strict=True)):
            for name in param_names(op):
                if match := _LAYER.match(name):
                    layer = int(match[1])
            costs[layer if at < len(program.body) else layers - 1] += getattr(cost, of)
        total = sum(costs) or 1.0
        found.append([cost / total for cost in costs])
    return [LayerCost(*each) for each in zip(*found, strict=True)]


def stage_layers(program: Program, layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, so that the dearest stage is as cheap as can be, decoding and with prompts; () where no cut
    is needed, or none is possible. Of equal cuts it is the one with the fewest layers in its first stages.
    """
    if stages < 2 or stages > layers:
        return ()
    return cut(layer_costs(program, layers), stages)


def cut(costs: Sequence[LayerCost], stages: int) -> tuple[int, ...]:
    """Numbers of neighbouring layers, at least one in each stage; see stage_layers."""
    count = len(costs)
    sums: list[list[float]] = [[0.0, *accumulate(each)] for each in zip(*costs, strict=True)]

    def dearest(first: int, stop: int) -> float:
        return max([each[stop] - each[first] for each in sums])

    # best[stop]: the dearest of the stages so far, and their ends, for layers 0 … stop - 1.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(1, stages + 1):
        best = {
            stop: min(
                (max(best[first][0], dearest(first, stop)), (*best[first][1], stop))
                for first in range(stage - 1, stop)
                if first in best
            )
            for stop in range(stage, count - (stages - stage) + 1)
        }
    ends = best[count][1]
    return tuple(stop - first for first, stop in zip((0, *ends), ends, strict=False))
