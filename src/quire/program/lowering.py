"""What lowering collects: parameters, buffers and ops, and the linears and norms that every layer is made of."""

from __future__ import annotations

from dataclasses import replace

from quire.program.formats import DType, Groups, NumberFormats
from quire.program.op import Op, writes
from quire.program.ops.linear import Linear
from quire.program.ops.rows import Norm, Quantize
from quire.program.tensors import Buffer, Param, Part
from quire.spec import ModelSpec, Rope
from quire.spec import Norm as NormSpec


class Lowering:
    """Collects params, buffers and ops while the layers of a spec are walked once."""

    def __init__(self, spec: ModelSpec, formats: NumberFormats) -> None:
        self.spec, self.formats = spec, formats
        self.params: dict[str, Param] = {}
        self.buffers: dict[str, Buffer] = {}
        self.body: list[Op] = []
        self.ropes: list[Rope] = []
        self.kv_numbers: dict[int, int] = {}  # layer of the model -> its place in Program.kv_layers

    def norm(self, which: str | None, index: int, x: str, delta: str | None, out: str) -> None:
        """x += delta, then out = norm(x), or x itself without a norm. `which` is a field of WeightNames."""
        norm, weight, bias = self.spec.norm, None, None
        if which:
            name = getattr(self.spec.names, which).format(i=index)
            weight, bias = self.norm_weights(f"layers.{index}.{which}", name, norm)
        self.body.append(Norm(x, delta, weight, norm.eps, out, norm.kind, bias))

    def norm_weights(self, at: str, name: str, norm: NormSpec) -> tuple[str, str | None]:
        dim = self.spec.dim
        weight = self.vector(at, (Part(f"{name}.weight", dim, plus=norm.plus),))
        return weight, self.vector(f"{at}.bias", (Part(f"{name}.bias", dim),)) if norm.bias else None

    def linear(
        self, name: str, x: str, out: str, sources: tuple[str, ...], rows: tuple[int, ...], *,
        axes: tuple[str, ...], bias: bool, col_axis: str = "", fused: str = "",
    ) -> None:  # fmt: skip
        """out = x @ weightᵀ, the weight stacked from the sources' rows, or from `fused`, which holds them all.

        Where the number formats have one for `name`.0, `name`.1, … each source is in its own, and neighbours of one
        format are stacked.
        """
        cols, total, first = self.buffers[x].cols, sum(rows), 0
        weights: list[Part] = []
        biases: list[Part] = []
        for source, n, axis in zip(sources, rows, axes, strict=True):
            at = first if fused else 0
            weights.append(
                Part(f"{fused or source}.weight", n, cols, axis, col_axis, at, (total, cols) if fused else ())
            )
            biases.append(Part(f"{fused or source}.bias", n, 0, axis, "", at, (total,) if fused else ()))
            first += n
        first = 0
        for at, stop in self.runs(name, len(weights)):
            part = name if stop - at == len(weights) else f"{name}.{at}"
            weight = self.weight(part, tuple(weights[at:stop]))
            taken = self.quantized(self.body, x, weight)
            bias_name = self.vector(f"{part}.bias", tuple(biases[at:stop])) if bias else None
            self.body.append(Linear(taken, weight, bias_name, out, first))
            first += sum(rows[at:stop])

    def runs(self, name: str, count: int) -> list[tuple[int, int]]:
        """Ranges of a linear's sources that are one weight: all of them unless each has a format of its own."""
        own = [self.formats.params.get(f"{name}.{at}") for at in range(count)]
        if None in own:
            return [(0, count)]
        starts = [at for at in range(count) if at == 0 or own[at] != own[at - 1]]
        return list(zip(starts, [*starts[1:], count], strict=True))

    def vector(self, name: str, parts: tuple[Part, ...], experts: int = 0) -> str:
        self.params[name] = Param(name, "vector", parts, "f32", experts=experts)
        return name

    def weight(self, name: str, parts: tuple[Part, ...], experts: int = 0) -> str:
        """Declare a linear weight in the format that was chosen for it."""
        form = self.formats.of(name).fitted(parts[0].cols)
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
        if groups is None:
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
        for part in ("cols", "dtype", "group", "per"):
            if getattr(wanted, part) != getattr(first, part):
                name += f"_{getattr(wanted, part)}"
        self.buffers.setdefault(name, replace(wanted, name=name))
        return name

    def rope(self, rope: Rope) -> int:
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)
