"""FLOPs and bytes of a step, op by op: what a roofline report, the planner and the simulator read; see program/work."""

from __future__ import annotations

from collections.abc import Sequence

from quire.program.memory import kv_token_bytes
from quire.program.op import Op, param_names, writes
from quire.program.program import Program
from quire.program.work import Cost, Machine, Row, Work, touched_experts, visible_keys, visible_pairs
from quire.records import dataclass

__all__ = [
    "Cost",
    "Machine",
    "Row",
    "StepCost",
    "active_parameters",
    "peak_of",
    "step_cost",
    "touched_experts",
    "visible_keys",
    "visible_pairs",
]


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of each op of Program.ops in a step, and of the step."""

    ops: tuple[Cost, ...]

    @property
    def total(self) -> Cost:
        return sum(self.ops, Cost())


def step_cost(program: Program, rows: Sequence[Row], logit_rows: int) -> StepCost:
    """Cost of running `rows` with logits for `logit_rows` tokens; the head is left out when that is 0."""
    work = Work(
        rows=rows,
        buffers={buffer.name: buffer for buffer in program.buffers},
        params={param.name: param for param in program.all_params},
        ropes=program.ropes,
        token_kv_bytes=[kv_token_bytes(layer, layer.head_dim) for layer in program.kv_layers],
    )
    tokens = sum(row.query_len for row in rows)
    body = [op.cost(work, tokens) for op in program.body]
    head = [op.cost(work, logit_rows) if logit_rows else Cost() for op in program.head]
    return StepCost(tuple(body + head))


def peak_of(program: Program, op: Op) -> str:
    """The number format in which an op multiplies: a key of the measured compute limits.

    A linear multiplies in the format of its input, attention in that of the KV cache. An int8 cache is multiplied by
    two-byte numbers, twice per product, so its peak is that of bf16. All other arithmetic is float32, including
    products of float16. Other narrow caches are widened to bf16.
    """
    if op.reads_cache:
        return "f32" if program.kv_type in {"f32", "f16"} else "bf16"
    x = getattr(op, "x", None)
    if x is not None and any(program.param(name).kind != "vector" for name in param_names(op)):
        return str(program.buffer(x).dtype)
    return "f32"


def active_parameters(program: Program) -> int:
    """Parameters that take part in one token's step: of experts, those of the top_k that it goes to."""
    params = {param.name: param for param in program.all_params}
    shares = dict.fromkeys(params, (1, 1))
    for op in program.body:
        if op.reads_chosen_experts:
            per = max(program.buffer(name).per for name in writes(op))
            for name in param_names(op):
                shares[name] = per, params[name].experts
    return sum(p.rows * max(p.cols, 1) * shares[p.name][0] // shares[p.name][1] for p in program.all_params)
