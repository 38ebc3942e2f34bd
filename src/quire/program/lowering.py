"""What lowering collects: parameters, buffers and ops, and the linears and norms that every layer is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quire import _native
from quire.program.formats import DType, Groups, NumberFormats
from quire.program.op import Op, writes
from quire.program.ops.collectives import AllGather, AllReduce
from quire.program.ops.linear import Expand, HeadLinear, Linear, Shrink, ShrinkIds
from quire.program.ops.rows import Norm, Quantize
from quire.program.ranks import RankPlan, Share
from quire.program.tensors import Adapted, AdaptedPart, Buffer, ExpertLayer, Owned, Param, Part
from quire.records import dataclass
from quire.spec import ModelSpec, NormSpec, Rope
from quire.types import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """What adapters may change: linears of attention, of dense feed-forwards and routers up to `rank`, 0 for none.

    `embedding`, `head`, `experts`: these too. `whole`: embedding and head may be others.
    """

    rank: int = 0
    embedding: bool = False
    head: bool = False
    experts: bool = False
    whole: bool = False


class Lowering:
    """Collects params, buffers and ops while the layers of a spec are walked once.

    `axes` are the rank's shares of the axes that parts name, those of a layer while it is lowered.
    """

    def __init__(
        self, spec: ModelSpec, formats: NumberFormats, plan: RankPlan, lora: LoraRoom | None = None
    ) -> None:
        self.spec, self.formats, self.plan = spec, formats, plan
        self.lora = lora or LoraRoom()
        self.adapted, self.owned = dict[str, Adapted](), dict[str, Owned]()
        self.layers = plan.layers(len(spec.layers))
        self.axes: dict[str, Share] = {}
        self.params: dict[str, Param] = {}
        self.expert_layers: list[ExpertLayer] = []
        self.borrowed: set[str] = set()  # names of those that another program's executor holds
        self.buffers: dict[str, Buffer] = {}
        self.body: list[Op] = []
        self.ropes: list[Rope] = []
        # layer of the model -> its place in Program.kv_layers, and that of its recent tokens
        self.kv_numbers: dict[int, int] = {}
        self.recent_numbers: dict[int, int] = {}

    def norm(self, which: str | None, index: int, x: str, delta: str | None, out: str) -> None:
        """x += delta, then out = norm(x), or x itself without a norm. `which` is a field of WeightNames."""
        norm, weight, bias = self.spec.norm, None, None
        if which:
            name = getattr(self.spec.names, which).format(i=index)
            weight, bias = self.norm_weights(f"layers.{index}.{which}", name, norm)
        self.body.append(Norm(x, delta, weight, norm.eps, out, norm.kind, bias))

    def norm_weights(self, at: str, name: str, norm: NormSpec, dim: int = 0) -> tuple[str, str | None]:
        dim = dim or self.spec.dim
        weight = self.vector(at, (Part(f"{name}.weight", dim, added=norm.added),))
        return weight, self.vector(f"{at}.bias", (Part(f"{name}.bias", dim),)) if norm.bias else None

    def linear(
        self, name: str, x: str, out: str, sources: tuple[str, ...], rows: tuple[int, ...], *,
        axes: tuple[str, ...], bias: bool, col_axis: str = "", fused: str = "", starts: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """out = x @ weightᵀ, the weight stacked from the sources' rows, or from `fused`, which holds them all.

        `starts`: where the rows of each begin in `fused`; without them they are in order.

        Where the number formats have one for `name`.0, `name`.1, … each source is in its own, and neighbours of one
        format are stacked.
        """
        cols, total, first = self.buffers[x].cols, sum(rows), 0
        if self.plan.fast and col_axis:  # x has this rank's share of them
            cols = cols * self.axes[col_axis].total // self.axes[col_axis].count
        weights: list[Part] = []
        biases: list[Part] = []
        mine: list[Share] = []  # rows of each source
        for number, (source, n, axis) in enumerate(zip(sources, rows, axes, strict=True)):
            at = (starts[number] if starts else first) if fused else 0
            weights.append(
                Part(f"{fused or source}.weight", n, cols, axis, col_axis, at, (total, cols) if fused else ())
            )
            biases.append(Part(f"{fused or source}.bias", n, 0, axis, "", at, (total,) if fused else ()))
            first += n
            held = _range(self.axes.get(axis), n) or (0, n)
            mine.append(Share(*held, n))
        parts = [adapted_rows(source, share) for source, share in zip(sources, mine, strict=True)]
        if fused:
            begins = starts or tuple(sum(rows[:at]) for at in range(len(rows)))
            pieces = tuple((b + part.start, b + part.stop) for b, part in zip(begins, mine, strict=True))
            parts = [AdaptedPart(fused, sum(part.count for part in mine), pieces)]
        adapted, shrunk = self.shrink(name, x, tuple(parts))
        first = 0
        for at, stop in self.runs(name, len(weights)):
            part = name if stop - at == len(weights) else f"{name}.{at}"
            weight = self.weight(part, tuple(weights[at:stop]))
            taken = self.quantized(self.body, x, weight)
            bias_name = self.vector(f"{part}.bias", tuple(biases[at:stop])) if bias else None
            self.body.append(Linear(taken, weight, bias_name, out, first, adapted=adapted, shrunk=shrunk))
            first += self.params[weight].rows

    def shrink(
        self, name: str, x: str, parts: tuple[AdaptedPart, ...], ops: list[Op] | None = None
    ) -> tuple[str | None, str | None]:
        """Append the first half of what adapters add to a linear over `x`; returns its name and buffer, if any."""
        if not self.lora.rank:
            return None, None
        out = self.shrunk(Adapted(name, self.buffers[x].cols, self.lora.rank, parts), x)
        (self.body if ops is None else ops).append(Shrink(x, name, out))
        return name, out

    def shrunk(self, adapted: Adapted, like: str = "") -> str:
        """Declare a linear that adapters may change, and the buffer between its halves, for the rows of `like`."""
        self.adapted[adapted.name] = adapted
        cols = len(adapted.parts) * rank_lanes(adapted.rank)
        if like and self.buffers[like].rows == "logits":
            return self.buffer("shrunk_head", cols, "f32", logits=True)
        return self.buffer("shrunk", cols, "f32")

    def adapt_embedding(self, out: str, module: str) -> None:
        """Append what adapters add to embeddings in `out`."""
        if self.lora.embedding:
            part = AdaptedPart(module, self.spec.dim, turned=True)
            shrunk = self.shrunk(Adapted("embed", self.spec.vocab, self.lora.rank, (part,)))
            self.body.append(ShrinkIds("embed", shrunk))
            self.body.append(Expand(out, "embed", shrunk))

    def own(self, name: str, module: str, param: str) -> str | None:
        """Declare that an adapter may have this parameter of its own; returns its name, if there is room."""
        if not self.lora.whole:
            return None
        groups = self.params[param].groups
        if groups is not None and groups.offsets != "none":
            raise UnsupportedModelError(
                f"lora_target_modules: modules_to_save is not supported with {param} in groups with offsets"
            )
        self.owned[name] = Owned(name, module, self.params[param])
        return name

    def head_linear(
        self, name: str, x: str, out: str, parts: tuple[AdaptedPart, ...], shared: Literal["a", "b"]
    ) -> None:
        """Append a linear by head of the parameter `name`; its parts share a matrix of an adapter."""
        adapted = shrunk = None
        if self.lora.rank:
            adapted, cols = name, self.params[name].cols
            shrunk = self.shrunk(Adapted(name, cols, self.lora.rank, parts, shared))
            self.body.append(Shrink(x, name, shrunk, apart=True))
        self.body.append(HeadLinear(x, name, out, adapted, shrunk))

    def branch(
        self, name: str, x: str, out: str, source: str, *, axis: str, cols: int, unit: int, bias: bool
    ) -> None:
        """The last linear of a branch, whose inputs, `cols` over all ranks, are split by `axis`, in whole `unit`s.

        Fills this rank's columns of the branch, or all of them when partial sums are added.
        """
        x, dim = self.rounded(x, name), self.spec.dim
        if not self.plan.fast:
            x = self.gathered_input(x, name, cols, unit)
            self.linear(name, x, out, (source,), (dim,), axes=("hidden",), bias=bias, col_axis=axis)
            return
        sums = self.buffer("partial_sums", dim, "f32")
        bias = bias and self.plan.tensor_parallel_rank == 0
        self.linear(name, x, sums, (source,), (dim,), axes=("hidden",), bias=bias, col_axis=axis)
        self.body.append(AllReduce(sums, out, self.plan.tensor_parallel_size, "sum"))

    def columns(self, axis: str, field: str, total: int) -> Share:
        """Set this rank's share of an axis of columns; `field` names their number in messages."""
        self.axes[axis] = share = self.plan.columns(field, total, _native.PANEL_ROWS)
        return share

    def mine(self, part: Part) -> Part:
        """What this rank holds of a whole part."""
        rows, cols = self.axes.get(part.row_axis), self.axes.get(part.col_axis) if self.plan.fast else None
        if (rows is None or rows.whole) and (cols is None or cols.whole):
            return part
        return part.cut(_range(rows, part.rows), _range(cols, part.cols))

    def gathered(self, x: str, name: str, cols: int, ops: list[Op] | None = None) -> str:
        """Whole rows, of `cols` columns, of a buffer that may hold this rank's columns only."""
        source = self.buffers[x]
        if source.cols == cols:
            return x
        out = self.declare(replace(source, name=name, cols=cols))
        (self.body if ops is None else ops).append(AllGather(x, out, self.plan.tensor_parallel_size))
        return out

    def gathered_input(self, x: str, weight: str, cols: int, unit: int) -> str:
        """Whole rows of a buffer that has this rank's columns, for the linear of that weight.

        What becomes int8 is rounded before it travels, by the greatest magnitude in all ranks' columns, unless their
        groups would be cut, or adapters take it as it is.
        """
        source, name, form = self.buffers[x], x.removesuffix("_part"), self.formats.of(weight).fitted(cols)
        if source.cols == cols or form.groups is None or unit % form.groups.size or self.lora.rank:
            return self.gathered(x, name, cols)
        top = self.declare(replace(source, name="top", cols=1))
        mine = self.bytes(f"{x}_bytes", source, form.groups)
        self.body.append(Quantize(x, mine, top))
        tops = self.gathered(top, "tops", self.plan.tensor_parallel_size)
        self.body.append(Quantize(x, mine, tops=tops))
        return self.gathered(mine, f"{name}_bytes", cols)

    def part(
        self, name: str, share: Share, dtype: DType = "f32", *, logits: bool = False, per: int = 1
    ) -> str:
        """Declare a buffer for this rank's columns of `name`, or for all of them."""
        name = name if share.whole else f"{name}_part"
        return self.buffer(name, share.count, dtype, logits=logits, per=per)

    def runs(self, name: str, count: int) -> list[tuple[int, int]]:
        """Ranges of a linear's sources that are one weight: all of them unless each has a format of its own."""
        own = [self.formats.params.get(f"{name}.{at}") for at in range(count)]
        if None in own:
            return [(0, count)]
        starts = [at for at in range(count) if at == 0 or own[at] != own[at - 1]]
        return list(zip(starts, [*starts[1:], count], strict=True))

    def vector(self, name: str, parts: tuple[Part, ...], experts: int = 0) -> str:
        self.params[name] = Param(name, "vector", tuple(map(self.mine, parts)), "f32", experts=experts)
        return name

    def table(self, name: str, part: Part) -> str:
        """Declare a table of embeddings."""
        self.params[name] = Param(name, "table", (self.mine(part),), self.formats.weights)
        return name

    def weight(self, name: str, parts: tuple[Part, ...], experts: int = 0) -> str:
        """Declare a linear weight in the format that was chosen for it."""
        parts = tuple(map(self.mine, parts))
        form = self.formats.of(name).fitted(parts[0].cols)
        if self.plan.fast and form.quantized:
            raise UnsupportedModelError(f'reduce: "fast" needs float weights, but {name} is {form}')
        self.params[name] = Param(name, "linear", parts, form.dtype, form.groups, experts)
        return name

    def input(self, name: str, cols: int, weight: str, *, logits: bool = False, per: int = 1) -> str:
        """The buffer that an op fills for the linear of that weight."""
        return self.buffer(name, cols, self.formats.of(weight).inputs, logits=logits, per=per)

    def rounded(self, x: str, weight: str) -> str:
        """A float32 buffer as the linear of that weight takes it, before quantizing."""
        dtype = self.formats.of(weight).inputs
        if dtype == self.buffers[x].dtype:
            return x
        name = x.removesuffix(f"_{self.buffers[x].dtype}")
        out = self.buffer(name, self.buffers[x].cols, dtype)
        self.once(self.body, Norm(x, None, None, self.spec.norm.eps, out))
        return out

    def quantized(self, ops: list[Op], x: str, weight: str) -> str:
        """What a linear takes for input: x itself, or its bytes, rounded here, when the weight is quantized."""
        groups = self.params[weight].groups
        if groups is None or self.buffers[x].dtype == "i8":
            return x
        x_bytes = self.bytes(f"{x}_bytes", self.buffers[x], groups)
        self.once(ops, Quantize(x, x_bytes))
        return x_bytes

    def once(self, ops: list[Op], op: Quantize | Norm) -> None:
        """Append an op that fills `out` from x, unless what it would do is still there from before."""
        for earlier in reversed(ops):
            if earlier == op:
                return
            if {op.x, op.out} & set(writes(earlier)):
                break
        ops.append(op)

    def bytes(self, name: str, source: Buffer, groups: Groups) -> str:
        """A buffer for the rows of another, rounded to int8."""
        return self.declare(replace(source, name=name, dtype="i8", group=groups.size, rotated=groups.rotated))

    def buffer(self, name: str, cols: int, dtype: DType, *, logits: bool = False, per: int = 1) -> str:
        """Declare a buffer of floats."""
        return self.declare(Buffer(name, cols, dtype, "logits" if logits else "tokens", per=per))

    def declare(self, wanted: Buffer) -> str:
        """Declare a buffer once; layers of one shape share it, another shape or format gets a buffer of its own."""
        first, name = self.buffers.get(wanted.name, wanted), wanted.name
        if wanted.rotated != first.rotated:
            name += "_rotated" if wanted.rotated else "_plain"
        for part in ("cols", "dtype", "group", "per", "replicas"):
            if getattr(wanted, part) != getattr(first, part):
                name += f"_{getattr(wanted, part)}"
        self.buffers.setdefault(name, replace(wanted, name=name))
        return name

    def rope(self, rope: Rope) -> int:
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)


def adapted_rows(module: str, share: Share) -> AdaptedPart:
    """Those rows of a module that a rank has, as a part of a linear."""
    return AdaptedPart(module, share.count, () if share.whole else ((share.start, share.stop),))


def rank_lanes(rank: int) -> int:
    """A rank in whole vectors of sixteen, as kernels take it."""
    return -(-rank // _native.RANK_LANES) * _native.RANK_LANES


def _range(share: Share | None, count: int) -> tuple[int, int] | None:
    """The share of an axis as a range of `count` rows or columns, which are equally many for each unit."""
    if share is None:
        return None
    return count * share.start // share.total, count * share.stop // share.total
