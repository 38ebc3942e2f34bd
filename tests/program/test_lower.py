"""Lowering: every name an op uses exists, shapes agree, and buffers are filled before they are read."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from helpers.specs import BF16, F32, I8, decoder_spec, moe_spec, programs, with_latents
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.op import Op, param_names, reads, writes
from quire.program.ops.attention import Attend, LatentAttend, LatentWrite, RopeWrite
from quire.program.ops.experts import Combine, Dispatch, Experts, Route
from quire.program.ops.linear import HeadLinear, Linear
from quire.program.ops.rows import Add, Embed, GatedAct, GatherRows, Norm, Quantize, Scale
from quire.program.program import Program
from quire.spec import MLP, ModelSpec, Rope, Router


def check_shapes(program: Program, op: Op) -> None:
    """Widths, number formats and param kinds of one op fit together."""

    def cols(name: str | None) -> int:
        return 0 if name is None else program.buffer(name).cols

    match op:
        case Embed():
            assert program.param(op.table).kind in {"table", "linear"}
            assert program.param(op.table).cols == cols(op.out)
        case Norm():
            assert cols(op.x) == cols(op.out)
            assert all(program.param(name).rows == cols(op.x) for name in (op.weight, op.bias) if name)
            assert op.delta is None or cols(op.delta) == cols(op.x)
            assert program.buffer(op.x).dtype == "f32"
        case Add():
            assert cols(op.x) == cols(op.delta)
            assert {program.buffer(name).dtype for name in (op.x, op.delta)} == {"f32"}
        case Scale():
            assert program.buffer(op.x).dtype == "f32"
        case Linear():
            weight = program.param(op.weight)
            made = weight.rows // 2 if op.act else weight.rows
            assert (cols(op.x), cols(op.out)) == (weight.cols, made)
            assert op.bias is None or program.param(op.bias).rows == weight.rows
        case RopeWrite():
            layer = program.kv_layers[op.layer]
            assert cols(op.qkv) == op.shape.q_cols + 2 * op.shape.kv_cols
            assert (layer.kv_heads, layer.head_dim) == (op.shape.kv_heads, op.shape.head_dim)
            assert op.rope is None or program.ropes[op.rope].dim <= op.shape.head_dim
            for name, heads in ((op.q_norm, op.shape.heads), (op.k_norm, op.shape.kv_heads)):
                each = heads * op.shape.head_dim
                assert name is None or program.param(name).rows in (
                    (each,) if op.whole else (each, op.shape.head_dim)
                )
        case Attend():
            assert cols(op.out) == op.shape.q_cols
            assert program.kv_layers[op.layer].window == op.window
        case HeadLinear():
            weight = program.param(op.weight)
            assert (cols(op.x), cols(op.out)) == (weight.experts * weight.cols, weight.rows)
            assert weight.dtype in {"f32", "bf16", "f16"}
            assert program.buffer(op.x).dtype == weight.format.inputs
        case LatentWrite():
            shape, layer = op.shape, program.kv_layers[op.layer]
            assert (cols(op.q), cols(op.kv), cols(op.q_nope)) == (
                shape.q_cols,
                shape.cached,
                shape.heads * shape.nope,
            )
            assert (layer.latent, layer.vectors, layer.head_dim) == (True, 1, shape.cached)
            assert program.param(op.norm).rows == shape.rank
            assert program.ropes[op.rope].dim == shape.rope
        case LatentAttend():
            assert cols(op.q_latent) == cols(op.out) == op.shape.heads * op.shape.rank
        case GatedAct():
            assert cols(op.gate_up) == 2 * cols(op.out)
        case GatherRows():
            assert cols(op.x) == cols(op.out)
        case Route() | Dispatch() | Experts() | Combine():
            check_experts(program, op)


def check_experts(program: Program, op: Op) -> None:
    found = {b.name: b for b in program.buffers}
    match op:
        case Route():
            assert found[op.logits].cols == op.router.experts
            assert {found[name].cols for name in writes(op)} == {op.router.top_k}
            assert [found[name].dtype for name in writes(op)] == ["i32", "f32", "i32"]
        case Dispatch():
            x, out = found[op.x], found[op.out]
            assert (x.cols, x.dtype, x.group) == (out.cols, out.dtype, out.group)
            assert (x.per, out.per) == (1, found[op.places].cols)
        case Experts():
            weight = program.param(op.weight)
            assert (found[op.x].cols, found[op.out].cols) == (weight.cols, weight.matrix_rows)
            assert found[op.x].per == found[op.out].per == found[op.ids].cols
            assert all(part.rows <= weight.matrix_rows for part in weight.parts)
            bias = op.bias and program.param(op.bias)
            assert not bias or (bias.rows, bias.experts) == (weight.rows, weight.experts)
        case Combine():
            assert found[op.x].cols == found[op.out].cols
            assert found[op.x].per == found[op.places].cols == found[op.weights].cols
            assert op.gate is None or found[op.gate].cols == 1


@given(programs())
@settings(max_examples=100)
def test_programs_are_well_formed(program: Program) -> None:
    names = [param.name for param in program.params]
    assert sorted(names) == sorted({name for op in program.ops for name in param_names(op)})
    filled: set[str] = set()
    for op in program.ops:
        assert set(reads(op)) <= filled
        filled |= set(writes(op))
        check_shapes(program, op)
    assert filled == {buffer.name for buffer in program.buffers}
    rows = {name: program.buffer(name).rows for name in filled}
    assert {rows[name] for op in program.body for name in reads(op) + writes(op)} == {"tokens"}
    assert {rows[name] for op in program.head for name in writes(op)} == {"logits"}


@given(programs())
@settings(max_examples=50)
def test_each_layer_has_one_place_in_the_cache(program: Program) -> None:
    for layer in program.kv_layers:
        group = program.cache_groups[layer.group]
        assert group.layers[layer.index_in_group] == layer.layer
        assert group.window == layer.window
        assert layer.index_in_group < program.layers_per_group


def test_weights_into_and_out_of_latents_are_never_quantized() -> None:
    """kv_b by head, each number once; the other linears of the layer are."""
    spec = with_latents(decoder_spec(100, 64, 32, (2, 1, 4), [0]), 30)
    named = {"layers.0.keys_up": I8, "layers.0.values_up": WeightFormat("i4", Groups(32))}
    program = lower(spec, NumberFormats("bf16", "bf16", I8, params=named))
    keys, values = program.param("layers.0.keys_up"), program.param("layers.0.values_up")
    assert (keys.dtype, values.dtype, program.param("layers.0.kv_a").dtype) == ("bf16", "bf16", "i8")
    assert (keys.matrix_rows, keys.cols, values.matrix_rows, values.cols) == (22, 10, 6, 22)
    taken = sorted((p.first, p.cols) for p in keys.parts) + sorted((p.first, p.rows) for p in values.parts)
    rows = [row for first, count in taken for row in range(first, first + count)]
    assert sorted(rows) == list(range(3 * 16))
    assert {part.shape for part in (*keys.parts, *values.parts)} == {(48, 22)}


def test_linears_of_one_input_may_have_other_formats() -> None:
    """Queries in int8 and a latent in bfloat16: the norm writes float32, which is rounded for each."""
    spec = with_latents(decoder_spec(100, 64, 32, (2, 1, 4), [0]))
    program = lower(spec, NumberFormats("bf16", "bf16", params={"layers.0.q": I8}))
    linears = {op.weight: program.buffer(op.x).dtype for op in program.body if isinstance(op, Linear)}
    assert (linears["layers.0.q"], linears["layers.0.kv_a"]) == ("i8", "bf16")
    filled: set[str] = set()
    for op in program.ops:
        assert set(reads(op)) <= filled
        filled |= set(writes(op))


def test_tied_embedding_is_one_parameter() -> None:
    tied, untied = (lower(decoder_spec(100, 8, 8, (2, 1, 4), [0], tied=t), BF16) for t in (True, False))
    assert {p.name for p in untied.params} - {p.name for p in tied.params} == {"embed"}
    assert untied.param("embed").kind == "table"
    assert [part.tensor for part in tied.param("head").parts] == ["model.embed_tokens.weight"]


def test_every_tensor_of_a_layer_is_asked_for_once() -> None:
    program = lower(decoder_spec(100, 8, 6, (2, 1, 4), [0, 0], bias=True, qk_norm=True), F32)
    asked = [part.tensor for param in program.params for part in param.parts]
    assert len(asked) == len(set(asked)) == 2 * (4 + 4 + 3 + 3 + 2 + 2) + 3
    qkv = program.param("layers.1.qkv")
    assert [(part.tensor[-13:], part.rows) for part in qkv.parts] == [
        ("q_proj.weight", 8), ("k_proj.weight", 4), ("v_proj.weight", 4)
    ]  # fmt: skip


def with_second_layer(spec: ModelSpec, width: int, rope: Rope) -> ModelSpec:
    layer = spec.layers[1]
    other = replace(layer, mlp=MLP(width), mixer=replace(layer.mixer, rope=rope))
    return replace(spec, layers=(spec.layers[0], other))


def test_layers_of_other_shapes_get_buffers_and_ropes_of_their_own() -> None:
    spec = decoder_spec(100, 8, 6, (2, 1, 4), [0, 0])
    assert len(lower(spec, F32).ropes) == 1
    program = lower(with_second_layer(spec, 10, Rope(theta=1e6, dim=4)), F32)
    assert len(program.ropes) == 2
    assert {"gate_up", "gate_up_20", "gated", "gated_10"} <= {buffer.name for buffer in program.buffers}


def test_number_formats_reach_weights_inputs_and_cache() -> None:
    program = lower(decoder_spec(100, 8, 6, (2, 1, 4), [0]), BF16)
    assert {p.dtype for p in program.params if p.kind != "vector"} == {"bf16"}
    assert {p.dtype for p in program.params if p.kind == "vector"} == {"f32"}
    assert program.kv_type == "bf16"
    rounded = {buffer.name for buffer in program.buffers if buffer.dtype == "bf16"}
    assert rounded == {op.x for op in program.ops if isinstance(op, Linear)}


def test_experts_and_shared_expert_share_one_rounding_of_their_input() -> None:
    """The router reads float32, whatever the weights; experts and shared expert the same bytes of it."""
    spec = moe_spec(Router(4, 2), shared=MLP(24), shared_gate=True, layers=1)
    program = lower(spec, NumberFormats("bf16", "bf16", I8), fused=False)
    inputs = [op.x for op in program.ops if isinstance(op, Quantize)]
    assert inputs == ["hidden", "mixed", "hidden", "gated", "expert_gated"]
    for name in ("layers.0.router", "layers.0.shared_gate"):
        assert program.param(name).dtype == "f32"
    assert program.param("layers.0.experts.down").format == I8
    bf16 = lower(spec, BF16)
    copies = [op for op in bf16.ops if isinstance(op, Norm) and op.weight is None]
    assert [(op.x, op.out) for op in copies] == [("hidden_f32", "hidden")]


def test_formats_by_parameter() -> None:
    """Layers in groups of 32, one exception in bfloat16, another in groups of 64, the head in int8."""
    small, large = WeightFormat("i4", Groups(32)), WeightFormat("i4", Groups(64, "f16", "u8"))
    params = {"layers.0.qkv": WeightFormat("bf16"), "layers.1.gate_up": large}
    program = lower(
        decoder_spec(100, 72, 96, (2, 1, 4), [0, 0]), NumberFormats("bf16", "bf16", small, I8, params)
    )
    found = {p.name: p.format for p in program.params if p.kind == "linear"}
    assert found["layers.0.qkv"] == WeightFormat("bf16")
    assert found["layers.1.gate_up"] == large
    assert found["head"] == I8
    assert {found[name] for name in ("layers.0.o", "layers.1.qkv", "layers.0.down")} == {small}
    for op in program.ops:
        if isinstance(op, Linear):
            x, weight = program.buffer(op.x), program.param(op.weight)
            assert x.dtype == ("i8" if weight.format.quantized else "bf16")
            assert x.group == (weight.groups.size if weight.groups else 0)
    hidden = {b.name: b.dtype for b in program.buffers if b.name.startswith("hidden")}
    assert hidden == {"hidden": "bf16", "hidden_f32_bytes": "i8", "hidden_f32_bytes_64": "i8"}
