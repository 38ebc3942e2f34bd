"""Arena plan, KV blocks and weights: exact bytes, and no buffer ever overwritten while it is needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.specs import BF16, F32, decoder_spec, llama3_70b, programs, qwen3_0_6b, with_latents
from quire.program.formats import Groups, NumberFormats
from quire.program.lower import lower
from quire.program.memory import (
    ALIGNMENT,
    buffer_bytes,
    kv_block_bytes,
    live_buffers,
    param_bytes,
    plan_arena,
    rope_table_bytes,
    row_pitch,
    weight_bytes,
)
from quire.program.op import reads, writes
from quire.program.ops.rows import Norm
from quire.program.program import Program
from quire.program.tensors import Buffer, Param, Part
from quire.types import UnsupportedModelError

GIB = 2**30
ROWS = st.integers(1, 40)


def sizes_of(program: Program, max_tokens: int, max_logit_rows: int) -> dict[str, int]:
    return {b.name: buffer_bytes(b, max_tokens, max_logit_rows) for b in program.buffers}


@given(programs(), ROWS, ROWS)
@settings(max_examples=150)
def test_every_read_finds_the_written_values(program: Program, max_tokens: int, max_logit_rows: int) -> None:
    """Marks each cache line of the arena with its last writer, over a step and two more runs of the head."""
    plan, sizes = (
        plan_arena(program, max_tokens, max_logit_rows),
        sizes_of(program, max_tokens, max_logit_rows),
    )
    owner = [""] * (plan.total // ALIGNMENT)
    lines = {
        name: slice(offset // ALIGNMENT, (offset + sizes[name]) // ALIGNMENT)
        for name, offset in plan.offsets.items()
    }
    for op in program.ops + program.head + program.head:
        for name in reads(op):
            assert set(owner[lines[name]]) == {name}, (op, name)
        for name in writes(op):
            owner[lines[name]] = [name] * len(owner[lines[name]])
        for left, right in combinations(
            {*reads(op), *writes(op)}, 2
        ):  # what an op touches, apart from itself
            assert lines[left].stop <= lines[right].start or lines[right].stop <= lines[left].start
    for output in program.outputs:
        assert set(owner[lines[output.buffer]]) == {output.buffer}


@given(programs(), ROWS, ROWS)
@settings(max_examples=100)
def test_arena_is_aligned_and_not_wasteful(program: Program, max_tokens: int, max_logit_rows: int) -> None:
    plan, sizes = (
        plan_arena(program, max_tokens, max_logit_rows),
        sizes_of(program, max_tokens, max_logit_rows),
    )
    assert set(plan.offsets) == set(sizes)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets.values())
    needed = max(sum(sizes[name] for name in together) for together in live_buffers(program))
    assert needed <= plan.total <= sum(sizes.values())


def test_buffers_that_the_head_reads_outlive_the_body() -> None:
    program = lower(decoder_spec(100, 32, 48, (2, 1, 16), [0, 0]), BF16)
    for live in live_buffers(program)[len(program.body) :]:
        assert {"residual", "delta"} <= live
    assert "delta" not in live_buffers(program)[1]  # the first norm has nothing to add


def test_arena_of_qwen3_0_6b_is_the_least_possible() -> None:
    """One token: logits, maxima, last_hidden, residual and delta at the last op are the peak, by hand."""
    plan = plan_arena(lower(qwen3_0_6b(), BF16), 1, 1)
    assert plan.total == 151936 * 4 + 2374 * 4 + 40 + 1024 * 2 + 1024 * 4 + 1024 * 4
    # 512 tokens, one logit row: qkv, mixed, residual at attention.
    plan = plan_arena(lower(qwen3_0_6b(), BF16), 512, 1)
    assert plan.total == 512 * (4096 * 4 + 2048 * 2 + 1024 * 4)


def test_in_place_update_lives_on() -> None:
    """The last norm of a body updates the residual that the head reads."""
    program = lower(decoder_spec(100, 32, 48, (2, 1, 16), [0]), BF16)
    last_norm = max(i for i, op in enumerate(program.body) if isinstance(op, Norm))
    assert {"residual", "hidden"} <= live_buffers(program)[last_norm]


@pytest.mark.parametrize(
    ("layers", "kv_heads", "tokens", "expected"),
    [
        (80, 8, 4096, 1_342_177_280),  # 70B: 1.25 GiB
        (80, 8, 131072, 40 * GIB),
        (80, 64, 4096, 10 * GIB),  # 70B without grouped-query attention
        (32, 8, 4096, GIB // 2),  # 8B
        (126, 8, 4096, 2_113_929_216),  # 405B
    ],
)
def test_kv_of_released_shapes(layers: int, kv_heads: int, tokens: int, expected: int) -> None:
    """2 x layers x kv_heads x head_dim x tokens x bytes, in blocks of 16 tokens."""
    program = lower(decoder_spec(128, 64, 64, (64, kv_heads, 128), [0] * layers), BF16)
    assert tokens // 16 * kv_block_bytes(program, 16) == expected
    wide = replace(program, kv_layers=tuple(replace(layer, type="f32") for layer in program.kv_layers))
    assert kv_block_bytes(wide, 32) == 4 * kv_block_bytes(program, 16)


def test_kv_block_holds_the_layers_of_one_group() -> None:
    program = lower(decoder_spec(128, 64, 64, (4, 2, 16), [0, 8, 8, 8]), BF16)
    assert (len(program.cache_groups), program.layers_per_group) == (4, 1)
    assert kv_block_bytes(program, 16) == 2 * 2 * 16 * 16 * 2


def test_heads_are_stored_in_whole_vectors() -> None:
    """24 dimensions take the place of 32."""
    program = lower(decoder_spec(128, 64, 64, (4, 2, 24), [0, 0, 0]), BF16)
    assert kv_block_bytes(program, 16) == 3 * 2 * 2 * 32 * 16 * 2


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
def test_int8_kv_is_half_of_bfloat16_and_its_scales(head_dim: int) -> None:
    """A bfloat16 scale for each key and each value of a head and token; nothing else."""
    spec = decoder_spec(128, 64, 64, (4, 2, head_dim), [0, 0, 0])
    half = lower(spec, BF16)
    scales = 32 * 3 * 2 * 2 * 2  # tokens, layers, heads, keys and values, bytes
    assert (
        kv_block_bytes(lower(spec, NumberFormats("bf16", "i8")), 32) == kv_block_bytes(half, 32) // 2 + scales
    )


def test_kv_of_latents_is_held_once() -> None:
    """A latent of 22 and a rotated key of 4 in whole vectors; 61 layers of 512 + 64: 70,272 bytes per token."""
    program = lower(with_latents(decoder_spec(128, 64, 64, (4, 2, 16), [0, 0, 0])), BF16)
    assert kv_block_bytes(program, 16) == 3 * 32 * 16 * 2
    released = replace(program, kv_layers=(replace(program.kv_layers[0], head_dim=576),), layers_per_group=61)
    assert kv_block_bytes(released, 64) == 64 * 70_272


def test_weights_by_head_are_padded_by_head() -> None:
    parts = tuple(Part("kv_b", 70, 10, first=h * 20, stored=(60, 70), transposed=True) for h in range(3))
    assert param_bytes(Param("w", "linear", parts, "bf16", experts=3)) == 3 * 128 * 10 * 2


def test_kv_of_unequal_layers_is_refused() -> None:
    program = lower(decoder_spec(128, 64, 64, (4, 2, 16), [0, 0]), BF16)
    odd = replace(program, kv_layers=(program.kv_layers[0], replace(program.kv_layers[1], kv_heads=4)))
    with pytest.raises(UnsupportedModelError, match=r"num_key_value_heads.*\[64, 128\]"):
        kv_block_bytes(odd, 16)
    same = replace(
        program, kv_layers=(program.kv_layers[0], replace(program.kv_layers[1], kv_heads=1, head_dim=32))
    )
    assert kv_block_bytes(same, 16) == kv_block_bytes(program, 16)


def test_bytes_of_one_parameter() -> None:
    assert param_bytes(Param("w", "linear", (Part("a", 60, 3), Part("b", 5, 3)), "bf16")) == 128 * 4 * 2
    assert param_bytes(Param("w", "linear", (Part("a", 60, 3), Part("b", 5, 3)), "f32")) == 128 * 3 * 4
    assert param_bytes(Param("w", "linear", (Part("a", 64, 8),), "f32")) == 64 * 8 * 4
    assert param_bytes(Param("t", "table", (Part("a", 65, 3),), "bf16")) == 448  # 390
    assert param_bytes(Param("v", "vector", (Part("a", 5), Part("b", 2)), "bf16")) == 64  # 28


def test_weights_of_qwen3_0_6b() -> None:
    """151936 x 1024 tied embedding, 28 layers of 15,728,640 weights, 65,536 float32 norm weights."""
    program = lower(qwen3_0_6b(), BF16)
    assert weight_bytes(program) == 2 * (155_582_464 + 28 * 15_728_640) + 4 * 65_536 == 1_192_230_912


def test_weights_of_llama3_70b() -> None:
    """70,553,706,496 parameters, of which 161 x 8192 norm weights are kept in float32."""
    norms = (2 * 80 + 1) * 8192
    assert weight_bytes(lower(llama3_70b(), BF16)) == 2 * (70_553_706_496 - norms) + 4 * norms


def test_rope_tables_are_shared_by_layers_of_one_rope() -> None:
    program = lower(decoder_spec(128, 64, 64, (4, 2, 16), [0, 0, 0]), F32)
    assert rope_table_bytes(program, 100) == 2 * 100 * 8 * 4


def test_bytes_of_weights_and_inputs_in_groups() -> None:
    """70 x 100 in groups of 32: 128 packed rows of four whole groups of nibbles, float16 scales and byte zeros."""
    parts = (Part("a", 70, 100),)
    assert param_bytes(Param("w", "linear", parts, "i4", Groups(32))) == 128 * (4 * 16 + 4 * 2)
    assert param_bytes(Param("w", "linear", parts, "i4", Groups(32, "f16", "u8"))) == 128 * (4 * 16 + 4 * 3)
    assert param_bytes(Param("w", "linear", parts, "i4", Groups(64, "f32", "f32"))) == 128 * (2 * 32 + 2 * 8)
    assert param_bytes(Param("w", "linear", parts, "i2", Groups(32, "f16", "u8"))) == 128 * (4 * 8 + 4 * 3)
    assert param_bytes(Param("w", "linear", parts, "i3", Groups(32, "f16", "u8"))) == 128 * (4 * 12 + 4 * 3)
    two_level = Groups(32, "f16*u8", "f16*u8")
    assert param_bytes(Param("w", "linear", parts, "i4", two_level)) == 128 * (4 * 16 + 4 * 2 + 4)
    assert param_bytes(Param("w", "linear", parts, "i8", Groups(16, "f32"))) == 128 * (7 * 16 + 7 * 4)
    grouped = Buffer("x", 100, "i8", group=32)
    assert row_pitch(grouped) == 128
    assert (
        buffer_bytes(grouped, 5, 1) == 5 * 128 + 192
    )  # 5 rows of a scale, 4 sums and 4 counts of bits: 180 bytes
