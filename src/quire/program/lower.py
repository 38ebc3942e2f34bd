"""Lowering: ModelSpec + number formats -> Program."""

from __future__ import annotations

from dataclasses import replace

from quire.core.cache_groups import plan_groups
from quire.program.formats import DType, Groups, NumberFormats
from quire.program.fuse import fuse
from quire.program.lower_experts import lower_experts
from quire.program.lower_latent import latent_input, lower_latent
from quire.program.op import Op, writes
from quire.program.ops.attention import Attend, HeadShape, RopeWrite
from quire.program.ops.linear import MAXIMA_COLS, Linear
from quire.program.ops.rows import Add, Embed, GatedAct, GatherRows, Norm, Quantize, Scale
from quire.program.program import Output, Program
from quire.program.tensors import Buffer, KVLayer, Param, Part
from quire.spec import MLP, Attention, LatentAttention, Layer, ModelSpec, MoE, Rope
from quire.spec import Norm as NormSpec
from quire.types import CacheGroup, UnsupportedModelError

MAXIMA = "logit_maxima"


def lower(spec: ModelSpec, formats: NumberFormats, *, fused: bool = True) -> Program:
    """Lower a spec to a flat op list. Pure: the same arguments give the same program.

    `fused`: with the pass of program/fuse, which changes no number.

    Raises UnsupportedModelError for formats that a layer's cache cannot have.
    """
    if formats.kv == "i8" and any(isinstance(layer.attention, LatentAttention) for layer in spec.layers):
        raise UnsupportedModelError(
            "kv_cache_dtype = int8 is not supported with latent attention (MLA): its cache is one latent a token "
            "already; use bfloat16 or float32"
        )
    program = Lowering(spec, formats).program()
    return fuse(program) if fused else program


class Lowering:
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
        if spec.embed_scale != 1.0:
            self.body.append(Scale(residual, spec.embed_scale))
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
            outputs=(Output("logits", "logits"), Output("maxima", MAXIMA)),
        )

    def layer(self, index: int, layer: Layer, residual: str, delta: str | None) -> str | None:
        """Append one block's ops; returns the buffer still to be added to the residual stream."""
        dim, names = self.spec.dim, ("attn_norm", "mlp_norm") if layer.pre_norm else (None, None)
        hidden = self.mixer_input(index, layer)
        self.norm(names[0], index, residual, delta, hidden)
        beside = self.mlp_input(index, layer)
        if layer.parallel and beside != hidden:  # the same values, rounded for weights of another format
            self.norm(names[0], index, residual, None, beside)
        if isinstance(layer.attention, LatentAttention):
            branch = lower_latent(self, index, layer.attention, hidden)
        else:
            branch = self.attention(index, layer.attention, hidden)
        if layer.post_norm:
            self.norm("attn_post_norm", index, branch, None, branch)
        delta = self.join(residual, branch)
        if not layer.parallel:
            self.norm(names[1], index, residual, delta, beside)
        elif delta is not None:
            self.body.append(Add(residual, delta, 1.0))
        if isinstance(layer.mlp, MoE):
            branch = lower_experts(self, index, layer.mlp, beside)
        else:
            branch = self.mlp(index, layer.mlp, beside, self.buffer("delta", dim, "f32"))
        if layer.post_norm:
            self.norm("mlp_post_norm", index, branch, None, branch)
        return self.join(residual, branch)

    def mixer_input(self, index: int, layer: Layer) -> str:
        """The buffer that the norm before a mixer fills."""
        if isinstance(layer.attention, LatentAttention):
            return latent_input(self, index, layer.attention)
        return self.input("hidden", self.spec.dim, f"layers.{index}.qkv")

    def mlp_input(self, index: int, layer: Layer) -> str:
        """The buffer that the norm before a feed-forward fills; a router takes float32."""
        if isinstance(layer.mlp, MoE):
            return self.buffer("hidden", self.spec.dim, "f32")
        return self.input("hidden", self.spec.dim, f"layers.{index}.gate_up")

    def join(self, residual: str, branch: str) -> str | None:
        """What the next norm has to add to the residual stream; a scaled branch is added at once."""
        if self.spec.residual_scale == 1.0:
            return branch
        self.body.append(Add(residual, branch, self.spec.residual_scale))
        return None

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

    def attention(self, index: int, att: Attention, hidden: str) -> str:
        """The token mixer of a layer; returns the buffer of its branch."""
        names, at = self.spec.names, f"layers.{index}"
        shape = HeadShape(att.heads, att.kv_heads, att.head_dim)
        qkv = self.buffer("qkv", shape.q_cols + 2 * shape.kv_cols, "f32")
        mixed = self.input("mixed", shape.q_cols, f"{at}.o")
        out = self.buffer("delta", self.spec.dim, "f32")
        sources = tuple(name.format(i=index) for name in (names.q, names.k, names.v))
        rows, axes = (shape.q_cols, shape.kv_cols, shape.kv_cols), ("heads", "kv_heads", "kv_heads")
        self.linear(
            f"{at}.qkv", hidden, qkv, sources, rows, axes=axes, bias=att.qkv_bias, fused=names.qkv.format(i=index)
        )  # fmt: skip
        self.body.append(self.rope_write(index, att, shape, qkv))
        sinks = None
        if att.sinks:
            sinks = self.vector(
                f"{at}.sinks", (Part(names.sinks.format(i=index), att.heads, row_axis="heads"),)
            )
        self.body.append(Attend(qkv, mixed, shape, index, att.scale, att.window, att.softcap, sinks))
        self.linear(
            f"{at}.o", mixed, out, (names.o.format(i=index),), (self.spec.dim,), axes=("",),
            bias=att.out_bias, col_axis="heads",
        )  # fmt: skip
        return out

    def rope_write(self, index: int, att: Attention, shape: HeadShape, qkv: str) -> RopeWrite:
        """Norms of q and k, rotation and cache write of a layer."""
        names, rope = self.spec.names, None if att.rope is None else self.rope(att.rope)
        if att.qk_norm is None:
            return RopeWrite(qkv, shape, index, rope, None, None, self.spec.norm.eps)
        norm, weights = att.qk_norm.norm, []
        for letter, name, heads in (("q", names.q_norm, att.heads), ("k", names.k_norm, att.kv_heads)):
            source, axis = name.format(i=index, h="{h}"), "heads" if letter == "q" else "kv_heads"
            if att.qk_norm.whole:
                parts = [Part(f"{source}.weight", heads * att.head_dim, row_axis=axis)]
            elif att.qk_norm.shared:
                parts = [Part(f"{source}.weight", att.head_dim)]
            elif "{h}" in source:
                tensors = (f"{source}.weight".format(h=h) for h in range(heads))
                parts = [Part(tensor, att.head_dim, row_axis=axis) for tensor in tensors]
            else:
                stored = (heads, att.head_dim)
                parts = [Part(f"{source}.weight", heads * att.head_dim, row_axis=axis, stored=stored)]
            parts = [replace(part, plus=norm.plus) for part in parts]
            weights.append(self.vector(f"layers.{index}.{letter}_norm", tuple(parts)))
        return RopeWrite(
            qkv, shape, index, rope, weights[0], weights[1], norm.eps, norm.kind, att.qk_norm.whole
        )  # fmt: skip

    def mlp(self, index: int, mlp: MLP, hidden: str, out: str, *, prefix: str = "") -> str:
        """A gated feed-forward; fills and returns `out`. `prefix`: of its names in WeightNames and params."""
        names, at = self.spec.names, f"layers.{index}.{prefix}"
        gate_up = self.buffer("gate_up", 2 * mlp.width, "f32")
        gated = self.input("gated", mlp.width, f"{at}down")
        gate, up, down = (
            getattr(names, f"{prefix}{name}").format(i=index) for name in ("gate", "up", "down")
        )
        fused = "" if prefix else names.gate_up.format(i=index)
        self.linear(
            f"{at}gate_up", hidden, gate_up, (gate, up), (mlp.width, mlp.width), axes=("mlp", "mlp"),
            bias=mlp.bias, fused=fused,
        )  # fmt: skip
        self.body.append(GatedAct(gate_up, gated, mlp.act))
        self.linear(
            f"{at}down", gated, out, (down,), (self.spec.dim,), axes=("",), bias=mlp.bias, col_axis="mlp"
        )
        return out

    def head(self, residual: str, delta: str | None, weight: str) -> tuple[Op, ...]:
        spec = self.spec
        last = self.buffer("last", spec.dim, "f32", logits=True)
        last_hidden = self.input("last_hidden", spec.dim, weight, logits=True)
        logits = self.buffer("logits", spec.vocab, "f32", logits=True)
        norm, bias = self.norm_weights("final_norm", spec.names.final_norm, spec.norm)
        ops: list[Op] = [
            GatherRows(residual, delta, last),
            Norm(last, None, norm, spec.norm.eps, last_hidden, spec.norm.kind, bias),
        ]
        last_hidden = self.quantized(ops, last_hidden, weight)
        maxima = self.buffer(MAXIMA, -(-spec.vocab // MAXIMA_COLS), "f32", logits=True)
        if spec.logits_scale != 1.0 or spec.logits_cap:
            ops.append(Linear(last_hidden, weight, None, logits))
            ops.append(Scale(logits, spec.logits_scale, spec.logits_cap, maxima))
        else:
            ops.append(Linear(last_hidden, weight, None, logits, maxima=maxima))
        return tuple(ops)

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
        form, source = self.params[weight].format, self.buffers[x]
        if not form.quantized:
            return x
        x_bytes = self.bytes(f"{x}_bytes", source, form.groups)
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

    def bytes(self, name: str, source: Buffer, groups: Groups | None) -> str:
        """A buffer for the rows of another, rounded to int8."""
        size, rotated = (groups.size, groups.rotated) if groups else (0, False)
        return self.declare(replace(source, name=name, dtype="i8", group=size, rotated=rotated))

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

    def kv_layers(self, groups: tuple[CacheGroup, ...]) -> tuple[KVLayer, ...]:
        place = {layer: (g, k) for g, group in enumerate(groups) for k, layer in enumerate(group.layers)}
        return tuple(
            KVLayer(i, 1, a.cached, a.window, *place[i], latent=True)
            if isinstance(a, LatentAttention)
            else KVLayer(i, a.kv_heads, a.head_dim, a.window, *place[i])
            for i, a in enumerate(layer.attention for layer in self.spec.layers)
        )
