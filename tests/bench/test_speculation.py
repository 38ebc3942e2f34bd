"""quire bench speculation: drafts of a known acceptance, and what is measured of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from quire.bench import results
from quire.bench import speculation_bench as bench
from quire.bench.engine_run import BenchEngine, Prompts
from quire.bench.html_report import page
from quire.bench.known_drafts import KnownDrafts
from quire.bench.random_checkpoint import write_checkpoint
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.planner.shapes import SHAPES
from quire.speculate.proposer import Room
from quire.types import NewSeq, SamplingParams

TINY = {
    **SHAPES["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500,
    "max_position_embeddings": 512,
}  # fmt: skip
LENGTH = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), TINY)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with one layer and a trimmed vocabulary."""
    found = tmp_path_factory.mktemp("draft")
    return write_checkpoint(found, {**TINY, "num_hidden_layers": 1, "vocab_size": 300})


@pytest.fixture(scope="module", params=["without a model", "with a model"])
def engine(request: pytest.FixtureRequest, folder: Path, draft: Path) -> BenchEngine:
    config = EngineConfig(threads=1, max_model_len=128, max_num_seqs=4, enable_prefix_caching=False)
    if request.param == "with a model":
        return BenchEngine(str(folder), config.replace(draft_model=str(draft)))
    return BenchEngine(str(folder), config.replace(speculate="ngram"))


@pytest.fixture(scope="module")
def work(engine: BenchEngine) -> tuple[list[list[int]], list[list[int]]]:
    prompts = Prompts(500, 0).make(4, 10)
    return prompts, bench.recorded(engine, prompts, LENGTH)


def side(
    engine: BenchEngine, work: tuple[list[list[int]], list[list[int]]], rate: float, drafts: int
) -> bench.Side:
    known = bench.known_drafts(engine, rate, *work)
    return bench.Side(engine, bench.speculation_with(engine, known, itertools.repeat(drafts)))


def test_drafts_are_right_as_often_as_they_are_to_be(
    engine: BenchEngine, work: tuple[list[list[int]], list[list[int]]]
) -> None:
    sides = {
        "all": side(engine, work, 1.0, 3),
        "some": side(engine, work, 0.6, 3),
        "none": side(engine, work, 0.0, 3),
    }
    rows = {row["method"]: row for row in bench.compare(bench.Side(engine, None), sides, work[0], LENGTH, 2)}
    assert rows["all"]["acceptance"] == 1.0
    assert rows["all"]["tau"] > 3.5
    assert rows["none"]["acceptance"] == 0.0
    assert rows["none"]["tau"] == 1.0
    rates = sides["some"].positions.rates()
    assert sides["some"].positions.tried[0] > 100
    assert rates[0] == pytest.approx(0.6, abs=0.15)
    assert rows["some"]["tau"] == pytest.approx(bench.expected_tokens(rates), rel=0.03)
    assert all(row["off"] > 0 and row["speedup"] > 0 for row in rows.values())


def test_a_draft_that_changes_an_output_is_an_error(
    engine: BenchEngine, work: tuple[list[list[int]], list[list[int]]]
) -> None:
    one = side(engine, work, 1.0, 2)
    one.run = lambda *_, **__: [[1], [2]]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="wrong: the outputs are not those without drafts"):
        bench.compare(bench.Side(engine, None), {"wrong": one}, work[0][:2], LENGTH, 1)


def test_every_number_of_tokens_has_its_cost(engine: BenchEngine) -> None:
    rows = bench.row_costs(engine, Prompts(500, 1).make(1, 8)[0], 3, 4)
    assert [row["tokens"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["ratio"] == 1.0


def test_streams_that_never_run_together_are_refused(engine: BenchEngine) -> None:
    with pytest.raises(ValueError, match="streams: 5 never decode at once"):
        bench.Side(engine, None).run(Prompts(500, 2).make(5, 8), 4)


def test_drafts_go_on_where_a_sequence_resumes() -> None:
    drafts = KnownDrafts(1.0, 500)
    drafts.record([1, 2], [10, 11, 12, 13])
    drafts.start(NewSeq(7, [1, 2, 10], 2, SamplingParams(), 0, 0, ([],)))
    drafts.extend(7, [11])
    assert drafts.look([7], 5)[7].length == 2
    assert drafts.propose({7: Room(2, 2)}) == {7: [12, 13]}
    drafts.extend(7, [12, 13])
    assert not drafts.look([7], 5)


def test_the_command_saves_one_result(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "bench", "speculation", str(folder), "--methods", "ngram", "known:0.9", "--streams", "1,2", "--pairs", "1",
        "--output-len", "12", "--most-rows", "3", "--threads", "1", "--save", str(tmp_path / "saved.json"),
    ]  # fmt: skip
    assert main(command) == 0
    assert "known:0.9" in capsys.readouterr().out
    saved = results.load(tmp_path / "saved.json")
    assert [(row["method"], row["streams"]) for row in saved.tables["speculation"]] == [
        ("known:0.9", 1), ("known:0.9", 2), ("ngram", 1), ("ngram", 2),
    ]  # fmt: skip
    assert [row["tokens"] for row in saved.tables["row_costs"]] == [1, 2, 3]
    assert saved.metrics["speedup ngram 1"].unit == "ratio"
    shown = page([saved])
    for title in ("Speed-up by load", "What a step costs by its tokens"):
        assert title in shown


@pytest.mark.parametrize("method", ["known:2", "known:x", "no such"])
def test_a_wrong_method_is_named(folder: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculation", str(folder), "--methods", method, "--pairs", "1"]) != 0
    assert method in capsys.readouterr().err


def test_a_json_object_is_named_by_its_method(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [json.dumps({"method": method}) for method in ("ngram", "self")]
    command = ["bench", "speculation", str(folder), "--methods", *given, "--streams", "1", "--pairs", "1"]
    more = ["--output-len", "8", "--most-rows", "2", "--threads", "1", "--save", str(tmp_path / "saved.json")]
    assert main([*command, *more]) == 0
    assert capsys.readouterr().out.count('"method"') == 0
    rows = results.load(tmp_path / "saved.json").tables["speculation"]
    assert [row["method"] for row in rows] == ["ngram", "self"]


def test_prompts_of_a_file_are_taken_in_turns(folder: Path, tmp_path: Path, engine: BenchEngine) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "three")))
    first, second, third = bench.read_prompts(engine, file, 4, 3)
    assert first == third != second
