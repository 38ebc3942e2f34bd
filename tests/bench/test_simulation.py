"""The simulator decides as the engine does, and keeps the laws of queues."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.bench.simulated_arrivals import SimulationError, arrivals_of_trace, load_of_log
from quire.bench.simulated_server import Arrival, SimulatedServer
from quire.bench.traces import TraceRow
from quire.cli.calc import named_size
from quire.cli.main import main
from quire.core.cost_model import FEATURES
from quire.core.scheduler_config import SchedulerConfig
from quire.planner.devices import device
from quire.planner.step_bound import StepBound
from quire.steplog import log_rows as rows
from quire.steplog.log_files import Log, LogFile, read_log, read_rows
from steplog.storm import engine, request, storm


def made_arrivals(seed: int, count: int) -> list[Arrival]:
    rng, at, found = random.Random(seed), 0.0, []
    base = [rng.randrange(1, 40) for _ in range(40)]
    for _ in range(count):
        at += rng.expovariate(200.0)
        prompt = base[: rng.randint(1, 40)] + [rng.randrange(1, 40) for _ in range(rng.randint(0, 10))]
        found.append(Arrival(at, prompt, rng.randint(1, 25)))
    return found


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 24}, {"policy": "sjf"}, {"policy": "lpm", "num_blocks": 30}]
)
def test_it_decides_as_the_engine_does_given_the_same_step_times(options: dict[str, Any]) -> None:
    arrivals = made_arrivals(3, 60)
    core, _, clock = engine(5, **options)
    clock.cost = 0
    clock_zero, coming = clock.now, list(enumerate(arrivals))
    seen: list[tuple[object, ...]] = []
    while coming or core.has_work():
        while coming and clock_zero + round(coming[0][1].at * 1e9) <= clock.now:
            index, one = coming.pop(0)
            request(
                core, str(index), list(one.prompt), clock, max_tokens=one.output, ignore_eos=True, arrival=one.at
            )  # fmt: skip
        if core.has_work():
            core.step()
            seen.append(state(core.scheduler))
        elif coming:
            clock.now = clock_zero + round(coming[0][1].at * 1e9)
    assert core.recorder is not None
    log = [r for r in read_rows(core.recorder.ring()).rows if isinstance(r, rows.Step)]
    times = iter([step.updated / 1e9 for step in log])
    config = core.scheduler.config
    server = SimulatedServer(config, lambda _: next(times), noise=0.0)
    again: list[tuple[object, ...]] = []
    served = server.run(arrivals, lambda one: again.append(state(one.scheduler)))
    assert again == seen
    assert served.preemptions == core.scheduler.num_preemptions


def state(scheduler: Any) -> tuple[object, ...]:
    running = tuple((seq.seq_id, seq.computed, len(seq.tokens)) for seq in scheduler.running)
    return scheduler.step_counts, running, scheduler.num_waiting, scheduler.blocks_used


def test_littles_law_and_conservation() -> None:
    arrivals = made_arrivals(1, 300)
    costs = (0.002, 1e-4, 5e-5, 0.0, 0.0, 0.0, 0.0, 0.0)
    config = SchedulerConfig(num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    areas, last = [0.0], [0.0, 0]

    def look(server: SimulatedServer) -> None:
        areas[0] += last[1] * (server.now - last[0])
        last[:] = [server.now, server.scheduler.num_running + server.scheduler.num_waiting]

    server = SimulatedServer(config, costs, noise=0.0)
    served = server.run(arrivals, look)
    assert all(r.output_tokens == a.output for r, a in zip(served.records, arrivals, strict=True))
    # N(t) is looked at between steps, so it is right up to a step for each request
    inside = sum((r.finished or 0.0) - (r.sent or 0.0) for r in served.records)
    step = 0.002 + 64 * 1e-4
    assert abs(areas[0] - inside) <= 2 * step * len(arrivals)
    assert server.scheduler.blocks_used == 0


@pytest.mark.simulator
def test_a_queue_with_one_place_waits_as_theory_says() -> None:
    """M/D/1: W = s + ρ s / (2 (1 − ρ))."""
    service, rho, rng, at = 0.01, 0.7, random.Random(2), 0.0
    arrivals = []
    for _ in range(40_000):
        at += rng.expovariate(rho / service)
        arrivals.append(Arrival(at, [1], 1))
    config = SchedulerConfig(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=16)
    served = SimulatedServer(config, (service, *[0.0] * (len(FEATURES) - 1)), noise=0.0).run(arrivals)
    waits = [(one.finished or 0.0) - one.scheduled for one in served.records]
    expected = service + rho * service / (2 * (1 - rho))
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.05)


@pytest.mark.simulator
def test_many_places_share_the_processor_as_theory_says() -> None:
    """M/G/1 with processor sharing: W = E[S] / (1 − ρ), whatever the distribution of lengths."""
    token, rho, mean, rng, at = 1e-4, 0.6, 100, random.Random(3), 0.0
    arrivals = []
    for _ in range(6000):
        at += rng.expovariate(rho / (mean * token))
        arrivals.append(Arrival(at, [1], max(1, min(4000, int(rng.expovariate(1 / mean))))))
    config = SchedulerConfig(
        num_blocks=60_000, max_num_seqs=500, max_num_batched_tokens=1000, max_model_len=8192
    )
    served = SimulatedServer(config, (0.0, token, token, *[0.0] * 5), noise=0.0).run(arrivals)
    waits = [(one.finished or 0.0) - one.scheduled for one in served.records]
    work = sum(one.output for one in arrivals) / len(arrivals) * token
    load = work / (arrivals[-1].at / len(arrivals))
    assert sum(waits) / len(waits) == pytest.approx(work / (1 - load), rel=0.15)


@pytest.mark.simulator
@pytest.mark.parametrize("seed", range(40))
def test_storms_are_replayed(tmp_path: Path, seed: int) -> None:
    from quire.offline.replay_log import replay

    rng = random.Random(seed)
    options = {"num_blocks": rng.choice([24, 40]), "policy": rng.choice(["fcfs", "sjf", "lpm", "priority+fair"]),
               "max_draft_tokens": rng.choice([0, 6]), "max_num_seqs": rng.randint(2, 6)}  # fmt: skip
    core, _ = storm(seed, 150, file=LogFile(tmp_path / "a.qlog", 2**26), **options)
    assert core.recorder is not None
    core.recorder.close()
    assert replay(read_log(tmp_path / "a.qlog")).difference == ""


def test_traces_share_tokens_where_their_blocks_are_equal() -> None:
    trace = [TraceRow(0.0, 1100, 5, (1, 2), 512), TraceRow(2.0, 1030, 5, (1, 3), 512), TraceRow(3.0, 9000, 5)]
    found = arrivals_of_trace(trace)
    assert [one.at for one in found] == [0.0, 2.0, 3.0]
    assert [len(one.prompt) for one in found] == [1100, 1030, 9000]
    same = next(i for i, (a, b) in enumerate(zip(found[0].prompt, found[1].prompt, strict=False)) if a != b)
    assert same == 512
    with pytest.raises(SimulationError, match="no arrival times"):
        arrivals_of_trace([TraceRow(None, 1, 1)])


def test_a_log_is_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.qlog"
    core, names = storm(4, 30, file=LogFile(path, 2**24))
    assert core.recorder is not None
    core.recorder.close()
    load = load_of_log(read_log(path))
    assert 20 <= len(load.arrivals) <= len(names)
    assert load.config == core.scheduler.config
    assert main(["sim", "--log", str(path), "--max-num-seqs", "2"]) == 0
    assert "ttft" in capsys.readouterr().out
    trace = tmp_path / "timed.jsonl"
    lines = [
        {"timestamp": i, "input_length": 12, "output_length": 4, "hash_ids": [1, 2, 10 + i]} for i in range(9)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    timed = ["--trace", str(trace), "--trace-format", "timed-trace:4:2"]
    assert main(["sim", "--log", str(path), *timed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["left_out"]) == (9, 0)
    assert found["hit_share"] == pytest.approx(8 * 8 / (9 * 12))
    assert main(["sim", "--log", str(path), "--trace", str(trace), "--trace-format", "mooncake"]) == 2
    assert "trace-format: 'mooncake' is not timed-trace" in capsys.readouterr().err
    with pytest.raises(SimulationError, match="no request has ended"):
        load_of_log(Log(read_log(path).rows[:2]))


def test_the_roofline_is_the_longer_of_arithmetic_and_memory() -> None:
    model, gpu = named_size("llama-3-8b"), device("a100")
    time = StepBound(model=model, device=gpu).seconds
    alone, batch = time((1, 1, 0, 1000, 0, 0, 0, 0)), time((1, 64, 0, 0, 0, 0, 0, 0))
    weights = model.params_b * 2 / gpu.bandwidth_gb_s
    assert alone == pytest.approx(weights + 2 * model.kv_values * 1000 / gpu.bandwidth_gb_s / 1e9)
    assert batch == pytest.approx(weights)
    prompt = time((1, 0, 4096, 0, 0, 0, 0, 0))
    assert prompt == pytest.approx(2 * model.active_b * 4096 / gpu.tflops["bf16"] / 1e3)
    assert time((1, 0, 4096, 0, 1e6, 0, 0, 0)) > prompt
