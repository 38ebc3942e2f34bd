"""Sequences of more than two partitions: attention of any kind has the same bits however they are cut."""

from __future__ import annotations

import numpy as np

from helpers.attention import VOCAB, Latent, Shape, native, random_tokens
from quire.cache_kinds import LATE_KV, LATE_TOKENS, KVType
from quire.executor.base import F32, Limits
from quire.program.lower import NumberFormats

LENGTH = 2300  # more than two partitions


def limits(block_size: int = 16, kv: KVType = "bf16") -> Limits:
    """Blocks are of whole groups of tokens that are rounded together."""
    if kv in LATE_KV:
        block_size = -(-block_size // LATE_TOKENS) * LATE_TOKENS
    return Limits(160, 4, 160, LENGTH, 5 * -(-LENGTH // block_size), block_size)


def last_logits(
    shape: Shape | Latent,
    kv: KVType,
    *,
    threads: int,
    chunks: list[int],
    isa: str = "",
    block_size: int = 16,
    others: int = 0,
) -> F32:
    """Logits of a sequence's tokens from position 2080 on, run in the given chunks together with `others` sequences.

    The cache is full of NaN at first.
    """
    program = shape.program(NumberFormats("f32", kv))
    executor, stepper = native(program, limits(block_size, kv), isa, threads, stepper_seed=others)
    executor.core.fill_cache(255)
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


def assert_same_bits_however_cut(shape: Shape | Latent, kv: KVType, isa: str) -> None:
    """Whole on one thread; then cut, crowded, in larger blocks, on threads that share a row."""
    whole = last_logits(shape, kv, threads=1, chunks=[40], isa=isa)
    assert np.isfinite(whole).all()
    for threads, chunks, block_size, others in ((3, [1] * 8 + [32], 16, 0), (2, [7, 33], 48, 2)):
        found = last_logits(
            shape, kv, threads=threads, chunks=chunks, isa=isa, block_size=block_size, others=others
        )
        assert np.array_equal(found.view(np.uint32), whole.view(np.uint32))


def assert_unwritten_positions_are_seen(shape: Shape | Latent, kv: KVType) -> None:
    """Negative control for the cache full of NaN: reading what no step wrote gives NaN."""
    executor, stepper = native(shape.program(NumberFormats("f32", kv)), limits(kv=kv))
    executor.core.fill_cache(255)
    subject = stepper.add(random_tokens(1, 60))
    stepper.fill({subject: 30})  # and never run
    assert np.isnan(stepper.step(executor, {subject: 1})[subject]).all(), kv


def assert_nan_stays_with_its_sequence(shape: Shape | Latent, kv: KVType, isa: str) -> None:
    """A token whose embedding is NaN spoils all later tokens of its sequence, and no other sequence."""
    program, token = shape.program(NumberFormats("f32", kv)), VOCAB - 1

    def run(poison: bool) -> dict[int, F32]:
        executor, stepper = native(program, limits(kv=kv), isa, threads=2)
        if poison:
            table = np.full((1, program.param("head").cols), np.nan, np.float32)
            executor.put(program.param("head"), token, table, "F32")
        tokens = np.random.default_rng(3).integers(0, token, (2, 40))
        tokens[0, 20] = token
        return stepper.step(executor, {stepper.add(line.tolist()): 40 for line in tokens})

    clean, found = run(poison=False), run(poison=True)
    first, second = sorted(clean)
    keep = slice(0, token)  # the head is tied: the poisoned token has no logit
    assert np.isnan(found[first][20:]).all()
    assert np.array_equal(found[second][:, keep], clean[second][:, keep])
