"""How soon a tenant gets its first token tells it nothing about the prompts of another."""

from __future__ import annotations

import random
from statistics import mean

from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.types import Request, SamplingParams, TokenIds

from .scheduling import answer, config

SECRET = [*range(100, 150)]  # its last two tokens are no whole block
TRIALS, SHUFFLES = 60, 400


def first_token(seed: int, *, sent: bool, domain: str) -> float:
    """Seconds by a virtual clock until a prober has the first token of the secret prompt, in a domain, beside random
    work of others. Before, the victim has sent the same prompt, or another one of its length."""
    rng, costs = random.Random(seed), StepCostModel()
    scheduler = Scheduler(
        config(
            num_blocks=200,
            block_size=8,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            max_model_len=128,
            copy_partial=True,
        ),
        random.Random(seed),
    )
    now = 0.0

    def ask(name: str, prompt: list[int], tenant: str, tokens: int = 1) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add(
            Request(
                request_id=name, prompt_token_ids=TokenIds(prompt), params=params, arrival=now, tenant=tenant
            )
        )

    def step() -> list[str]:
        nonlocal now
        out = scheduler.schedule()
        now += costs.seconds(scheduler.step_features) * rng.uniform(0.9, 1.1)
        events = scheduler.update(out, answer(out, [[7] if row.sample else [] for row in out.scheduled]))
        return [event.request_id for event in events]

    ask("victim", SECRET if sent else [*range(200, 250)], "victim")
    while scheduler.has_work():
        step()
    for index in range(rng.randint(0, 4)):
        ask(
            f"other{index}",
            [rng.randrange(50) for _ in range(rng.randint(1, 30))],
            "other",
            rng.randint(1, 20),
        )
    asked = now
    ask("probe", [*SECRET, 5], domain)
    while "probe" not in step():
        pass
    return now - asked


def p_value(domain: str) -> float:
    """By permutations: how probable the difference of the two means is if it makes no difference what was sent. The
    trials are of other seeds, as a prober cannot repeat the past."""
    sent = [first_token(seed, sent=True, domain=domain) for seed in range(TRIALS)]
    not_sent = [first_token(seed, sent=False, domain=domain) for seed in range(TRIALS, 2 * TRIALS)]
    seen = abs(mean(sent) - mean(not_sent))
    rng, both, beyond = random.Random(1), sent + not_sent, 0
    for _ in range(SHUFFLES):
        rng.shuffle(both)
        beyond += abs(mean(both[:TRIALS]) - mean(both[TRIALS:])) >= seen
    return beyond / SHUFFLES


def test_the_first_token_tells_nothing_of_another_tenant() -> None:
    assert p_value("prober") > 0.05


def test_in_a_common_domain_it_does() -> None:
    """The same test finds a cache that is shared."""
    assert p_value("victim") < 0.01


def test_with_the_same_past_it_is_the_same_to_the_bit() -> None:
    for seed in range(20):
        times = {first_token(seed, sent=sent, domain="prober") for sent in (True, False)}
        assert len(times) == 1
