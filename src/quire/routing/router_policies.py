"""Which server answers a request: for the router, and for the simulator of several servers.

Nothing here has a clock or a socket; random choices come from a generator with a seed.

round-robin    one after the other
least-work     the one with the least predicted work: prompt tokens that are not cached, until the answer begins, and
               tokens to generate, and what the way there costs
power-of-two   the one with less work of two at random (Mitzenmacher 2001, "The Power of Two Choices in Randomized
               Load Balancing")
session        always the same one for a session, by consistent hashing with bounded loads (Mirrokni et al. 2016), of
               those that are near
prefix         the one whose work would end first, counting what it has cached of the prompt
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from quire.records import dataclass

# A server has at most this many times the mean number of requests while another one could answer.
BOUND = 1.25
# What a generated token costs, in prompt tokens: a step of a batch takes little longer with a chunk of a prompt than
# without one, so that a token of an answer takes about as long as several of a prompt.
ANSWER_TOKEN = 4.0
_POINTS = 64  # of a server on the ring


class Choosable(Protocol):
    """A server as policies see it. `work` is what it has been sent and has not answered, `queued` what it has from
    elsewhere, and `distance` what the way to it and back costs, in prompt tokens; 0 for those that are as near as any.
    """

    @property
    def name(self) -> str: ...

    @property
    def requests(self) -> int: ...

    @property
    def work(self) -> float: ...

    @property
    def weight(self) -> float: ...

    @property
    def queued(self) -> float: ...

    @property
    def distance(self) -> float: ...


Server = TypeVar("Server", bound=Choosable)


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A request as policies see it: its session, its length in tokens, the tokens that it may generate, and the tokens
    of it that a server has probably cached.
    """

    session: str
    prompt_tokens: float
    answer_tokens: float
    cached: Callable[[str], float]

    def work(self, server: str) -> float:
        """What it costs on a server, in prompt tokens."""
        return self.uncached(server) + self.answer_work

    def uncached(self, server: str) -> float:
        """The tokens of the prompt that a server has to compute."""
        return max(self.prompt_tokens - self.cached(server), 1.0)

    @property
    def answer_work(self) -> float:
        """What its answer costs, in prompt tokens: what is left to do once that has begun."""
        return ANSWER_TOKEN * self.answer_tokens


def near(servers: Sequence[Server]) -> list[Server]:
    """The servers that are as near as any."""
    return [each for each in servers if not each.distance] or [*servers]


def cool(servers: Sequence[Server]) -> list[Server]:
    """The servers that may get one more request: of those that are near none gets more than BOUND times its share of
    all that these have."""
    close = near(servers)
    total, weights = sum(each.requests for each in close) + 1, sum(each.weight for each in close)
    most = BOUND * total / weights
    all_far = close[0].distance > 0
    return [
        each for each in servers
        if (each.distance and not all_far) or each.requests < math.ceil(most * each.weight)
    ]  # fmt: skip


def _until_done(server: Choosable, work: float) -> float:
    """When a server would have done so much more, in prompt tokens of a server of weight 1."""
    return (server.work + server.queued + work) / server.weight + server.distance


class RoutingPolicy(Protocol):
    """Chooses one of several servers; `servers` is not empty."""

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server: ...


class RoundRobin:
    """One after the other; a server of weight 2 comes twice as often (smooth weighted round robin, as in nginx)."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server:  # noqa: ARG002
        credit = {each.name: self._credit.get(each.name, 0.0) + each.weight for each in servers}
        chosen = max(servers, key=lambda each: credit[each.name])
        credit[chosen.name] -= sum(each.weight for each in servers)
        self._credit = credit
        return chosen


class LeastWork:
    """The server with the least work for its weight."""

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server:  # noqa: ARG002
        return min(servers, key=lambda each: (_until_done(each, 0.0), each.requests))


class PowerOfTwo:
    """The server with less work of two at random."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server:
        two = self._generator.sample(list(servers), min(2, len(servers)))
        return LeastWork().choose(prompt, two)


class SessionAffinity:
    """The same server for a session while it is there and cool, else the next one on the ring; without a session, the
    one with the least work. A server that comes or goes moves only the sessions that are its own.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ring: list[tuple[int, str]] = []

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server:
        if not prompt.session:
            return LeastWork().choose(prompt, servers)
        servers = near(servers)
        able = {each.name: each for each in cool(servers)}
        names = tuple(sorted(each.name for each in servers))
        if names != self._names:
            self._names = names
            self._ring = sorted(
                (_point(f"{name} {number}"), name) for name in names for number in range(_POINTS)
            )
        begin = bisect_right(self._ring, (_point(prompt.session), ""))
        following = (self._ring[(begin + step) % len(self._ring)][1] for step in range(len(self._ring)))
        return next(able[name] for name in following if name in able)


class PrefixAware:
    """The cool server on which the request would be answered first: what waits there, and what the request costs there.

    With nothing cached anywhere this is least work. Of equal ones the one with the fewest requests is chosen.
    """

    def choose(self, prompt: RoutedPrompt, servers: Sequence[Server]) -> Server:
        return min(
            cool(servers),
            key=lambda each: (_until_done(each, prompt.work(each.name)), each.requests),
        )


POLICIES: dict[str, Callable[[random.Random], RoutingPolicy]] = {
    "prefix": lambda _: PrefixAware(),
    "least-work": lambda _: LeastWork(),
    "power-of-two": PowerOfTwo,
    "round-robin": lambda _: RoundRobin(),
    "session": lambda _: SessionAffinity(),
}


def policy_named(name: str, seed: int | None = None) -> RoutingPolicy:
    """A new policy of a name; `seed` is that of what it draws. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"router: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name](random.Random(seed))


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
