"""Steps that overlap in a pipeline: the bits of one rank, whatever happens between the halves of a step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.rank_processes import Wide, answers, asked, bits, make
from quire import LLM, SamplingParams, StructuredOutput
from quire.beams import Beams
from quire.engine.api import Ask
from quire.engine.build import rank_processes
from quire.engine.sync_engine import SyncEngine
from quire.executor.base import HalfStep, Outputs
from quire.executor.native_ranks import LeadingExecutor
from quire.executor.ranked import RankLostError, SharedStep
from quire.offline.replay_log import replay
from quire.outputs import RequestOutput
from quire.steplog.log_files import read_rows

STAGES = {"pipeline_parallel_size": 2}


@contextmanager
def counted_halves() -> Iterator[list[int]]:
    """Commands in which two steps ran, and those in which one did."""
    counts, run = [0, 0], LeadingExecutor.run_halves

    def counting(self: LeadingExecutor, first: HalfStep | None, second: HalfStep | None) -> Outputs:
        counts[first is None or second is None] += 1
        return run(self, first, second)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeadingExecutor, "run_halves", counting)
        yield counts


def test_halves_of_two_steps_run_at_once(wide: Wide) -> None:
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    began = time.monotonic()
    with make(wide("qwen3"), **STAGES) as llm, counted_halves() as counts:
        assert answers(llm) == alone
        worked = [seconds for seconds, _ in llm.built.core.rank_seconds()]
    assert counts[0] > 10, counts
    assert len(worked) == 2
    assert all(0 < seconds < time.monotonic() - began for seconds in worked)


def test_a_half_that_takes_what_the_other_step_left_has_other_bits(
    wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the leading rank reads the hand-over of the step beside its own."""
    with make(wide("qwen3")) as llm:
        alone = answers(llm)
    take = SharedStep._take_residual
    monkeypatch.setattr(
        SharedStep,
        "_take_residual",
        lambda self, executor, tokens, twin, same: take(self, executor, tokens, 1 - twin, same=same),
    )
    with make(wide("qwen3"), **STAGES) as llm:
        assert answers(llm) != alone


def asks(chance: random.Random, count: int) -> list[Ask]:
    """Requests of all kinds, whose prompts begin alike."""
    common, made = [chance.randrange(3, 128) for _ in range(40)], []
    for seed in range(count):
        prompt = common[: chance.choice([0, 0, 16, 40])] + [
            chance.randrange(3, 128) for _ in range(chance.randint(1, 30))
        ]
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.8]), seed=seed, max_tokens=chance.randint(1, 25), logprobs=2,
            ignore_eos=chance.random() < 0.7, n=chance.choice([1, 1, 1, 2]),
            repetition_penalty=chance.choice([1.0, 1.3]),
        )  # fmt: skip
        ask = Ask(prompt=prompt, params=params)
        match chance.randrange(20):
            case 0:
                ask = replace(ask, params=replace(params, prompt_logprobs=2))
            case 1:
                ask = replace(ask, params=replace(params, structured=StructuredOutput(regex="[a-c]{3,9}")))
            case 2:
                ask = replace(ask, params=replace(params, guidance_scale=2.0), negative_prompt=prompt[-3:])
            case 3:
                ask = replace(ask, params=SamplingParams(max_tokens=9, temperature=0), beams=Beams(width=2))
            case 4:
                ask = replace(ask, prediction=[prompt[-1]] * 8)
            case _:
                pass
        made.append(ask)
    return made


def life(llm: LLM, seed: int, *, aborts: bool) -> list[Any]:
    """What requests get that come, and partly go, while others run: tokens and log-probabilities of each sample, and
    why it ended."""
    chance = random.Random(seed)
    waiting, engine = asks(random.Random(seed), 14), SyncEngine(llm.built)
    outputs: list[RequestOutput] = []
    while waiting or engine.has_work():
        while waiting and chance.random() < 0.5:
            outputs.append(engine.add(waiting.pop()))
        if aborts and outputs and chance.random() < 0.06:
            engine.abort(chance.choice(outputs).request_id)
        engine.step()
    engine.step()  # an empty one, which lets the worker forget the last sequences
    llm.built.core.scheduler.audit()
    return [
        [
            (
                s.token_ids,
                [each.logprob for position in s.logprobs or [] for each in position],
                s.finish_reason,
            )
            for s in output.outputs
        ]
        for output in outputs
    ]


def check_life(found: list[Any], expected: list[Any]) -> int:
    """Each request got what it gets alone, up to where it was aborted; how many were."""
    aborted = 0
    for samples, right in zip(found, expected, strict=True):
        for (tokens, logprobs, reason), (all_tokens, all_logprobs, right_reason) in zip(
            samples, right, strict=True
        ):
            aborted += reason == "abort"
            if reason != "abort":
                assert (tokens, logprobs, reason) == (all_tokens, all_logprobs, right_reason)
            elif all_logprobs:  # a beam search that was aborted has other beams
                assert tokens == all_tokens[: len(tokens)]
                assert logprobs == all_logprobs[: len(logprobs)]
    return aborted


LIVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "few blocks": ("qwen3", {"num_kv_blocks": 9}, STAGES),
    "windows": ("qwen2-mixed-windows", {}, STAGES),
    "latents": ("deepseek3", {}, STAGES),
    "swap": ("llama3.1", {"num_kv_blocks": 9, "swap_space": 2**20}, STAGES),
    "int8": ("qwen3-moe", {"quantization": "int8"}, STAGES | {"tensor_parallel_size": 2}),
    "four": ("gpt-oss", {"kv_cache_dtype": "int8"}, {"pipeline_parallel_size": 4}),
}


def check_lives(folder: Any, options: dict[str, Any], plan: dict[str, Any], seeds: range) -> None:
    expected = {}
    with make(folder, **options) as llm:
        for seed in seeds:
            expected[seed] = life(llm, seed, aborts=False)
    aborted = 0
    with make(folder, **options, **plan) as llm, counted_halves() as counts:
        for seed in seeds:
            aborted += check_life(life(llm, seed, aborts=True), expected[seed])
    assert aborted
    assert counts[0] > 10 * len(seeds), counts


def test_preempted_sequences(wide: Wide) -> None:
    """Sequences that outgrow the cache between the halves of a step."""
    prompts = [np.random.default_rng(seed).integers(3, 128, 20).tolist() for seed in range(4)]
    params = SamplingParams(max_tokens=60, temperature=0, logprobs=1, ignore_eos=True)
    found = []
    for plan in ({}, STAGES):
        with make(wide("qwen3"), num_kv_blocks=10, **plan) as llm:
            found.append([bits(output) for output in llm.generate(prompts, params)])
            assert llm.built.core.scheduler.num_preemptions > 0
    assert found[0] == found[1]


def test_any_life(wide: Wide) -> None:
    check_lives(wide("qwen3"), {"num_kv_blocks": 9}, STAGES, range(2))


@pytest.mark.ranks
@pytest.mark.parametrize("name", LIVES)
def test_any_life_of_any_plan(wide: Wide, name: str) -> None:
    model, options, plan = LIVES[name]
    check_lives(wide(model), options, plan, range(12))


def test_a_log_of_overlapping_steps_is_replayed(wide: Wide) -> None:
    rows, params = asked()
    with make(wide("qwen3"), **STAGES) as llm:
        llm.generate(rows[:4], params[:4])  # a copy of a part of a block is not in a log
        assert llm.built.core.recorder is not None
        log = read_rows(llm.built.core.recorder.ring())
    found = replay(log)
    assert found.difference == ""
    assert found.steps > 20


def keep_busy(engine: SyncEngine, prompts: list[list[int]], params: SamplingParams) -> None:
    while True:
        if not engine.has_work():
            for prompt in prompts:
                engine.add(Ask(prompt=prompt, params=params))
        engine.step()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.ranks)]
)  # it takes three seconds to see that a rank hangs
def test_a_stage_that_dies_between_the_halves_ends_the_step(wide: Wide, number: signal.Signals) -> None:
    with make(wide("qwen3"), **STAGES) as llm:
        assert llm.built.ranks is not None
        prompts = [np.random.default_rng(seed).integers(3, 128, 20).tolist() for seed in range(3)]
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        engine = SyncEngine(llm.built)
        for prompt in prompts:
            engine.add(Ask(prompt=prompt, params=params))
        for _ in range(4):
            engine.step()
        assert llm.built.core._next is not None
        os.kill(llm.built.ranks.pids[0], number)
        reason = "was killed by SIGKILL" if number == signal.SIGKILL else "does not answer"
        with pytest.raises(RankLostError, match=f"rank 0 of 2 {reason}"):
            keep_busy(engine, prompts, params)


@pytest.mark.ranks
def test_stages_end_by_themselves_in_the_middle_of_a_step(
    wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half still runs a step when all are to end: its first stage stands still until it is waited for."""
    monkeypatch.setattr(rank_processes, "_END_SECONDS", 60.0)  # those that do not end by then are killed
    with make(wide("gpt-oss"), pipeline_parallel_size=4) as llm:
        ranks, executor, engine = llm.built.ranks, llm.built.executor, SyncEngine(llm.built)
        assert ranks is not None
        assert isinstance(executor, LeadingExecutor)
        for seed in range(3):
            prompt = np.random.default_rng(seed).integers(3, 128, 20).tolist()
            engine.add(Ask(prompt=prompt, params=SamplingParams(max_tokens=60, ignore_eos=True)))
        for _ in range(4):
            engine.step()
        executor._settle()
        stopped, settle = ranks.pids[0], LeadingExecutor._settle

        def settling(self: LeadingExecutor, first: int = 0) -> None:
            os.kill(stopped, signal.SIGCONT)
            settle(self, first)

        os.kill(stopped, signal.SIGSTOP)
        engine.step()
        assert llm.built.core._next is not None
        monkeypatch.setattr(LeadingExecutor, "_settle", settling)
    assert {process.returncode for process in ranks._processes.values()} == {0}
