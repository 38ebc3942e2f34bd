"""A feed-forward of experts: routing, sorting rows by expert, products with each one's weights, the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from quire.program.op import ExpertScratch, Op, Read, Scratch, Weight, Write
from quire.program.tensors import Buffer
from quire.program.work import EXP_FLOPS, Cost, Work, touched_experts
from quire.records import dataclass
from quire.spec import Router


@dataclass(frozen=True, slots=True)
class Route(Op):
    """The experts of each token, best first, and their weights, from `logits` [T, experts] (see spec Router).

        s = softmax(logits) or sigmoid(logits)          c = s + correction
        ids[t] = the top_k highest c, highest first, those of groups that are left out being -∞
        weights[t] = s[ids[t]] (/ their sum + 1e-20) · scale

    Equal numbers: the lower expert or group first. All is float32. places[t, j] is the row of pair (t, j) when all
    pairs are sorted by expert, and by token inside an expert. A token whose logits are not all finite goes to the
    first top_k experts with weights NaN.

    An executor may hold experts at other places (executor/expert_places), of which there are `spare` more than experts;
    ids are places then.
    """

    logits: Read
    correction: Weight | None
    ids: Write
    weights: Write
    places: Write
    router: Router
    spare: int = 0
    chooses_experts: ClassVar[bool] = True

    def cost(self, work: Work, n: int) -> Cost:
        flops = (EXP_FLOPS + 3) * self.router.experts  # exponential, sum, correction, comparison
        moved = work.rows_bytes(self.logits, self.ids, self.weights, self.places)
        return Cost(n * flops, work.vector_bytes(self.correction), n * moved)

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        del buffer
        return (ExpertScratch(self.router.experts + self.spare, self.router.top_k),)


@dataclass(frozen=True, slots=True)
class Dispatch(Op):
    """out[places[t, j]] = x[t]: each token's row once for each of its experts, an expert's rows together."""

    x: Read
    places: Read
    out: Write

    def cost(self, work: Work, n: int) -> Cost:
        moved = work.rows_bytes(self.x, self.places) + work.buffers[self.out].per * work.row_bytes(self.out)
        return Cost(activation_bytes=n * moved)


@dataclass(frozen=True, slots=True)
class Experts(Op):
    """out[r] = x[r] @ weight[e]ᵀ (+ bias[e]) for every row r = places[t, j] of x, e = ids[t, j].

    A Linear for each expert that has rows (grouped matrix product); weights of the others are not read. An output row
    has the bits that Linear gives it alone. The weight may hold only those at some of the `experts` places, from
    number `first` on; rows of others are not filled.
    `adapted` and `shrunk` as in Linear, with as many parts for each expert, one expert after the other.
    """

    x: Read
    ids: Read
    places: Read
    weight: Weight
    bias: Weight | None
    out: Write
    experts: int
    first: int = 0
    adapted: str | None = None
    shrunk: Read | None = None
    reads_chosen_experts: ClassVar[bool] = True
    skips_zeros: ClassVar[bool] = True

    def cost(self, work: Work, n: int) -> Cost:
        weight, per = work.params[self.weight], work.buffers[self.out].per
        n *= work.buffers[self.out].replicas  # which have as many tokens, as far as anybody knows
        rows = n * per * weight.experts // self.experts  # of a rank with some of the experts: its share
        flops = 2 * rows * weight.matrix_rows * weight.cols + (rows * weight.matrix_rows if self.bias else 0)
        read = weight.rows * work.weight_row_bytes(weight) + work.vector_bytes(self.bias)
        touched = touched_experts(self.experts, per, n)
        return Cost(flops, read * touched // self.experts, rows * work.rows_bytes(self.x, self.out))


@dataclass(frozen=True, slots=True)
class ShrinkExperts(Op):
    """out[r, p] = A_e,p @ x[r] for every row r = places[t, j], e = ids[t, j], and each part p that an expert has in the
    linear `adapted`: Shrink for experts. x has a row for each pair, or one for each token."""

    x: Read
    ids: Read
    places: Read
    adapted: str
    out: Write
    experts: int

    def cost(self, work: Work, n: int) -> Cost:
        del work, n
        return Cost()


@dataclass(frozen=True, slots=True)
class Combine(Op):
    """out[t] = Σ_j weights[t, j] · x[places[t, j]] in the order of j, then + shared[t].

    With `gate` [T, 1] the last is + sigmoid(gate[t]) · shared[t].
    """

    x: Read
    places: Read
    weights: Read
    shared: Read | None
    gate: Read | None
    out: Write

    def cost(self, work: Work, n: int) -> Cost:
        per, cols = work.buffers[self.x].per, work.buffers[self.out].cols
        moved = (per - 1) * work.row_bytes(self.x)
        moved += work.rows_bytes(self.x, self.out, self.places, self.weights, self.shared, self.gate)
        flops = 2 * per * cols + (2 * cols if self.gate else cols if self.shared else 0)
        return Cost(n * flops, activation_bytes=n * moved)
