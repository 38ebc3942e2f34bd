"""Scales of an fp8 cache from the keys and values of a text.

The model runs over the text as it would be served, with its own cache, and the greatest magnitude of each head's keys
and values is found. A scale maps that to 448, the largest number of E4M3; E5M2 has as much precision with the same
scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, weight_origin
from quire.engine.build.load_weights import load_weights
from quire.engine.build.opening import Model
from quire.executor.base import F32, Limits, StepArrays
from quire.executor.kinds import native_kind
from quire.program.formats import HeadScales
from quire.program.ops.attention import HeadShape
from quire.types import UnsupportedModelError

CHUNK = 64  # tokens of a step
LARGEST = 448.0  # of E4M3
LEAST = 2.0**-40  # of a scale: a head may be zero all over the text

Progress = Callable[[int, int], None]


def calibrate_scales(
    model: Model, asked: EngineConfig, tokens: Sequence[int], length: int, loading: Progress | None = None
) -> dict[int, HeadScales]:
    """The scales of each layer's heads over a text, in pieces of `length` tokens.

    Raises UnsupportedModelError for a model without keys and values by head, MemoryBudgetError without room.
    """
    asked = asked.replace(kv_cache_dtype="auto", kv_cache_scales=None, max_num_seqs=1, max_model_len=length)
    config, program = choose(model, asked, machine_facts("native"))
    # the rows of queries, keys and values that attention finds, rotated as the cache has them
    ops: list[tuple[int, Any]] = [
        (index, op) for index, op in enumerate(program.body) if op.reads_cache and hasattr(op, "qkv")
    ]
    if not ops:
        raise UnsupportedModelError("calibrate: no layer of the model has keys and values by head")
    groups, blocks = len(program.cache_groups), -(-length // 16)
    limits = Limits(CHUNK, 1, 1, length, blocks * groups, 16)
    executor = native_kind(config.threads, config.isa).make(program)
    try:
        load_weights(weight_origin(model), program, config, executor, loading)
        arrays = StepArrays(limits, groups)
        executor.bind(limits, arrays)
        for group, table in enumerate(arrays.block_tables):
            table[0, :blocks] = np.arange(group * blocks, (group + 1) * blocks)
        largest = {op.layer: np.zeros((2, op.shape.kv_heads), np.float32) for _, op in ops}
        for start, stop in _chunks(len(tokens), length):
            n, first = stop - start, start % length
            chunk = tokens[start:stop]
            arrays.token_ids[:n], arrays.positions[:n] = chunk, range(first, first + n)
            arrays.slots[0], arrays.query_start[:2] = 0, (0, n)
            done = 0
            for index, op in ops:
                executor.run_range(n, 1, 0, done, index + 1)
                done = index + 1
                rows = executor.read(op.qkv, n)
                largest[op.layer] = np.maximum(largest[op.layer], _magnitudes(op.shape, rows))
            executor.run_range(n, 1, 0, done, len(program.body))
    finally:
        executor.close()
    return {
        program.kv_layers[layer].layer: HeadScales(*(tuple(_scales(each)) for each in found))
        for layer, found in largest.items()
    }


def _chunks(count: int, length: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens that are run together, each in one sequence of `length` tokens."""
    for begin in range(0, count, length):
        end = min(begin + length, count)
        yield from ((start, min(start + CHUNK, end)) for start in range(begin, end, CHUNK))


def _magnitudes(shape: HeadShape, rows: F32) -> F32:
    """The greatest magnitude of each head's keys and values, [2, heads]."""
    heads = rows[:, shape.q_cols :].reshape(len(rows), 2, shape.kv_heads, shape.head_dim)
    found: F32 = np.abs(heads).max((0, 3))
    return found


def _scales(largest: F32) -> list[float]:
    return [max(float(each) / LARGEST, LEAST) for each in largest]
