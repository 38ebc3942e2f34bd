"""The result file: a round trip, what it never holds, and what a reader refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench import results
from quire.bench.environment import Watch, environment
from quire.bench.limits import LimitsProbe, LimitsSample, mean
from quire.bench.recording import Recording
from quire.cli.main import main


def example() -> results.Result:
    return Recording("latency", ["quire", "bench", "latency", "/models/m", "--save=/tmp/a/out.json"]).result(
        limits=results.MachineLimits(
            "avx2", 2, results.spread([3e10, 4e10]), {"f32": results.spread([1e11])}
        ),
        settings={"model": "m", "rounds": 3},
        metrics={"latency": results.metric([3.0, 1.0, 2.0], "s", "lower")},
        definitions={"latency": "start to last token"},
        tables={"rounds": [{"round": 1, "seconds": 3.0, "note": None}]},
    )


def test_round_trip(tmp_path: Path) -> None:
    result = example()
    path = tmp_path / "new" / "result.json"
    results.save(result, path)
    assert results.load(path) == result
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    assert result.metrics["latency"].value == 2.0
    assert json.loads(results.to_json(result)) == json.loads(path.read_text())


def test_a_result_holds_no_absolute_path() -> None:
    assert example().command == ["quire", "bench", "latency", "m", "--save=out.json"]


def test_fields_of_a_later_writer_are_accepted_and_a_later_version_is_not(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    data = json.loads(results.to_json(example()))
    path.write_text(json.dumps({**data, "novelty": 1}))
    assert results.load(path).kind == "latency"
    path.write_text(json.dumps({**data, "version": results.VERSION + 1}))
    with pytest.raises(results.ResultError, match=r"r\.json: version: 2 is newer"):
        results.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: 'other' is not 'quire-bench'"),
        ({"metrics": {"latency": 3}}, r"metrics"),
        ({"limits": {"isa": "avx2"}}, r"limits"),
        ({"metrics": {"latency": {"value": 1, "unit": "s", "better": "bigger"}}}, "better|bigger"),
    ],
)
def test_wrong_files_are_refused_by_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**json.loads(results.to_json(example())), **change}))
    with pytest.raises(results.ResultError, match=message):
        results.load(path)


def test_files_that_are_not_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(results.ResultError, match="No such file"):
        results.load(path)
    path.write_text("[1, 2")
    with pytest.raises(results.ResultError, match="not a result of quire bench"):
        results.load(path)


def test_no_samples_have_no_value() -> None:
    assert results.metric([], "s").value is None


def test_environment_and_watch() -> None:
    found = environment()
    assert found.quire
    assert found.cpu
    assert 1 <= found.usable_cores <= found.cores
    assert found.memory > 1 << 20
    noise = Watch().stop()
    assert noise.others >= 0
    assert noise.seconds > 0


def test_limits_between_two_samples_are_their_mean() -> None:
    assert mean(LimitsSample(2.0, {"f32": 10.0}), LimitsSample(4.0, {"f32": 30.0})) == LimitsSample(
        3.0, {"f32": 20.0}
    )


def test_limits_of_a_small_arena() -> None:
    probe = LimitsProbe("baseline", 1, ("f32",))
    probe.sample()
    probe.sample()
    limits = probe.limits()
    assert (limits.isa, limits.threads, limits.bandwidth.count) == ("baseline", 1, 2)
    assert limits.bandwidth.low > 0
    assert set(limits.compute) == {"f32"}


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "nothing"])
    assert ended.value.code == 2
    assert "limits" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["bench", "limits", "--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["bench", "limits", "--help"])
    assert ended.value.code == 0
    assert "--threads" in capsys.readouterr().out
