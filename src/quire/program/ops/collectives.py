"""What ranks of one stage tell each other. Ranks run the same ops in the same order and meet at each of these.

A program of one rank has none. `wire_bytes` of their cost is the least that a rank must receive. Replicas that share
experts meet in the last two, with other tokens each; one that has none to compute comes without rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from quire.program.formats import DTYPE_BYTES
from quire.program.op import ExpertScratch, Op, Read, Scratch, Write
from quire.program.tensors import Buffer
from quire.program.work import Cost, Work
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """out = columns `first` … `first` + `cols` - 1 of every rank's x, side by side in the order of ranks.

    Ranks may have unequal numbers of columns; 0 `cols` takes all from `first` on. Rows of int8 have one scale on all
    ranks, see Quantize, and whole groups.
    """

    x: Read
    out: Write
    ranks: int
    first: int = 0
    cols: int = 0

    def cost(self, work: Work, n: int) -> Cost:
        x, out, own = work.buffers[self.x], work.row_bytes(self.out), work.row_bytes(self.x)
        if self.cols:
            own = self.cols * DTYPE_BYTES[x.dtype]
        n *= x.per
        return Cost(activation_bytes=n * (own + out), wire_bytes=n * (out - own))


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """out = every rank's x, joined in the order of ranks.

    "bits": bitwise or, where all ranks but one have zeros: exact, and any integer sum does it too. "sum": float32
    sums, whose bits depend on the number of ranks.
    """

    x: Read
    out: Write
    ranks: int
    how: Literal["bits", "sum"]

    def cost(self, work: Work, n: int) -> Cost:
        row = work.row_bytes(self.x)
        flops = self.ranks * work.buffers[self.x].cols
        return Cost(
            n * flops, activation_bytes=2 * n * row, wire_bytes=2 * n * row * (self.ranks - 1) // self.ranks
        )


@dataclass(frozen=True, slots=True)
class AllToAll(Op):
    """Rows of experts, whole in the rank that has the expert, become columns of all rows in each rank.

    x has a row for each pair of a token and an expert, sorted by expert; a rank has filled those of its own experts,
    which are an even share of the `experts` places (RankPlan.experts). out[r] = this rank's columns of row r, unsummed.
    """

    x: Read
    ids: Read
    out: Write
    ranks: int
    experts: int

    def cost(self, work: Work, n: int) -> Cost:
        row = work.row_bytes(self.out)
        n *= work.buffers[self.x].per
        moved = work.row_bytes(self.x) // self.ranks + row
        return Cost(activation_bytes=n * moved, wire_bytes=n * row * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True, slots=True)
class ShareTokens(Op):
    """out, out_ids = x, ids of all replicas, one replica after the other; places as in Route, of the pairs of all.

    `ranks` of these replicas share the experts, `tensor_ranks` of each.
    """

    x: Read
    ids: Read
    out: Write
    out_ids: Write
    places: Write
    ranks: int
    tensor_ranks: int
    experts: int
    shows: ClassVar[tuple[str, ...]] = ("x", "ids")

    def cost(self, work: Work, n: int) -> Cost:
        row, replicas = work.rows_bytes(self.x, self.ids), work.buffers[self.out].replicas
        return Cost(activation_bytes=n * (replicas + 2) * row, wire_bytes=n * (replicas - 1) * row)

    def scratch(self, buffer: Callable[[str], Buffer]) -> tuple[Scratch, ...]:
        out = buffer(self.out_ids)
        return (ExpertScratch(self.experts, out.cols * out.replicas),)


@dataclass(frozen=True, slots=True)
class ReturnRows(Op):
    """out[places[t, j]] = this rank's columns of x[shared_places[t', j]], of the rank that has the expert ids[t', j];
    t' is the token t of this replica among those of all. The way back from ShareTokens."""

    x: Read
    ids: Read
    shared_places: Read
    places: Read
    out: Write
    ranks: int
    tensor_ranks: int
    experts: int
    shows: ClassVar[tuple[str, ...]] = ("x",)

    def cost(self, work: Work, n: int) -> Cost:
        row = work.row_bytes(self.out)
        n *= work.buffers[self.out].per
        moved = work.row_bytes(self.x) // self.tensor_ranks + 2 * row
        return Cost(activation_bytes=n * moved, wire_bytes=n * row * (self.ranks - 1) // self.ranks)
