"""A log runs again: the same decisions, step by step."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.live import LiveEngineConfig
from quire.config.shipped import shipped_models
from quire.offline.replay_log import ReplayError, replay, schedule_digest
from quire.steplog import log_rows as rows
from quire.steplog.log_files import HEADER, Log, LogFile, framed, read_log

from .storm import engine, request, storm

SHAPES: list[dict[str, Any]] = [
    {},
    {"num_blocks": 24},
    {"max_draft_tokens": 6},
    {"enable_prefix_caching": False},
    {"policy": "sjf"},
    {"policy": "lpm", "num_blocks": 30},
    {"policy": "priority+fair"},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 60},
    {"slo": ("chat:ttft=500ms,tpot=3ms",)},
    {"num_blocks": 24, "steps_in_flight": 2, "takes_turns": True},
    {"max_draft_tokens": 6, "steps_in_flight": 2, "takes_turns": True},
    {"slo": ("chat:ttft=500ms,tpot=3ms",), "steps_in_flight": 2, "takes_turns": True},
    {"num_blocks": 24, "max_draft_tokens": 6, "policy": "edf"},
    {"copy_partial": True, "block_size": 8},
    {"copy_partial": True, "block_size": 8, "num_blocks": 12, "steps_in_flight": 2, "takes_turns": True},
    {"copy_partial": True, "block_size": 8, "num_blocks": 12, "policy": "lpm"},
]


def recorded(tmp_path: Path, seed: int, *, prompts: bool = False, **options: Any) -> Log:
    path = tmp_path / f"{seed}.qlog"
    core, _ = storm(seed, file=LogFile(path, 2**26), prompts=prompts, **options)
    assert core.recorder is not None
    core.recorder.close()
    return read_log(path)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_storm_gives_the_same_schedule(tmp_path: Path, shape: int) -> None:
    preempted = 0
    for seed in (1, 2):
        log = recorded(tmp_path, 100 * shape + seed, prompts=seed == 2, **SHAPES[shape])
        steps = [row for row in log.rows if isinstance(row, rows.Step)]
        preempted += sum(len(step.preempted) for step in steps)
        found = replay(log)
        assert found.difference == ""
        assert found.steps == len(steps)
        assert found.digest == schedule_digest(steps)
    assert preempted or SHAPES[shape].get("num_blocks", 40) == 40, "the storm preempts nothing"


def test_the_first_difference_stops_a_replay_and_is_told(tmp_path: Path) -> None:
    log = recorded(tmp_path, 1)
    index = [i for i, row in enumerate(log.rows) if isinstance(row, rows.Step)][20]
    step = log.rows[index]
    assert isinstance(step, rows.Step)
    changed = [*step.rows]
    changed[1] += 1
    forged = rows.Step(**{name: getattr(step, name) for name in step.__struct_fields__} | {"rows": changed})
    found = replay(Log([*log.rows[:index], forged, *log.rows[index + 1 :]]))
    assert found.steps == 20
    assert found.difference.startswith(f"step {step.number}: rows: ")


def test_a_clock_reading_that_differs_changes_decisions(tmp_path: Path) -> None:
    """Negative control: the controller goes by the times of steps, which are in the log."""
    log = recorded(tmp_path, 5, slo=("chat:ttft=500ms,tpot=3ms",))
    slower = [
        rows.Step(
            **{name: getattr(row, name) for name in row.__struct_fields__} | {"updated": 3 * row.updated}
        )
        if isinstance(row, rows.Step)
        else row
        for row in log.rows
    ]
    assert replay(log).difference == ""
    assert "limits" in replay(Log(slower)).difference


def test_a_cut_log_is_replayed_up_to_the_cut(tmp_path: Path) -> None:
    log = recorded(tmp_path, 3)
    cut = Log(log.rows[: len(log.rows) // 2])
    found = replay(cut)
    assert found.difference == ""
    assert found.steps == sum(isinstance(row, rows.Step) for row in cut.rows)


def test_what_is_not_replayed_is_refused_by_name(tmp_path: Path) -> None:
    log = recorded(tmp_path, 1)
    opened = log.rows[0]
    assert isinstance(opened, rows.Opened)
    fields = {name: getattr(opened, name) for name in opened.__struct_fields__}
    for change, word in (({"part": 2}, "files are missing"), ({"swap": True}, "swap_space")):
        with pytest.raises(ReplayError, match=word):
            replay(Log([rows.Opened(**fields | change), *log.rows[1:]]))
    with pytest.raises(ReplayError, match="not those of this version"):
        replay(Log([rows.Opened(**fields | {"options": {"groups": []}}), *log.rows[1:]]))
    with pytest.raises(ReplayError, match="empty"):
        replay(Log([]))


def test_output_may_fill_a_block_of_a_prompt_that_comes_later(tmp_path: Path) -> None:
    """The end of a prompt and the first tokens of its output equal by chance a block of others, who find it."""
    path = tmp_path / "a.qlog"
    core, _ = storm(24, 150, file=LogFile(path, 2**26), policy="sjf", max_num_seqs=3)
    assert core.recorder is not None
    core.recorder.close()
    assert replay(read_log(path)).difference == ""


def test_changes_of_the_configuration_and_floors_of_tenants_are_replayed(tmp_path: Path) -> None:
    path, clock_ms = tmp_path / "a.qlog", 1_000_000
    core, _, clock = engine(
        7, file=LogFile(path, 2**26), num_blocks=40, policy="fcfs", floors={"a": 12}, max_num_seqs=4
    )
    rng = random.Random(7)
    for i in range(90):
        prompt = [rng.randrange(1, 40) for _ in range(rng.randint(1, 40))]
        request(core, f"r{i}", prompt, clock, max_tokens=rng.randint(1, 20), tenant=rng.choice(["a", "b"]),
                account=rng.choice(["x", "y"]), ignore_eos=True)  # fmt: skip
        if i in {30, 60}:
            policy, share = ("sjf", 0.5) if i == 30 else ("fair", 0.1)
            core.configure(
                LiveEngineConfig(
                    max_num_seqs=3 if i == 30 else 4, max_num_batched_tokens=20, max_draft_tokens=0,
                    scheduling_policy=policy, overtake_ms=500.0, slo=("chat:ttft=50ms,tpot=3ms",) if i == 60 else (),
                    cache_shares={"b": share},
                )
            )  # fmt: skip
        core.step()
        clock.now += clock_ms * rng.randint(0, 3)
    while core.has_work():
        core.step()
    assert core.recorder is not None
    core.recorder.close()
    log = read_log(path)
    found = replay(log)
    assert found.difference == ""
    assert found.steps == sum(isinstance(row, rows.Step) for row in log.rows)
    # negative controls: without a change, and without the floors, other steps come
    changes = [row for row in log.rows if isinstance(row, rows.Reconfigured)]
    assert len(changes) == 2
    assert "b" not in changes[0].options["cache_shares"], "tenants have no names in a log"
    for change in changes:
        assert replay(Log([row for row in log.rows if row is not change])).difference != ""
    forged = rows.Reconfigured(changes[0].at, changes[0].options | {"colour": 1})
    with pytest.raises(ReplayError, match="not of this version"):
        replay(Log([forged if row is changes[0] else row for row in log.rows]))


def test_the_command_replays_a_file_and_its_remains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, 1)
    path = tmp_path / "1.qlog"
    assert main(["replay", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["difference"], found["damage"], found["cut"], found["requests"] > 20) == ("", "", "", True)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "the same" in out
    assert f"note: {path}: damaged at byte" in out
    assert "note: the engine did not end in order" in out
    assert main(["replay", str(path), "--speed", "-1"]) == 2


def test_steps_begin_as_far_apart_as_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorded(tmp_path, 1)
    began = log.rows[0].at  # type: ignore[union-attr]
    due = [(row.at - began) / 1e9 for row in log.rows if isinstance(row, rows.Step)]
    assert replay(log, speed=due[-1] / 0.02).seconds >= 0.02
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(sum(seen[-1:]) + seconds)

    clock = SimpleNamespace(
        sleep=sleep, monotonic=lambda: sum(seen[-1:]), monotonic_ns=lambda: round(1e9 * sum(seen[-1:]))
    )
    monkeypatch.setattr("quire.offline.replay_log.time", clock)
    for speed in (1.0, 10.0):
        seen.clear()
        found = replay(log, speed=speed)
        assert found.difference == ""
        assert seen == pytest.approx([at / speed for at in due], abs=1e-6)


def test_a_model_computes_the_recorded_tokens_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With drawn tokens, several samples and preemptions; and a token that was another one is found."""
    path, options = (
        tmp_path / "a.qlog",
        {"max_num_seqs": 8, "num_kv_blocks": 24, "max_model_len": 128, "threads": 1},
    )
    with LLM("quire-mini", progress=False, record=str(path), record_prompts=True, **options) as llm:  # type: ignore[arg-type]
        made = llm.generate(
            ["Once upon a time", "The quick brown", "Once upon a river", "Hello"],
            SamplingParams(temperature=1.0, max_tokens=60, n=2, ignore_eos=True),
        )
    tokens = sum(len(one.token_ids) for each in made for one in each.outputs)
    again = ["replay", str(path), "--model", str(shipped_models()["quire-mini"]), "--threads", "1", "--json"]
    assert main(again) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["difference"], found["requests"], found["compared_tokens"]) == ("", 4, tokens)
    log = read_log(path).rows
    assert any(row.preempted for row in log if isinstance(row, rows.Step)), "nothing gave way"
    at, ended = next((i, row) for i, row in enumerate(log) if isinstance(row, rows.Ended))
    ids = array("i", ended.chain.tokens)
    ids[5] ^= 1
    chain = rows.TokenChain(ended.chain.like, ended.chain.shared, ended.chain.digest, ids.tobytes())
    log[at] = rows.Ended(ended.at, ended.number, ended.sample, ended.reason, ended.tokens, chain)
    path.write_bytes(HEADER + b"".join(framed(rows.encode(row)) for row in log))
    assert main(again) == 1
    assert f"token 5 of its output was {ids[5]}, and is {ids[5] ^ 1} now" in capsys.readouterr().out
