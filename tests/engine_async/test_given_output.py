"""Output that a request goes on behind counts as a part of its prompt where work to come is counted, and is no new
token."""

from __future__ import annotations

import asyncio
import random
from array import array
from dataclasses import replace
from typing import Any, cast

import pytest

from core.scheduling import config, run
from engine_async.running import ask
from engine_async.test_admission import door
from engine_async.test_outlook import STATS, STEP, SWING, TOKEN
from quire.config.schema import SchedulerOptions
from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.service_estimates import ServiceEstimates
from quire.engine.api import EngineUnavailableError, GenerateAsk, OverloadedError
from quire.engine.core import EngineCore
from quire.engine.front.given_texts import GivenTexts
from quire.engine.front.outlook import Outlook
from quire.engine.front.output import OutputBuilder
from quire.engine.front.stream import LiveRequest
from quire.engine.request_forms import check_given
from quire.objectives import ServiceTerms
from quire.steplog import log_rows as rows
from quire.steplog.log_files import read_rows
from quire.types import Request, RequestError, SamplingParams, TokenIds
from steplog.storm import engine

PROMPT, GIVEN = 5, 40


def behind(name: str, given: int = GIVEN, n: int = 1, account: str = "", **params: int) -> Request:
    limits = SamplingParams(n=n, ignore_eos=True, **{"max_tokens": 60, **params})
    return Request(
        request_id=name,
        prompt_token_ids=TokenIds(range(1, PROMPT + 1)),
        params=limits,
        given=(TokenIds(range(6, 6 + given)),) * n,
        terms=ServiceTerms(account=account),
    )


def test_the_queue_counts_it() -> None:
    admission = door(max_tokens=100, num_blocks=64, max_num_seqs=1)
    admission.admit(1, GenerateAsk(request=behind("1")), 0.0)
    assert admission.waiting_tokens == PROMPT + GIVEN
    admission.admit(2, GenerateAsk(request=behind("2")), 0.0)
    with pytest.raises(OverloadedError, match="45 more exceed"):
        admission.admit(3, GenerateAsk(request=behind("3")), 0.0)
    admission.admit(4, GenerateAsk(request=replace(behind("4"), given=())), 0.0)


def test_the_time_to_its_first_token_has_it() -> None:
    """And what it will still take does not have what it has already."""
    said: list[float] = []
    outlook = Outlook(SchedulerConfig(num_blocks=100), SchedulerOptions())
    for request in (behind("a"), replace(behind("b"), given=())):
        outlook.check(GenerateAsk(request=request, predicted=said.append), [], request.arrival, STATS)
    assert said[0] - said[1] == pytest.approx(GIVEN * TOKEN, abs=SWING)
    lengths = ServiceEstimates(StepCostModel(STATS.step_costs))
    assert lengths.new_tokens(behind("a")) == 60 - GIVEN
    assert lengths.seconds(behind("a")) == pytest.approx(
        lengths.costs.prompt_seconds(PROMPT + GIVEN) + (60 - GIVEN) * STEP
    )


def test_one_that_has_no_new_token_is_still_to_be_computed() -> None:
    outlook = Outlook(SchedulerConfig(num_blocks=100), SchedulerOptions())
    outlook.check(ask("first", range(PROMPT), predicted=lambda _: None), [], 0.0, STATS)
    request = behind("a")
    live = LiveRequest(1, request, OutputBuilder(request, None, None, lambda _: None))
    live.following.given(request)
    work = outlook._live(live).work
    assert (work.prompt, work.computed, work.output) == (PROMPT + GIVEN, 0, 60 - GIVEN)
    live.following.grow(0, [7], 1.0)
    work = outlook._live(live).work
    assert (work.prompt, work.computed) == (0, PROMPT + GIVEN + 1)


def test_one_whose_text_cannot_be_made_ends_with_an_error() -> None:
    """Whatever goes wrong there: nobody waits for a request that is never launched."""

    class Broken:
        async def apart(self, *_: object) -> None:
            raise RuntimeError("cannot schedule new futures")

    ended: list[Exception] = []
    given = GivenTexts(lambda _: ended.append(AssertionError()), lambda _, error: ended.append(error))
    request = behind("a")
    live = LiveRequest(1, request, OutputBuilder(request, None, None, lambda _: None))

    async def main() -> None:
        given.launch(live, cast(Any, Broken()))
        await asyncio.gather(*given._running)

    asyncio.run(main())
    assert [type(error) for error in ended] == [EngineUnavailableError]
    assert "cannot schedule" in str(ended[0])


def test_it_is_no_first_token() -> None:
    request = behind("a", n=2)
    following = OutputBuilder(
        replace(request, given=(TokenIds(), TokenIds([8, 9]))), None, None, lambda _: None
    )
    (delta,) = following.given(replace(request, given=(TokenIds(), TokenIds([8, 9]))))
    assert (delta.index, delta.token_ids) == (1, [8, 9])
    assert following.output.timings.first_token == 0.0
    following.grow(1, [7], 3.0)
    following.grow(0, [7], 4.0)
    assert following.output.timings.first_token == 3.0
    assert following.output.usage.completion_tokens == 4


def test_an_account_pays_for_it() -> None:
    """Two accounts under a fair policy: one has a long prompt, the other a short one and that much output."""
    scheduler = Scheduler(
        config(policy="fair", max_num_batched_tokens=64, max_model_len=128), random.Random(1)
    )
    whole = replace(
        behind("whole", account="b"), prompt_token_ids=TokenIds(range(1, 1 + PROMPT + GIVEN)), given=()
    )
    plain = replace(behind("plain", account="c"), given=())
    paid = {}
    for request in (behind("given", account="a"), whole, plain):
        scheduler.add(replace(request, namespace=request.request_id, params=SamplingParams(max_tokens=50)))
        state = scheduler._requests.get(request.request_id)
        assert state is not None
        account = state.sequences[0].account
        assert account is not None
        before = account.served
        run(scheduler)
        paid[request.request_id] = account.served - before
        scheduler.abort(request.request_id)
    assert paid["given"] == paid["whole"] > 2 * paid["plain"]


def logged(core: EngineCore) -> list[Any]:
    assert core.recorder is not None
    return list(read_rows(core.recorder.ring()).rows)


def test_the_log_has_it_in_its_chains() -> None:
    """A prompt that repeats prompt and output finds the blocks of all of it, as the cache does."""
    core, _, _ = engine(1, prompts=True, max_model_len=140)
    core.add(behind("a"))
    assert core.recorder is not None
    while core.has_work():
        core.step()
    (ended,) = [row for row in logged(core) if isinstance(row, rows.Ended)]
    assert ended.tokens == 60 - GIVEN
    output = array("i", ended.chain.tokens).tolist()
    assert len(output) == ended.tokens
    core.add(replace(behind("b"), given=(), prompt_token_ids=TokenIds([*range(1, 6 + GIVEN), *output])))
    first, second = [row for row in logged(core) if isinstance(row, rows.Arrived)]
    assert first.prompt_tokens == PROMPT + GIVEN
    assert "given" in first.traits
    assert second.chain.shared == second.prompt_tokens // 4


def test_several_samples_have_theirs_and_the_prompt_in_common() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=32), random.Random(1))
    request = replace(
        behind("a", n=3, max_tokens=9), given=(TokenIds([11, 12]), TokenIds(), TokenIds([13] * 7))
    )
    check_given(request, 100)
    scheduler.add(request)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    computed = 0
    while scheduler.has_work():
        out, events = run(scheduler)
        computed += sum(len(row.token_ids) for row in out.scheduled)
        for event in events:
            found[event.sample_index] += event.new_token_ids
        scheduler.audit()
    assert {sample: len(new) for sample, new in found.items()} == {0: 7, 1: 9, 2: 2}
    assert computed < 3 * PROMPT + 9 + 18, "the prompt's whole blocks are computed once"
    for given in ((TokenIds([1]),), (TokenIds([1]), TokenIds([2]), TokenIds([100]))):
        with pytest.raises(RequestError):
            check_given(replace(request, given=given), 100)
