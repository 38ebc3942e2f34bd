"""FLOPs and bytes of a step, against brute-force counting and numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.models_table import example_config

from helpers.specs import BF16, F32, decoder_spec, llama3_70b, moe_spec, programs, qwen3_0_6b, with_latents
from quire.program.cost import (
    Cost,
    Machine,
    Row,
    active_parameters,
    step_cost,
    touched_experts,
    visible_keys,
    visible_pairs,
)  # fmt: skip
from quire.program.formats import DTYPE_BYTES, Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.attention import Attend, LatentAttend, LatentWrite, RopeWrite
from quire.program.ops.experts import Experts
from quire.program.ops.linear import HeadLinear, Linear
from quire.program.ops.rows import Add, Embed, GatedAct, GatherRows, Norm, Scale
from quire.program.program import Program
from quire.spec import NormSpec, Router
from quire.spec.config_reader import ConfigReader
from quire.spec.families import read_spec

ROWS = st.builds(Row, st.integers(1, 40), st.integers(0, 60))


@given(ROWS, st.integers(0, 70))
@settings(max_examples=500)
def test_visible_pairs_and_keys_by_counting(row: Row, window: int) -> None:
    pairs = {
        (p, key)
        for p in range(row.context_len, row.context_len + row.query_len)
        for key in range(max(0, p - window + 1) if window else 0, p + 1)
    }
    assert visible_pairs(row, window) == len(pairs)
    assert visible_keys(row, window) == len({key for _, key in pairs})


@given(programs(), st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 5))
@settings(max_examples=60)
def test_linear_flops_and_weights_by_counting(program: Program, rows: list[Row], logit_rows: int) -> None:
    """Every linear weight is multiplied once a row and read once a step, the head only with logits."""
    cost = step_cost(program, rows, logit_rows)
    tokens = sum(row.query_len for row in rows)
    for op, one in zip(program.ops, cost.ops, strict=True):
        if isinstance(op, Linear):
            weight, n = program.param(op.weight), logit_rows if op in program.head else tokens
            products = sum(part.rows * part.cols for part in weight.parts)
            assert one.flops == 2 * n * products + (n * weight.rows if op.bias else 0)
            if n:
                assert one.weight_bytes >= products * DTYPE_BYTES[weight.dtype]
    if not logit_rows:
        assert cost.ops[len(program.body) :] == (Cost(),) * len(program.head)


def test_int8_keys_and_values_are_read_and_written_with_their_scales() -> None:
    program = lower(decoder_spec(10, 8, 6, (2, 1, 4), [0]), NumberFormats("bf16", "i8"))
    cost = step_cost(program, [Row(2, 4)], 0)
    assert cost.total.kv_written_bytes == 2 * 2 * (4 + 2)
    assert cost.total.kv_read_bytes == 6 * 2 * (4 + 2)


def test_latent_attention_by_hand() -> None:
    """Three heads of 10 + 4 over a latent of 22, values of 6, in bfloat16; the cache is read and written once."""
    program = lower(with_latents(decoder_spec(10, 8, 6, (2, 1, 4), [0])), BF16)
    cost = step_cost(program, [Row(2, 4)], 0)  # queries at 4 and 5
    found = zip(program.ops, cost.ops, strict=True)
    latent = [one for op, one in found if isinstance(op, HeadLinear | LatentWrite | LatentAttend)]
    write, keys, attend, values = latent
    q, row = 3 * 14, 22 + 4
    moved = (q + 3 * 4) * 4 + 3 * 10 * 2 + row * 4 + 4 * 4 + 4
    assert write == Cost(2 * (3 * 4 * 4 + 4 * 22), 22 * 4, 2 * moved, kv_written_bytes=2 * row * 2)
    assert keys == Cost(2 * 2 * 3 * 22 * 10, 3 * 22 * 10 * 2, 2 * (3 * 10 * 2 + 3 * 22 * 4))
    assert attend.flops == 2 * 3 * (26 + 22) * (5 + 6)
    assert attend.kv_read_bytes == 6 * 26 * 2
    assert values == Cost(2 * 2 * 3 * 6 * 22, 3 * 6 * 22 * 2, 2 * (3 * 22 * 2 + 3 * 6 * 4))


def test_each_op_by_hand() -> None:
    """One layer of dim 8, 2 heads and 1 kv head of 4, width 6, vocabulary 10, biases, q/k norms; bf16."""
    spec = decoder_spec(10, 8, 6, (2, 1, 4), [3], bias=True, qk_norm=True)
    program = lower(spec, BF16)
    cost = step_cost(program, [Row(2, 4), Row(3, 0)], 2)  # queries at 4, 5 and at 0, 1, 2
    found = {type(op): one for op, one in zip(program.body[:6], cost.ops[:6], strict=True)}
    t = 5
    assert found[Embed] == Cost(0, t * 8 * 2, t * (8 * 4 + 4))
    assert found[Norm] == Cost(t * 32, 8 * 4, t * (8 * 4 + 8 * 2))
    # rope: 3 heads of 4 dimensions, 2 pairs each, 6 flops a pair; 4 flops an element of the q/k norms
    assert found[RopeWrite] == Cost(
        t * (3 * 2 * 6 + 4 * 12), 2 * 4 * 4, t * (16 * 4 + 8 * 4 + 4 * 4 + 4), kv_written_bytes=t * 2 * 4 * 2
    )
    # window 3: 3 + 3 and 1 + 2 + 3 pairs; keys 2…5 and 0…2
    assert found[Attend] == Cost(12 * 2 * 2 * 8, 0, t * (8 * 4 + 8 * 2), kv_read_bytes=7 * 2 * 4 * 2)
    norm, gate_up, act, down = cost.ops[6:10]
    assert norm == Cost(t * 40, 8 * 4, t * (3 * 8 * 4 + 8 * 2))  # with a delta to add
    assert gate_up == Cost(t * (2 * 8 * 12 + 12), 8 * 12 * 2 + 12 * 4, t * (8 * 2 + 12 * 4))
    assert isinstance(program.body[8], GatedAct)
    assert act == Cost(t * 5 * 6, 0, t * (12 * 4 + 6 * 2))
    assert down == Cost(t * (2 * 6 * 8 + 8), 6 * 8 * 2 + 8 * 4, t * (6 * 2 + 8 * 4))
    assert isinstance(program.head[0], GatherRows)
    assert cost.ops[10] == Cost(2 * 8, 0, 2 * (3 * 8 * 4 + 4))
    assert cost.ops[12] == Cost(2 * 2 * 8 * 10, 8 * 10 * 2, 2 * (8 * 2 + 10 * 4 + 4))  # one maximum


def test_multipliers_and_layer_norms_by_hand() -> None:
    """Dim 8, parallel blocks, LayerNorm with bias, an embedding multiplier and soft-capped logits of 10 words."""
    spec = decoder_spec(10, 8, 6, (2, 1, 4), [0])
    layer = replace(spec.layers[0], parallel=True)
    spec = replace(
        spec,
        layers=(layer,),
        norm=NormSpec("layer", bias=True),
        embed_scale=3.0,
        logits_scale=0.5,
        logits_cap=30.0,
    )
    program = lower(spec, F32)
    cost = step_cost(program, [Row(5, 0)], 2)
    found = {type(op): one for op, one in zip(program.ops, cost.ops, strict=True)}
    assert cost.ops[1] == Cost(5 * 8, 0, 2 * 5 * 8 * 4)  # one product an element
    assert found[Add] == Cost(2 * 5 * 8, 0, 3 * 5 * 8 * 4)
    assert found[Norm] == Cost(2 * (6 * 8 + 8), 2 * 8 * 4, 2 * 2 * 8 * 4)
    assert found[Scale] == Cost(2 * 10 * 5, 0, 2 * (2 * 10 * 4 + 4))  # and a tanh; one maximum


def test_decode_of_qwen3_0_6b_reads_its_weights() -> None:
    """bf16 weights are 1.19 GB; a context of 1023 cached tokens adds 28 x 2 x 1024 x 1024 x 2 bytes of KV."""
    total = step_cost(lower(qwen3_0_6b(), BF16), [Row(1, 1023)], 1).total
    assert total.weight_bytes == 1_192_230_912 + 1024 * 2  # and one row of the embedding
    assert total.kv_read_bytes == 28 * 2 * 1024 * 1024 * 2
    assert total.kv_written_bytes == 28 * 2 * 1024 * 2
    assert total.activation_bytes < 0.01 * total.bytes
    assert 0.9 < total.intensity < 1.1  # two FLOPs for each two-byte weight


def test_prefill_of_qwen3_0_6b() -> None:
    """0.88 GFLOP a token in linears, 4 x 2048 x pairs in attention, and the head once."""
    program = lower(qwen3_0_6b(), BF16, fused=False)
    cost = step_cost(program, [Row(512, 0)], 1)
    linears = sum(
        one.flops for op, one in zip(program.body, cost.ops, strict=False) if isinstance(op, Linear)
    )
    assert linears == 512 * 2 * 28 * 15_728_640
    assert linears / 512 == pytest.approx(0.88e9, rel=0.002)
    attention = sum(
        one.flops for op, one in zip(program.ops, cost.ops, strict=True) if isinstance(op, Attend)
    )
    assert attention == 28 * 4 * 2048 * (512 * 513 // 2)
    assert cost.ops[-1].flops == 2 * 155_582_464
    rest = cost.total.flops - linears - attention - cost.ops[-1].flops
    assert 0 < rest < 0.01 * cost.total.flops


def test_decode_flops_of_70b_are_twice_its_parameters() -> None:
    total = step_cost(lower(llama3_70b(), BF16), [Row(1, 0)], 1).total
    embedding = 128256 * 8192
    assert total.flops == pytest.approx(2 * (70_553_706_496 - embedding), rel=1e-3)


def test_chunks_do_the_work_of_the_whole() -> None:
    """FLOPs and written KV of the body add up exactly over chunks; weights are read once for each chunk."""
    program = lower(decoder_spec(64, 32, 48, (4, 2, 8), [0, 5, 16]), F32)
    whole = step_cost(program, [Row(50, 0)], 0).total
    parts = [step_cost(program, [Row(n, start)], 0).total for n, start in ((7, 0), (1, 7), (30, 8), (12, 38))]
    total = sum(parts, Cost())
    assert (total.flops, total.kv_written_bytes) == (whole.flops, whole.kv_written_bytes)
    assert total.weight_bytes > 3 * whole.weight_bytes
    assert total.kv_read_bytes > whole.kv_read_bytes


def test_bound_takes_the_slower_resource() -> None:
    cost = Cost(flops=600, weight_bytes=100, activation_bytes=60, kv_read_bytes=30, kv_written_bytes=10)
    assert cost.bytes == 200
    assert cost.intensity == 3.0
    assert cost.bound(Machine(flops=100.0, bandwidth=100.0)) == 6.0
    assert cost.bound(Machine(flops=1000.0, bandwidth=100.0)) == 2.0
    assert Cost().intensity == 0.0


def test_weights_in_groups_cost_their_codes_scales_and_offsets() -> None:
    """One layer, width 64: qkv reads 64 x 64 nibbles, two float16 scales and two zero points a row."""
    spec = decoder_spec(100, 64, 96, (2, 1, 16), [0])
    form = WeightFormat("i4", Groups(32, "f16", "u8"))
    program = lower(spec, NumberFormats("bf16", "bf16", form))
    cost = step_cost(program, [Row(3, 0)], 0)
    linears = [(op, c) for op, c in zip(program.ops, cost.ops, strict=True) if isinstance(op, Linear)]
    assert linears[0][1].weight_bytes == 64 * (32 + 2 * 3)
    assert linears[0][1].activation_bytes == 3 * (64 + 4 + 2 * 8 + 64 * 4)


def test_experts_cost_as_much_as_a_step_touches() -> None:
    """One token reads top_k experts, many tokens the expected number of different ones, at most all."""
    assert [touched_experts(128, 8, n) for n in (0, 1, 2, 10_000)] == [0, 8, 16, 128]
    assert touched_experts(8, 2, 4) == round(8 * (1 - 0.75**4))
    program = lower(moe_spec(Router(8, 2, bias=True), 40, bias=True, layers=1, dim=48), BF16)
    index = next(i for i, op in enumerate(program.ops) if isinstance(op, Experts))
    for tokens, touched in ((1, 2), (3, touched_experts(8, 2, 3))):
        cost = step_cost(program, [Row(tokens, 0)], 1).ops[index]
        assert cost.weight_bytes == touched * (80 * 48 * 2 + 80 * 4)
        assert cost.flops == 2 * tokens * (2 * 80 * 48 + 80)
        assert cost.activation_bytes == 2 * tokens * (48 * 2 + 80 * 4)


def test_active_parameters_of_qwen3_30b_a3b() -> None:
    """30.5 billion parameters, 3.3 of them for a token."""
    config = {"model_type": "qwen3_moe", **example_config("qwen3_moe")}
    program = lower(read_spec(ConfigReader(config))[0], BF16)
    inactive = 48 * 3 * 120 * 768 * 2048
    assert sum(p.rows * max(p.cols, 1) for p in program.params) == 30_532_122_624
    assert active_parameters(program) == 30_532_122_624 - inactive == 3_353_032_704
