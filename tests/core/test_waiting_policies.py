"""What each policy promises of the order, on a virtual clock with random arrivals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire.config.schema import POLICIES
from quire.core.policy import Policy
from quire.core.prefix_queue import PrefixQueue
from quire.core.scheduler import Scheduler
from quire.objectives import ServiceTerms
from quire.types import Request, RequestError, SamplingParams, SchedulerOutput, TokenIds

from .scheduling import config, run

OVERTAKE = 40.0
CROWD = {"num_blocks": 4000, "max_num_seqs": 4, "max_num_batched_tokens": 24, "overtake": OVERTAKE}
BASES = [list(range(b, b + 40)) for b in (100, 200, 300)]


def requests(rng: random.Random, count: int, gap: float) -> list[Request]:
    """Poisson arrivals of mixed lengths, in part with a common prefix and a time at which they are due."""
    at, made = 0.0, []
    for index in range(count):
        at += rng.expovariate(1 / gap)
        prompt = rng.choice(BASES)[: rng.randrange(0, 40, 4)] + [
            rng.randrange(9) for _ in range(rng.randint(1, 9))
        ]
        made.append(
            Request(
                request_id=str(index),
                prompt_token_ids=TokenIds(prompt),
                params=SamplingParams(max_tokens=rng.randint(1, 14), ignore_eos=True),
                arrival=at,
                terms=ServiceTerms(
                    account=rng.choice("ab"), due=at + rng.uniform(-5, 200) if rng.random() < 0.6 else None
                ),
            )
        )
    return made


def play(scheduler: Scheduler, asked: list[Request]) -> Iterator[SchedulerOutput]:
    """Every step, of a second each."""
    now, waiting = 0.0, list(reversed(asked))
    while waiting or scheduler.has_work():
        while waiting and waiting[-1].arrival <= now:
            scheduler.add(waiting.pop())
        out, _ = run(scheduler)
        yield out
        now += 1


def overtaken_too_long(scheduler: Scheduler, asked: list[Request], *, by_account: bool) -> int:
    """Number of requests that started after one that arrived `OVERTAKE` or more behind them."""
    latest, wrong, seen = {"": float("-inf"), "a": float("-inf"), "b": float("-inf")}, 0, set()
    for out in play(scheduler, asked):
        for name in [new.request_id for new in out.new]:
            request = asked[int(name)]
            account = request.terms.account if by_account else ""
            if name not in seen:
                wrong += latest[account] >= request.arrival + OVERTAKE
                latest[account] = max(latest[account], request.arrival)
            seen.add(name)
    assert len(seen) == len(asked)
    return wrong


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if not policy.startswith("priority")])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.scheduling) for seed in range(1, 20))]
)
def test_nothing_is_overtaken_beyond_the_bound(policy: str, seed: int) -> None:
    asked = requests(random.Random(seed), 600, 1.6)
    scheduler = Scheduler(config(policy=policy, **CROWD))
    assert overtaken_too_long(scheduler, asked, by_account="fair" in policy) == 0
    scheduler.audit()


def test_the_bound_is_that_of_the_option() -> None:
    asked = requests(random.Random(0), 600, 1.6)
    scheduler = Scheduler(config(policy="edf", **CROWD | {"overtake": 4 * OVERTAKE}))
    assert overtaken_too_long(scheduler, asked, by_account=False) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_place_stays_free_while_something_waits(policy: str) -> None:
    scheduler = Scheduler(config(policy=policy, **CROWD))
    for out in play(scheduler, requests(random.Random(3), 200, 1.5)):
        assert len(out.scheduled) == 4 or out.num_tokens == 24 or not scheduler.num_waiting


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if "priority" in policy])
def test_a_more_urgent_level_goes_first_under_every_combination(policy: str) -> None:
    scheduler = Scheduler(config(policy=policy, **CROWD))
    rng, started = random.Random(4), []
    asked = [replace(request, priority=rng.randint(-1, 1)) for request in requests(rng, 60, 0.0001)]
    for request in asked:
        scheduler.add(request)
    while scheduler.has_work():
        out, _ = run(scheduler)
        started += [asked[int(new.request_id)].priority for new in out.new]
    assert started == sorted(request.priority for request in asked)


def test_running_streams_decode_while_a_prompt_that_ranks_ahead_is_computed() -> None:
    scheduler = Scheduler(config(policy="edf", max_num_seqs=4, max_num_batched_tokens=8, max_model_len=128))
    late = Request(
        request_id="a", prompt_token_ids=TokenIds([1]), params=SamplingParams(max_tokens=30), arrival=0.0
    )
    scheduler.add(late)
    run(scheduler)
    scheduler.add(
        replace(
            late,
            request_id="b",
            prompt_token_ids=TokenIds(range(50)),
            arrival=1.0,
            terms=ServiceTerms(due=2.0),
        )
    )
    for _ in range(7):
        out, _ = run(scheduler)
        assert sorted(len(row.token_ids) for row in out.scheduled)[0] == 1
        assert out.num_tokens == 8


def test_the_shortest_request_by_history_goes_first() -> None:
    scheduler = Scheduler(config(policy="sjf", **CROWD))
    history = scheduler.estimates

    def ask(name: str, account: str, arrival: float) -> Request:
        params = SamplingParams(max_tokens=40)
        return Request(
            request_id=name,
            prompt_token_ids=TokenIds([1, 2]),
            params=params,
            terms=ServiceTerms(account=account),
            arrival=arrival,
        )

    assert history.output_tokens(ask("", "short", 0)) == history.output_tokens(ask("", "long", 0))
    for _ in range(20):
        history.ended(ask("", "short", 0), 2)
        history.ended(ask("", "long", 0), 38)
    assert history.output_tokens(ask("", "short", 0)) == pytest.approx(2)
    assert history.output_tokens(ask("", "new", 0)) == pytest.approx(20, abs=4)
    assert history.output_tokens(replace(ask("", "short", 0), terms=ServiceTerms(expected_tokens=17))) == 17
    known = SamplingParams(max_tokens=40, ignore_eos=True)
    assert history.output_tokens(replace(ask("", "short", 0), params=known)) == 40
    assert history.output_tokens(replace(ask("", "short", 0), params=replace(known, stop=("x",)))) < 3
    for index in range(8):
        scheduler.add(ask(f"l{index}", "long", 0.0))
    scheduler.add(ask("s", "short", 1.0))
    out, _ = run(scheduler)
    assert out.new[0].request_id == "s"


def test_lengths_of_many_kinds_are_forgotten() -> None:
    history = Scheduler(config()).estimates
    for index in range(3000):
        history.ended(requests(random.Random(index), 1, 1)[0], index)
        params = SamplingParams(max_tokens=5)
        request = Request(
            request_id="",
            prompt_token_ids=TokenIds([1]),
            params=params,
            terms=ServiceTerms(account=str(index)),
        )
        history.ended(request, 3)
    assert len(history._kinds) <= 4096


@pytest.mark.parametrize("policy", ["lpm", "priority+lpm"])
@pytest.mark.parametrize("seed", range(3))
def test_the_longest_cached_prefix_is_found_without_looking_for_it(policy: str, seed: int) -> None:
    """Against a search through the whole queue, while blocks are published and evicted."""
    rng = random.Random(seed)
    scheduler = Scheduler(config(policy=policy, **CROWD | {"num_blocks": rng.choice([40, 70, 4000])}))
    asked = [replace(r, priority=rng.randint(0, 1) * (policy != "lpm")) for r in requests(rng, 300, 0.8)]
    parsed, hits, queues = Policy.parse(policy, OVERTAKE), 0, dict[PrefixQueue, None]()
    for step, _ in enumerate(play(scheduler, asked)):
        if step % 7 == 0:
            scheduler.abort(str(rng.randrange(len(asked))))
        waiting = list(scheduler._requests.waiting)
        queues |= dict.fromkeys(scheduler._requests.waiting.watching)  # type: ignore[attr-defined]
        ranks = {}
        for seq in waiting:
            hit = scheduler._blocks.find(seq).length
            hits += hit > 0
            arrival = seq.state.request.arrival
            ranks[seq] = (seq.rank[0], arrival - parsed.lead(hit), arrival, seq.seq_id)
        assert scheduler._requests.waiting.peek() is min(waiting, key=ranks.__getitem__, default=None)
    assert hits
    scheduler.audit()
    assert not scheduler._requests.waiting.watching  # type: ignore[attr-defined]
    assert queues
    for queue in queues:
        assert not queue._known
        assert all(not root.children for root in queue._roots.values())


def test_shares_go_by_weights_and_a_flood_does_not_delay_the_others() -> None:
    shares_by_weight("fair", 5)


def shares_by_weight(policy: str, seed: int) -> None:
    """Two accounts that always have work, of which one weighs three times as much, and one that asks now and then."""
    scheduler = Scheduler(config(policy=policy, num_blocks=4000, max_num_seqs=8, max_num_batched_tokens=64))
    served = dict.fromkeys(("flood", "heavy", "light"), 0)
    rng, numbers, most = random.Random(seed), itertools.count(), 0.0

    def add(account: str, weight: float, now: float) -> None:
        params = SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True)
        prompt = TokenIds(rng.choices(range(999), k=rng.randint(1, 12)))
        name = f"{account} {next(numbers)}"
        terms = ServiceTerms(account=account, weight=weight)
        scheduler.add(
            Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=now, terms=terms)
        )

    for _ in range(400):
        add("flood", 1.0, 0.0)
    for step in range(1500):
        queued = {seq.state.request.terms.account for seq in scheduler._requests.waiting}
        for account, weight in (("flood", 1.0), ("heavy", 3.0)):
            for _ in range(1 if account in queued else 4):
                add(account, weight, float(step))
        if step % 10 == 0:
            add("light", 1.0, float(step))
        _, events = run(scheduler)
        for event in events:
            served[event.request_id.split()[0]] += len(event.new_token_ids)
        counters = scheduler.counters
        most = max(most, abs(counters.of("flood") - counters.of("heavy")))
    assert 2.7 < served["heavy"] / served["flood"] < 3.3
    # Two largest requests, and what a step adds.
    assert most <= 2 * (12 + 2 * 12) + 8 * 2
    waits = [
        seq.state.request.request_id
        for seq in scheduler._requests.waiting
        if seq.state.request.terms.account == "light"
    ]
    assert len(waits) <= 1


def test_an_account_saves_nothing_up_while_it_pauses() -> None:
    scheduler = Scheduler(config(policy="fair", **CROWD))
    base = requests(random.Random(0), 1, 1)[0]
    for index in range(300):
        scheduler.add(
            replace(base, request_id=f"x{index}", terms=ServiceTerms(account="busy"), arrival=float(index))
        )
        run(scheduler)
    served = scheduler.counters.of("busy")
    assert served > 0
    scheduler.add(replace(base, request_id="late", terms=ServiceTerms(account="late"), arrival=400.0))
    assert scheduler.counters.of("late") > served / 2


def test_every_name_on_the_command_line_is_a_policy() -> None:
    for name in POLICIES:
        Policy.parse(name)
    assert {Policy.parse(name) for name in POLICIES} == {
        Policy(order, levels, shares)
        for order in ("fcfs", "sjf", "lpm", "edf")
        for levels in (False, True)
        for shares in (False, True)
        if not (shares and order == "lpm")
    }


@pytest.mark.parametrize("wrong", ["", "lifo", "sjf+priority", "fcfs+sjf", "fair+lpm", "priority+priority"])
def test_what_is_not_a_policy_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(ValueError, match="policy"):
        Policy.parse(wrong)


def test_a_priority_needs_a_policy_that_has_it() -> None:
    from quire.llm.asked import priority_list

    assert priority_list([1], 1, "priority+fair+sjf") == [1]
    with pytest.raises(RequestError, match="scheduling policy is fair"):
        priority_list([1], 1, "fair")
