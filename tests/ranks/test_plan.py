"""What a plan gives to each rank: whole models in pieces, and plans that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.specs import BF16, F32, I8, decoder_spec, llama3_70b, moe_spec, qwen3_0_6b, with_latents
from quire.program.cost import Row, step_cost
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.memory import kv_block_bytes, param_bytes, plan_arena, weight_bytes
from quire.program.op import reads, writes
from quire.program.ops.attention import Attend
from quire.program.ops.collectives import AllGather, AllReduce, AllToAll
from quire.program.program import Program
from quire.program.ranks import RankPlan
from quire.program.tensors import Part
from quire.spec import MLP, ModelSpec, NormSpec, QKNorm, Router
from quire.types import UnsupportedModelError

COLLECTIVES = (AllGather, AllReduce, AllToAll)
DENSE = decoder_spec(330, 256, 328, (8, 4, 32), [0, 24, 24, 24], qk_norm=True, bias=True)
EXPERTS = moe_spec(Router(6, 2), 200, dim=256, layers=4, shared=MLP(200), shared_gate=True)
SPECS = [DENSE, replace(DENSE, tied=True), EXPERTS, with_latents(DENSE, 30, bias=True)]


def programs(spec: ModelSpec, size: int, stages: int = 1, **plan: Any) -> list[Program]:
    return [
        lower(spec, BF16, RankPlan(size, rank, stages, stage, **plan))
        for stage in range(stages)
        for rank in range(size)
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_one_rank_is_the_model(spec: ModelSpec) -> None:
    program = lower(spec, BF16, RankPlan())
    assert program == lower(spec, BF16)
    alone = RankPlan(expert_parallel=True, reduce="fast")
    assert lower(spec, BF16, alone) == replace(program, plan=alone)
    assert not [op for op in program.ops if isinstance(op, COLLECTIVES)]
    assert program.inputs == ()
    assert {output.name for output in program.outputs} == {"logits", "maxima"}


def elements(part: Part) -> int:
    return part.rows * max(part.cols, 1)


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_ranks_hold_the_model_once(spec: ModelSpec, whole_experts: bool, size: int, stages: int) -> None:
    """Every element of a tensor is held by one rank, or, where its axis has no name, by all ranks of a stage."""
    if spec is EXPERTS and size == 3:
        pytest.skip("two key/value heads")
    held: dict[str, dict[tuple[int, int, int, int], int]] = {}
    for program in programs(spec, size, stages, expert_parallel=whole_experts):
        for part in (part for param in program.params for part in param.parts):
            at = (part.first, part.first_col, part.rows, part.cols)
            found = held.setdefault(part.tensor, {})
            found[at] = found.get(at, 0) + 1
    whole: dict[str, int] = {}
    for part in (part for param in lower(spec, BF16).params for part in param.parts):
        whole[part.tensor] = whole.get(part.tensor, 0) + elements(part)
    assert held.keys() == whole.keys()
    for tensor, ranges in held.items():
        assert sum(rows * max(cols, 1) for _, _, rows, cols in ranges) == whole[tensor]
        twice = 2 if spec.tied and stages > 1 and tensor == spec.names.embed else 1
        assert set(ranges.values()) <= {twice, size}
        split = ("q_proj", "o_proj", "down_proj", "up_proj", "embed_tokens", "lm_head")
        if any(f"{name}.weight" in tensor for name in split):
            assert set(ranges.values()) == {twice}


def test_panels_stay_whole() -> None:
    for rank in range(3):
        plan = RankPlan(3, rank)
        share = plan.columns("vocab_size", 330, 64)
        assert share.start % 64 == 0
        assert share.stop % 64 == 0 or share.stop == 330
    assert [RankPlan(3, r).columns("vocab_size", 330, 64).count for r in range(3)] == [128, 128, 74]
    assert [RankPlan(3, r).heads(8, 4)[0].count for r in range(3)] == [2, 2, 4]
    assert [RankPlan(8, r).heads(16, 4)[1].start for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_stage_counts_its_own_layers() -> None:
    first, last = (lower(DENSE, F32, RankPlan(1, 0, 2, stage, stage_layers=(1, 3))) for stage in range(2))
    assert [op.layer for op in last.ops if isinstance(op, Attend)] == [0, 1, 2]
    assert [layer.layer for layer in last.kv_layers] == [1, 2, 3]
    assert "layers.3.qkv" in {param.name for param in last.params}
    assert (first.head, [output.name for output in first.outputs]) == ((), ["residual"])
    assert [each.name for each in last.inputs] == ["residual"]
    # the same groups in the same order, so that one block table serves both; one stage has no layer of a group
    assert [group.window for group in first.cache_groups] == [group.window for group in last.cache_groups]
    assert [group.layers for group in first.cache_groups] == [(0,), (), (), ()]
    assert [group.layers for group in last.cache_groups] == [(), (1,), (2,), (3,)]
    place = {(layer.group, layer.index_in_group) for layer in last.kv_layers}
    assert len(place) == 3
    # what crosses is needed from the first op on, and nothing is put in its place before it is read
    assert "residual" in reads(last.body[0])
    assert any("residual" in writes(op) for op in first.body)


@pytest.mark.parametrize(
    ("spec", "plan", "message"),
    [
        (
            llama3_70b(),
            {"tensor_parallel_size": 12},
            "num_attention_heads 64 with num_key_value_heads 8; 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64 can",
        ),
        (DENSE, {"tensor_parallel_size": 8}, "cannot split vocab_size 330: it has 6 panels of 64 columns"),
        (
            replace(DENSE, vocab=1000),
            {"tensor_parallel_size": 8},
            "cannot split hidden_size 256: it has 4 panels of 64 columns",
        ),
        (
            decoder_spec(330, 256, 100, (8, 4, 32), [0]),
            {"tensor_parallel_size": 4},
            "cannot split intermediate_size 100: it has 2 panels",
        ),
        (
            moe_spec(Router(3, 2), 100, dim=256),
            {"tensor_parallel_size": 2, "reduce": "fast"},
            'reduce: "fast" is not for models with experts',
        ),
        (
            replace(moe_spec(Router(3, 2), 256, dim=256), vocab=330),
            {"tensor_parallel_size": 4, "expert_parallel": True},
            "4 ranks cannot share num_experts 3: each needs one, so tensor_parallel_size can be 3 at most",
        ),
        (DENSE, {"pipeline_parallel_size": 5}, "pipeline_parallel_size: 5 is more than the model's 4 layers"),
        (
            DENSE,
            {"pipeline_parallel_size": 2, "stage_layers": (1, 2)},
            r"stage_layers: \[1, 2\] add up to 3, but the model has 4 layers",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(spec: ModelSpec, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        lower(spec, F32, RankPlan(**plan))


def test_fields_have_limits() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size: 0 is less than 1"):
        RankPlan(0)
    with pytest.raises(ValueError, match=r"tensor_parallel_rank: 2 is not in \[0, 1\]"):
        RankPlan(2, 2)
    with pytest.raises(ValueError, match=r"pipeline_parallel_rank: -1 is not in \[0, 0\]"):
        RankPlan(pipeline_parallel_rank=-1)
    with pytest.raises(ValueError, match="is not a number of layers, at least 1, for each of 2 stages"):
        RankPlan(pipeline_parallel_size=2, stage_layers=(0, 4))
    with pytest.raises(UnsupportedModelError, match=r'"fast" needs float weights, but layers\.0\.qkv is i8'):
        lower(DENSE, NumberFormats("f32", "f32", I8), RankPlan(2, reduce="fast"))
    norms = tuple(
        replace(x, mixer=replace(x.mixer, qk_norm=QKNorm(NormSpec(), whole=True))) for x in DENSE.layers
    )
    with pytest.raises(UnsupportedModelError, match="norm over all heads; up to 4 can"):
        lower(replace(DENSE, vocab=1000, dim=512, layers=norms), F32, RankPlan(8))


def test_memory_and_cost_of_a_rank() -> None:
    """Weights, cache and work divide; what is on the wire follows from widths alone."""
    spec, size = llama3_70b(), 8
    one, rank = lower(spec, BF16), lower(spec, BF16, RankPlan(size))
    norms = sum(param_bytes(param) for param in one.params if param.kind == "vector")
    every = [weight_bytes(lower(spec, BF16, RankPlan(size, number))) for number in range(size)]
    assert sum(every) == weight_bytes(one) + (size - 1) * norms
    assert max(every) < 1.001 * min(every)
    assert kv_block_bytes(rank, 16) == kv_block_bytes(one, 16) // size
    assert plan_arena(rank, 256, 8).total < plan_arena(one, 256, 8).total
    row = [Row(1, 1023)]
    whole, part = step_cost(one, row, 1).total, step_cost(rank, row, 1).total
    assert (whole.wire_bytes, part.kv_read_bytes) == (0, whole.kv_read_bytes // size)
    assert part.flops == pytest.approx(whole.flops / size, rel=0.01)
    dim, width = 8192, 28672
    gathered = 80 * (
        2 * dim + 4 * dim + 2 * width + 4 * dim
    )  # attention's heads, its branch; the same of the MLP
    others = 2004 - 250  # panels of the vocabulary
    assert part.wire_bytes == (gathered + 2 * 4 * dim) * 7 // 8 + others * (64 + 1) * 4


def test_partial_sums_move_other_bytes() -> None:
    """The figures of docs/decisions/0046: an all-reduce moves two rows of float32 a branch."""
    for spec, dim in ((qwen3_0_6b(), 1024),):
        for size in (2, 4, 8):
            program = lower(spec, BF16, RankPlan(size, reduce="fast"))
            wire = step_cost(program, [Row(1, 0)], 0).total.wire_bytes
            assert wire == (2 * 28 + 1) * 2 * 4 * dim * (size - 1) // size


def test_bytes_of_experts_on_the_wire() -> None:
    """Whole experts send their rows unsummed, and each rank only the columns that it sums."""
    spec = replace(moe_spec(Router(128, 8), 768, dim=2048, layers=1), vocab=6400)
    wide = NumberFormats("bf16", "bf16", WeightFormat("i4", Groups(32)))
    by_kind = {}
    for whole_experts in (False, True):
        program = lower(spec, wide, RankPlan(2, expert_parallel=whole_experts))
        costs = zip(program.ops, step_cost(program, [Row(1, 0)], 0).ops, strict=True)
        by_kind[whole_experts] = {
            (type(op).__name__, op.out): cost.wire_bytes for op, cost in costs if isinstance(op, COLLECTIVES)
        }
    # codes, with two int32 for each group, and the greatest magnitude of each row
    assert by_kind[False]["AllGather", "expert_gated_bytes"] == 8 * (768 + 8 * 24) // 2
    assert by_kind[False]["AllGather", "tops"] == 8 * 4
    assert by_kind[True]["AllToAll", "expert_out_part"] == 8 * 1024 * 4 // 2
    assert ("AllGather", "tops") not in by_kind[True]
