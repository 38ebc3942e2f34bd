"""Which replica gets a request: functions of what a router knows, without state of their own.

round-robin      one after the other
two-choices      of two by chance the one with fewer requests (Mitzenmacher 2001)
least-requests   the one with the fewest requests
least-work       the one with the fewest tokens left to compute, this prompt's included, less what it has cached
prefix           the one with most of the prompt in its cache, unless loads are far apart or it has little of it
hash             rendezvous hashing of the start of a prompt; none has over 1.25 × the mean of requests
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from quire.records import dataclass

BOUND = 1.25  # of the mean load: Mirrokni et al. 2018, consistent hashing with bounded loads
_SHARE = 0.5  # of a prompt that has to be cached for its replica to be preferred
_APART, _RATIO = 32, 1.5  # requests more, and times as many, than the replica with the fewest


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a router knows of a replica. `tokens` are those that its requests have yet to compute, prompts and expected
    outputs together; `cached` those of the new prompt that it need not compute.
    """

    requests: int = 0
    tokens: float = 0.0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request to be placed. `number` counts requests; `start` names the first tokens of its prompt."""

    number: int
    prompt: int
    start: bytes = b""


RouterPolicy = Callable[[RoutedRequest, Sequence[ReplicaLoad]], int]


def round_robin(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
    return request.number % len(loads)


def two_choices(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
    drawn = int.from_bytes(_hash(request.number.to_bytes(8, "little")), "little")
    first, second = drawn % len(loads), drawn // len(loads) % len(loads)
    return min(first, second, key=lambda i: loads[i].requests)


def least_requests(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
    """Of equals the first in turn, so that idle replicas share what comes."""
    return min(_turned(request, loads), key=lambda i: loads[i].requests)


def least_work(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
    return min(
        _turned(request, loads), key=lambda i: loads[i].tokens + max(0, request.prompt - loads[i].cached)
    )


def prefix(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
    counts = [load.requests for load in loads]
    best = max(_turned(request, loads), key=lambda i: loads[i].cached)
    apart = max(counts) > min(counts) + _APART and max(counts) > _RATIO * min(counts)
    if apart or loads[best].cached < _SHARE * request.prompt:
        return least_requests(request, loads)
    return best


def bounded_hash(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
    most = BOUND * (sum(load.requests for load in loads) + 1) / len(loads)
    ranked = sorted(
        range(len(loads)), key=lambda i: _hash(request.start + i.to_bytes(4, "little")), reverse=True
    )
    return next((i for i in ranked if loads[i].requests + 1 <= max(1.0, most)), ranked[0])


POLICIES: dict[str, RouterPolicy] = {
    "round-robin": round_robin,
    "two-choices": two_choices,
    "least-requests": least_requests,
    "least-work": least_work,
    "prefix": prefix,
    "hash": bounded_hash,
}


def router_policy(name: str) -> RouterPolicy:
    """The policy of a name. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"router: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]


def _turned(request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> list[int]:
    first = request.number % len(loads)
    return [*range(first, len(loads)), *range(first)]


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
