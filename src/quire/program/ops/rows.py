"""Ops that treat every row by itself: embedding, norms, sums, gates, rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from quire.program.op import Change, Op, Read, Role, RowScratch, Scratch, Weight, Write
from quire.program.tensors import Buffer
from quire.program.work import EXP_FLOPS, ID_BYTES, NORM_FLOPS, Cost, Work
from quire.records import dataclass
from quire.spec.model import Activation, NormKind, PlainActivation, PoolKind

ChangeWithDelta = Annotated[str, Role(reads=True, writes="delta")]
WriteFromFirst = Annotated[str, Role(reads="first", writes=True)]


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """out[t] = table[token_ids[t]]; the table may be a tied, packed linear weight.

    Its rows are those of tokens from `first` on; out[t] is 0 for a token without one. Of a token whose embedding the
    step is given, the id is a placeholder: its row is replaced, see Program.entry.

    `own`: the Owned parameter that takes the table's place for rows whose adapter has one.
    """

    table: Weight
    out: Write
    first: int = 0
    own: str | None = None

    def cost(self, work: Work, n: int) -> Cost:
        table = work.weight_row_bytes(work.params[self.table])
        return Cost(weight_bytes=n * table, activation_bytes=n * (work.row_bytes(self.out) + ID_BYTES))


@dataclass(frozen=True, slots=True)
class EmbedSum(Op):
    """out[t] = words[id % V] + segments[id // V] + positions[first + position of t] (arXiv 1810.04805), for the V rows
    of `words`; without the tables that are None."""

    words: Weight
    positions: Weight | None
    segments: Weight | None
    out: Write
    first: int = 0

    def cost(self, work: Work, n: int) -> Cost:
        tables = [work.params[name] for name in (self.words, self.positions, self.segments) if name]
        read = sum(work.weight_row_bytes(table) for table in tables)
        flops = (len(tables) - 1) * work.buffers[self.out].cols
        return Cost(n * flops, n * read, n * (work.row_bytes(self.out) + 2 * ID_BYTES))


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """x += delta (when given), then out = norm(x) * weight (+ bias), rounded to out's dtype.

    Kind rms: x / sqrt(mean(x²) + eps), arXiv 1910.07467; layer: the mean is subtracted first, 1607.06450. Without
    a weight out is x itself. x is float32 and is changed only by a delta; out may be x.

    It fills the columns of out from `first` on, as many as x has; those before are kept when they are another op's.
    """

    x: ChangeWithDelta
    delta: Read | None
    weight: Weight | None
    eps: float
    out: WriteFromFirst
    kind: NormKind = "rms"
    bias: Weight | None = None
    first: int = 0

    def cost(self, work: Work, n: int) -> Cost:
        cols, x = work.buffers[self.x].cols, work.row_bytes(self.x)
        flops, moved = NORM_FLOPS[self.kind] * cols if self.weight else 0, x + work.row_bytes(self.out, cols)
        if self.delta:
            flops, moved = flops + cols, moved + work.row_bytes(self.delta) + x
        if self.bias:
            flops += cols
        flops += work.rounding_flops(self.out)
        return Cost(n * flops, work.vector_bytes(self.weight, self.bias), n * moved)

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        return rounded_row(buffer(self.out))


@dataclass(frozen=True, slots=True)
class Add(Op):
    """x += scale * delta, or scale * act(delta): a branch joins the residual stream."""

    x: Change
    delta: Read
    scale: float
    act: PlainActivation | None = None

    def cost(self, work: Work, n: int) -> Cost:
        moved = 2 * work.row_bytes(self.x) + work.row_bytes(self.delta)
        flops = 2 + (EXP_FLOPS if self.act else 0)
        return Cost(flops * n * work.buffers[self.x].cols, activation_bytes=n * moved)


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """x = scale * x, then cap * tanh(x / cap) unless cap is 0; in place (Gemma 2, arXiv 2408.00118, section 2).

    `maxima` as in Linear.
    """

    x: Change
    scale: float
    cap: float = 0.0
    maxima: Write | None = None

    def cost(self, work: Work, n: int) -> Cost:
        flops = (1 + EXP_FLOPS if self.cap else 1) * work.buffers[self.x].cols
        return Cost(
            n * flops, activation_bytes=n * (2 * work.row_bytes(self.x) + work.rows_bytes(self.maxima))
        )


@dataclass(frozen=True, slots=True)
class Quantize(Op):
    """out = round(x / scale) with scale = max|x| / 127 for each row. A group's scale is the row's, halved as often as
    its own maximum allows, up to GROUP_BITS times; rotated groups are rotated before that.

    `top` [T, 1] gets max|x|, and `tops` has that of every rank's columns of the row, which then counts in place of x's.

    The input of a quantized linear (dynamic, per token). Norm, GatedAct and Attend round their float32 rows so when
    their out is i8. Ties round to even; zeros have scale 0.
    """

    x: Read
    out: Write
    top: Write | None = None
    tops: Read | None = None

    def cost(self, work: Work, n: int) -> Cost:
        n *= work.buffers[self.out].per
        moved = work.rows_bytes(self.x, self.out, self.top, self.tops)
        return Cost(n * work.rounding_flops(self.out), activation_bytes=n * moved)


@dataclass(frozen=True, slots=True)
class GatedAct(Op):
    """out = act(gate) * up for gate_up = [gate | up], each of out's width."""

    gate_up: Read
    out: Write
    act: Activation

    def cost(self, work: Work, n: int) -> Cost:
        n, flops = n * work.buffers[self.out].per, (EXP_FLOPS + 1) * work.buffers[self.out].cols
        flops += work.rounding_flops(self.out)
        return Cost(n * flops, activation_bytes=n * work.rows_bytes(self.gate_up, self.out))

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        return rounded_row(buffer(self.out))


@dataclass(frozen=True, slots=True)
class Activate(Op):
    """out = act(x), rounded to out's dtype; out may be x."""

    x: Read
    out: Write
    act: PlainActivation

    def cost(self, work: Work, n: int) -> Cost:
        flops = EXP_FLOPS * work.buffers[self.out].cols + work.rounding_flops(self.out)
        return Cost(n * flops, activation_bytes=n * work.rows_bytes(self.x, self.out))

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        return rounded_row(buffer(self.out))


@dataclass(frozen=True, slots=True)
class PoolRows(Op):
    """out[n] = the mean of x over the tokens of a row of the step, added in rising order, or x of its first token.

    It is the row that has the token rows[n]; see GatherRows. The row has its whole text in the step.
    """

    x: Read
    out: Write
    kind: PoolKind

    def cost(self, work: Work, n: int) -> Cost:
        tokens = sum(row.query_len for row in work.rows) if self.kind == "mean" else n
        return Cost(
            tokens * work.buffers[self.x].cols,
            activation_bytes=tokens * work.row_bytes(self.x) + n * (work.row_bytes(self.out) + ID_BYTES),
        )


@dataclass(frozen=True, slots=True)
class GatherRows(Op):
    """out[n] = x[rows[n]] (+ delta[rows[n]]): from tokens to the rows whose logits are wanted."""

    x: Read
    delta: Read | None
    out: Write

    def cost(self, work: Work, n: int) -> Cost:
        flops = work.buffers[self.x].cols if self.delta else 0
        return Cost(
            n * flops, activation_bytes=n * (work.rows_bytes(self.x, self.out, self.delta) + ID_BYTES)
        )


def rounded_row(out: Buffer) -> tuple[Scratch, ...]:
    """Rows of an i8 buffer are put together in float32 and rounded when they are whole."""
    return (RowScratch(out.cols),) if out.dtype == "i8" else ()
