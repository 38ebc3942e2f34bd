"""How much work a request will be: its output length by history, and the seconds that it takes alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol

from quire.core.given_output import first_tokens, mean_given
from quire.types import Request, SamplingParams

_KINDS = 4096  # most kinds of requests that are remembered; the one seen longest ago is forgotten
_MEMORY = 64  # requests of a kind that count
_ENOUGH = 8  # requests after which a kind speaks for itself
_UNKNOWN_TOKENS = 256.0  # output of a request without max_tokens, before any has ended


class TokenCosts(Protocol):
    """What tokens cost: core.step_costs."""

    def prompt_seconds(self, tokens: int) -> float:
        """To compute a prompt alone."""

    def token_seconds(self) -> float:
        """To decode one token of one sequence."""


class NominalCosts:
    """Costs before any step has been seen: only their relation counts."""

    def prompt_seconds(self, tokens: int) -> float:
        return 5e-4 * tokens

    def token_seconds(self) -> float:
        return 2e-2


def has_known_length(params: SamplingParams) -> bool:
    """Whether only `max_tokens` can end an output."""
    return params.ignore_eos and not (params.stop or params.stop_token_ids)


class ServiceEstimates:
    """Output lengths by account, adapter, prompt length and max_tokens, each from the kind with enough history that is
    nearest to the request. Bounded memory, O(1) a request.
    """

    def __init__(self, costs: TokenCosts | None = None) -> None:
        self.costs = costs or NominalCosts()
        self._kinds: OrderedDict[Hashable, list[float]] = OrderedDict()  # kind -> requests, mean length
        self._work = 0.0  # moving mean of the seconds of requests
        self.error = 0.0  # moving mean of |predicted - real| / real

    def output_tokens(self, request: Request) -> float:
        """The predicted output of a sample: `expected_tokens` if the request has them, `max_tokens` if nothing else can
        end it."""
        if request.terms.expected_tokens is not None:
            return request.terms.expected_tokens
        params = request.params
        most, found = params.max_tokens, None
        if most is not None and has_known_length(params):
            return most
        for kind in _kinds(request):
            seen = self._kinds.get(kind)
            if seen is not None and (found is None or seen[0] >= _ENOUGH):
                found = seen[1]
                if seen[0] >= _ENOUGH:
                    break
        if found is None:
            found = _UNKNOWN_TOKENS if most is None else min(most / 2 + 0.5, _UNKNOWN_TOKENS)
        return found if most is None else min(found, most)

    def new_tokens(self, request: Request) -> float:
        """The same without the output that is given; 1 at least."""
        return max(1.0, self.output_tokens(request) - mean_given(request))

    def seconds(self, request: Request) -> float:
        """The time that a request takes alone, without cached prefixes."""
        prompt = self.costs.prompt_seconds(first_tokens(request))
        return prompt + request.params.n * self.new_tokens(request) * self.costs.token_seconds()

    def relative_work(self, request: Request) -> float:
        """Between 0 and 1: half for a request that takes as long as others did on average lately."""
        work = self.seconds(request)
        return work / (work + (self._work or work))

    def arrived(self, request: Request) -> None:
        """Count a request in what others are compared with."""
        work = self.seconds(request)
        self._work += (work - self._work) / _MEMORY if self._work else work

    def ended(self, request: Request, tokens: int) -> None:
        """A sample has ended by itself with so many tokens of output."""
        predicted = self.output_tokens(request)
        self.error += (abs(predicted - tokens) / max(1, tokens) - self.error) / _MEMORY
        for kind in _kinds(request):
            seen = self._kinds.setdefault(kind, [0.0, 0.0])
            seen[0] = min(seen[0] + 1, _MEMORY)
            seen[1] += (tokens - seen[1]) / seen[0]
            self._kinds.move_to_end(kind)
        while len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)


def _kinds(request: Request) -> Iterator[Hashable]:
    """From the narrowest to all requests; lengths by powers of two."""
    lengths = len(request.prompt_token_ids).bit_length(), (request.params.max_tokens or 0).bit_length()
    yield request.terms.account, request.adapter, *lengths
    yield request.terms.account, lengths[1]
    yield request.adapter, *lengths, None
    yield lengths[1], None
    yield None
