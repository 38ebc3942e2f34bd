"""Every policy over random histories: it chooses a server that is there, spreads work, and keeps what it promises."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from quire.routing.router_policies import (
    BOUND,
    POLICIES,
    PrefixAware,
    RoutedPrompt,
    SessionAffinity,
    cool,
    policy_named,
)


@dataclass
class Stand:
    """A server in a test."""

    name: str
    requests: int = 0
    work: float = 0.0
    weight: float = 1.0
    queued: float = 0.0
    distance: float = 0.0


def asked(session: str = "", cached: dict[str, float] | None = None, tokens: float = 1000.0) -> RoutedPrompt:
    return RoutedPrompt(session, tokens, 100.0, lambda name: (cached or {}).get(name, 0.0))


@pytest.mark.parametrize("name", POLICIES)
def test_random_histories(name: str) -> None:
    """10,000 requests that come and go at random: the load of equal servers stays even."""
    generator, policy = random.Random(3), policy_named(name, 5)
    servers = [Stand(f"s{i}") for i in range(4)]
    running: list[tuple[Stand, float]] = []
    given: Counter[str] = Counter()
    for number in range(10_000):
        prompt = asked(f"session {generator.randrange(200)}", tokens=generator.randrange(10, 4000))
        able = [each for each in servers if generator.random() < 0.95] or servers
        chosen = policy.choose(prompt, able)
        assert chosen in able
        work = prompt.work(chosen.name)
        chosen.requests, chosen.work = chosen.requests + 1, chosen.work + work
        running.append((chosen, work))
        given[chosen.name] += 1
        while len(running) > 40 or (running and generator.random() < 0.4):
            ended, work = running.pop(generator.randrange(len(running)))
            ended.requests, ended.work = ended.requests - 1, ended.work - work
        if number % 100 == 0 and name in {"prefix", "session"} and len(able) == 4:
            assert (
                max(each.requests for each in servers)
                <= BOUND * sum(each.requests for each in servers) / 4 + 1.25 * 4
            )
    assert max(given.values()) < (1.6 if name == "session" else 1.3) * min(given.values())


def test_weights() -> None:
    servers = [Stand("a", weight=3.0), Stand("b", weight=1.0)]
    policy = policy_named("round-robin")
    assert Counter(policy.choose(asked(), servers).name for _ in range(400)) == {"a": 300, "b": 100}


def test_a_cached_prompt_stays_until_its_server_has_more_than_its_share() -> None:
    servers, policy = [Stand("a"), Stand("b"), Stand("c")], PrefixAware()
    prompt = asked(cached={"b": 900.0})
    assert policy.choose(prompt, servers).name == "b"
    servers[1].work = 800.0  # still cheaper: 900 tokens need not be computed
    assert policy.choose(prompt, servers).name == "b"
    servers[1].work = 2000.0
    assert policy.choose(prompt, servers).name != "b"
    servers[1].work, servers[1].requests = (
        100.0,
        1,
    )  # nothing runs elsewhere: that would be more than its share
    assert policy.choose(prompt, servers).name != "b"
    assert "b" not in {each.name for each in cool(servers)}


def test_a_session_moves_only_when_its_server_goes() -> None:
    policy, servers = SessionAffinity(), [Stand(f"s{i}") for i in range(5)]
    names = [f"user {i}" for i in range(1000)]
    first = {name: policy.choose(asked(name), servers).name for name in names}
    again = {name: policy.choose(asked(name), servers[1:]).name for name in names}
    assert all(first[name] == again[name] for name in names if first[name] != "s0")
    assert min(Counter(first.values()).values()) > 100
