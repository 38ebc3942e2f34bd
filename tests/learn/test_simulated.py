"""Simulations that run the simulator: their figures are those of the scheduler, the metrics and the sweep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.bench.lesson import batches, pools, single
from quire.bench.lesson.plant import Plant
from quire.bench.lesson.production_experiments import experiment, factors
from quire.bench.lesson.simulated_lessons import SIMULATIONS
from quire.bench.request_metrics import compute_metrics
from quire.bench.simulated_server import Arrival
from quire.cli.main import main
from quire.core.scheduler_config import SchedulerConfig
from quire.learn.catalog import card
from quire.learn.scene import Scene

_BY_NAME = {one.name: one for one in SIMULATIONS}


def number(scene: Scene, label: str) -> float:
    return next(float(one.value) for one in scene.figures if one.label == label)


def shown(name: str, **values: str) -> Scene:
    return _BY_NAME[name].scene(values)


def test_latencies_are_those_of_the_benchmark() -> None:
    scene = shown("latency-metrics", load="4")
    times = scene.charts[0].series[0].x
    found = compute_metrics(float(times[0]), [float(at) for at in times])
    assert number(scene, "TPOT") == found["tpot_ms"]
    assert number(scene, "TTFT") == found["ttft_ms"]
    assert number(scene, "E2EL") == found["e2el_ms"]
    assert "40.82 ms" in scene.remark


def test_more_load_never_makes_tokens_faster() -> None:
    rates = [number(shown("latency-metrics", load=str(load)), "TPOT") for load in (1, 2, 8, 32, 128)]
    assert rates == sorted(rates)


def test_the_knee_is_that_of_the_sweep_and_the_zone_ends_at_the_level() -> None:
    scene = shown("throughput-latency")
    assert number(scene, "edge of the zone") == 100
    curve = single._curve("Llama 3 8B", card("NVIDIA L4 24 GB").title, 100, 50)
    knee = single._knee(curve, 50, 100.0)
    assert number(scene, "most goodput") == knee.best.goodput
    assert knee.highest_served is not None
    assert knee.lowest_unserved is not None
    assert knee.highest_served < knee.lowest_unserved
    assert number(shown("throughput-latency", slo_ms="1"), "most goodput") == 0


def test_all_kinds_of_batching_serve_the_same_tokens() -> None:
    (table,) = shown("batching").tables
    assert len({row[-1] for row in table.rows}) == 1
    latency = {row[0]: float(row[2].split()[0]) for row in table.rows}
    assert latency["continuous"] < latency["dynamic"] <= latency["static"]


@pytest.mark.parametrize("variance", [0, 20, 50, 100])
def test_a_closed_batch_lasts_as_its_longest_answer(variance: int) -> None:
    ran, formula = batches.closed_ratio(variance, seed=3)
    assert ran == pytest.approx(formula, rel=0.05)
    assert (ran == 1) == (variance == 0)


def test_prompts_of_others_interrupt_answers_only_on_shared_cards() -> None:
    figures = {
        (mode, load): number(shown("pools", mode=mode, load=str(load)), "ITL, p99")
        for mode in pools.MODES
        for load in (1.0, 6.0)
    }
    assert figures["colocated", 6.0] > 2 * figures["disaggregated", 6.0]
    assert figures["disaggregated", 6.0] < 1.3 * figures["disaggregated", 1.0]
    moved = {row[0]: row[1:] for row in shown("pools").tables[0].rows}
    assert moved["KV cache"][0] == "640 MiB"
    assert moved["infiniband-ndr"][0] == "13.42 ms"  # lessons divide MiB by GB/s: 12.8
    assert moved["infiniband-ndr"][1].startswith("separate")
    assert moved["ethernet-100g"][1].startswith("keep")


def test_a_server_shows_its_queue_and_what_is_wrong() -> None:
    scene = shown("production", rate="3")
    assert number(scene, "output") > 0
    assert scene.charts[0].series[0].name == "waiting"
    assert number(shown("production", rate="3", prefix_cache="true"), "TTFT, mean") < number(
        scene, "TTFT, mean"
    )
    with pytest.raises(ValueError, match="gpus: the weights of Llama 3 70B leave no room"):
        shown("production", model="Llama 3 70B")
    with pytest.raises(ValueError, match="batching: several replicas"):
        shown("production", gpus="2", layout="replicas", batching="static")


def test_a_changed_engine_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are what the scheduler decides: with half of the budget of a step, others come out."""
    arrivals = [Arrival(0.0, range(3000), 20)]
    plant = Plant(model="Llama 3 8B", device=card("NVIDIA L4 24 GB"))
    before = plant.serve(arrivals).steps
    config = Plant.config
    monkeypatch.setattr(Plant, "config", lambda self: _narrow(config(self)))
    assert plant.serve(arrivals).steps > before


def _narrow(config: SchedulerConfig) -> SchedulerConfig:
    return replace(config, max_num_batched_tokens=config.max_num_batched_tokens // 4)


def test_the_command_runs_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "experiment", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Prefix cache" in printed
    assert "holds: the first token comes earlier" in printed
    assert main(["sim", "experiment", "8"]) == 2


# The command runs the third in every `make test`; the last three take a minute.
IN_TURN = [pytest.param(n, marks=() if n in {1, 2, 4} else pytest.mark.simulator) for n in range(1, 8)]


@pytest.mark.parametrize("number", IN_TURN)
def test_experiments_come_out_as_lessons_say(number: int) -> None:
    found = experiment(number)
    assert [sentence for sentence, holds in found.holds if not holds] == []


@pytest.mark.simulator
def test_factors_multiply_to_what_all_bring() -> None:
    *each, product = factors()
    assert len(each) == 3
    assert float(product.value) > 1
