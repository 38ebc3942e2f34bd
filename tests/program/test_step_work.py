"""Sums of what steps compute and move, from counts, against step_cost of the same steps."""

from __future__ import annotations

import pytest

from helpers.specs import BF16, llama3_70b, moe_spec, qwen3_0_6b
from quire.core.cost_model import FEATURES
from quire.program.cost import Row, peak_of, step_cost
from quire.program.lower import lower
from quire.program.program import Program
from quire.program.step_work import StepWork
from quire.spec import ModelSpec, Router

STEPS = {
    "decode": ([Row(1, 700)], 1),
    "batch": ([Row(1, 100 * i) for i in range(1, 33)], 32),
    "prompt": ([Row(512, 0)], 1),
    "chunk": ([Row(256, 1024)], 1),
    "mixed": ([Row(1, 300), Row(1, 40), Row(128, 64)], 3),
}


def features(rows: list[Row]) -> tuple[float, ...]:
    """core.cost_model.FEATURES of rows without drafts."""
    found = dict.fromkeys(FEATURES, 0.0) | {"step": 1.0}
    for row in rows:
        if row.query_len == 1:
            found["decode_rows"] += 1
            found["decode_context"] += row.context_len + 1
        else:
            found["prompt_tokens"] += row.query_len
            found["prompt_work"] += row.query_len * (row.context_len + row.query_len / 2)
    return tuple(found.values())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "spec", [qwen3_0_6b(), llama3_70b(), moe_spec(Router(8, 2))], ids=["qwen", "llama", "moe"]
)
def test_sums_are_those_of_the_steps(spec: ModelSpec, step: str) -> None:
    program = lower(spec, BF16)
    rows, logits = STEPS[step]
    cost = step_cost(program, rows, logits)
    work = StepWork(program)
    for _ in range(3):
        work.add(features(rows))
    work.count()
    total = cost.total
    assert sum(work.flops.values()) / 3 == pytest.approx(total.flops, rel=0.03)
    moved = total.weight_bytes + total.kv_read_bytes + total.kv_written_bytes
    assert work.moved / 3 == pytest.approx(moved, rel=0.03)
    assert work.flops.keys() == {peak_of(program, op) for op in program.ops}


def test_without_steps_nothing_is_counted() -> None:
    program: Program = lower(qwen3_0_6b(), BF16)
    work = StepWork(program)
    work.count()
    assert work.moved == sum(work.flops.values()) == 0
    work.add(tuple(0.0 for _ in FEATURES))
    work.count()
    assert work.moved == 0
