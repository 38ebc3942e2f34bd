"""Lowering: ModelSpec + number formats -> Program."""

from __future__ import annotations

from dataclasses import replace

from quire.core.cache_groups import plan_groups
from quire.program.formats import DType, NumberFormats
from quire.program.ops import (
    Attend,
    Buffer,
    Embed,
    GatedAct,
    GatherRows,
    HeadShape,
    KVLayer,
    Linear,
    Norm,
    Op,
    Param,
    Part,
    Program,
    Quantize,
    RopeWrite,
)
from quire.spec import Layer, ModelSpec, Rope
from quire.types import CacheGroup


def lower(spec: ModelSpec, formats: NumberFormats) -> Program:
    """Lower a spec to a flat op list. Pure: the same arguments give the same program."""
    return _Lowering(spec, formats).program()


class _Lowering:
    """Collects params, buffers and ops while walking the layers of a spec once."""

    def __init__(self, spec: ModelSpec, formats: NumberFormats) -> None:
        self.spec, self.formats = spec, formats
        self.params: dict[str, Param] = {}
        self.buffers: dict[str, Buffer] = {}
        self.body: list[Op] = []
        self.ropes: list[Rope] = []

    def program(self) -> Program:
        spec = self.spec
        head_name = spec.names.embed if spec.tied else spec.names.head
        head = self.weight("head", (Part(head_name, spec.vocab, spec.dim, "vocab"),))
        embed = head
        if not spec.tied:
            embed = "embed"
            parts = (Part(spec.names.embed, spec.vocab, spec.dim, "vocab"),)
            self.params[embed] = Param(embed, "table", parts, self.formats.weights)
        residual = self.buffer("residual", spec.dim, "f32")
        self.body.append(Embed(embed, residual))
        delta: str | None = None
        for index, layer in enumerate(spec.layers):
            delta = self.layer(index, layer, residual, delta)
        head_ops = self.head(residual, delta, head)
        cache = plan_groups([layer.attention.window for layer in spec.layers])
        return Program(
            params=tuple(self.params.values()),
            buffers=tuple(self.buffers.values()),
            body=tuple(self.body),
            head=head_ops,
            ropes=tuple(self.ropes),
            kv_layers=self.kv_layers(cache.groups),
            cache_groups=cache.groups,
            layers_per_group=cache.layers_per_group,
            kv_dtype=self.formats.kv,
            vocab=spec.vocab,
        )

    def layer(self, index: int, layer: Layer, residual: str, delta: str | None) -> str:
        """Append one block's ops; returns the buffer still to be added to the residual stream."""
        spec, names, att, mlp = self.spec, self.spec.names, layer.attention, layer.mlp
        at = f"layers.{index}"
        shape = HeadShape(att.heads, att.kv_heads, att.head_dim)
        hidden = self.input("hidden", spec.dim, f"{at}.qkv")
        qkv = self.buffer("qkv", shape.q_cols + 2 * shape.kv_cols, "f32")
        mixed = self.input("mixed", shape.q_cols, f"{at}.o")
        projected = self.buffer("delta", spec.dim, "f32")
        norm = self.vector(f"{at}.attn_norm", (names.attn_norm.format(i=index),), (spec.dim,))
        self.body.append(Norm(residual, delta, norm, spec.norm_eps, hidden))
        sources = tuple(name.format(i=index) for name in (names.q, names.k, names.v))
        rows, axes = (shape.q_cols, shape.kv_cols, shape.kv_cols), ("heads", "kv_heads", "kv_heads")
        self.linear(f"{at}.qkv", hidden, qkv, sources, rows, axes=axes, bias=att.qkv_bias)
        norms: list[str | None] = [None, None]
        if att.qk_norm:
            for k, name in enumerate((names.q_norm, names.k_norm)):
                norms[k] = self.vector(f"{at}.{'qk'[k]}_norm", (name.format(i=index),), (att.head_dim,))
        rope = self.rope(att.rope)
        self.body.append(RopeWrite(qkv, shape, index, rope, norms[0], norms[1], spec.norm_eps))
        sinks = None
        if att.sinks:
            sinks = self.vector(f"{at}.sinks", (names.sinks.format(i=index),), (att.heads,), ("heads",))
        self.body.append(Attend(qkv, mixed, shape, index, att.scale, att.window, att.softcap, sinks))
        self.linear(
            f"{at}.o", mixed, projected, (names.o.format(i=index),), (spec.dim,), axes=("",),
            bias=att.out_bias, col_axis="heads",
        )  # fmt: skip
        norm = self.vector(f"{at}.mlp_norm", (names.mlp_norm.format(i=index),), (spec.dim,))
        hidden = self.input("hidden", spec.dim, f"{at}.gate_up")
        self.body.append(Norm(residual, projected, norm, spec.norm_eps, hidden))
        gate_up = self.buffer("gate_up", 2 * mlp.width, "f32")
        gated = self.input("gated", mlp.width, f"{at}.down")
        sources = (names.gate.format(i=index), names.up.format(i=index))
        self.linear(
            f"{at}.gate_up",
            hidden,
            gate_up,
            sources,
            (mlp.width, mlp.width),
            axes=("mlp", "mlp"),
            bias=mlp.bias,
        )
        self.body.append(GatedAct(gate_up, gated, mlp.act))
        self.linear(
            f"{at}.down", gated, projected, (names.down.format(i=index),), (spec.dim,), axes=("",),
            bias=mlp.bias, col_axis="mlp",
        )  # fmt: skip
        return projected

    def head(self, residual: str, delta: str | None, weight: str) -> tuple[Op, ...]:
        spec = self.spec
        last = self.buffer("last", spec.dim, "f32", logits=True)
        last_hidden = self.input("last_hidden", spec.dim, weight, logits=True)
        logits = self.buffer("logits", spec.vocab, "f32", logits=True)
        norm = self.vector("final_norm", (spec.names.final_norm,), (spec.dim,))
        ops: list[Op] = [
            GatherRows(residual, delta, last),
            Norm(last, None, norm, spec.norm_eps, last_hidden),
        ]
        last_hidden = self.quantized(ops, last_hidden, weight)
        ops.append(Linear(last_hidden, weight, None, logits))
        return tuple(ops)

    def linear(
        self, name: str, x: str, out: str, sources: tuple[str, ...], rows: tuple[int, ...], *,
        axes: tuple[str, ...], bias: bool, col_axis: str = "",
    ) -> None:  # fmt: skip
        cols = self.buffers[x].cols
        parts = tuple(
            Part(f"{source}.weight", n, cols, axis, col_axis)
            for source, n, axis in zip(sources, rows, axes, strict=True)
        )
        weight = self.weight(name, parts)
        x = self.quantized(self.body, x, weight)
        biases = tuple(f"{source}.bias" for source in sources)
        bias_name = self.vector(f"{name}.bias", biases, rows, axes) if bias else None
        self.body.append(Linear(x, weight, bias_name, out))

    def vector(
        self, name: str, tensors: tuple[str, ...], rows: tuple[int, ...], axes: tuple[str, ...] | None = None
    ) -> str:
        axes = axes or ("",) * len(rows)
        parts = tuple(Part(t, r, 0, a) for t, r, a in zip(tensors, rows, axes, strict=True))
        self.params[name] = Param(name, "vector", parts, "f32")
        return name

    def weight(self, name: str, parts: tuple[Part, ...]) -> str:
        """Declare a linear weight in the format that was chosen for it."""
        form = self.formats.of(name)
        self.params[name] = Param(name, "linear", parts, form.dtype, form.groups)
        return name

    def input(self, name: str, cols: int, weight: str, *, logits: bool = False) -> str:
        """The buffer that an op fills for the linear of that weight."""
        return self.buffer(name, cols, self.formats.of(weight).inputs, logits=logits)

    def quantized(self, ops: list[Op], x: str, weight: str) -> str:
        """What a linear takes for input: x itself, or its bytes, rounded here, when the weight is quantized."""
        form, source = self.formats.of(weight), self.buffers[x]
        if not form.quantized:
            return x
        group, logits = form.groups.size if form.groups else 0, source.rows == "logits"
        x_bytes = self.buffer(f"{x}_bytes", source.cols, "i8", logits=logits, group=group)
        ops.append(Quantize(x, x_bytes))
        return x_bytes

    def buffer(self, name: str, cols: int, dtype: DType, *, logits: bool = False, group: int = 0) -> str:
        """Declare a buffer once; layers of one shape share it, another shape or format gets a buffer of its own."""
        wanted = Buffer(name, cols, dtype, "logits" if logits else "tokens", group)
        first = self.buffers.get(name, wanted)
        for mine, its in ((cols, first.cols), (dtype, first.dtype), (group, first.group)):
            if mine != its:
                wanted = replace(wanted, name=f"{wanted.name}_{mine}")
        self.buffers.setdefault(wanted.name, wanted)
        return wanted.name

    def rope(self, rope: Rope) -> int:
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def kv_layers(self, groups: tuple[CacheGroup, ...]) -> tuple[KVLayer, ...]:
        place = {layer: (g, k) for g, group in enumerate(groups) for k, layer in enumerate(group.layers)}
        return tuple(
            KVLayer(i, a.kv_heads, a.head_dim, a.window, *place[i])
            for i, a in enumerate(layer.attention for layer in self.spec.layers)
        )
