"""Batching policies on a virtual clock: figures that theory gives exactly."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.bench.batching import (
    POLICIES,
    CostMachine,
    Job,
    SimulatedCost,
    compare_batching,
    interference,
    longest_over_mean,
    replay,
)
from quire.bench.statistics import percentile
from quire.cli.main import main
from quire.core.scheduler_config import SchedulerConfig

STEP = SimulatedCost(base=1.0, token=0.0)  # every step takes a second


def config(**options: object) -> SchedulerConfig:
    known = {"num_blocks": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    return SchedulerConfig(**{**known, **options})  # type: ignore[arg-type]


def jobs(lengths: list[int], due: float = 0.0) -> list[Job]:
    return [Job(due, [i, 1, 2], length) for i, length in enumerate(lengths)]


def test_static_batches_last_as_long_as_their_longest_member() -> None:
    run = replay(jobs([1, 2, 3, 10, 5, 5, 5, 5]), config(), CostMachine(STEP), "static")
    assert [record.finished for record in run.records] == [1, 2, 3, 10, 15, 15, 15, 15]
    assert len(run.steps) == 15
    assert run.slot_use == pytest.approx((1 + 2 + 3 + 10 + 20) / (4 * 15))


def test_continuous_fills_a_place_as_soon_as_it_is_free() -> None:
    run = replay(jobs([1, 2, 3, 10, 5, 5, 5, 5]), config(), CostMachine(STEP))
    assert [record.finished for record in run.records] == [1, 2, 3, 10, 6, 7, 8, 11]
    assert len(run.steps) == 11


def test_static_waits_for_a_full_batch_and_dynamic_for_a_while() -> None:
    work = [Job(0.0, [1], 2), Job(0.5, [2], 2), Job(9.0, [3], 2), Job(9.5, [4], 2)]
    static = replay(work, config(), CostMachine(STEP), "static")
    assert [record.times[0] for record in static.records] == [10.5] * 4
    dynamic = replay(work, config(), CostMachine(STEP), "dynamic", wait=2.0)
    assert [record.times[0] for record in dynamic.records] == [3.0, 3.0, 10.5, 10.5]
    full = replay(work, config(max_num_seqs=2), CostMachine(STEP), "dynamic", wait=100.0)
    assert full.records[0].times[0] == 1.5  # full at 0.5
    now = replay(work, config(), CostMachine(STEP))
    assert [record.times[0] for record in now.records] == [1.0, 2.0, 10.0, 11.0]


def test_the_measured_ratio_is_the_theorys() -> None:
    """Everything there at the start, every step equally long: static over continuous is L_max over L-mean."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 40) for _ in range(160)]
    found = compare_batching(jobs(lengths), config(), lambda: CostMachine(STEP))
    by_batch, whole = longest_over_mean(lengths, 4)
    assert found.theory == (by_batch, whole)
    assert found.ratio("continuous") == pytest.approx(by_batch, rel=0.05)
    assert found.step_ratio("continuous") == pytest.approx(by_batch, rel=0.05)
    assert found.ratio("continuous") == pytest.approx(200 / 100.5 * 0.8, rel=0.05)
    assert found.rate("dynamic") == pytest.approx(found.rate("static"))
    equal = compare_batching(jobs([10] * 16), config(), lambda: CostMachine(STEP))
    assert equal.ratio("continuous") == pytest.approx(1.0)  # no variance, nothing to gain
    tokens = {policy: run.summary.output_tokens for policy, run in found.runs.items()}
    assert set(tokens.values()) == {sum(lengths)}


def test_theory() -> None:
    assert longest_over_mean([1, 1, 1, 5, 2, 2, 2, 2], 4) == pytest.approx(((20 + 8) / 16, 5 / 2))
    with pytest.raises(ValueError, match="lengths"):
        longest_over_mean([], 4)


def test_chunked_prefill_bounds_the_delay_of_streams_by_a_long_prompt() -> None:
    cost = SimulatedCost(base=0.02, token=0.001)
    streams = [Job(0.0, [i], 60) for i in range(3)]
    prompt = Job(0.5, list(range(1000)), 2)
    chunked = interference(streams, prompt, config(max_num_batched_tokens=103), CostMachine(cost))
    whole = interference(streams, prompt, config(enable_chunked_prefill=False), CostMachine(cost))
    assert max(chunked.before) == pytest.approx(0.023)
    assert max(chunked.during) == pytest.approx(0.02 + 0.103)  # a step is never larger than its budget
    assert max(whole.during) == pytest.approx(0.02 + 1.003)  # the whole prompt at once
    assert whole.ttft < chunked.ttft  # what the prompt pays for it
    with pytest.raises(ValueError, match="no stream overlapped"):
        interference([Job(0.0, [1], 2)], Job(50.0, [1] * 100, 2), config(), CostMachine(cost))


def test_p99_of_running_streams_is_bounded_while_prompts_of_10_000_tokens_arrive() -> None:
    """Keys cost too, so late chunks of a prompt cost more than early ones; the bound counts them."""
    cost = SimulatedCost(base=0.02, token=0.001, key=1e-6)
    long, budget, streams = 10_000, 256, 8
    room = config(num_blocks=8192, max_num_seqs=16, max_model_len=16_384, max_num_batched_tokens=budget)
    jobs = [Job(0.0, [i], 400) for i in range(streams)]
    jobs += [Job(1.0 + 4 * i, [i, *range(long - 1)], 2) for i in range(3)]
    gaps = []
    for record in replay(jobs, room, CostMachine(cost)).records[:streams]:
        gaps += [end - start for start, end in pairwise(record.times)]
    bound = cost.base + cost.token * budget + cost.key * (streams * 401 + 3 * (long + 2))
    assert percentile(sorted(gaps), 99) <= max(gaps) <= bound
    assert (
        sum(gap > cost.base + cost.token * budget * 0.9 for gap in gaps) > streams * 3 * 30
    )  # prompts filled the steps
    whole = replace(room, max_num_batched_tokens=16_384, enable_chunked_prefill=False)
    stalled = replay(jobs, whole, CostMachine(cost)).records[0].times
    assert max(end - start for start, end in pairwise(stalled)) > 30 * bound


def test_pictures_show_every_policy_and_both_prefills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, report = (
        [str(tmp_path / f"{name}.json") for name in ("batching", "interference")],
        tmp_path / "page.html",
    )
    assert (
        main(
            ["bench", "batching", "--requests", "12", "--batch-size", "4", "--rate", "2", "--save", saved[0]]
        )
        == 0
    )
    assert main(["bench", "interference", "--prompt-len", "600", "--chunk", "64", "--save", saved[1]]) == 0
    assert main(["bench", "report", *saved, "-o", str(report)]) == 0
    capsys.readouterr()
    rows = json.loads(Path(saved[0]).read_text())["tables"]
    assert {row["policy"] for row in rows["policy_steps"]} == set(POLICIES)
    assert len(rows["policy_requests"]) == 12 * len(POLICIES)
    assert all(row["due"] <= row["first"] <= row["finished"] for row in rows["policy_requests"])
    gaps = json.loads(Path(saved[1]).read_text())["tables"]["stream_gaps"]
    worst = {name: max(row["gap"] for row in gaps if row["prefill"] == name) for name in ("chunked", "whole")}
    assert worst["chunked"] == pytest.approx(0.02 + 0.0005 * 68)
    assert worst["whole"] == pytest.approx(0.02 + 0.0005 * 604)
    page = report.read_text()
    figures = [element.text for element in ElementTree.fromstring(page.partition("\n")[2]).iter("figcaption")]
    titles = ["Places of the batch in use", *(f"Requests under {policy} batching" for policy in POLICIES)]
    assert figures == [*titles, "Gaps between tokens of the running streams"]
    assert "policy steps" not in page  # a row for each step is for the picture
