"""Encoders, classifiers and decoders without a head: the pooled row of every text equals transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.backends import BACKENDS, NATIVE, Backend
from helpers.encoders import (
    ENCODERS,
    TinyEncoder,
    pooled_rows,
    reference_row,
    save_encoder,
    texts,
    tiny_encoder,
    worst,
)
from helpers.specs import BF16, F32, I8
from quire.executor import base
from quire.executor.native import NativeExecutor
from quire.program.formats import NumberFormats

TOGETHER, APART = [range(6)], [[0], [1], [2], [3], [4], [5]]
ENOUGH = 4e-5  # of numbers that reach about 3, over sums in another order


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """reference(model): the folder of a tiny model, and transformers' row of each text."""
    made: dict[str, tuple[Path, list[base.F32]]] = {}

    def get(model: TinyEncoder) -> tuple[Path, list[base.F32]]:
        if model.name not in made:
            folder = tmp_path_factory.mktemp(model.name)
            theirs = save_encoder(model, folder)
            made[model.name] = folder, [reference_row(model, theirs, tokens) for tokens in texts()]
        return made[model.name]

    return get


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("model", ENCODERS, ids=str)
def test_rows_are_those_of_transformers(model: TinyEncoder, backend: Backend, reference) -> None:  # type: ignore[no-untyped-def]
    folder, wanted = reference(model)
    assert 0.2 < max(np.abs(row).max() for row in wanted) < 8
    assert worst(pooled_rows(folder, backend, TOGETHER, F32), wanted) <= ENOUGH


@pytest.mark.parametrize("formats", [F32, BF16, NumberFormats("f32", "f32", I8)], ids=["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta-score", "qwen3"])
def test_a_text_has_the_same_bits_in_any_batch_and_on_any_threads(
    name: str, formats: NumberFormats, reference
) -> None:  # type: ignore[no-untyped-def]
    folder, wanted = reference(tiny_encoder(name))
    one = Backend("one thread", lambda program: NativeExecutor(program, threads=1), 0.0)
    alone = pooled_rows(folder, one, APART, formats)
    for other in (
        pooled_rows(folder, NATIVE, TOGETHER, formats),
        pooled_rows(folder, NATIVE, [[4, 1], [0, 5, 2, 3]], formats, 7),
    ):
        assert all(np.array_equal(other[number], row) for number, row in alone.items())
    cosines = [cosine(row, wanted[number]) for number, row in alone.items()]
    assert min(cosines) >= (1 - 1e-6 if formats == F32 else 0.99)


def cosine(one: base.F32, other: base.F32) -> float:
    """Of a single number: how near it is, as 1 - |difference|."""
    if len(one) == 1:
        return 1.0 - float(abs(one[0] - other[0])) / 3.0
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
