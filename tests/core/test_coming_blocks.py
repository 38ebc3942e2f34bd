"""Prompts that other engines compute: which requests wait for blocks, for how long, and for which."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.cache_kinds import FullGroup, SlidingGroup
from quire.core.coming_blocks import MOST_SECONDS, PATIENCE, Arrivals
from quire.core.scheduler import Scheduler
from quire.core.tier import Name, chain, root_digest
from quire.objectives import ServiceTerms
from quire.types import Request, TokenIds

from .test_fetching import Kept, ask, make, update

SIZE = 4


class Shared(Kept):
    """A tier that others write to, with a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.now, self.looks = True, 0.0, 0
        self.sent: list[Name] = []

    def published(self, name: Name, block: int, tenant: str) -> None:
        self.sent.append(name)

    def look(self) -> bool:
        self.looks += 1
        return self.up


def coming(name: str, prompt: list[int], blocks: int) -> Request:
    return replace(ask(name, TokenIds(prompt)), terms=ServiceTerms(coming=blocks))


def digests(prompt: list[int], tenant: str = "") -> list[bytes]:
    digest, found = root_digest(b"weights", tenant, "shared:"), []
    for start in range(0, len(prompt) - SIZE + 1, SIZE):
        digest = chain(digest, TokenIds(prompt[start : start + SIZE]).tobytes())
        found.append(digest)
    return found


def made(tier: Shared, **changes: object) -> tuple[Arrivals, Scheduler]:
    scheduler = make(tier, **changes)
    return Arrivals(tier, scheduler.caches, scheduler.config, lambda: tier.now), scheduler


def missing(arrivals: Arrivals, request: Request) -> list[Name]:
    """The blocks that a request waits for."""
    prompt, found = arrivals._missing(request, 0.0), []
    while (name := prompt.next()) is not None:
        found.append(name)
        prompt.at += 1
    return found


PROMPT = [*range(14)]  # three whole blocks, and two tokens that are computed in any case


def test_a_request_waits_until_all_its_blocks_are_there() -> None:
    tier = Shared()
    arrivals, _ = made(tier)
    request = coming("a", PROMPT, 3)
    for digest in digests(PROMPT):
        assert arrivals.awaits(request)
        tier.now += 0.9 * PATIENCE  # each one that comes makes it wait again
        tier.names.add((digest, 0))
    assert not arrivals.awaits(request)
    assert not arrivals.awaits(request), "the answer is final"
    assert (arrivals.came, arrivals.late) == (1, 0)
    assert arrivals.seconds == pytest.approx(2.7 * PATIENCE)
    assert not arrivals.awaits(coming("b", PROMPT, 3)), "they are there"
    assert not arrivals.awaits(ask("c", TokenIds(PROMPT))), "nothing was said of it"
    assert arrivals.came == 2


@pytest.mark.parametrize("death", ["nothing comes", "slow", "down"])
def test_what_does_not_come_is_not_waited_for(death: str) -> None:
    tier = Shared()
    arrivals, _ = made(tier)
    prompt, waited = [*range(4 * 40 + 1)], 0.0
    request = coming("a", prompt, 40)
    tier.up = death != "down"
    while arrivals.awaits(request):
        waited, tier.now = waited + 0.5, tier.now + 0.5
        if death == "slow":  # a block in each look
            tier.names |= {(digest, 0) for digest in digests(prompt)[: round(2 * waited)]}
    assert waited == {"nothing comes": PATIENCE, "slow": MOST_SECONDS, "down": 0.0}[death]
    assert (arrivals.came, arrivals.late) == (0, 1)


def test_only_blocks_that_are_needed_and_missing_are_waited_for() -> None:
    """Not those that are cached here, nor those before a window, nor more than the prompt has."""
    tier = Shared()
    groups = FullGroup((0,)), SlidingGroup((1,), window=6)
    arrivals, scheduler = made(tier, groups=groups, num_blocks=20)
    names = digests(PROMPT)
    found = missing(arrivals, coming("a", PROMPT, 99))
    assert found == [(names[0], 0), (names[1], 0), (names[1], 1), (names[2], 0), (names[2], 1)]
    assert missing(arrivals, coming("a", PROMPT[:12], 3)) == [
        (names[0], 0),
        (names[0], 1),
        (names[1], 0),
        (names[1], 1),
    ]
    scheduler.add(ask("b", TokenIds(PROMPT[:6]), 1))
    while scheduler.has_work():
        out = scheduler.schedule()
        update(scheduler, out)
    assert missing(arrivals, coming("a", PROMPT, 3)) == found[1:]
    other = replace(coming("c", PROMPT, 3), tenant="other")
    assert next(name for name, _ in missing(arrivals, other)) == digests(PROMPT, "other")[0]


def test_cached_blocks_of_a_prompt_are_sent_again() -> None:
    """A server of blocks that was started again has none of them."""
    tier = Shared()
    arrivals, scheduler = made(tier)
    scheduler.add(ask("a", TokenIds(PROMPT), 1))
    while scheduler.has_work():
        update(scheduler, scheduler.schedule())
    first, tier.sent = tier.sent, []
    arrivals.send(ask("b", TokenIds([*PROMPT[:8], 99, 99, 99])))
    assert tier.sent == first[:2] == [(digest, 0) for digest in digests(PROMPT)[:2]]
    arrivals.send(replace(ask("c", TokenIds(PROMPT)), tenant="other"))
    assert len(tier.sent) == 2


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_every_request_goes_on_within_its_bounds(seed: int) -> None:
    """Blocks come in any order, or never; the tier is lost and comes back; requests end while they wait."""
    rng, tier = random.Random(seed), Shared()
    arrivals, _ = made(tier)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(2, 40))] for _ in range(12)]
    waiting = {n: coming(f"r{n}", prompt, rng.randrange(1, 12)) for n, prompt in enumerate(prompts)}
    begun: dict[int, float] = {}
    on = [(digest, 0) for prompt in prompts for digest in digests(prompt)]
    ended = aborted = 0
    while waiting:
        tier.now += rng.random() / 4
        tier.up = rng.random() < 0.95 if tier.up else rng.random() < 0.5
        for _ in range(rng.randrange(3)):
            (tier.names.add if rng.random() < 0.8 else tier.names.discard)(rng.choice(on or [(b"", 0)]))
        for number, request in list(waiting.items()):
            if rng.random() < 0.02:
                aborted += number in begun
                arrivals.forget(waiting.pop(number).request_id)
            elif arrivals.awaits(request):
                began = begun.setdefault(number, tier.now)
                assert tier.now - began <= MOST_SECONDS
            else:
                ended += 1
                arrivals.forget(waiting.pop(number).request_id)
    assert arrivals.came + arrivals.late == ended
    assert not arrivals._prompts
