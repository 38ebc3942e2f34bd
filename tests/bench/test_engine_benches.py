"""Benchmarks of an engine in this process, and of fresh processes: counts, limits and reports."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.specs import BF16, decoder_spec
from quire.bench import latency, profile, results, startup, throughput
from quire.bench.bounds import op_bound
from quire.bench.engine_run import BenchEngine, EngineStep, Prompts, judge
from quire.bench.html_report import page
from quire.bench.limits import LimitsProbe, LimitsSample
from quire.bench.random_checkpoint import write_checkpoint
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.planner import shapes
from quire.program.cost import Row, step_cost
from quire.program.lower import lower

TINY = {
    **shapes.SHAPES["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
    "max_position_embeddings": 256,
}  # fmt: skip
LIMITS = LimitsSample(1e9, {"f32": 1e9, "bf16": 4e9, "i8": 8e9})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def engine(folder: Path) -> BenchEngine:
    config = EngineConfig(threads=1, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
    return BenchEngine(str(folder), config)


def test_every_step_and_token_is_written_down(engine: BenchEngine) -> None:
    prompts = Prompts(500, 0).make(5, 20)
    run = engine.run(prompts, [3, 4, 5, 6, 7], concurrency=2)
    assert run.prompt_tokens == 100
    assert run.output_tokens == 25
    assert (
        sum(step.tokens for step in run.steps) == 100 + 25 - 5
    )  # the last token of each is never computed on
    assert max(len(step.rows) for step in run.steps) <= 2
    assert sum(step.logit_rows for step in run.steps) == 25
    assert {step.kind for step in run.steps} >= {"prefill", "decode"}
    assert all(0 < step.engine < step.wall for step in run.steps)
    assert sum(step.wall for step in run.steps) <= run.seconds
    assert len(run.first_tokens()) == 5


def test_all_at_once_fills_the_slots(engine: BenchEngine) -> None:
    run = engine.run(Prompts(500, 1).make(6, 5), [4] * 6)
    assert max(len(step.rows) for step in run.steps) == 4


def test_the_first_request_may_be_ahead_of_the_others(engine: BenchEngine) -> None:
    run = engine.run(Prompts(500, 2).make(3, 5), [8, 2, 2], ahead=3)
    assert [len(step.rows) for step in run.steps[:4]] == [1, 1, 1, 3]


def test_steps_are_of_the_kind_that_their_rows_are() -> None:
    kinds = [
        EngineStep(rows, 1, {}).kind
        for rows in ([Row(1, 9)] * 3, [Row(7, 0)], [Row(1, 9), Row(7, 0)], [Row(1, 0)])
    ]
    assert kinds == ["decode", "prefill", "mixed", "prefill"]


def test_a_judged_step_takes_the_longer_of_its_bounds(engine: BenchEngine) -> None:
    program = engine.program
    decode, prefill = EngineStep([Row(1, 30)], 1, {}, wall=2.0), EngineStep([Row(32, 0)], 1, {}, wall=3.0)
    total = step_cost(program, decode.rows, 1).total
    moved = total.weight_bytes + total.kv_read_bytes + total.kv_written_bytes
    one = judge(program, [decode], LIMITS)
    assert (one.moved, one.memory_seconds) == (moved, moved / 1e9)
    both = judge(program, [decode, prefill], LIMITS)
    other = judge(program, [prefill], LIMITS)
    assert one.bound_seconds == max(one.memory_seconds, one.compute_seconds)
    assert both.bound_seconds == pytest.approx(one.bound_seconds + other.bound_seconds)
    assert both.share == pytest.approx(both.bound_seconds / 5.0)
    faster = judge(program, [decode], LimitsSample(2e9, {name: 2 * v for name, v in LIMITS.compute.items()}))
    assert faster.bound_seconds == pytest.approx(
        one.bound_seconds / 2
    )  # a machine twice as good: half the share
    assert judge(program, [], LIMITS).share is None


def test_latency_figures(engine: BenchEngine) -> None:
    asked = latency.LatencyAsked(batch_size=2, input_len=10, output_len=5, iterations=2, warmup=1, seed=0)
    probe = LimitsProbe("", 1)
    metrics, tables = latency.measure(engine, probe, asked)
    assert len(tables["iterations"]) == 2
    assert set(metrics) == set(latency.FIGURES)
    for row in tables["iterations"]:
        assert row["ttft"] < row["latency"]
        assert row["decode_share"] > 0
    assert metrics["latency"].samples == [row["latency"] for row in tables["iterations"]]
    assert probe.limits().bandwidth.count == 4


def test_a_profile_names_the_limit_of_most_of_an_ops_time() -> None:
    """Many steps of 31 rows are bound by computing; the last ones, of one row, by memory."""
    program = lower(decoder_spec(300, 512, 1024, (4, 2, 64), [0], tied=True, qk_norm=True), BF16)
    limits = LimitsSample(1e9, {"f32": 2e10, "bf16": 2e10})
    times = profile.OpTimes(program)
    for rows in (31, 31, 31, 1):
        step = EngineStep([Row(1, 20)] * rows, rows, {"forward": 2.0, "sample": 0.25}, wall=2.5)
        step.op_seconds, step.op_waited = [0.1] * len(program.ops), [0.0] * len(program.ops)
        bounds = op_bound(step_cost(program, step.rows, rows).ops[2], "bf16", 1e9, limits.compute, 1 << 40)
        assert bounds.by == ("compute" if rows > 1 else "memory")
        times.add([step], limits)
    found = {row["name"] or row["op"]: row for row in times.table()["profile"]}
    assert found["qkv"]["bound"] == "compute"
    assert found["qkv"]["limit_share"] > 0
    assert found["norm 512"]["bound"] == "cache"  # of some steps is enough: there is no share
    assert found["norm 512"]["limit_share"] is None
    assert found["sample"]["seconds"] == 0.25
    assert found["native"]["seconds"] == pytest.approx(2.0 - 0.1 * len(program.ops))
    assert found["engine"]["seconds"] == pytest.approx(0.25)


def test_a_profile_adds_up_to_its_steps(folder: Path) -> None:
    config = EngineConfig(threads=2, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
    asked = throughput.ThroughputAsked(
        num_prompts=4, input_len=12, output_len=6, ratio=0.5, concurrency=2, iterations=1, warmup=0, seed=0
    )
    with BenchEngine(str(folder), config, profile=True) as engine:
        _, tables = throughput.measure(engine, LimitsProbe("", 1), asked)
        count = {"linear": 4 * 2 + 1, "attend": 2, "rope_write": 2, "gated_act": 2, "embed": 1}
        for kind in tables["composition"]:
            rows = [row for row in tables["profile"] if row["step"] == kind["kind"]]
            assert sum(row["seconds"] for row in rows) * kind["steps"] == pytest.approx(kind["seconds"])
            assert sum(row["share"] for row in rows) == pytest.approx(1)
            assert all(row["seconds"] > 0 and 0 <= (row["waiting"] or 0) <= 1 for row in rows)
            for op, times in count.items():
                assert sum(row["count"] for row in rows if row["op"] == op) == times
            assert [row["op"] for row in rows[-3:]] == list(profile.OUTSIDE)
        assert profile.lines(tables["profile"])
        ran = engine.built.executor.take_profile()[0]  # type: ignore[attr-defined]
        assert not any(ran)  # every step took its own
        engine.built.executor.profile(False)  # type: ignore[attr-defined]
        run = engine.run(Prompts(500, 0).make(1, 4), [2])
        assert not any(step.op_seconds for step in run.steps)


def test_one_token_has_no_tpot(engine: BenchEngine) -> None:
    asked = latency.LatencyAsked(batch_size=1, input_len=4, output_len=1, iterations=1, warmup=0, seed=0)
    metrics, _ = latency.measure(engine, LimitsProbe("", 1), asked)
    assert metrics["tpot"].value is None
    assert metrics["decode"].value is None
    assert metrics["prefill"].value is not None


def test_throughput_figures(engine: BenchEngine) -> None:
    asked = throughput.ThroughputAsked(
        num_prompts=5, input_len=12, output_len=6, ratio=0.5, concurrency=3, iterations=1, warmup=1, seed=0
    )
    metrics, tables = throughput.measure(engine, LimitsProbe("", 1), asked)
    (row,) = tables["iterations"]
    assert row["output"] * row["seconds"] == pytest.approx(
        sum(s["decode_tokens"] for s in tables["steps"]) + 5
    )
    assert sum(kind["steps"] for kind in tables["composition"]) == len(tables["steps"])
    bound = sum(kind["bound_seconds"] for kind in tables["composition"])
    assert row["share"] == pytest.approx(bound / row["seconds"])
    assert set(metrics) == set(throughput.FIGURES)
    for kind in tables["composition"]:
        steps = [step for step in tables["steps"] if step["kind"] == kind["kind"]]
        assert len(steps) == kind["steps"]
        least = sum(step["share"] * step["seconds"] for step in steps)
        assert least == pytest.approx(kind["bound_seconds"])
    prompt = max(tables["steps"], key=lambda step: step["prefill_tokens"])
    token = min(tables["steps"], key=lambda step: step["flops"])
    assert prompt["flops"] / prompt["bytes"] > token["flops"] / token["bytes"]


def test_lengths_vary_within_their_range() -> None:
    lengths = Prompts(10, 3).lengths(200, 20, 0.5)
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(set(lengths)) > 5
    assert Prompts(10, 3).lengths(3, 20, 0.0) == [20, 20, 20]


@pytest.mark.parametrize("bench", ["latency", "throughput"])
def test_commands(bench: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "r.json"
    code = main(
        ["bench", bench, str(folder), "--input-len", "6", "--output-len", "3", "--num-iters", "1", "--warmup", "0",
         "--threads", "1", "--save", str(saved), *(["--num-prompts", "3"] if bench == "throughput" else [])]
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "memory reads" in out
    assert "median" in out
    result = results.load(saved)
    assert (result.kind, result.settings["model"]) == (bench, folder.name)
    assert str(folder) not in saved.read_text()
    text = page([result])
    ElementTree.fromstring(text[text.index("<html") :])
    assert ("Contents of each step" in text) == (bench == "throughput")
    assert ("Steps of the run and the limits of the machine" in text) == (bench == "throughput")
    marks = len([step for step in result.tables.get("steps", []) if step["kind"] == "decode"])
    assert text.count(" decode step, ") == marks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["latency", "shape:qwen3-0.6b", "--batch-size", "65"],
            "batch_size: 65 is more than max_num_seqs, 64",
        ),
        (["latency", "shape:qwen9"], "shape: 'qwen9' is not one of"),
        (["throughput", "shape:qwen3-0.6b", "--random-range-ratio", "1"], "random_range_ratio: 1 is not in"),
        (["startup", "shape:qwen9"], "shape: 'qwen9' is not one of"),
        (
            ["startup", "--at-most", "lunch", "1"],
            "at-most: lunch 1: must be one of import, generate, cold, serve",
        ),
        (["throughput", "shape:qwen3-0.6b", "--num-prompts", "no"], "'no' is not an integer"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", *words])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err


def test_options_of_a_config() -> None:
    config = EngineConfig(threads=2, quantization="int8", enable_prefix_caching=False, memory=1 << 30)
    flags = startup.engine_flags(config)
    assert sorted(flags) == sorted(
        ["--threads", "2", "--quantization", "int8", "--no-enable-prefix-caching", "--memory", str(1 << 30)]
    )
    assert startup.engine_flags(EngineConfig()) == []


def test_startup_of_real_processes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "r.json"
    words = [
        "--num-iters",
        "1",
        "--threads",
        "1",
        "--save",
        str(saved),
        "--only",
        "generate",
        "--only",
        "cold",
        "--only",
        "serve",
    ]
    bounds = ["--at-most", "generate", "1e9", "--at-most", "cold", "0"]
    assert main(["bench", "startup", str(folder), *words, *bounds]) == 1
    err = capsys.readouterr().err
    assert "cold: " in err
    assert " s exceed the limit of 0 s" in err
    assert "generate: " not in err
    result = results.load(saved)
    assert set(result.metrics) == {"generate", "generate_process", "cold", "serve"}
    for kind in ("generate", "cold", "serve"):
        phases = {row["phase"]: row for row in result.tables["phases"] if row["kind"] == kind}
        assert {"imports", "weights", "ready"} <= set(phases)
        first, value = phases["ready"]["end"], result.metrics[kind].value
        assert value is not None
        assert 0 < phases["imports"]["begin"] <= first <= value + 0.05  # the system counts starts in 10 ms


def test_a_process_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    assert main(["bench", "startup", str(tmp_path), "--num-iters", "1", "--only", "serve"]) == 1
    assert "quire serve ended with" in capsys.readouterr().err
