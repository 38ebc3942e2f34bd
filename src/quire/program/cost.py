"""FLOPs and bytes of a step, op by op: what a roofline report, the planner and the simulator read.

All counts are exact integers for the work the op definitions ask for, whatever kernel does it. A multiply
and an add are two FLOPs. Bytes are the least that memory must move when nothing stays in a cache between
ops: each weight once, each activation read and written once, each visible key and value once a row.
Transcendentals count as EXP_FLOPS; they never decide a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.program.formats import DTYPE_BYTES
from quire.program.memory import kv_vector_bytes
from quire.program.ops import (
    Add,
    Attend,
    Combine,
    Dispatch,
    Embed,
    Experts,
    GatedAct,
    GatherRows,
    HeadLinear,
    KVLayer,
    LatentAttend,
    LatentWrite,
    Linear,
    Norm,
    Op,
    Param,
    Program,
    Quantize,
    RopeWrite,
    Route,
    Scale,
    param_names,
)

NORM_FLOPS = {"rms": 4, "layer": 6}  # square, add to the sum, scale, weight; and the mean: sum, subtract
QUANTIZE_FLOPS = 3  # magnitude, scale, round
SCALE_BYTES = 4  # of one row of int8
GROUP_BYTES = 8  # of one group of it: two int32
EXP_FLOPS = 4  # act(gate): exponential or error function, and the arithmetic around it
ID_BYTES = 4  # a token id, position or row number


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence in a step: `query_len` new tokens after `context_len` tokens that are already cached."""

    query_len: int
    context_len: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine can do in a second: `flops` at the program's number format, `bandwidth` in bytes."""

    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one op or many. Bytes are split by what they belong to; ids and rope tables are activations."""

    flops: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_read_bytes: int = 0
    kv_written_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte (roofline model, Williams et al. 2009); 0 without bytes."""
        return self.flops / self.bytes if self.bytes else 0.0

    def bound(self, machine: Machine) -> float:
        """Least seconds on a machine: the longer of computing and moving bytes, perfectly overlapped."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_written_bytes + other.kv_written_bytes,
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of each op of Program.ops in a step, and of the step."""

    ops: tuple[Cost, ...]

    @property
    def total(self) -> Cost:
        return sum(self.ops, Cost())


def step_cost(program: Program, rows: Sequence[Row], logit_rows: int) -> StepCost:
    """Cost of running `rows` with logits for `logit_rows` tokens; the head is left out when that is 0."""
    counter = _Counter(program, rows, logit_rows)
    body = [counter.cost(op, counter.tokens) for op in program.body]
    head = [counter.cost(op, logit_rows) if logit_rows else Cost() for op in program.head]
    return StepCost(tuple(body + head))


def visible_pairs(row: Row, window: int) -> int:
    """(query, key) pairs of causal attention: the query at position p sees min(p + 1, window) keys."""
    first, last = (
        row.context_len + 1,
        row.context_len + row.query_len,
    )  # keys each query sees, when not limited
    if window == 0:
        return _sum_range(first, last)
    whole = _sum_range(first, min(last, window))
    return whole + window * (last - max(first - 1, window)) if last > window else whole


def visible_keys(row: Row, window: int) -> int:
    """Positions that at least one query of the row sees."""
    behind = max(0, row.context_len - window + 1) if window else 0
    return row.context_len + row.query_len - behind if row.query_len else 0


def touched_experts(experts: int, top_k: int, tokens: int) -> int:
    """How many experts of a layer `tokens` tokens go to together: exactly top_k for one.

    For more, the number expected when every token takes its own at random: experts · (1 - (1 - top_k/experts)^tokens).
    """
    return round(experts * (1 - (1 - top_k / experts) ** tokens))


def active_parameters(program: Program) -> int:
    """Parameters that take part in one token's step: of experts, those of the top_k that it goes to."""
    params = {param.name: param for param in program.params}
    shares = dict.fromkeys(params, (1, 1))
    for op in program.body:
        if isinstance(op, Experts):
            for name in param_names(op):
                shares[name] = program.buffer(op.out).per, params[name].experts
    return sum(p.rows * max(p.cols, 1) * shares[p.name][0] // shares[p.name][1] for p in program.params)


class _Counter:
    """Looks up widths and formats of a program and counts one op at a time."""

    def __init__(self, program: Program, rows: Sequence[Row], logit_rows: int) -> None:
        self.program, self.rows, self.logit_rows = program, rows, logit_rows
        self.tokens = sum(row.query_len for row in rows)
        self.params = {param.name: param for param in program.params}
        self.buffers = {buffer.name: buffer for buffer in program.buffers}

    def cost(self, op: Op, n: int) -> Cost:
        """Cost of one op over n rows."""
        match op:
            case Embed():
                cost = self.embed(op, n)
            case Norm():
                cost = self.norm(op, n)
            case Add():
                cost = Cost(
                    2 * n * self.buffers[op.x].cols,
                    0,
                    n * (2 * self.row_bytes(op.x) + self.row_bytes(op.delta)),
                )
            case Scale():
                flops = (1 + EXP_FLOPS if op.cap else 1) * self.buffers[op.x].cols
                cost = Cost(n * flops, 0, n * (2 * self.row_bytes(op.x) + self.maxima_bytes(op)))
            case Linear():
                cost = self.linear(op, n)
            case Quantize():
                cost = self.quantize(op, n)
            case RopeWrite():
                cost = self.rope_write(op, n)
            case Attend():
                cost = self.attend(op, n)
            case HeadLinear() | LatentWrite() | LatentAttend():
                cost = self.latent(op, n)
            case GatedAct():
                cost = self.gated_act(op, n)
            case GatherRows():
                cost = self.gather_rows(op, n)
            case Route() | Dispatch() | Experts() | Combine():
                cost = self.of_experts(op, n)
        return cost

    def row_bytes(self, buffer: str, cols: int | None = None) -> int:
        """Bytes of one row of a buffer, or of its first `cols` columns."""
        found = self.buffers[buffer]
        wide = found.cols if cols is None else cols
        scales = 0
        if found.dtype == "i8":  # a scale, and of a group its bits and sum
            groups = -(-wide // found.group) if found.group else 0
            scales = SCALE_BYTES + GROUP_BYTES * groups
        return wide * DTYPE_BYTES[found.dtype] + scales

    def weight_bytes(self, weight: Param) -> int:
        """Bytes of a row of a linear weight or table: what it holds, without padding."""
        if weight.groups is not None:
            codes = weight.cols * (4 if weight.dtype == "i4" else 8)
            return -(-codes // 8) + weight.groups.row_bytes(weight.cols)
        return weight.cols * DTYPE_BYTES[weight.dtype] + (SCALE_BYTES if weight.dtype == "i8" else 0)

    def kv_bytes(self, layer: int) -> int:
        """Bytes of what the cache holds of one token in one layer, without padding."""
        found: KVLayer = self.program.kv_layers[layer]
        return found.vectors * kv_vector_bytes(found.head_dim, self.program.kv_dtype)

    def vector_bytes(self, *names: str | None) -> int:
        return sum(self.params[name].rows * DTYPE_BYTES["f32"] for name in names if name)

    def embed(self, op: Embed, n: int) -> Cost:
        table = self.params[op.table]
        return Cost(
            weight_bytes=n * self.weight_bytes(table),
            activation_bytes=n * (self.row_bytes(op.out) + ID_BYTES),
        )

    def norm(self, op: Norm, n: int) -> Cost:
        cols, x = self.buffers[op.x].cols, self.row_bytes(op.x)
        flops, moved = NORM_FLOPS[op.kind] * cols if op.weight else 0, x + self.row_bytes(op.out)
        if op.delta:
            flops, moved = flops + cols, moved + self.row_bytes(op.delta) + x
        if op.bias:
            flops += cols
        flops += self.rounding_flops(op.out)
        return Cost(n * flops, self.vector_bytes(op.weight, op.bias), n * moved)

    def rounding_flops(self, out: str) -> int:
        """FLOPs of rounding a row of an i8 buffer, in the op that writes it."""
        found = self.buffers[out]
        if found.dtype != "i8":
            return 0
        stages = found.group.bit_length() - 1 if found.rotated else 0
        return (QUANTIZE_FLOPS + stages) * found.cols

    def linear(self, op: Linear, n: int) -> Cost:
        weight = self.params[op.weight]
        flops = 2 * n * weight.rows * weight.cols + (n * weight.rows if op.bias else 0)
        read = weight.rows * self.weight_bytes(weight) + self.vector_bytes(op.bias)
        cols = weight.rows
        if op.act:
            cols //= 2
            flops += n * (EXP_FLOPS + 1) * cols
        written = cols * DTYPE_BYTES[self.buffers[op.out].dtype] + self.maxima_bytes(op)
        return Cost(flops, read, n * (self.row_bytes(op.x) + written))

    def maxima_bytes(self, op: Linear | Scale) -> int:
        return self.row_bytes(op.maxima) if op.maxima else 0

    def quantize(self, op: Quantize, n: int) -> Cost:
        n *= self.buffers[op.out].per
        return Cost(n * self.rounding_flops(op.out), 0, n * (self.row_bytes(op.x) + self.row_bytes(op.out)))

    def rope_write(self, op: RopeWrite, n: int) -> Cost:
        shape, dim = op.shape, 0 if op.rope is None else self.program.ropes[op.rope].dim
        flops = 3 * dim * (shape.heads + shape.kv_heads)  # four products and two sums for each pair
        flops += NORM_FLOPS[op.kind] * (shape.q_cols if op.q_norm else 0)
        flops += NORM_FLOPS[op.kind] * (shape.kv_cols if op.k_norm else 0)
        table = dim * DTYPE_BYTES["f32"] + ID_BYTES
        moved = self.row_bytes(op.qkv) + self.row_bytes(op.qkv, shape.q_cols) + table
        written = n * self.kv_bytes(op.layer)
        weights = self.vector_bytes(op.q_norm, op.k_norm)
        return Cost(n * flops, weights, n * moved, kv_written_bytes=written)

    def attend(self, op: Attend, n: int) -> Cost:
        shape = op.shape
        pairs = sum(visible_pairs(row, op.window) for row in self.rows)
        keys = sum(visible_keys(row, op.window) for row in self.rows)
        return Cost(
            flops=4 * shape.q_cols * pairs + n * self.rounding_flops(op.out),
            activation_bytes=n * (self.row_bytes(op.qkv, shape.q_cols) + self.row_bytes(op.out)),
            kv_read_bytes=keys * self.kv_bytes(op.layer),
        )

    def latent(self, op: HeadLinear | LatentWrite | LatentAttend, n: int) -> Cost:
        """Cost of an op of latent attention."""
        match op:
            case HeadLinear():
                return self.head_linear(op, n)
            case LatentWrite():
                return self.latent_write(op, n)
            case LatentAttend():
                return self.latent_attend(op, n)

    def head_linear(self, op: HeadLinear, n: int) -> Cost:
        weight = self.params[op.weight]
        read = weight.rows * self.weight_bytes(weight)
        return Cost(
            2 * n * weight.rows * weight.cols, read, n * (self.row_bytes(op.x) + self.row_bytes(op.out))
        )

    def latent_write(self, op: LatentWrite, n: int) -> Cost:
        shape = op.shape
        flops = 3 * shape.rope * (shape.heads + 1) + NORM_FLOPS["rms"] * shape.rank
        table = shape.rope * DTYPE_BYTES["f32"] + ID_BYTES
        rotated = self.row_bytes(op.q, shape.heads * shape.rope)
        moved = self.row_bytes(op.q) + rotated + self.row_bytes(op.q_nope) + self.row_bytes(op.kv) + table
        written = n * self.kv_bytes(op.layer)
        return Cost(n * flops, self.vector_bytes(op.norm), n * moved, kv_written_bytes=written)

    def latent_attend(self, op: LatentAttend, n: int) -> Cost:
        """Scores over latent and key, values over the latent; each cached number is read once for both."""
        shape = op.shape
        pairs = sum(visible_pairs(row, 0) for row in self.rows)
        keys = sum(visible_keys(row, 0) for row in self.rows)
        q = self.row_bytes(op.q_latent) + self.row_bytes(op.q, shape.heads * shape.rope)
        return Cost(
            flops=2 * shape.heads * (shape.cached + shape.rank) * pairs,
            activation_bytes=n * (q + self.row_bytes(op.out)),
            kv_read_bytes=keys * self.kv_bytes(op.layer),
        )

    def gated_act(self, op: GatedAct, n: int) -> Cost:
        n, flops = n * self.buffers[op.out].per, (EXP_FLOPS + 1) * self.buffers[op.out].cols
        flops += self.rounding_flops(op.out)
        return Cost(n * flops, activation_bytes=n * (self.row_bytes(op.gate_up) + self.row_bytes(op.out)))

    def of_experts(self, op: Route | Dispatch | Experts | Combine, n: int) -> Cost:
        match op:
            case Route():
                return self.route(op, n)
            case Dispatch():
                moved = self.row_bytes(op.x) + self.row_bytes(op.places)
                return Cost(activation_bytes=n * (moved + self.buffers[op.out].per * self.row_bytes(op.out)))
            case Experts():
                return self.experts(op, n)
            case Combine():
                return self.combine(op, n)

    def route(self, op: Route, n: int) -> Cost:
        flops = (EXP_FLOPS + 3) * op.router.experts  # exponential, sum, correction, comparison
        moved = sum(self.row_bytes(name) for name in (op.logits, op.ids, op.weights, op.places))
        return Cost(n * flops, self.vector_bytes(op.correction), n * moved)

    def experts(self, op: Experts, n: int) -> Cost:
        weight, rows = self.params[op.weight], n * self.buffers[op.out].per
        flops = 2 * rows * weight.matrix_rows * weight.cols + (rows * weight.matrix_rows if op.bias else 0)
        read = weight.rows * self.weight_bytes(weight) + self.vector_bytes(op.bias)
        touched = touched_experts(weight.experts, self.buffers[op.out].per, n)
        moved = self.row_bytes(op.x) + self.row_bytes(op.out)
        return Cost(flops, read * touched // weight.experts, rows * moved)

    def combine(self, op: Combine, n: int) -> Cost:
        per, cols = self.buffers[op.x].per, self.buffers[op.out].cols
        moved = per * self.row_bytes(op.x) + self.row_bytes(op.out)
        moved += sum(self.row_bytes(x) for x in (op.places, op.weights, op.shared, op.gate) if x)
        flops = 2 * per * cols + (2 * cols if op.gate else cols if op.shared else 0)
        return Cost(n * flops, activation_bytes=n * moved)

    def gather_rows(self, op: GatherRows, n: int) -> Cost:
        moved = self.row_bytes(op.x) + self.row_bytes(op.out) + ID_BYTES
        if op.delta is None:
            return Cost(activation_bytes=n * moved)
        return Cost(n * self.buffers[op.x].cols, activation_bytes=n * (moved + self.row_bytes(op.delta)))


def _sum_range(first: int, last: int) -> int:
    """first + (first + 1) + … + last; 0 when empty."""
    return (first + last) * (last - first + 1) // 2 if last >= first else 0
