"""Experts natively: routing, products of every weight format and bits, against torch, on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.pairs import pairwise
from helpers.specs import EXPERTS, moe_spec
from helpers.stepper import Stepper, compare_buffers
from quire import _native
from quire.executor.base import F32, Executor, Limits
from quire.executor.native import NativeExecutor, NativeKind
from quire.executor.torch import TorchExecutor
from quire.executor.torch import experts as definitions
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.experts import Route
from quire.program.program import Program
from quire.quant import quantize
from quire.spec import ModelSpec, Router

ISAS = _native.supported_isas()
I4 = WeightFormat("i4", Groups(32))
FORMATS = {
    "f32": NumberFormats("f32", "f32"),
    "bf16": NumberFormats("bf16", "f32"),
    "f16": NumberFormats("f16", "f32"),
    "i4": NumberFormats("f32", "f32", I4),
    "i4-zeros": NumberFormats("f32", "f32", WeightFormat("i4", Groups(16, "f16", "u8"))),
    "i8-groups": NumberFormats("bf16", "f32", WeightFormat("i8", Groups(32, "f32"))),
}
LIMITS = Limits(max_tokens=420, max_rows=4, max_logit_rows=420, max_len=512, num_blocks=120)


def spec_of(kind: int) -> ModelSpec:
    """Widths that fill neither panels nor vectors nor groups; one dense layer where there are three."""
    moe = EXPERTS[kind]
    more = {"act": moe.act, "bias": moe.bias, "shared": moe.shared, "shared_gate": moe.shared_gate}
    return moe_spec(moe.router, moe.width, dim=56, dense=(0,) if kind else (), layers=2, **more)


def fill(program: Program, executors: list[Executor]) -> None:
    random = np.random.default_rng(1)
    for param in program.params:
        row = 0
        for part in param.parts:
            shape = (part.rows, part.cols) if part.cols else (part.rows,)
            data = random.standard_normal(shape).astype(np.float32)
            scale = (
                0.3
                if not part.cols
                else 2.0 / np.sqrt(part.cols)
                if "router" in param.name
                else part.cols**-0.5
            )
            data = data * np.float32(scale) + np.float32("norm" in param.name)
            for executor in executors:
                executor.put(param, row, data, "F32")
            row += part.rows


def bound(
    program: Program, threads: int, isa: str, limits: Limits = LIMITS
) -> tuple[NativeExecutor, Stepper]:
    executor, stepper = NativeExecutor(program, threads=threads, isa=isa), Stepper(program, limits)
    fill(program, [executor])
    executor.bind(limits, stepper.arrays)
    return executor, stepper


def sequence(stepper: Stepper, seed: int, length: int = 400) -> int:
    return stepper.add(np.random.default_rng(seed).integers(0, 100, length).tolist())


@pytest.mark.parametrize(("kind", "formats", "isa"), pairwise(range(len(EXPERTS)), [*FORMATS], ISAS))
def test_buffers(kind: int, formats: str, isa: str) -> None:
    """After every op, every buffer agrees. In bfloat16 sums between two values round either way."""
    program = lower(spec_of(kind), FORMATS[formats])
    native, stepper = bound(program, 2, isa)
    reference = TorchExecutor(program)
    fill(program, [reference])
    reference.bind(LIMITS, stepper.arrays)
    a, b = sequence(stepper, 0), sequence(stepper, 1)
    tolerance = 2e-5 if formats in {"f32", "f16"} else 2e-2
    for counts in ({a: 33, b: 7}, {a: 1}):
        for difference in compare_buffers(native, reference, stepper.fill(counts)):
            assert difference.rms <= tolerance * max(difference.scale, 1.0), difference


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("formats", FORMATS)
def test_same_bits_whatever_else_runs(formats: str, isa: str) -> None:
    """400 tokens at once, more than one task takes of one expert; one by one; and with others; on 1 to 3 threads."""
    program = lower(moe_spec(Router(3, 2, renormalise=True), 40, dim=56, layers=1), FORMATS[formats])
    found = []
    for threads, steps in ((1, [{0: 400}]), (3, [{0: 201, 1: 50}, *[{0: 1, 1: 1}] * 3, {0: 196, 1: 9}])):
        executor, stepper = bound(program, threads, isa)
        for seed in range(2):
            sequence(stepper, seed)
        found.append(np.concatenate([stepper.step(executor, counts)[0] for counts in steps]))
    np.testing.assert_array_equal(found[0], found[1])
    decode, stepper = bound(program, 2, isa)
    sequence(stepper, 0)
    each = [stepper.step(decode, {0: 1})[0] for _ in range(40)]
    np.testing.assert_array_equal(np.concatenate(each), found[0][:40])


ROUTERS = {
    "softmax": Router(37, 5),
    "renormalised": Router(128, 8, renormalise=True, scale=1.5),
    "best of groups": Router(24, 4, groups=6, top_groups=2, scale=16.0),
    "best two of groups": Router(
        32,
        6,
        "sigmoid",
        correction=True,
        groups=8,
        top_groups=3,
        group_score="top2",
        renormalise=True,
        scale=2.5,
    ),
    "all": Router(3, 3, "sigmoid", correction=True),
    "one": Router(1, 1),
}


def routed(router: Router, logits: F32, correction: F32 | None, isa: str) -> tuple[F32, F32, F32]:
    """ids, weights and places of the native op on logits [tokens, experts]."""
    program = lower(moe_spec(router, 8, layers=1), FORMATS["f32"])
    index, op = next((i, op) for i, op in enumerate(program.ops) if isinstance(op, Route))
    if correction is None and op.correction:
        ops = tuple(replace(x, correction=None) if isinstance(x, Route) else x for x in program.body)
        program = replace(program, body=ops)
    executor, _ = bound(program, 2, isa)
    executor.run_range(len(logits), 0, 0, 0, 0)
    if correction is not None and op.correction:
        executor.put(program.param(op.correction), 0, correction, "F32")
    executor._view(op.logits, len(logits))[:] = logits
    executor.run_range(len(logits), 0, 0, index, index + 1)
    ids, weights, places = (executor.read(name, len(logits)) for name in (op.ids, op.weights, op.places))
    return ids, weights, places


def defined(router: Router, logits: F32, correction: F32 | None) -> tuple[F32, F32, F32]:
    shape = (len(logits), router.top_k)
    ids, weights, places = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape), torch.zeros(shape)
    given = None if correction is None else torch.from_numpy(correction)
    definitions.route(router, torch.from_numpy(logits), given, (ids, weights, places))
    return ids.float().numpy(), weights.numpy(), places.numpy()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ROUTERS)
def test_route(name: str, isa: str) -> None:
    """Random logits, equal ones, some not finite: equal choices, and weights equal to the rounding of float32."""
    router, random = ROUTERS[name], np.random.default_rng(2)
    logits = (3 * random.standard_normal((130, router.experts))).astype(np.float32)
    logits[:20] = np.round(logits[:20])  # many ties
    logits[20] = 0.0
    logits[21, -1], logits[22, 0], logits[23, router.experts // 2] = np.nan, np.inf, -np.inf
    correction = (
        (0.5 * random.standard_normal(router.experts)).astype(np.float32) if router.correction else None
    )
    ids, weights, places = routed(router, logits, correction, isa)
    expected = defined(router, logits, correction)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=3e-6)
    np.testing.assert_array_equal(places, expected[2])
    np.testing.assert_array_equal(ids[20], np.arange(router.top_k) if correction is None else ids[20])
    assert np.isnan(weights[21:24]).all()
    assert np.isfinite(np.delete(weights, [21, 22, 23], axis=0)).all()
    assert sorted(places.ravel()) == list(range(places.size))
    by_place = np.empty(places.size)
    by_place[places.ravel().astype(int)] = ids.ravel()
    assert (np.diff(by_place) >= 0).all()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("softmax", {"scores": "sigmoid"}),
        ("softmax", {"renormalise": True}),
        ("softmax", {"scale": 1.1}),
        ("best of groups", {"groups": 1, "top_groups": 1}),
        ("best of groups", {"top_groups": 3}),
        ("best of groups", {"group_score": "top2"}),
        ("best two of groups", {"group_score": "max"}),
        ("best two of groups", {"renormalise": False}),
        ("best two of groups", {"correction": False}),
    ],
)
def test_a_fact_of_the_router_changes_the_routing(name: str, changes: dict[str, object]) -> None:
    """Negative controls: the comparison above would notice."""
    router, random = ROUTERS[name], np.random.default_rng(3)
    logits = random.standard_normal((60, router.experts)).astype(np.float32)
    correction = random.standard_normal(router.experts).astype(np.float32) if router.correction else None
    expected = defined(router, logits, correction)
    other = replace(router, **changes)  # type: ignore[arg-type]
    ids, weights, _ = routed(other, logits, correction if other.correction else None, "")
    assert (ids != expected[0]).any() or np.abs(weights - expected[1]).max() > 1e-3


def test_only_touched_experts_are_read() -> None:
    """Weights of experts that no token goes to may be anything: here NaN."""
    program = lower(moe_spec(Router(6, 2), 40, layers=1), FORMATS["f32"])
    clean, stepper = bound(program, 2, "")
    number = sequence(stepper, 0)
    logits = stepper.step(clean, {number: 1})[number]
    ids = {int(e) for e in read_ids(clean, program)}
    assert len(ids) == 2
    poisoned, stepper = bound(program, 2, "")
    for name in ("layers.0.experts.gate_up", "layers.0.experts.down"):
        param = program.param(name)
        for e in set(range(6)) - ids:
            nothing = np.full((param.matrix_rows, param.cols), np.nan, np.float32)
            poisoned.put(param, e * param.matrix_rows, nothing, "F32")
    number = sequence(stepper, 0)
    np.testing.assert_array_equal(stepper.step(poisoned, {number: 1})[number], logits)


def read_ids(executor: NativeExecutor, program: Program) -> F32:
    """The experts of the one token of the last step, routed again: later ops reuse the memory."""
    index, op = next((i, op) for i, op in enumerate(program.ops) if isinstance(op, Route))
    executor.stop_after(index)
    executor.run(1, 1, 0)
    executor.stop_after(None)
    return executor.read(op.ids, 1).ravel()


@pytest.mark.parametrize("isa", ISAS)
def test_codes_of_experts(isa: str) -> None:
    """Rows that come quantized, expert by expert, give the bits of floats that round to them."""
    program = lower(moe_spec(Router(3, 2), 40, dim=56, layers=1), FORMATS["i4"])
    floats, stepper = bound(program, 2, isa)
    number = sequence(stepper, 0)
    expected = stepper.step(floats, {number: 9})[number]
    codes, again = bound(program, 2, isa)
    for executor, given in ((floats, False), (codes, True)):
        generator = np.random.default_rng(8)
        for name in ("layers.0.experts.gate_up", "layers.0.experts.down"):
            param = program.param(name)
            assert param.groups is not None
            for e in range(param.experts):
                data = (generator.standard_normal((param.matrix_rows, param.cols)) * 0.2).astype(np.float32)
                if given:
                    executor.put_codes(param, e * param.matrix_rows, quantize(data, param.groups, 4))
                else:
                    executor.put(param, e * param.matrix_rows, data, "F32")
    number = sequence(stepper, 0)
    one = stepper.step(floats, {number: 9})[number]
    number = sequence(again, 0)
    np.testing.assert_array_equal(again.step(codes, {number: 9})[number], one)
    assert not np.array_equal(one, expected)


@pytest.mark.parametrize("formats", FORMATS)
def test_memory_is_as_planned(formats: str) -> None:
    program = lower(spec_of(1), FORMATS[formats])
    executor, _ = bound(program, 2, "")
    planned = NativeKind(2).planned_bytes(program, LIMITS)
    held = executor.memory()
    assert 0 <= held["activations"] - planned["activations"] < 3 * 4096  # three arenas of whole pages
    assert 0 <= held["weights"] - planned["weights"] < 4096


@pytest.mark.parametrize("formats", FORMATS)
def test_packed_weights_are_mapped_as_they_were_written(formats: str, tmp_path: Path) -> None:
    program = lower(spec_of(2), FORMATS[formats])
    packed, stepper = bound(program, 2, "")
    mapped = NativeExecutor(program, threads=2)
    with open(tmp_path / "weights", "w+b") as file:
        sums = packed.save_weights(file.fileno(), 0, packed.weight_chunks)
        assert mapped.map_weights(file.fileno(), sums)
    again = Stepper(program, LIMITS)
    mapped.bind(LIMITS, again.arrays)
    a, b = sequence(stepper, 0), sequence(again, 0)
    np.testing.assert_array_equal(again.step(mapped, {b: 20})[b], stepper.step(packed, {a: 20})[a])


def test_rows_of_two_experts_in_one_part_are_refused() -> None:
    program = lower(moe_spec(Router(3, 2), 40, layers=1), FORMATS["f32"])
    param = program.param("layers.0.experts.down")
    with pytest.raises(ValueError, match="several experts"):
        NativeExecutor(program, threads=1).put(
            param, 0, np.zeros((param.rows, param.cols), np.float32), "F32"
        )
