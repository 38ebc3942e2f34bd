"""Usage by account and tag adds up to what the machine did."""

from __future__ import annotations

import random

import pytest

from quire.core.cost_model import StepCostModel
from quire.core.usage_books import UsageBooks
from quire.objectives import ServiceTerms
from quire.types import Request, SamplingParams, TokenIds

from .scheduling import answer, make


def lived(seed: int, *, accounts: str, sharing: bool) -> tuple[UsageBooks, dict[str, float], float]:
    """A scheduler under random load on a virtual clock; returns its books, and what was seen from outside."""
    rng = random.Random(seed)
    scheduler = make(num_blocks=40, max_num_seqs=6, policy=rng.choice(["fcfs", "fair"]))
    costs, now = StepCostModel(), 0.0
    seen = dict.fromkeys(("prompt", "cached", "generated", "seconds", "block_seconds"), 0.0)
    books, started, cached = scheduler.usage, set(), {}
    for step in range(400):
        if rng.random() < 0.5 and step < 300:
            account = rng.choice(accounts)
            scheduler.add(
                Request(
                    request_id=str(step),
                    prompt_token_ids=TokenIds([rng.randint(1, 2) for _ in range(rng.randint(1, 24))]),
                    params=SamplingParams(max_tokens=rng.randint(1, 12), ignore_eos=True),
                    arrival=now,
                    tenant="" if sharing else account,
                    terms=ServiceTerms(account=account, tag=rng.choice(["", "x"])),
                )
            )
        out = scheduler.schedule()
        flight = scheduler.newest
        if out.scheduled and flight is not None:
            books.weigh(flight.rows, flight.seqs, costs.weights)
        books.hold(scheduler.caches, scheduler.running, now)
        used = scheduler.blocks_used + scheduler.blocks_cached
        for new in out.new:
            if new.request_id not in started:
                started.add(new.request_id)
                seen["prompt"] += new.prompt_len
        took = rng.uniform(0.001, 0.1)
        now += took
        seen["block_seconds"] += used * took
        events = scheduler.update(out, answer(out, [[7] if row.sample else [] for row in out.scheduled]))
        for event in events:
            seen["generated"] += len(event.new_token_ids)
            cached[event.request_id] = event.cached_tokens
        if out.scheduled:
            books.ran(took)
            seen["seconds"] += took
        books.hold(scheduler.caches, scheduler.running, now)
        idle = rng.choice([0.0, 0.5])  # blocks stay in use while nothing runs
        seen["block_seconds"] += (scheduler.blocks_used + scheduler.blocks_cached) * idle
        now += idle
    seen["cached"] = sum(cached.values())
    books.advance(now)
    return books, seen, now


@pytest.mark.parametrize("accounts", ["a", "abc"])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_lines_add_up_to_the_machine(seed: int, accounts: str, sharing: bool) -> None:
    books, seen, _ = lived(seed, accounts=accounts, sharing=sharing)
    for name, total in seen.items():
        assert sum(getattr(line, name) for line in books.lines.values()) == pytest.approx(total, rel=1e-9), (
            name
        )
    assert {line.account for line in books.lines.values()} - {""} == set(accounts)


def test_a_long_prompt_pays_for_the_step_that_it_makes_long() -> None:
    """By the weights of the model: a decoding row beside a prompt of many tokens pays little of the step."""
    scheduler, costs = make(num_blocks=64, max_model_len=200, max_num_batched_tokens=128), StepCostModel()
    for account, prompt in (("decodes", 2), ("prompt", 100)):
        scheduler.add(
            Request(
                request_id=account, prompt_token_ids=TokenIds([1] * prompt), params=SamplingParams(max_tokens=9),
                terms=ServiceTerms(account=account),
            )
        )  # fmt: skip
        out = scheduler.schedule()
        scheduler.usage.weigh(out.scheduled, scheduler.newest.seqs, costs.weights)  # type: ignore[union-attr]
        scheduler.update(out, answer(out, [[7] if row.sample else [] for row in out.scheduled]))
    scheduler.usage.ran(1.0)
    shares = {line.account: line.seconds for line in scheduler.usage.lines.values()}
    assert sum(shares.values()) == pytest.approx(1.0)
    each = costs.weights
    decode = each[0] / 2 + each[1] + each[3] * 3
    prompt = each[0] / 2 + 100 * each[2] + each[4] * 100 * 50
    assert shares["prompt"] / shares["decodes"] == pytest.approx(prompt / decode, rel=1e-6)
