"""What a cache of few bits needs to know of keys and values, from those of a text.

The model runs over the text as it would be served, with its own cache.

fp8: the greatest magnitude of each head's keys and values is found. A scale maps that to 448, the largest number of
E4M3; E5M2 has as much precision with the same scales.

kvquant3 (KVQuant, arXiv 2401.18079): of each dimension of keys, before their rotation, the range without its outliers;
of each head levels by k-means, in which an error counts by what it does. The paper takes Fisher information from a
backward pass. Here an error of a key counts by the mean square of the queries that it is multiplied with, and one of a
value by its size.
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
from quire.offline.kv_levels import LayerSample
from quire.program.formats import HeadCodes, HeadScales
from quire.program.ops.attention import HeadShape, RopeWrite
from quire.records import dataclass
from quire.spec import Rope
from quire.types import UnsupportedModelError

CHUNK = 64  # tokens of a step
LARGEST = 448.0  # of E4M3
LEAST = 2.0**-40  # of a scale: a head may be zero all over the text

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Queries, keys and values of a layer [n, columns], rotated, at positions from `first` on."""

    layer: int
    shape: HeadShape
    rope: Rope | None
    first: int
    rows: F32


def calibrate_scales(
    model: Model, asked: EngineConfig, tokens: Sequence[int], length: int, loading: Progress | None = None
) -> dict[int, HeadScales]:
    """The scales of each layer's heads over a text, in pieces of `length` tokens.

    Raises UnsupportedModelError for a model without keys and values by head, MemoryBudgetError without room.
    """
    largest: dict[int, F32] = {}
    for found in _rows_of(model, asked, tokens, length, loading):
        here = _magnitudes(found.shape, found.rows)
        largest[found.layer] = np.maximum(largest.get(found.layer, here), here)
    return {layer: HeadScales(*(tuple(_scales(each)) for each in both)) for layer, both in largest.items()}


def calibrate_codes(
    model: Model, asked: EngineConfig, tokens: Sequence[int], length: int, loading: Progress | None = None
) -> dict[int, HeadCodes]:
    """What codes of a kvquant3 cache stand for in each layer; as calibrate_scales."""
    samples: dict[int, LayerSample] = {}
    for found in _rows_of(model, asked, tokens, length, loading):
        sample = samples.get(found.layer)
        if sample is None:
            sample = samples[found.layer] = LayerSample(found.shape, found.rope, length, len(tokens))
        sample.take(found.rows, found.first)
    return {layer: sample.codes() for layer, sample in samples.items()}


def _rows_of(
    model: Model, asked: EngineConfig, tokens: Sequence[int], length: int, loading: Progress | None
) -> Iterator[_Rows]:
    """What attention finds in each layer, some tokens of the text after the other."""
    asked = asked.replace(kv_cache_dtype="auto", kv_cache_scales=None, max_num_seqs=1, max_model_len=length)
    config, program = choose(model, asked, machine_facts("native"))
    ops: list[tuple[int, Any]] = [
        (index, op) for index, op in enumerate(program.body) if op.reads_cache and hasattr(op, "qkv")
    ]
    if not ops:
        raise UnsupportedModelError("calibrate: no layer of the model has keys and values by head")
    ropes = {op.layer: op.rope for op in program.body if isinstance(op, RopeWrite)}
    groups, blocks = len(program.cache_groups), -(-length // 16)
    limits = Limits(CHUNK, 1, 1, length, blocks * groups, 16)
    executor = native_kind(config.threads, config.isa).make(program)
    try:
        load_weights(weight_origin(model), program, config, executor, loading)
        arrays = StepArrays(limits, groups)
        executor.bind(limits, arrays)
        for group, table in enumerate(arrays.block_tables):
            table[0, :blocks] = np.arange(group * blocks, (group + 1) * blocks)
        for start, stop in _chunks(len(tokens), length):
            n, first = stop - start, start % length
            chunk = tokens[start:stop]
            arrays.token_ids[:n], arrays.positions[:n] = chunk, range(first, first + n)
            arrays.slots[0], arrays.query_start[:2] = 0, (0, n)
            done = 0
            for index, op in ops:
                executor.run_range(n, 1, 0, done, index + 1)
                done = index + 1
                rope = ropes[op.layer]
                layer = program.kv_layers[op.layer].layer
                yield _Rows(
                    layer,
                    op.shape,
                    None if rope is None else program.ropes[rope],
                    first,
                    executor.read(op.qkv, n),
                )
            executor.run_range(n, 1, 0, done, len(program.body))
    finally:
        executor.close()


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
