"""Kernel benchmarks: the copied programs compute what the model does, bounds are right, plots are XML."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.specs import BF16, decoder_spec
from quire.bench import kernels, results
from quire.bench.bounds import op_bound, step_bound
from quire.bench.html_report import page
from quire.bench.kernel_programs import Bench, Unit, copies_for, units, with_copies
from quire.cache_kinds import KVType
from quire.cli.main import main
from quire.engine.build.opening import Model, open_model
from quire.executor.base import Limits
from quire.executor.kinds import native_kind
from quire.planner import shapes
from quire.program.cost import Cost, Row, peak_of, step_cost
from quire.program.lower import lower
from quire.program.op import writes
from quire.program.ops.attention import Attend, RopeWrite
from quire.program.ops.linear import Linear
from quire.program.program import Program

TINY = {
    **shapes.SHAPES["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Model:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return open_model(tmp_path, tokenizer=False)


def layer_program() -> Program:
    return lower(decoder_spec(300, 64, 96, (4, 2, 16), [0], tied=True, qk_norm=True), BF16)


def outputs(program: Program, unit: Unit, copies: int, which: int) -> list[np.ndarray]:
    """What one copy of a unit writes for two sequences, after the ops before it."""
    bench = Bench(with_copies(program, unit, copies), Limits(16, 2, 4, 48, 8), native_kind(1))
    bench.fill((Row(3, 40), Row(1, 7)))
    bench.run(which, which + 1)
    found = [bench.executor.read(name, 4) for name in writes(program.ops[unit.stop - 1])]
    bench.close()
    return found


@pytest.mark.parametrize("unit", units(layer_program()), ids=lambda unit: unit.name.replace(" ", "-"))
def test_every_copy_computes_the_same_as_the_op(unit: Unit) -> None:
    """Same weights, same inputs, keys and values of its own: every copy's outputs are equal to the bit."""
    program = layer_program()
    first, last, alone = (outputs(program, unit, *which) for which in ((3, 0), (3, 2), (1, 0)))
    for one, other, only in zip(first, last, alone, strict=True):
        assert np.isfinite(one).all()
        assert one.any()
        np.testing.assert_array_equal(one, other)
        if unit.kind != "attend":  # its queries were rotated once for each copy's cache
            np.testing.assert_array_equal(one, only)


def test_a_copy_with_other_weights_would_be_seen() -> None:
    """Negative control of the test above: weights differ between parameters, so outputs do."""
    program = layer_program()
    qkv, gate = (u for u in units(program) if u.name in {"qkv", "gate_up"})
    found = []
    for unit in (qkv, gate):
        bench = Bench(with_copies(program, unit, 1), Limits(4, 4, 4, 16, 4), native_kind(1))
        bench.fill((Row(1, 0),) * 4)
        bench.run(0, 1)
        op = program.ops[unit.start]
        found.append(bench.executor.read(writes(op)[0], 4)[:, :128])
        bench.close()
    assert not np.array_equal(*found)


def test_copies_fill_more_than_the_spill() -> None:
    spec = decoder_spec(300, 1024, 3072, (16, 8, 128), [0])
    program = lower(spec, BF16)
    down = next(u for u in units(program) if u.name == "down")
    assert copies_for(program, down, [Row(1, 0)], 64 << 20) == math.ceil((64 << 20) / (1024 * 3072 * 2))
    attend = next(u for u in units(program) if u.kind == "attend")
    assert copies_for(program, attend, [Row(1, 8191)], 64 << 20) == 2  # 8192 tokens take 32 MiB
    norm = next(u for u in units(program) if u.kind == "norm")
    assert copies_for(program, norm, [Row(1, 0)], 64 << 20) == 16


def test_one_layer_and_its_head_are_covered(model: Model) -> None:
    asked = kernels.Asked(rows=(1, 3), contexts=(20,))
    found = list(kernels.cases(model, asked))
    assert {case.format for case in found} == set(kernels.weight_formats()) - set(kernels.LEFT_OUT)
    for name in ("qkv", "o", "gate_up", "down", "head"):
        assert sum(case.unit.name == name and case.format == "bf16" for case in found) == 1
    assert {case.unit.kind for case in found} >= {
        "attend",
        "rope_write",
        "norm",
        "gated_act",
        "layer",
        "embed",
    }
    assert next(c for c in found if c.unit.name == "head").program.vocab == 500
    for case in found:  # every op of the one-layer program is timed somewhere, or looks like one that is
        assert case.steps


def test_measured_rows_hold_together(model: Model) -> None:
    asked = kernels.Asked(
        rows=(1, 70), contexts=(20,), formats=("bf16",), kv_formats=("bf16",), rounds=1, seconds=1e-5
    )
    runner = kernels.Runner(asked, threads=1)
    rows = [row for found in runner.model(model) for row in found]
    assert {row["op"] for row in rows} >= {"linear", "attend", "layer", "sample"}
    for row in rows:
        assert row["seconds"] > 0
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        if row["share"] is not None:  # one round: its share is exactly the bound over the time
            assert row["share"] == pytest.approx(row["bound_seconds"] / row["seconds"])
    assert {row["sequences"] for row in rows if row["op"] == "linear"} == {1}


def test_bound_is_the_longer_of_computing_and_moving() -> None:
    compute = {"f32": 100.0, "bf16": 200.0}
    streaming = Cost(flops=100, weight_bytes=100, activation_bytes=2)
    found = op_bound(streaming, "bf16", 10.0, compute, cache=1000)
    assert (found.seconds, found.by) == (10.0, "memory")
    assert found.share(20.0) == 0.5
    busy = op_bound(Cost(flops=4000, weight_bytes=100), "bf16", 10.0, compute, cache=1000)
    assert (busy.seconds, busy.by) == (20.0, "compute")
    assert op_bound(Cost(flops=4000, weight_bytes=100), "f32", 10.0, compute, 1000).seconds == 40.0
    cached = op_bound(Cost(flops=1, weight_bytes=1, activation_bytes=500), "f32", 10.0, compute, cache=1000)
    assert cached.by == "cache"
    assert cached.share(1.0) is None
    spilled = op_bound(Cost(flops=1, weight_bytes=1, activation_bytes=500), "f32", 10.0, compute, cache=100)
    assert (spilled.by, spilled.seconds) == ("memory", 50.1)


def test_an_op_computes_in_the_format_of_its_input() -> None:
    program = layer_program()
    peaks = {type(op): peak_of(program, op) for op in program.ops}
    assert (peaks[Linear], peaks[Attend], peaks[RopeWrite]) == ("bf16", "bf16", "f32")


@pytest.mark.parametrize(("kv", "peak"), [("f32", "f32"), ("bf16", "bf16"), ("i8", "bf16"), ("i4", "bf16")])
def test_attention_computes_in_the_format_of_the_cache(kv: KVType, peak: str) -> None:
    """An int8 cache is multiplied by numbers of two bytes: two int8 products, which is the rate of bf16."""
    program = layer_program()
    program = replace(program, kv_layers=tuple(replace(layer, type=kv) for layer in program.kv_layers))
    assert {peak_of(program, op) for op in program.ops if isinstance(op, Attend)} == {peak}


def test_step_bound_adds_ops_at_their_own_peaks() -> None:
    program = layer_program()
    cost = step_cost(program, [Row(5, 9)], 1)
    ops = list(zip(program.ops, cost.ops, strict=True))
    fast = sum(c.flops for op, c in ops if isinstance(op, Linear | Attend))
    slow = sum(c.flops for op, c in ops) - fast
    computing, moving = step_bound(program, cost, 10.0, {"f32": 3.0, "bf16": 7.0})
    assert computing == pytest.approx(fast / 7.0 + slow / 3.0)
    total = cost.total
    assert moving == pytest.approx((total.weight_bytes + total.kv_read_bytes + total.kv_written_bytes) / 10.0)


def test_attention_steps_stay_within_the_requested_sizes() -> None:
    found = list(kernels.attention_steps((128, 8192), 32, 4096))
    assert found == [(Row(1, 127),) * batch for batch in (1, 8, 32)]
    assert (Row(512, 1536),) in list(kernels.attention_steps((2048,), 512, 40960))


def test_command(tmp_path: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    plot, saved = tmp_path / "roofline.svg", tmp_path / "result.json"
    code = main(
        ["bench", "kernels", "--model", str(model.folder), "--rows", "2,1", "--contexts", "20", "--formats",
         "bf16", "--ops", "linear,attention", "--rounds", "1", "--seconds", "0.00001", "--threads", "1",
         "--plot", str(plot), "--save", str(saved)]
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "linear gate_up" in out
    assert "memory reads" in out
    result = results.load(saved)
    rows = result.tables["ops"]
    assert {row["op"] for row in rows} == {"linear", "attend"}
    assert str(tmp_path) not in saved.read_text()
    root = ET.parse(plot).getroot()
    assert root.tag.endswith("svg")
    marks = [e for e in root.iter() if e.tag.endswith(("circle", "polygon")) and len(e)]
    assert len(marks) == len(rows)
    assert sum(e.tag.endswith("text") and "memory reads" in (e.text or "") for e in root.iter()) == 1
    text = page([result])
    inside = ET.fromstring(text[text.index("<html") :])
    assert sum(e.tag.endswith(("circle", "polygon")) and len(e) for e in inside.iter()) == len(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops", "matmul"], "ops: 'matmul' is not one of"),
        (["--formats", "int3"], "formats: 'int3' is not one of"),
        (["--kv-formats", "int3"], "kv_formats: 'int3' is not one of"),
        (["--shapes", "gpt-9"], "shape: 'gpt-9' is not one of"),
        (["--rows", "0"], "0 is below 1"),
        (["--seconds", "0"], "seconds: 0 is not above 0"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "kernels", "--rounds", "1", *options])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_shapes_are_models(shape: str, tmp_path: Path) -> None:
    spec = open_model(shapes.write(shape, tmp_path), tokenizer=False).facts.spec
    assert len(spec.layers) == shapes.SHAPES[shape]["num_hidden_layers"]
