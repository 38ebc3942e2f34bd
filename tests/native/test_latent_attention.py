"""Latent attention natively: against its torch definition, with equal bits however it is cut, over stale memory."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention import VOCAB, Latent, native, pair, random_tokens
from quire import _native
from quire.executor.base import F32, Limits
from quire.program.formats import DType
from quire.program.lower import NumberFormats
from quire.types import UnsupportedModelError

ISAS = _native.supported_isas()
KV: list[DType] = ["f32", "bf16"]
SHAPES = [
    Latent(4, 32, 8),
    Latent(16, 128, 32, q_rank=20),
    Latent(60, 24, 4),  # more heads than rows of a call
    Latent(3, 34, 6, interleaved=False),  # latent and key share a vector
    Latent(7, 80, 12),
]
TOLERANCE = {"f32": 3e-5, "bf16": 2e-2}  # of the largest output
LIMITS = Limits(max_tokens=160, max_rows=4, max_logit_rows=4, max_len=1600, num_blocks=280)
LENGTH = 2300  # more than two partitions


def mixed(shape: Latent, kv: DType, isa: str) -> tuple[F32, F32]:
    """Outputs of attention in a step with a decode, a chunk and a fresh prompt: native, torch."""
    left, right, stepper = pair(shape.program(NumberFormats("f32", kv)), LIMITS, isa)
    first, second, third = (stepper.add(random_tokens(seed, 300)) for seed in range(3))
    for counts in ({first: 130}, {first: 20, second: 100}, {first: 1, second: 61, third: 50}):
        size = stepper.fill(counts)
        for executor in (left, right):
            executor.run(size.num_tokens, size.num_rows, 0)
    return left.read("latents", size.num_tokens), right.read("latents", size.num_tokens)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_equals_torch(shape: Latent, kv: DType, isa: str) -> None:
    found, expected = mixed(shape, kv, isa)
    assert np.abs(expected).max() > 0.1
    assert np.abs(found - expected).max() <= TOLERANCE[kv] * np.abs(expected).max()


@pytest.mark.parametrize(
    "other",
    [Latent(4, 32, 8, interleaved=False), Latent(4, 32, 8, sharpness=2.1)],
    ids=["another rotation", "another scale"],
)
def test_each_fact_of_the_op_matters(other: Latent) -> None:
    """Negative control: the comparison above would see a rotated part or a scale that is left out."""
    left, right = (mixed(shape, "f32", "")[0] for shape in (SHAPES[0], other))
    assert np.abs(left - right).max() > 20 * TOLERANCE["f32"] * np.abs(left).max()


def limits(block_size: int = 16) -> Limits:
    return Limits(160, 4, 160, LENGTH, 4 * -(-LENGTH // block_size), block_size)


def last_logits(
    shape: Latent,
    kv: DType,
    *,
    threads: int,
    chunks: list[int],
    isa: str = "",
    block_size: int = 16,
    others: int = 0,
) -> F32:
    """Logits of a sequence's tokens from position 2080 on, run in the given chunks beside `others` sequences.

    The cache is full of NaN at first.
    """
    program = shape.program(NumberFormats("f32", kv))
    executor, stepper = native(program, limits(block_size), isa, threads, stepper_seed=others)
    executor.core.fill_cache(float("nan"))
    subject = stepper.add(random_tokens(1, LENGTH))
    company = [stepper.add(random_tokens(5 + i, LENGTH)) for i in range(others)]
    for _ in range(13):
        size = stepper.fill({subject: 160})
        executor.run(size.num_tokens, size.num_rows, 0)
    found = []
    for i, chunk in enumerate(chunks):
        counts = {subject: chunk} | {other: 1 + (i * 7 + k) % 20 for k, other in enumerate(company)}
        found.append(stepper.step(executor, counts)[subject])
    return np.concatenate(found)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("shape", "kv"), [(SHAPES[3], "f32"), (SHAPES[4], "bf16")], ids=str)
def test_long_context_on_many_threads(shape: Latent, kv: DType, isa: str) -> None:
    """Whole on one thread; then cut, crowded, in larger blocks, on threads that share a row."""
    whole = last_logits(shape, kv, threads=1, chunks=[40], isa=isa)
    assert np.isfinite(whole).all()
    for threads, chunks, block_size, others in ((3, [1] * 8 + [32], 16, 0), (2, [7, 33], 48, 2)):
        found = last_logits(
            shape, kv, threads=threads, chunks=chunks, isa=isa, block_size=block_size, others=others
        )
        assert np.array_equal(found.view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("kv", KV)
def test_a_position_that_was_never_written_is_seen(kv: DType) -> None:
    """Negative control for the cache full of NaN: reading what no step wrote gives NaN."""
    executor, stepper = native(SHAPES[0].program(NumberFormats("f32", kv)), limits())
    executor.core.fill_cache(float("nan"))
    subject = stepper.add(random_tokens(1, 60))
    stepper.fill({subject: 30})  # and never run
    assert np.isnan(stepper.step(executor, {subject: 1})[subject]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV)
def test_numbers_that_are_not_finite_stay_with_their_sequence(kv: DType, isa: str) -> None:
    """A token whose embedding is NaN spoils what comes after it, and no other sequence."""
    program, token = SHAPES[0].program(NumberFormats("f32", kv)), VOCAB - 1

    def run(poison: bool) -> dict[int, F32]:
        executor, stepper = native(program, limits(), isa, threads=2)
        if poison:
            table = np.full((1, program.param("head").cols), np.nan, np.float32)
            executor.put(program.param("head"), token, table, "F32")
        tokens = np.random.default_rng(3).integers(0, token, (2, 40))
        tokens[0, 20] = token
        return stepper.step(executor, {stepper.add(line.tolist()): 40 for line in tokens})

    clean, found = run(poison=False), run(poison=True)
    first, second = sorted(clean)
    assert np.isnan(found[first][20:]).all()
    assert np.array_equal(found[second][:, :token], clean[second][:, :token])


def test_an_int8_cache_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"kv_cache_dtype = int8.*latent"):
        SHAPES[0].program(NumberFormats("f32", "i8"))
