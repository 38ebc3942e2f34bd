"""Products with a weight."""

from __future__ import annotations

from typing import ClassVar

from quire import _native
from quire.program.formats import DTYPE_BYTES
from quire.program.op import Change, Op, Read, Weight, Write
from quire.program.ops.rows import WriteFromFirst
from quire.program.work import EXP_FLOPS, Cost, Work
from quire.records import dataclass
from quire.spec.model import Activation

MAXIMA_COLS = _native.MAXIMA_COLS  # neighbouring columns that share a maximum


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """out = x @ weightᵀ (+ bias), accumulated in float32 in ascending order of the input feature.

    A weight in groups: each group's products of whole numbers are summed exactly, and scaled by the weight's scale when
    they are added to the float32 sum, group after group; the input's scale is multiplied at the end.

    It fills the columns of out from `first` on; those before are kept when they are another weight's.

    With `act` the weight is [gate | up], and out what GatedAct makes of the product; or, without `up`, what Activate
    makes of it.

    `maxima` is for who looks for the greatest numbers of a row (the sampler): column i is the maximum of out's columns
    64 i … 64 i + 63, or NaN when one of them is NaN or +inf.

    `adapted` names the Adapted whose first row is out's first column. For rows with an adapter, the sums with B of what
    Shrink left in `shrunk` are added to out, behind the bias and before `act`; where the adapter has gains, so is gain
    times both products (DoRA). Rows without one are left alone.

    `own`: the Owned parameter that takes the weight's place for rows whose adapter has one.

    `rows` above 0: only the first so many rows of the weight, and no bias.
    """

    x: Read
    weight: Weight
    bias: Weight | None
    out: WriteFromFirst
    first: int = 0
    act: Activation | None = None
    up: bool = True
    maxima: Write | None = None
    rows: int = 0
    adapted: str | None = None
    shrunk: Read | None = None
    own: str | None = None
    skips_zeros: ClassVar[bool] = True

    def cost(self, work: Work, n: int) -> Cost:
        weight = work.params[self.weight]
        cols = self.rows or weight.rows
        flops = 2 * n * cols * weight.cols + (n * cols if self.bias else 0)
        read = cols * work.weight_row_bytes(weight) + work.vector_bytes(self.bias)
        if self.act:
            cols //= 2 if self.up else 1
            flops += n * (EXP_FLOPS + int(self.up)) * cols
        written = cols * DTYPE_BYTES[work.buffers[self.out].dtype] + work.rows_bytes(self.maxima)
        return Cost(flops, read, n * (work.row_bytes(self.x) + written))


@dataclass(frozen=True, slots=True)
class Shrink(Op):
    """out[t, p] = A_p @ x[t] for each part p of the linear `adapted`; A is of the adapter of row t (arXiv 2106.09685).

    A part has as many columns of out as the pool has ranks, in whole vectors. Rows without an adapter are not filled.
    A and B are bfloat16, sums float32. Costs are those of steps without adapters: nothing. `apart`: each part has
    columns of x of its own, one part after the other.
    """

    x: Read
    adapted: str
    out: Write
    apart: bool = False

    def cost(self, work: Work, n: int) -> Cost:
        del work, n
        return Cost()


@dataclass(frozen=True, slots=True)
class ShrinkIds(Op):
    """out[t] = the column of A that belongs to the id of token t: Shrink of an embedding."""

    adapted: str
    out: Write

    def cost(self, work: Work, n: int) -> Cost:
        del work, n
        return Cost()


@dataclass(frozen=True, slots=True)
class Expand(Op):
    """out[t] += B of the linear `adapted` @ shrunk[t], for rows with an adapter."""

    out: Change
    adapted: str
    shrunk: Read

    def cost(self, work: Work, n: int) -> Cost:
        del work, n
        return Cost()


@dataclass(frozen=True, slots=True)
class HeadLinear(Op):
    """out[t, h] = weight[h] @ x[t, h] for the columns of each head h, as `Linear` sums; a matrix for each head.

    `adapted` and `shrunk` as in Linear, with a part for each head.
    """

    x: Read
    weight: Weight
    out: Write
    adapted: str | None = None
    shrunk: Read | None = None

    def cost(self, work: Work, n: int) -> Cost:
        weight = work.params[self.weight]
        read = weight.rows * work.weight_row_bytes(weight)
        return Cost(2 * n * weight.rows * weight.cols, read, n * work.rows_bytes(self.x, self.out))
