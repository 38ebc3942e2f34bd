"""Lowering: ModelSpec + number formats -> Program."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.cache_groups import plan_groups
from quire.program.ops import (
    Attend,
    Buffer,
    DType,
    Embed,
    GatedAct,
    GatherRows,
    HeadShape,
    KVLayer,
    Linear,
    Norm,
    Op,
    Param,
    ParamKind,
    Part,
    Program,
    Quantize,
    RopeWrite,
)
from quire.spec import Layer, ModelSpec, Rope
from quire.types import CacheGroup


@dataclass(frozen=True, slots=True)
class NumberFormats:
    """Formats of a program: linear weights and their inputs, and the KV cache. Sums are always float32.

    `quantized` "i8" stores linear weights in eight bits and rounds their inputs to eight bits token by token;
    `head` false keeps the output head (and a tied embedding) in `weights`.
    """

    weights: DType = "bf16"
    kv: DType = "bf16"
    quantized: DType | None = None
    head: bool = True

    @property
    def linears(self) -> DType:
        """What the linears of the layers are stored in."""
        return self.quantized or self.weights

    @property
    def head_weights(self) -> DType:
        return self.linears if self.head else self.weights

    @staticmethod
    def inputs_of(weights: DType) -> DType:
        """What an op writes for a linear of this format: an i8 linear's input is quantized from float32."""
        return "f32" if weights == "i8" else weights


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
        head = self.param(
            "head", "linear", (Part(head_name, spec.vocab, spec.dim, "vocab"),), self.formats.head_weights
        )
        embed = head
        if not spec.tied:
            embed = self.param(
                "embed",
                "table",
                (Part(spec.names.embed, spec.vocab, spec.dim, "vocab"),),
                self.formats.weights,
            )
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
        inputs = self.formats.inputs_of(self.formats.linears)
        hidden = self.buffer("hidden", spec.dim, inputs)
        qkv = self.buffer("qkv", shape.q_cols + 2 * shape.kv_cols, "f32")
        mixed = self.buffer("mixed", shape.q_cols, inputs)
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
        self.body.append(Norm(residual, projected, norm, spec.norm_eps, hidden))
        gate_up = self.buffer("gate_up", 2 * mlp.width, "f32")
        gated = self.buffer("gated", mlp.width, inputs)
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
        head_weights = self.formats.head_weights
        last_hidden = self.buffer("last_hidden", spec.dim, self.formats.inputs_of(head_weights), logits=True)
        logits = self.buffer("logits", spec.vocab, "f32", logits=True)
        norm = self.vector("final_norm", (spec.names.final_norm,), (spec.dim,))
        ops: list[Op] = [
            GatherRows(residual, delta, last),
            Norm(last, None, norm, spec.norm_eps, last_hidden),
        ]
        if head_weights == "i8":
            ops.append(Quantize(last_hidden, self.buffer("last_bytes", spec.dim, "i8", logits=True)))
        ops.append(Linear("last_bytes" if head_weights == "i8" else last_hidden, weight, None, logits))
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
        weight = self.param(name, "linear", parts, self.formats.linears)
        if self.formats.linears == "i8":
            x_bytes = self.buffer(f"{x}_bytes", cols, "i8")
            self.body.append(Quantize(x, x_bytes))
            x = x_bytes
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

    def param(self, name: str, kind: ParamKind, parts: tuple[Part, ...], dtype: DType) -> str:
        self.params[name] = Param(name, kind, parts, dtype)
        return name

    def buffer(self, name: str, cols: int, dtype: DType, *, logits: bool = False) -> str:
        """Declare a buffer once; layers of one shape share it, another width gets a buffer of its own."""
        name = name if self.buffers.get(name, Buffer(name, cols, dtype)).cols == cols else f"{name}_{cols}"
        self.buffers.setdefault(name, Buffer(name, cols, dtype, "logits" if logits else "tokens"))
        return name

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
